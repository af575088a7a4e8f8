"""The check by numbers: does a Quaver block compute what a module's own forward computes?

Both run on a small copy of the module (`stand_in`) with the same inputs and the same noise, in float32 and bf16, in
training and evaluation (`differs`). Outputs, their dtypes, and the gradients of inputs and parameters must agree.
`convert` and `from_huggingface` recognize a class by it unless its code is known (`same_code` in
`quaver.torch.conversion.replace.fused_module`).
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from quaver.torch.conversion.matchers.swap_class import original_class

#: Largest difference relative to the row's largest value; the order of summation may differ.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
#: With 16-bit dtypes, the block's error relative to float32 may be this factor times the original's.
FURTHER = 1.1

Function = Callable[..., Tensor]
Formula = TypeVar("Formula")

# ---- small copies and their inputs ----

#: Attributes that every nn.Module has.
OF_ALL = {*nn.Module().__dict__}


class CopyError(ValueError):
    """A module has no small copy."""


def stand_in(module: nn.Module, dtype: torch.dtype, features: Mapping[str, tuple[int, int]] | None = None) -> nn.Module:
    """Return a copy of a module with random parameters, on the CPU and without hooks.

    Args:
        module: a module whose children have no children.
        dtype: dtype of the parameters.
        features: (input, output) features of those children that become an nn.Linear, by name.
    Raises:
        CopyError: a child cannot be copied, or a buffer has no values yet.
    """
    children: dict[str, nn.Module] = {}
    for i, (name, part) in enumerate(module._modules.items()):
        if features is not None and name in features:
            k, n = features[name]
            bias = None if getattr(part, "bias", None) is None else random_tensor((n,), dtype, 2 * i + 1, scale=0.3)
            children[name] = linear(random_tensor((n, k), dtype, 2 * i, scale=k**-0.5), bias)
        elif part is None or part._modules:
            raise CopyError(f"it contains a {type(part).__name__}")
        else:
            children[name] = stand_in(part, dtype)
    if any(b is not None and b.is_meta for b in module._buffers.values()):
        raise CopyError("its buffers have no values yet")
    values = {}
    for i, (name, p) in enumerate(module._parameters.items()):
        if p is not None:
            values[name] = random_tensor(p.shape, dtype, 50 + i, *((0.5, 0.2) if p.dim() == 1 else (0.0, 0.5)))
    return bare_copy(module, children, values)


def bare_copy(module: nn.Module, children: Mapping[str, nn.Module], parameters: Mapping[str, Tensor]) -> nn.Module:
    """Return a module of the same original class with copies of the attributes and buffers, and without hooks."""
    kind = original_class(module)
    copied: nn.Module = kind.__new__(kind)
    nn.Module.__init__(copied)
    own = {name: value for name, value in module.__dict__.items() if name not in OF_ALL and name != "_state"}
    copied.__dict__.update({k: copy.copy(v) if isinstance(v, list | dict | set) else v for k, v in own.items()})
    copied._modules.update(children)
    copied._parameters.update({name: None for name, p in module._parameters.items() if p is None})
    copied._parameters.update({name: nn.Parameter(value) for name, value in parameters.items()})
    # Copies, because the forward may write to them.
    copied._buffers.update({n: b if b is None else b.detach().to("cpu", copy=True) for n, b in module._buffers.items()})
    return copied


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return an nn.Linear with these values, without drawing random numbers."""
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight)
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias))
    return layer


