"""A piece of bytes alone, four of them at once as an int32: what a compiler for CPUs makes vectors of.

It loads, widens and narrows bytes one after the other, or through memory; of an int32 it takes each byte by a shift. So
every tensor of a piece is read as [blocks, 16], sixteen int32 for a block of 64, and byte k of each is plane k: four
planes step by the formulas of `pieces.move`, and share the scales of their blocks. Random words come four at a time,
too, one for each plane. What lies in memory is float32 of these bits, which Inductor loads whole, int32 by halves that
wait for each other. The bits are those of a step without it.
"""

import torch
from torch import Tensor

from quaver.core.numbers.formats import E4M3
from quaver.core.states.codes import StateSpec
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import decode_scales
from quaver.torch.numerics.rounding import INFINITY_BITS, magnitude_bits
from quaver.torch.optim import codes, weights
from quaver.torch.optim.stepping import noise
from quaver.torch.optim.stepping.pieces import Parts, Way, Written

#: Elements that share a scale of a moment, and of a gradient; int32 of the first; bits of a residual.
BLOCK, LONG, LANES, MORE = 64, 128, 16, 8
#: More than the bits of a finite multiple of a scale.
FAR = 0x70000000


def fits(way: Way, own: Parts) -> bool:
    """Whether a piece consists of bytes alone that can be read as int32, and its weight has one scale that is known
    beforehand."""
    spec, gradient = way.keeping.spec, way.gradient
    return (
        own.weight[0].is_cpu
        and own.weight[0].shape[1] == LONG
        and way.shared
        and way.keeping.kind == "residual8"
        and spec is not None
        and spec.format == E4M3
        and gradient is not None
        and (gradient.code, gradient.block, gradient.scale) == ("e4m3", LONG, "bfloat16")
        and all(one.of.kind == "mitchell" and (one.block, one.scale) == (BLOCK, "bfloat16") for one in way.moments)
        and all(t.is_contiguous() and t.storage_offset() % 4 == 0 and t.data_ptr() % 4 == 0 for t in _bytes_of(own))
    )


def _bytes_of(own: Parts) -> tuple[Tensor, ...]:
    return own.weight[0], own.weight[2], own.gradient[0], *(held[0] for held in own.moments)


def viewed(own: Parts) -> Parts:
    """Lines of 128 as float32 [blocks, 16] that have their bits, and their scales as [blocks], or half as many."""

    def of(t: Tensor) -> Tensor:
        return t.view(torch.float32).view(-1, LANES)

    weight = (of(own.weight[0]), own.weight[1], of(own.weight[2]))
    moments = tuple((of(held[0]), held[1].view(-1)) for held in own.moments)
    return Parts(weight, moments, (of(own.gradient[0]), own.gradient[1].view(-1)))


