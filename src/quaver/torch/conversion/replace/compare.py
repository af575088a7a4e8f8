"""Check that a Quaver block computes the same as a module's own forward, by comparing outputs and gradients.

Both run on a small copy of the module with the same inputs and the same noise: rows of all magnitudes, infinities and
    NaN,
in float32 and bf16, in training and evaluation. Outputs, their dtypes, and the gradients of inputs and parameters must
agree.
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

# ---- FusedModule, and when the module's own forward must run ----

#: Attributes that every nn.Module has.
OF_ALL = {*nn.Module().__dict__}
#: Attributes that transformers sets on loaded or initialized modules and that no forward reads.
NOTES = {"_is_hf_initialized"}
#: (name, value) pairs of attributes.
Named = tuple[tuple[str, Any], ...]

#: Dtypes that blocks support because they were compared. In float16 a forward may differ, for example clamp.
DTYPES = (torch.float32, torch.bfloat16)


class FusedModule(nn.Module):
    """Base of classes that replace a module's forward by a Quaver block, keeping its parameters, children and hooks.

    The class of each module is created by `quaver.torch.conversion.matchers.swap_class`.
    """

    #: Formula of the block: its computation, and the names of the children and parameters that it uses.
    _formula: Any
    #: The original class, and those of its members that were compared with the block.
    _original: Any
    _compared: Named


def fixed(attributes: Mapping[str, Any]) -> Named:
    """Return the attributes that are compared by value: numbers, strings, tuples of them, and functions."""
    own = ((name, value) for name, value in attributes.items() if name not in OF_ALL and name not in NOTES)
    return tuple((name, value) for name, value in own if _is_comparable(value))


def _is_comparable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(part, PLAIN) for part in value)
    return isinstance(value, (*PLAIN, FunctionType, BuiltinFunctionType))


def reason_mutable(attributes: Mapping[str, Any]) -> str:
    """Return why a module with mutable attributes cannot be replaced, or "": a write to one could not be detected."""
    for name, value in attributes.items():
        if name not in OF_ALL and name not in NOTES and isinstance(value, Tensor | list | dict | set):
            return f"its {name} is a {type(value).__name__}, and a write to it could not be detected"
    return ""


def changed(attributes: Mapping[str, Any], before: Named) -> bool:
    """Return True if an attribute differs from the value that `fixed` recorded."""
    for name, value in before:
        now = attributes.get(name, nn.Module)
        if now is not value and (type(now) is not type(value) or now != value):
            return True
    return False


def replaced(module: FusedModule) -> bool:
    """Return True if the class's forward is no longer the one that was compared."""
    kind = type(module)
    return kind._original.forward is not dict(kind._compared)["forward"]


def patched(module: FusedModule, called: bool = False) -> bool:
    """Return True if the class or the instance overrides the forward, or a function it calls, since the comparison.

    Args:
        module: the replaced module.
        called: True ignores an instance forward that wraps the class's (functools.wraps), as accelerate's does in mixed
            precision; that wrapper is the caller.
    """
    kind = type(module)
    for name, value in kind._compared:
        if name in module.__dict__ and not (called and name == "forward" and _wraps(module, kind)):
            return True
        if getattr(kind._original, name, None) is not value:
            return True
    return False


def _wraps(module: FusedModule, kind: type) -> bool:
    """Return True if the instance's forward wraps its class's, by functools.wraps."""
    forward = module.__dict__["forward"]
    return not is_tracing() and inspect.unwrap(getattr(forward, "__func__", forward)) is kind.forward  # type: ignore[attr-defined]


def must_run_original(module: FusedModule, x: Any) -> bool:
    """Return True if the module's own forward must run on x.

    That is so if x is not a plain tensor of a supported dtype, or if a function transform is active that the block's
    autograd functions do not support.
    """
    if is_tracing():
        return not isinstance(x, Tensor) or x.dtype not in DTYPES or _narrowed(x)
    if (x.__class__ is not Tensor and x.__class__ is not nn.Parameter) or x.dtype not in DTYPES or x.is_nested:
        return True
    return (any_autocast_enabled() and _narrowed(x)) or transforms_active() or forward_level() >= 0


def _narrowed(x: Tensor) -> bool:
    """Return True if torch.autocast gives x's operations a dtype that was not compared."""
    kind = ops.autocast_device(x)
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) not in DTYPES


def casts(x: Tensor) -> bool:
    """Return True if torch.autocast may give x's operations another dtype than x's own."""
    return x.dtype is not torch.float32 and torch.is_autocast_enabled(ops.autocast_device(x))


# ---- comparison ----

Function = Callable[..., Tensor]


class BlockError(RuntimeError):
    """The Quaver block fails where the original forward runs."""


