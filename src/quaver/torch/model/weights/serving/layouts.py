"""How an operand lies in a file, whatever the format calls it, and what a format says of a layer.

A layout is what a spec's blocks are to a reader: one scale a tensor, a row, a square of 128, or blocks of 32 or 16
along k. Blocks that reach over several rows become as many rows with the same scale: no number changes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from quaver.core.numbers.formats import E2M1, E4M3
from quaver.core.spec import QuantSpec
from quaver.torch.numerics.quantized import Quantized

#: One scale for all; one a row; one for 128 × 128; E8M0 bytes of 32 along k; E4M3 scales of 16 along k and a factor.
Layout = Literal["tensor", "channel", "block", "mx", "nv"]
#: Elements along k that must be whole, by layout: readers take a last, partial block for a whole one.
WIDTHS: dict[Layout, int] = {"tensor": 1, "channel": 1, "block": 1, "mx": 32, "nv": 16}


class Unfit(ValueError):
    """What a format cannot hold, and why."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a format holds the weight of a layer, and what its readers do to the layer's input."""

    #: As the format calls it.
    name: str
    layout: Layout
    #: Of the weight, as fprop consumes it.
    weight: QuantSpec
    #: Of the input as a reader quantizes it; None leaves it in 16 bits.
    input: QuantSpec | None = None
    #: Whether the input's scale, of two levels that of the tensor, lies in the file.
    static: bool = False

    @property
    def reads(self) -> str:
        """What a reader does to the input, in words."""
        if self.input is None:
            return "16-bit inputs"
        where = "measured"
        if self.static:
            where = "the tensor's factor in the file" if self.input.two_level else "scale in the file"
        return f"inputs {self.input.format}[{_block(self.input)}], {where}"


def _block(spec: QuantSpec) -> str:
    return spec.text.partition("[")[2].partition("]")[0]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What is known of a layer's inputs before a server sees any."""

    #: As the recipe quantizes them; None leaves them in high precision.
    spec: QuantSpec | None
    #: The decode scale of delayed scaling, where a history has set one.
    scale: float | None = None
    #: The largest magnitude that `calibrate` saw.
    amax: float | None = None

    @property
    def static_scale(self) -> float | None:
        """The scale of E4M3 inputs per tensor, where one is known."""
        if self.scale is not None or self.amax is None:
            return self.scale
        return self.amax / E4M3.max if self.amax else 1.0

    @property
    def static_factor(self) -> float | None:
        """What the scales of blocks of two levels are divided by, where it is known."""
        if self.amax is None:
            return None
        return E4M3.max * E2M1.max / self.amax if self.amax else 1.0


class FileFormat:
    """A format of files: what it holds and how it says so. Each is a constant of this class in a module of its own.

    Args:
        name: as `format=` takes it.
        readers: programs that read it.
        scheme: (layout, weight's spec, inputs) to a `Scheme`; raises `Unfit`.
        tensors: (operand, scheme, inputs) to the tensors of a layer, by what follows the layer's name.
        configuration: (schemes by name of the layer, names of matrices in high precision) to what config.json says.
        beside: the same to the contents of further JSON files, by name.
        stacked: whether it holds stacks of experts as one tensor, and nothing else; False for matrices.
    """

    def __init__(
        self,
        name: str,
        readers: str,
        scheme: Callable[[Layout, QuantSpec, Inputs], Scheme],
        tensors: Callable[[Quantized, Scheme, Inputs], dict[str, Tensor]],
        configuration: Callable[[Mapping[str, Scheme], list[str]], dict[str, Any]],
        beside: Callable[[Mapping[str, Scheme], list[str]], dict[str, Any]] = lambda schemes, left: {},
        stacked: bool = False,
    ) -> None:
        self.name, self.readers, self.scheme, self.tensors = name, readers, scheme, tensors
        self.configuration, self.beside, self.stacked = configuration, beside, stacked