def run(
    way: Way,
    own: Parts,
    scalars: tuple[Tensor, ...],
    factor: Tensor | None,
    place: tuple[Tensor, ...] | None,
    amax: Tensor | None,
    keep: Tensor | None,
) -> Written:
    """A step in place: `pieces.move` and `pieces.put` of what `viewed` gives."""
    (_, scale, _), keeping = own.weight, way.keeping
    weight, beside, gradient = (t.view(torch.int32) for t in (own.weight[0], own.weight[2], own.gradient[0]))
    assert keeping.spec is not None and amax is not None
    shares = _shares(way, own, place)
    before = decode_scales(scale, keeping.spec, None)
    of_gradient = own.gradient[1].float().unsqueeze(-1).expand(-1, LONG // BLOCK).reshape(-1, 1)
    after = []
    for k in range(4):
        g = _e4m3(gradient, k) * of_gradient
        moments = tuple(_moment(held, one, k) for held, one in zip(own.moments, way.moments, strict=True))
        after.append(
            way.rule(_weight(weight, beside, k) * before, g if factor is None else g * factor, moments, scalars)
        )
    new: list[Tensor] = []
    for i, one in enumerate(way.moments):
        planes = [stepped.moments[i] for stepped in after]
        new += _written(planes, one, [share.pop(0) if one.stochastic else None for share in shares])
    top = reference.given_bits(amax, amax.view(1, 1))
    e = reference.factors(top, keeping.spec)
    scaled = [stepped.weight * e for stepped in after]
    lost = [share.pop(0) if keeping.stochastic else None for share in shares]
    numbers = [weights.numbers(keeping, x, MORE, drawn) for x, drawn in zip(scaled, lost, strict=True)]
    both = [weights.halves(keeping, number, x, MORE) for number, x in zip(numbers, scaled, strict=True)]
    # The largest number, and far above it what is not finite.
    largest = _most([torch.maximum(number, magnitude_bits(x) - FAR) for number, x in zip(numbers, scaled, strict=True)])
    largest = largest.amax().view(1, 1)
    stored = reference.stored_scale(top, (top < INFINITY_BITS) & (largest < INFINITY_BITS - FAR), e, keeping.spec)
    reached = weights.worth(
        keeping, *weights.halves(keeping, largest.clamp(max=0x7FFF), torch.zeros_like(e), MORE), MORE
    )
    reached = reached * decode_scales(stored, keeping.spec, None)
    held = (own.weight[0], own.weight[2], *(t for one in own.moments for t in one))
    new = [_joined([code for code, _ in both]), _joined([rest for _, rest in both]), *new]
    for target, value in zip(held, new, strict=True):
        target.copy_(value if keep is None else torch.where(keep, value, target))
    clamped = None
    if way.counts and after[0].clamped is not None:
        clamped = torch.stack([stepped.clamped.sum() for stepped in after if stepped.clamped is not None]).sum()
    return Written(torch.where(reached < codes.SMALLEST_NORMAL, 0.0, reached), clamped, stored)


def _shares(way: Way, own: Parts, place: tuple[Tensor, ...] | None) -> list[list[Tensor]]:
    """Noise of each plane for each code that is rounded at random."""
    if place is None:
        return [[], [], [], []]
    words = noise.traced_fours(own.weight[0].shape, *place)
    return [noise.shares(word, way.draws) for word in words]


def _above(x: Tensor, k: int) -> Tensor:
    """Byte k in the place of the highest, and what lies below it."""
    return x << (24 - 8 * k) if k < 3 else x


def _e4m3(x: Tensor, k: int) -> Tensor:
    """Values of E4M3, whose bits are those of a float32 of another bias, subnormals too; NaN's have the scale NaN."""
    return ((_above(x, k) >> 4) & -0x78100000).view(torch.float32) * 2.0**120


def _weight(weight: Tensor, beside: Tensor, k: int) -> Tensor:
    """What E4M3 and eight bits more are: `weights.worth`."""
    number = (_above(weight, k) & -0x1000000) + (_above(beside, k) >> 8)
    return ((number >> 4) & -0x78001000).view(torch.float32) * 2.0**120


def _joined(planes: list[Tensor], mask: Tensor | None = None) -> Tensor:
    """Four planes of int32, whose lowest bytes count, as the bits of float32; mask: int32, of bits that are kept."""
    joined = planes[0] & 0xFF
    for k in range(1, 4):
        joined = joined | (planes[k] if k == 3 else planes[k] & 0xFF) << 8 * k
    return (joined if mask is None else joined & mask).view(torch.float32)


def _moment(held: tuple[Tensor, ...], spec: StateSpec, k: int) -> Tensor:
    bytes = held[0].view(torch.int32)
    c = _above(bytes, k) >> 24 if spec.of.signed else (bytes >> 8 * k) & 0xFF
    return codes.values_of(c, spec.of) * held[1].float().unsqueeze(-1)


def _written(planes: list[Tensor], spec: StateSpec, drawn: list[Tensor | None]) -> list[Tensor]:
    """Codes and scales of a moment."""
    # In float32: beside a narrower number a compiler takes twice as many at once, which do not fit its registers.
    scale = codes.wide_scale_of(_most([x.abs() for x in planes]).amax(-1), spec)
    wide = scale.unsqueeze(-1)
    usable = (wide > 0) & (wide <= codes.LARGEST)
    inverse = torch.where(usable, wide, 1.0).reciprocal()
    # No code where a block has no scale.
    mask = -usable.to(torch.int32)
    return [_joined([_code(x, inverse, spec, u) for x, u in zip(planes, drawn, strict=True)], mask), scale.bfloat16()]


def _code(x: Tensor, inverse: Tensor, spec: StateSpec, drawn: Tensor | None) -> Tensor:
    """A code of kind "mitchell" in the lowest byte of int32: `codes.encode` of a block that has a scale."""
    bits = x.view(torch.int32) & 0x7FFFFFFF
    c = codes.mitchell(bits.view(torch.float32) * inverse, spec.of.halvings, drawn)
    if spec.of.signed:
        c = (c.view(torch.int32) | (x.view(torch.int32) & -0x80000000)).view(torch.float32)
    # Added to 1.5 × 2**23 a number is rounded to a whole one, which its lowest bits are.
    c = (c + 1.5 * 2.0**23).view(torch.int32)
    return torch.maximum(c & 0xFF, bits.clamp(max=1)) if spec.floor else c


def _most(planes: list[Tensor]) -> Tensor:
    a, b, c, d = planes
    return torch.maximum(torch.maximum(a, b), torch.maximum(c, d))