def rows(width: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield inputs [..., width]: rows of all magnitudes, with a large mean, of zeros, and with infinity and NaN."""
    x = random_tensor((6, width), torch.float32, 0)
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


# ---- comparison ----


@contextmanager
def neutral() -> Iterator[None]:
    """Make a comparison independent of the caller's inference mode and autocast, and restore the CPU's generator."""
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        yield


class BlockError(RuntimeError):
    """The Quaver block fails where the original forward runs."""


class Results(NamedTuple):
    """Outputs and gradients for one input: of the block, of the original forward, and of the latter in float32."""

    ours: list[Tensor | None]
    expected: list[Tensor | None]
    exact: Callable[[], list[Tensor | None]]


@neutral()
def first_equal(
    candidates: Iterable[Formula],
    build_copy: Callable[[torch.dtype], nn.Module],
    inputs: Callable[[torch.dtype], Iterator[tuple[Any, ...]]],
    otherwise: str,
    ours: Callable[..., Tensor] = lambda formula, *inputs: formula.of(*inputs),
    theirs: Function = nn.Module.__call__,
    **options: Any,
) -> tuple[Formula | None, str]:
    """Return the first formula that computes what a module does, or None and the reason.

    Args:
        candidates: the formulas in order of preference.
        build_copy, inputs, theirs: as for `differs`.
        otherwise: reason if no candidate gives the same first output.
        ours: function (formula, copy, *inputs) that computes the block.
        options: further arguments of `differs`.
    """
    try:
        copied, x = build_copy(torch.float32).eval(), next(inputs(torch.float32))
        with torch.no_grad():
            expected = theirs(copied, *x)
    except Exception as error:
        return None, reason_failed(error)
    why = otherwise
    for formula in candidates:
        with torch.no_grad():
            y = ours(formula, copied, *x)
        if isinstance(expected, Tensor) and y.shape == expected.shape and torch.allclose(y, expected, 1e-4, 1e-5):
            why = differs(build_copy, partial(ours, formula), inputs, theirs, **options)
            if not why:
                return formula, ""
    return None, why


@neutral()
def differs(
    build_copy: Callable[[torch.dtype], nn.Module],
    ours: Function,
    inputs: Callable[[torch.dtype], Iterator[tuple[Any, ...]]],
    theirs: Function = nn.Module.__call__,
    agree: Callable[[torch.dtype, list[Results]], bool] | None = None,
) -> str:
    """Return how a module's forward and the block differ, or "".

    Args:
        build_copy: function that builds the small copy in a dtype, with the same values each time.
        ours: function (copy, *inputs) that computes the block.
        inputs: function of a dtype that yields the inputs of the forward; other inputs than tensors are passed as is.
        theirs: function (copy, *inputs) that runs the original forward.
        agree: function of the results for all inputs that judges them; None judges those of each input.
    """
    for dtype, training in itertools.product(BOUNDS, (True, False)):
        try:
            copied = build_copy(dtype).train(training)
            # Keep references, so that a buffer created later cannot have the same id.
            before, alive = _plain(copied), list(copied.buffers())
            results = []
            for x in inputs(dtype):
                expected = differentiated(theirs, copied, x)
                results.append(Results(_run_block(ours, copied, x), expected, lambda x=x: _wide(theirs, copied, x)))  # type: ignore[misc]  # noqa: B023
                if agree is None and not _agree(dtype, *results[-1]):
                    return _where(dtype, training)
            if agree is not None and not agree(dtype, results):
                return _where(dtype, training)
        except Exception as error:
            return reason_failed(error)
        if _plain(copied) != before:
            return "its forward changes it"
        del alive
    return ""


def reason_failed(error: Exception) -> str:
    """Return the reason for leaving a module alone after an error in the comparison."""
    if isinstance(error, CopyError):
        return str(error)
    whose = "our block on a small copy" if isinstance(error, BlockError) else "a small copy of it"
    return f"{whose} does not run: {str(error).partition(chr(10))[0][:100]}"


def _where(dtype: torch.dtype, training: bool) -> str:
    where = "training" if training else "evaluation"
    return f"a small copy gives other results in {str(dtype).partition('.')[2]}, in {where}"


def differentiated(function: Callable[..., Any], module: nn.Module, x: Sequence[Any]) -> list[Tensor | None]:
    """Return the output of function(module, *x), and the gradients of the tensors in x and of the module's parameters.

    It seeds only the CPU generator, which callers restore; torch.manual_seed would also seed the GPUs'.
    """
    torch.default_generator.manual_seed(0)
    passed = [a.clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in x]
    with torch.enable_grad():
        y = function(module, *passed)
    if not isinstance(y, Tensor):
        raise TypeError(f"its forward returns a {type(y).__name__}")
    g = torch.linspace(-1, 1, y.numel(), dtype=torch.float32, device="cpu").view(y.shape).to(y.dtype)
    taken = [*(a for a in passed if isinstance(a, Tensor) and a.requires_grad), *module.parameters()]
    return [y.detach(), *torch.autograd.grad(y, taken, g, allow_unused=True)]


def first_of(outputs: Any) -> Tensor:
    """Return a module's output, or the first one if it returns several."""
    first: Tensor = outputs[0] if isinstance(outputs, tuple | list) else outputs
    return first


def _run_block(ours: Function, module: nn.Module, x: Sequence[Any]) -> list[Tensor | None]:
    try:
        return differentiated(ours, module, x)
    except Exception as error:
        raise BlockError(str(error)) from error


def _wide(theirs: Function, copied: nn.Module, x: Sequence[Any]) -> list[Tensor | None]:
    """Return the original results computed in float32 from the same values."""
    wider = [a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in x]
    return differentiated(theirs, copy.deepcopy(copied).float(), wider)


def _agree(
    dtype: torch.dtype, ours: list[Tensor | None], expected: list[Tensor | None], exact: Callable[[], Any]
) -> bool:
    """Return True if outputs and gradients agree; for a non-finite output only the output is compared.

    Some bf16 forwards round so often that the block, which rounds once, differs by more than the bound; it must then be
    as close to float32 as the original.
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


def close(a: Tensor | None, b: Tensor | None, within: torch.dtype) -> bool:
    """Return True if a and b have the same shape, dtype and non-finite values, and their rows are within the bound of
    the dtype `within`.
    """
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()) or not torch.equal(a.isnan(), b.isnan()):
        return False
    a, b = a.nan_to_num(posinf=1.0, neginf=-1.0).float(), b.nan_to_num(posinf=1.0, neginf=-1.0).float()
    largest = b.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return bool(((a - b).abs() <= BOUNDS[within] * largest).all())


def _plain(module: nn.Module) -> str:
    """Return a string of attributes by value, and of buffers by id and version, to detect changes."""
    own = {name: value for name, value in module.__dict__.items() if name not in OF_ALL}
    plain = str | int | float | list | tuple
    buffers = [(name, id(b), b._version) for name, b in module.named_buffers()]
    return repr(({name: value if isinstance(value, plain) else type(value) for name, value in own.items()}, buffers))