def layout_of(spec: QuantSpec) -> Layout:
    """The layout of a weight's spec.

    Raises:
        Unfit: servers know no such blocks, or no such scales.
    """
    name, (rows, k) = spec.format.name, spec.block
    if name == "e4m3" and spec.scale in ("fp32", "power_of_two", "unit") and not spec.hadamard:
        if spec.per_tensor:
            return "tensor"
        if spec.block == (1, None):
            return "channel"
        if spec.block == (128, 128):
            return "block"
    if spec.scale == "e8m0" and k == 32 and rows is not None and name in ("e4m3", "e2m3", "e2m1"):
        return "mx"
    if spec.two_level and k == 16:
        return "nv"
    raise Unfit(f"no server reads weights in {spec}")


def check_width(q: Quantized, layout: Layout) -> None:
    """Refuse rows that end within a block.

    Raises:
        Unfit: with the width.
    """
    width = WIDTHS[layout]
    if q.shape[1] % width:
        raise Unfit(
            f"its rows of {q.shape[1]} values end within a block of {width}, which readers take for a whole one"
        )


def stored_codes(q: Quantized) -> Tensor:
    """The codes row after row: float8_e4m3fn [N, K], of four bits uint8 [N, K / 2] with the even k in the lower half,
    of six uint8 [N, 3 K / 4], four in three bytes and the first in the lowest bits."""
    data = q.upright().data.contiguous()
    if q.spec.format.bits != 6:
        return data
    codes = data.int().view(q.shape[0], -1, 4)
    word = codes[..., 0] | codes[..., 1] << 6 | codes[..., 2] << 12 | codes[..., 3] << 18
    return torch.stack([word >> shift & 0xFF for shift in (0, 8, 16)], -1).to(torch.uint8).flatten(1)


def row_scales(q: Quantized) -> Tensor:
    """The stored scales of blocks along k, uint8, a row of them for each of the operand's: [N, K / width]."""
    q = q.upright()
    height = q.spec.block[0]
    assert isinstance(q.scale, Tensor) and height is not None
    return q.scale.repeat_interleave(height, 0)[: q.shape[0]].contiguous()


def one_scale(q: Quantized) -> Tensor:
    """The scale of the whole operand, float32 []."""
    return q.scales().reshape(()).clone()


def tensor_factor(q: Quantized) -> Tensor:
    """What the scales of blocks are divided by, float32 []."""
    assert q.tensor_factor is not None
    return q.tensor_factor.reshape(()).clone()


def cut(q: Quantized, start: int, stop: int) -> Quantized:
    """Rows of an operand as one of their own, with the scales that they have.

    Raises:
        Unfit: rows that begin or end within a block whose scales a format does not repeat.
    """
    if (start, stop) == (0, q.shape[0]):
        return q
    q, height = q.upright(), q.spec.block[0]
    scale = q.scale
    if isinstance(scale, Tensor) and height is not None:
        if start % height:
            raise Unfit(f"the checkpoint cuts it at row {start}, within a block of {height} rows")
        scale = scale[start // height : -(-stop // height)]
    return Quantized(q.data[start:stop], scale, q.spec, (stop - start, q.shape[1]), False, q.tensor_factor)


def with_one_factor(operands: Sequence[Quantized]) -> list[Quantized] | None:
    """Operands of two levels with one factor of the tensor for all, the largest one's, and blocks' scales that fit.

    A server that multiplies by them as one weight has one factor for it. None where a block's scale has no bits left.
    """
    factors = [tensor_factor(q) for q in operands]
    # Zeros have factor 1 and fit any other.
    smallest = min((f for q, f in zip(operands, factors, strict=True) if q.scales().any()), default=factors[0])
    results = []
    for q, factor in zip(operands, factors, strict=True):
        up = q.upright()
        assert isinstance(up.scale, Tensor)
        scale = up.scale.view(torch.float8_e4m3fn).float() * (smallest / factor)
        stored = scale.to(torch.float8_e4m3fn)
        if not torch.equal(stored.float(), scale):
            return None
        shared = smallest.reshape(1, 1).clone()
        results.append(Quantized(up.data, stored.view(torch.uint8), up.spec, up.shape, False, shared))
    return results
