"""Whether a block computes what a module's own forward computes: asked of a small twin, by outputs and gradients.

Both run on the same inputs, rows of all sizes, infinities and NaN among them, in float32 and bf16, in training and in
evaluation, with the same noise; outputs and their dtypes must agree, and the gradients of inputs and parameters.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.model.fusing.fused import OF_ALL
from quaver.torch.model.reach.same import BOUNDS, close, differentiated

Function = Callable[..., Tensor]


class BlockError(RuntimeError):
    """Our block, and not the forward that it is compared with, does not run."""


def why_not(error: Exception) -> str:
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
                    return why_not(error)
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
