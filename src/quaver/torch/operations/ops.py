"""The operations of the PyTorch front end, each with its implementations in order of preference, and the choice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.core.registry import Impl, Op
from quaver.core.registry import only as _only
from quaver.core.spec import QuantSpec, Recipe
from quaver.torch.backends.cpu import fp4, fp8, gemm
from quaver.torch.backends.gpu import choice
from quaver.torch.numerics import reference
from quaver.torch.numerics.philox import QUIET, Noise
from quaver.torch.numerics.quantized import Quantized

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def widened(x: Tensor) -> Tensor:
    """float32, or the float64 that it is."""
    return x if x.dtype is torch.float64 else x.float()


def _always(*_: object) -> str:
    return ""


def _by_reference(
    x: Tensor,
    spec: QuantSpec,
    amax: Tensor | float | None = None,
    factor: Tensor | float | None = None,
    noise: Any = QUIET,
    *_hints: object,
) -> Quantized:
    """What a kernel is told besides, such as where to note the amax, changes no bit: the caller looks what was done."""
    return reference.quantize(x, spec, amax, factor, noise)


QUANTIZE = Op(
    "quantize",
    [
        Impl("cpu", fp8.quantize, fp8.reason),
        Impl("cpu_fp4", fp4.quantize, fp4.reason),
        Impl("triton", choice.quantize, choice.why_not_quantize),
        Impl("reference", _by_reference, _always),
    ],
)
MATMUL = Op(
    "matmul",
    [
        Impl("cpu", gemm.matmul, gemm.reason),
        Impl("native", choice.native, choice.why_not_native),
        Impl("decoded", choice.decoded, choice.why_not_decoded),
        Impl("reference", reference.matmul, _always),
    ],
)


def _two_calls(
    x: Tensor,
    spec: QuantSpec,
    other: QuantSpec,
    amax: Tensor | float | None = None,
    factor: Tensor | float | None = None,
    noise: Noise = QUIET,
    other_noise: Noise = QUIET,
    *_hints: object,
) -> tuple[Quantized, Quantized]:
    q = QUANTIZE(x, spec, amax, factor, noise)
    if spec == other and spec.transposable and noise is other_noise:
        return q, q.T
    return q, QUANTIZE(x.t(), other, amax, factor, other_noise)


def _why_two_calls(x: Tensor, *args: Any) -> str:
    allowed = any(impl.name == "triton" for impl in QUANTIZE.active)
    return choice.why_not_quantize_both(x, *args) if allowed else "switched off by only()"


#: x [rows, k] by one spec and its transpose by another, from one read of x where an implementation can do that:
#: (x, spec, spec of the transpose, amax, factor, noise, noise of the transpose, whether factor is known not to be 0,
#: where a kernel may note the amax, whether it may sum x over its rows).
QUANTIZE_BOTH = Op(
    "quantize_both",
    [Impl("triton", choice.quantize_both, _why_two_calls), Impl("two calls", _two_calls, _always)],
)


def _plain_sum(g: Tensor, dtype: torch.dtype) -> Tensor:
    return g.sum(0, dtype=torch.float32).to(dtype)


#: The gradient [features] of a bias, of the gradient [tokens, features] of what it was added to.
BIAS_GRADIENT = Op(
    "bias_gradient",
    [Impl("triton", choice.column_sum, choice.why_not_sum), Impl("reference", _plain_sum, _always)],
)
#: All that `only` chooses from; attention adds itself.
OPS = [QUANTIZE, MATMUL, BIAS_GRADIENT]
#: The implementation that runs in place of one that `only` names and that refuses the call.
_FALL_BACK = {"triton": "reference", "native": "decoded"}


@contextmanager
def only(name: str) -> Iterator[None]:
    """Run one implementation of every operation, by name ("cpu", "reference", "triton"): `with only("reference"): ...`.

    An operation that has none of that name runs as ever. "triton" on a CPU interprets the kernels, and specs without
    one go to the reference; "native" and "decoded" run there too where torch can.

    It holds for the whole process, other threads included: on a GPU a backward runs in a thread of autograd's, which
    must see it. Enter it in one thread at a time.
    """
    having = [op for op in OPS if any(impl.name == name for impl in op.impls)]
    with _only(having or OPS, name), choice.asking(name):
        for op in having:
            op.active = [*op.active, *(i for i in op.impls if i.name == _FALL_BACK.get(name))]
        _resolved.clear()
        try:
            yield
        finally:
            _resolved.clear()


class Resolved(NamedTuple):
    """What quantizes and multiplies under a recipe."""

    #: Held, so that no other recipe gets its identity.
    recipe: Recipe
    quantize: Callable[..., Quantized]
    matmul: Callable[..., Tensor]
    #: `QUANTIZE_BOTH` where one read of an operand can serve two GEMMs, else None: two calls take their time.
    both: Callable[..., tuple[Quantized, Quantized]] | None = None


_resolved: dict[Any, Resolved] = {}


def resolve(recipe: Recipe, x: Tensor) -> Resolved:
    """The implementations that run a recipe's operations on operands like x.

    The choice does not depend on shapes, so it is made once for a recipe (and device, and dtype): asking takes as long
    as a small GEMM.
    """
    resolved = _resolved.get(id(recipe) if x.is_cpu else (id(recipe), x.device, x.dtype))
    if resolved is None:
        resolved = _resolve(recipe, x)
        _resolved[id(recipe) if x.is_cpu else (id(recipe), x.device, x.dtype)] = resolved
    return resolved


def _resolve(recipe: Recipe, x: Tensor) -> Resolved:
    if x.is_cuda:
        choice.announce(recipe, x)
    specs = {spec for spec in recipe.operands().values() if spec is not None}
    picks = {QUANTIZE.pick(x, spec) for spec in specs}
    run = picks.pop() if len(picks) == 1 else QUANTIZE
    kernels = any(impl.name == "triton" and not impl.reason(x, spec) for impl in QUANTIZE.active for spec in specs)
    if x.is_cpu and not choice.asked():
        operand = Quantized(x, 1.0, next(iter(specs)), (0, 0))
        return Resolved(recipe, run, MATMUL.pick(operand, operand, x.dtype, None))
    multiply = choice.resolve_matmul(x) if x.is_cuda and MATMUL.active is MATMUL.impls else MATMUL
    # Asking again at each call which implementation it is takes as long as a launch.
    unasked = x.is_cuda and QUANTIZE.active is QUANTIZE.impls
    return Resolved(recipe, run, multiply, (choice.quantize_both if unasked else QUANTIZE_BOTH) if kernels else None)


def bias_gradient(g: Tensor, dtype: torch.dtype, partial: Tensor | None = None) -> Tensor:
    """g [tokens, features] summed over its tokens in float32, in a fixed order, and rounded once: [features].

    Args:
        partial: `Quantized.partial_sums` of g, where whatever quantized it summed it on the way: g is not read again.
    """
    if partial is not None:
        return choice.add_up(partial, dtype)
    if torch.compiler.is_compiling() or (g.is_cpu and not choice.asked()):
        return _plain_sum(g, dtype)
    gradient: Tensor = BIAS_GRADIENT(g, dtype)
    return gradient


def autocast_device(x: Tensor) -> str:
    """The kind of torch.autocast that reaches a tensor; meta has none of its own."""
    return "cpu" if x.is_cpu or x.is_meta else x.device.type


@contextmanager
def without_autocast(device: str) -> Iterator[None]:
    """Keep an ambient torch.autocast from casting what a GEMM decodes; costs nothing where there is none."""
    if not torch.is_autocast_enabled(device):
        yield
        return
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, True)
