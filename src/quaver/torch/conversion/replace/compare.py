"""Whether a block computes what a module's own forward computes: asked of a small twin, by outputs and gradients.

Both run on the same inputs, rows of all sizes, infinities and NaN among them, in float32 and bf16, in training and in
evaluation, with the same noise; outputs and their dtypes must agree, and the gradients of inputs and parameters.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.conversion.matchers.swap_class import BOUNDS, PLAIN, close, differentiated
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import forward_level, transforms_active
from quaver.torch.operations.ops import any_autocast_enabled

# ---- fused -----------------------------------------------------------------------------------------------
# What stands above the class of a module that one of our blocks computes, and when the module's own forward runs.

#: Attributes of every module.
OF_ALL = {*nn.Module().__dict__}
#: What transformers notes of a module that it has loaded or initialized, and no forward reads.
NOTES = {"_is_hf_initialized"}
#: An attribute's name, and what it is.
Named = tuple[tuple[str, Any], ...]

#: What blocks compute in: what was compared. Forwards may do otherwise in float16, such as clamp.
DTYPES = (torch.float32, torch.bfloat16)


class FusedModule(nn.Module):
    """A module computed by one of our blocks, with its own parameters, submodules, hooks and attributes.

    Its class is made by `quaver.torch.conversion.matchers.swap_class` and says what is computed.
    """

    #: What the block computes, and of which of the module's parts.
    _formula: Any
    #: The class below, and of its members those that were compared with the block.
    _original: Any
    _compared: Named


def fixed(attributes: Mapping[str, Any]) -> Named:
    """Those attributes that are told by their value: numbers, names, tuples of them, and functions."""
    own = ((name, value) for name, value in attributes.items() if name not in OF_ALL and name not in NOTES)
    return tuple((name, value) for name, value in own if _told(value))


def _told(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(part, PLAIN) for part in value)
    return isinstance(value, (*PLAIN, FunctionType, BuiltinFunctionType))


def untold(attributes: Mapping[str, Any]) -> str:
    """Why a block must not compute a module with these attributes, or "": one may be written to, and nothing tells."""
    for name, value in attributes.items():
        if name not in OF_ALL and name not in NOTES and isinstance(value, Tensor | list | dict | set):
            return f"its {name} is a {type(value).__name__}, and nothing would tell that it was written to"
    return ""


def changed(attributes: Mapping[str, Any], before: Named) -> bool:
    """Whether an attribute is another than `fixed` has seen."""
    for name, value in before:
        now = attributes.get(name, nn.Module)
        if now is not value and (type(now) is not type(value) or now != value):
            return True
    return False


def replaced(module: FusedModule) -> bool:
    """Whether the class has another forward than was compared."""
    kind = type(module)
    return kind._original.forward is not dict(kind._compared)["forward"]


def patched(module: FusedModule, called: bool = False) -> bool:
    """Whether the class or the instance has another forward, or another function that it calls, than was compared.

    Args:
        called: True leaves out a forward of the instance that says that it wraps the class's, as accelerate's does in
            mixed precision: it has called what asks.
    """
    kind = type(module)
    for name, value in kind._compared:
        if name in module.__dict__ and not (called and name == "forward" and _wraps(module, kind)):
            return True
        if getattr(kind._original, name, None) is not value:
            return True
    return False


def _wraps(module: FusedModule, kind: type) -> bool:
    """Whether the instance's forward is a wrapper, by functools.wraps, of its class's."""
    forward = module.__dict__["forward"]
    return not is_tracing() and inspect.unwrap(getattr(forward, "__func__", forward)) is kind.forward  # type: ignore[attr-defined]


def stands_aside(module: FusedModule, x: Any) -> bool:
    """True if the module's own forward must run on x: x is no plain tensor, or a transform that our functions have no
    rules for is active."""
    if is_tracing():
        return not isinstance(x, Tensor) or x.dtype not in DTYPES or _narrowed(x)
    if (x.__class__ is not Tensor and x.__class__ is not nn.Parameter) or x.dtype not in DTYPES or x.is_nested:
        return True
    return (any_autocast_enabled() and _narrowed(x)) or transforms_active() or forward_level() >= 0


def _narrowed(x: Tensor) -> bool:
    """Whether torch.autocast gives x's operations a dtype that was not compared."""
    kind = ops.autocast_device(x)
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) not in DTYPES


def casts(x: Tensor) -> bool:
    """Whether torch.autocast may give x's operations other dtypes than x has."""
    return x.dtype is not torch.float32 and torch.is_autocast_enabled(ops.autocast_device(x))


# ---- comparing -------------------------------------------------------------------------------------------

Function = Callable[..., Tensor]


class BlockError(RuntimeError):
    """Our block, and not the forward that it is compared with, does not run."""


def reason_unsupported(error: Exception) -> str:
    """Why a module is left alone for an error."""
    whose = "our block on a small copy" if isinstance(error, BlockError) else "a small copy of it"
    return f"{whose} does not run: {str(error).partition(chr(10))[0][:100]}"


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Copies of a module's own buffers on the CPU, where twins are: a forward may write to them."""
    return {n: None if b is None else b.detach().to("cpu", copy=True) for n, b in module._buffers.items()}


