"""Tensors of any size that say that they are on a card, and operations of torch that compute nothing.

What an operation returns is zeros of the right shape, in memory that the system gives when it is written, which nobody
does: a training step at real sizes takes a fraction of a second. Views are views, and what changes a tensor leaves it.
`ENVIRONMENT` makes such memory zeros: the allocator takes each large piece anew from the system.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CARD = torch.device("cuda", 0)
#: What each tensor says of its place.
SAYS: dict[Any, Any] = {Tensor.device: CARD, Tensor.is_cuda: True, Tensor.is_cpu: False}
#: Operations on no more elements than this are computed: counts, seeds and factors are what they would be.
SMALL = 4096
#: Bytes from which memory is the system's own, and what has the allocator do so.
LARGE = 2**20
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(LARGE), "MALLOC_TRIM_THRESHOLD_": str(LARGE)}
#: Operations that read a tensor on the host.
READS = "_local_scalar_dense", "equal", "is_nonzero"
#: Those that change where a tensor lies, and what is there of it, and no number.
PLACES = "resize_", "set_", "as_strided_", "squeeze_", "unsqueeze_", "t_", "transpose_", "detach_"
#: Scaled GEMMs.
PRODUCTS = "_scaled_mm", "_scaled_grouped_mm"


def zeros(like: Tensor) -> Tensor:
    """Of a meta tensor's shape, strides and dtype; no page of a large one is taken until it is written."""
    # Deterministic mode would fill it.
    deterministic: Any = torch.utils.deterministic
    before, deterministic.fill_uninitialized_memory = deterministic.fill_uninitialized_memory, False
    try:
        buffer = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    finally:
        deterministic.fill_uninitialized_memory = before
    if buffer.untyped_storage().nbytes() < LARGE:
        buffer.untyped_storage().fill_(0)
    return buffer


def meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def filled(value: Any) -> Any:
    return zeros(value) if isinstance(value, Tensor) and value.is_meta else value


class Hollow(TorchDispatchMode):
    """While entered, operations on large tensors give zeros."""

    def __init__(self) -> None:
        super().__init__()
        #: What calls that are alike return, on meta.
        self.shapes: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(t.is_meta for t in tensors) or str(kwargs.get("device")) == "meta":
            return func(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        schema = func._schema
        name = schema.name.rpartition("::")[2]
        if name.startswith(PRODUCTS):
            return product(args)
        aliased = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if aliased or name in READS or name in PLACES:
            return func(*args, **kwargs)
        if not tensors:
            return created(func, args, kwargs)
        if all(t.numel() <= SMALL for t in tensors) and not (name == "mm" and "dtype" in schema.overload_name):
            return func(*args, **kwargs)
        if schema.is_mutable:
            written = [a for a, of in zip(args, schema.arguments, strict=False) if changes(of)]
            written += [kwargs[of.name] for of in schema.arguments if changes(of) and of.name in kwargs]
            return None if not schema.returns else written[0] if len(schema.returns) == 1 else tuple(written)
        key = (func, *(kernel_args(leaf) for leaf in tree_leaves((args, kwargs))))
        try:
            if key not in self.shapes:
                self.shapes[key] = func(*tree_map(meta, args), **tree_map(meta, kwargs))
        except NotImplementedError:
            return func(*args, **kwargs)
        return tree_map(filled, self.shapes[key])


def kernel_args(value: Any) -> Any:
    """What of an argument the shapes of results follow from."""
    if isinstance(value, Tensor):
        return (*value.shape, "by", *value.stride(), value.dtype)
    return value if isinstance(value, int | float | str | torch.dtype) else repr(value)


def changes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def created(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation makes of no tensor: at its size, zeros, where it is large or not filled anyway."""
    if "device" not in kwargs:
        return func(*args, **kwargs)
    sizes = args[0] if args and isinstance(args[0], list | tuple) else ()
    if "empty" not in func._schema.name and prod(sizes) <= SMALL:
        return func(*args, **kwargs)
    kwargs |= {"device": torch.device("meta")}
    kwargs |= {"generator": None} if "generator" in kwargs else {}
    return tree_map(filled, func(*args, **kwargs))


def product(args: Any) -> Tensor:
    """Of a scaled GEMM, [m, n] of the dtype that is asked for."""
    a, b = args[:2]
    dtype = next((value for value in args if isinstance(value, torch.dtype)), torch.bfloat16)
    return zeros(torch.empty((a.shape[0], b.shape[-1]), dtype=dtype, device="meta"))


class OnCard(TorchFunctionMode):
    """While entered, tensors say that they are on a card, and what asks for one gets ordinary memory."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = getattr(func, "__self__", None)
        if getattr(func, "__name__", "") == "__get__" and asked in SAYS:
            return func(*args) if args[0].is_meta else SAYS[asked]
        if getattr(func, "__name__", "") in ("cuda", "pin_memory") and isinstance(args[0], Tensor):
            return args[0]
        return func(*(here(value) for value in args), **{name: here(value) for name, value in kwargs.items()})


def here(value: Any) -> Any:
    """A card's place becomes this machine's."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")) else value
