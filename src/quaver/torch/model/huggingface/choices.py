"""What a layer's structure leaves open: tried on a copy with drawn weights, where outputs tell, then taken.

A layer's own weights may hide a difference: zeros do, and so do 16 bits.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

#: By how much numbers of drawn weights may differ, in units of the largest.
DRAWN = 1e-5
#: The same of a layer's own weights, of which scores may be as large as they like.
BOUNDS = {torch.float64: 3e-4, torch.float32: 3e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}

#: What families call a bias that chooses experts and weighs none: a buffer, 0 at first.
CORRECTION = ("e_score_correction_bias", "expert_bias")

T = TypeVar("T")


class Choices:
    """Which candidate was taken each time, in the order in which it was asked; given some, those are taken again.

    Without any the weights are `drawn`.
    """

    def __init__(self, given: "Choices | None" = None) -> None:
        self.taken: list[int] = []
        self._given = None if given is None else iter(given.taken)

    def first(self, candidates: Iterable[T], distance: Callable[[T], float], dtype: torch.dtype, says: str) -> T:
        """The first candidate within the bound of a dtype, or the one that was taken before.

        Raises:
            ValueError: `says`, with the smallest distance, if none is, or if the one taken before is not.
        """
        wanted = None if self._given is None else next(self._given)
        nearest = float("inf")
        for number, candidate in enumerate(candidates):
            if wanted in (None, number):
                off = distance(candidate)
                if off <= (DRAWN if self._given is None else BOUNDS[dtype]):
                    self.taken.append(number)
                    return candidate
                nearest = min(nearest, off)
        raise ValueError(f"{says}: they differ by {nearest:.1e} of the largest{_rounded()}")


def _rounded() -> str:
    """A sentence on settings by which float32 products are not float32's, "" where there are none."""
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    if all(backend.fp32_precision in ("none", "ieee") for backend in backends):
        return ""
    return (
        ". This process lets float32 products round (TF32): call "
        "torch.set_float32_matmul_precision('highest') while the layer is read"
    )


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, in units of the largest number of b; infinite where shapes or what is finite differ."""
    if a.shape != b.shape:
        return float("inf")
    size = b.abs().max().item()
    return ((a.double() - b.double()).abs().max() / (size or 1.0)).nan_to_num(torch.inf).item()


def distance_of_most(a: Tensor, b: Tensor) -> float:
    """`distance` of the nearer three quarters of the tokens in 16 bits, of all in wider dtypes.

    Where tokens choose experts a rounding of 16 bits sends some to others.
    """
    if a.shape != b.shape or a.dtype.itemsize > 2:
        return distance(a, b)
    size = b.abs().max().item()
    off = (a.double() - b.double()).abs().amax(-1).flatten().nan_to_num(torch.inf) / (size or 1.0)
    return float(off.quantile(0.75))


def drawn(layer: nn.Module) -> nn.Module:
    """A copy in float32 whose parameters are random, of a size that keeps numbers about 1."""
    other = copy.deepcopy(layer)
    if next(layer.parameters()).dtype is not torch.float64:
        other = other.float()
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for p in other.parameters():
            generator = generators.setdefault(p.device, torch.Generator(p.device).manual_seed(0))
            p.normal_(generator=generator)
            if p.dim() > 1:
                p.mul_(p.shape[-1] ** -0.5)
            else:
                p.mul_(0.3).add_(1)
        for name, buffer in other.named_buffers():
            if name.rpartition(".")[2] in CORRECTION:
                generator = generators.setdefault(buffer.device, torch.Generator(buffer.device).manual_seed(0))
                buffer.normal_(std=0.1, generator=generator)
    return other