def twin(module: nn.Module, kind: Any, submodules: dict[str, nn.Module], parameters: dict[str, Tensor]) -> nn.Module:
    """A module of a class with another's attributes, without its hooks, and with parts of its own."""
    copied: nn.Module = kind.__new__(kind)
    nn.Module.__init__(copied)
    own = {name: value for name, value in module.__dict__.items() if name not in OF_ALL and name != "_state"}
    copied.__dict__.update({k: copy.copy(v) if isinstance(v, list | dict | set) else v for k, v in own.items()})
    copied._modules.update(submodules)
    copied._parameters.update({name: None for name, p in module._parameters.items() if p is None})
    copied._parameters.update({name: nn.Parameter(value) for name, value in parameters.items()})
    return copied


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An nn.Linear of these values, which draws none of its own."""
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight)
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias))
    return layer


def differs(
    of_dtype: Callable[[torch.dtype], nn.Module],
    ours: Function,
    inputs: Callable[[torch.dtype], Iterator[tuple[Tensor, ...]]],
    theirs: Function = nn.Module.__call__,
) -> str:
    """Where a module's forward and ours differ, or "".

    Args:
        of_dtype: makes the twin, of the same values each time.
        ours: (twin, *inputs) to what its forward should give.
        inputs: of the forward.
        theirs: calls the twin.
    """
    for dtype in BOUNDS:
        for training in (True, False):
            copied = of_dtype(dtype).train(training)
            # Held, so that no buffer made later has the identity of one of these.
            before, held = _plain(copied), list(copied.buffers())
            for x in inputs(dtype):
                try:
                    expected = differentiated(theirs, copied, x)
                    results = of_block(ours, copied, x)
                    if not agree(results, expected, dtype, lambda: wide(theirs, copied, x)):  # noqa: B023
                        where = "training" if training else "evaluation"
                        return f"a small copy gives other results in {str(dtype).partition('.')[2]}, in {where}"
                except Exception as error:
                    return reason_unsupported(error)
            if _plain(copied) != before:
                return "its forward changes it"
            del held
    return ""


def of_block(ours: Function, module: nn.Module, x: Sequence[Tensor]) -> list[Tensor | None]:
    """As `differentiated`, of our block.

    Raises:
        BlockError: it does not run.
    """
    try:
        return differentiated(ours, module, x)
    except Exception as error:
        raise BlockError(str(error)) from error


def wide(theirs: Function, copied: nn.Module, x: Sequence[Tensor]) -> list[Tensor | None]:
    """The same in float32, of the values that there are."""
    return differentiated(theirs, copy.deepcopy(copied).float(), [a.float() if a.is_floating_point() else a for a in x])


#: How much further than theirs from float32 a result of ours may be, where both are rounded to fewer bits.
FURTHER = 1.1


def agree(
    ours: list[Tensor | None],
    expected: list[Tensor | None],
    dtype: torch.dtype,
    exact: Callable[[], list[Tensor | None]],
) -> bool:
    """Whether outputs and gradients agree; of an output that is not all finite, the output alone.

    Args:
        dtype: of the parameters.
        exact: gives the same in float32. Some forwards round so often that ours, which round once, differ by more than
            the bound: they must be as near to float32.
    """
    y = expected[0]
    assert y is not None
    if not y.isfinite().all():
        return close(ours[0], y, dtype)
    apart = [i for i, (a, b) in enumerate(zip(ours, expected, strict=True)) if not close(a, b, dtype)]
    if not apart or dtype is torch.float32:
        return not apart
    values = exact()
    for i in apart:
        a, b, c = ours[i], expected[i], values[i]
        if a is None or b is None or c is None or a.dtype is not b.dtype or a.shape != b.shape:
            return False
        if not (a.float() - c).norm() <= FURTHER * (b.float() - c).norm():
            return False
    return True


def _plain(module: nn.Module) -> str:
    """Attributes by value, and buffers by identity and version."""
    own = {name: value for name, value in module.__dict__.items() if name not in OF_ALL}
    plain = str | int | float | list | tuple
    buffers = [(name, id(b), b._version) for name, b in module.named_buffers()]
    return repr(({name: value if isinstance(value, plain) else type(value) for name, value in own.items()}, buffers))


def rows(width: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Batches and matrices of rows [..., width]: of every size, of a large mean, of zeros, and what is not finite."""
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn((6, width), generator=generator, dtype=torch.float32, device="cpu")
    sizes = torch.logspace(-4, 2, 6, dtype=torch.float32, device="cpu")[:, None]
    yield (x * sizes).view(2, 3, width).to(dtype)
    yield (x + torch.arange(6, dtype=torch.float32, device="cpu")[:, None]).to(dtype)
    x[0, 0], x[1, 1], x[2, 0], x[3] = torch.inf, torch.nan, 3e4, 0.0
    yield x.view(2, 3, width).to(dtype)


def drawn(shape: Sequence[int], dtype: torch.dtype, seed: int, mean: float = 0.0, scale: float = 1.0) -> Tensor:
    """Normally distributed values of float32, rounded."""
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")
    return x.mul_(scale).add_(mean).to(dtype)
