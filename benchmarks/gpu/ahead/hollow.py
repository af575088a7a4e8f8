"""Tensors of any size that report a GPU as their device, and torch operations on them that compute nothing.

Operations return zeros of the right shape, in memory that the system would only provide on a write, which never
happens: a training step at real sizes takes a fraction of a second. Views remain views, and in-place operations leave
their tensor unchanged. With `ENVIRONMENT`, the allocator gets each large buffer anew from the system, so that it is
zero.
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
#: Device attributes that each tensor reports.
SAYS: dict[Any, Any] = {Tensor.device: CARD, Tensor.is_cuda: True, Tensor.is_cpu: False}
#: Operations on at most so many elements are computed, so that counts, seeds and factors are correct.
SMALL = 4096
#: Bytes from which a buffer comes directly from the system, and the variables that make the allocator do so.
LARGE = 2**20
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(LARGE), "MALLOC_TRIM_THRESHOLD_": str(LARGE)}
#: Operations that read a tensor on the host.
READS = "_local_scalar_dense", "equal", "is_nonzero"
#: Operations that change a tensor's storage, shape or strides, but no value.
PLACES = "resize_", "set_", "as_strided_", "squeeze_", "unsqueeze_", "t_", "transpose_", "detach_"
#: Scaled GEMMs.
PRODUCTS = "_scaled_mm", "_scaled_grouped_mm"


def zeros(like: Tensor) -> Tensor:
    """Return zeros with a meta tensor's shape, strides and dtype; a large buffer takes no memory until written."""
    # Deterministic mode would fill the buffer.
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
    """Mode in which operations on large tensors return zeros."""

    def __init__(self) -> None:
        super().__init__()
        #: Results of calls on meta, by function and shapes of the arguments.
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
            return product(args, tensors)
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
        key = (func, *(shape_key(leaf) for leaf in tree_leaves((args, kwargs))))
        try:
            if key not in self.shapes:
                self.shapes[key] = func(*tree_map(meta, args), **tree_map(meta, kwargs))
        except NotImplementedError:
            return func(*args, **kwargs)
        return tree_map(filled, self.shapes[key])


def shape_key(value: Any) -> Any:
    """Return the properties of an argument that determine the shapes of results."""
    if isinstance(value, Tensor):
        return (*value.shape, "by", *value.stride(), value.dtype)
    return value if isinstance(value, int | float | str | torch.dtype) else repr(value)


def changes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def created(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a factory function; a large or uninitialized result becomes zeros."""
    if "device" not in kwargs:
        return func(*args, **kwargs)
    sizes = args[0] if args and isinstance(args[0], list | tuple) else ()
    if "empty" not in func._schema.name and prod(sizes) <= SMALL:
        return func(*args, **kwargs)
    kwargs |= {"device": torch.device("meta")}
    kwargs |= {"generator": None} if "generator" in kwargs else {}
    return tree_map(filled, func(*args, **kwargs))


def product(args: Any, tensors: list[Tensor]) -> Tensor:
    """Return the result of a scaled GEMM: zeros [m, n] of the requested dtype, or [groups, m, n] of sums over groups.

    Args:
        tensors: all tensors among the arguments.
    """
    a, b = args[:2]
    dtype = next((value for value in args if isinstance(value, torch.dtype)), torch.bfloat16)
    offsets = [t for t in tensors if t.dtype is torch.int32]
    groups = offsets[0].shape if offsets and b.dim() == 2 else ()
    return zeros(torch.empty((*groups, a.shape[0], b.shape[-1]), dtype=dtype, device="meta"))


class OnCard(TorchFunctionMode):
    """Mode in which tensors report a GPU as their device, and requests for GPU memory get memory of the host."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        attribute = getattr(func, "__self__", None)
        if getattr(func, "__name__", "") == "__get__" and attribute in SAYS:
            return func(*args) if args[0].is_meta else SAYS[attribute]
        if getattr(func, "__name__", "") in ("cuda", "pin_memory") and isinstance(args[0], Tensor):
            return args[0]
        return func(*(here(value) for value in args), **{name: here(value) for name, value in kwargs.items()})


def here(value: Any) -> Any:
    """Replace a GPU's device by the CPU; return other values unchanged."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")) else value