def reason_unsupported(error: Exception) -> str:
    """Return the reason for leaving a module alone after an error in the comparison."""
    whose = "our block on a small copy" if isinstance(error, BlockError) else "a small copy of it"
    return f"{whose} does not run: {str(error).partition(chr(10))[0][:100]}"


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return CPU copies of a module's own buffers; the forward may write to them."""
    return {n: None if b is None else b.detach().to("cpu", copy=True) for n, b in module._buffers.items()}


def bare_copy(
    module: nn.Module, kind: Any, submodules: dict[str, nn.Module], parameters: dict[str, Tensor]
) -> nn.Module:
    """Return a new module of class `kind` with another module's attributes but without its hooks.

    Args:
        module: module whose attributes are copied.
        kind: class of the result.
        submodules: children of the result.
        parameters: parameters of the result.
    """
    copied: nn.Module = kind.__new__(kind)
    nn.Module.__init__(copied)
    own = {name: value for name, value in module.__dict__.items() if name not in OF_ALL and name != "_state"}
    copied.__dict__.update({k: copy.copy(v) if isinstance(v, list | dict | set) else v for k, v in own.items()})
    copied._modules.update(submodules)
    copied._parameters.update({name: None for name, p in module._parameters.items() if p is None})
    copied._parameters.update({name: nn.Parameter(value) for name, value in parameters.items()})
    return copied


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return an nn.Linear with these values, without drawing random numbers."""
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
    """Return how a module's forward and the block differ, or "".

    Args:
        of_dtype: function that builds the small copy in a dtype, with the same values each time.
        ours: function (copy, *inputs) that computes the block.
        inputs: function of a dtype that yields the inputs of the forward.
        theirs: function (copy, *inputs) that runs the original forward.
    """
    for dtype in BOUNDS:
        for training in (True, False):
            copied = of_dtype(dtype).train(training)
            # Keep references, so that a buffer created later cannot have the same id.
            before, alive = _plain(copied), list(copied.buffers())
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
            del alive
    return ""


def of_block(ours: Function, module: nn.Module, x: Sequence[Tensor]) -> list[Tensor | None]:
    """Run `differentiated` on the block.

    Raises:
        BlockError: the block fails.
    """
    try:
        return differentiated(ours, module, x)
    except Exception as error:
        raise BlockError(str(error)) from error


def wide(theirs: Function, copied: nn.Module, x: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the original results computed in float32 from the same values."""
    return differentiated(theirs, copy.deepcopy(copied).float(), [a.float() if a.is_floating_point() else a for a in x])


#: With 16-bit dtypes, the block's error relative to float32 may be this factor times the original's.
FURTHER = 1.1


def agree(
    ours: list[Tensor | None],
    expected: list[Tensor | None],
    dtype: torch.dtype,
    exact: Callable[[], list[Tensor | None]],
) -> bool:
    """Return True if outputs and gradients agree; for a non-finite output only the output is compared.

    Args:
        ours: results of the block.
        expected: results of the original forward.
        dtype: dtype of the parameters.
        exact: function that returns the results in float32. Some forwards round so often that the block, which rounds
            once, differs by more than the bound; it must then be as close to float32 as the original.
    """
    y = expected[0]
    assert y is not None
    if not y.isfinite().all():
        return close(ours[0], y, dtype)
    differing = [i for i, (a, b) in enumerate(zip(ours, expected, strict=True)) if not close(a, b, dtype)]
    if not differing or dtype is torch.float32:
        return not differing
    values = exact()
    for i in differing:
        a, b, c = ours[i], expected[i], values[i]
        if a is None or b is None or c is None or a.dtype is not b.dtype or a.shape != b.shape:
            return False
        if not (a.float() - c).norm() <= FURTHER * (b.float() - c).norm():
            return False
    return True


def _plain(module: nn.Module) -> str:
    """Return a string of attributes by value, and of buffers by id and version, to detect changes."""
    own = {name: value for name, value in module.__dict__.items() if name not in OF_ALL}
    plain = str | int | float | list | tuple
    buffers = [(name, id(b), b._version) for name, b in module.named_buffers()]
    return repr(({name: value if isinstance(value, plain) else type(value) for name, value in own.items()}, buffers))


def rows(width: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield inputs [..., width]: rows of all magnitudes, with a large mean, of zeros, and with infinity and NaN."""
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn((6, width), generator=generator, dtype=torch.float32, device="cpu")
    sizes = torch.logspace(-4, 2, 6, dtype=torch.float32, device="cpu")[:, None]
    yield (x * sizes).view(2, 3, width).to(dtype)
    yield (x + torch.arange(6, dtype=torch.float32, device="cpu")[:, None]).to(dtype)
    x[0, 0], x[1, 1], x[2, 0], x[3] = torch.inf, torch.nan, 3e4, 0.0
    yield x.view(2, 3, width).to(dtype)


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int, mean: float = 0.0, scale: float = 1.0) -> Tensor:
    """Return normally distributed values, drawn in float32 and rounded to dtype."""
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")
    return x.mul_(scale).add_(mean).to(dtype)
