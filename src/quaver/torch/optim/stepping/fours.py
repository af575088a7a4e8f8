"""A piece whose numbers are of eight or sixteen bits, four at once in an int32 or in two of them: what a compiler for
CPUs makes vectors of.

It loads, widens and narrows bytes one after the other, or through memory; of an int32 it takes each by a shift. So
every tensor of a piece is read as [blocks, 16], for each block of 64 elements sixteen int32, of sixteen bits two times
sixteen, and of every four elements number k is plane k: four planes step by the formulas of `pieces.move`, and share
the scales of their blocks. Where all numbers are of sixteen bits they are read as they lie, [blocks, 32], and planes
are two. Random words come as many at a time, one for each plane. What lies in memory is float32 of
these bits, which Inductor loads whole, int32 by halves that wait for each other. The bits are those of a step without
it.
"""

import torch
from torch import Tensor

from quaver.core.numbers.formats import E4M3
from quaver.core.spec import QuantSpec
from quaver.core.states.codes import StateSpec
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import decode_scales
from quaver.torch.numerics.rounding import INFINITY_BITS, SMALLEST_NORMAL_BITS, magnitude_bits
from quaver.torch.optim import codes, weights
from quaver.torch.optim.stepping import noise
from quaver.torch.optim.stepping.pieces import Parts, Way, Written
from quaver.torch.optim.weights import Keeping

#: Elements that share a scale of a moment, and of a gradient; of every four elements, how many a block has.
BLOCK, LONG, LANES = 64, 128, 16
#: Bits of a residual.
MORE = {"residual8": 8, "residual16": 16}
#: More than the bits of a finite multiple of a scale.
FAR = 0x70000000
_LOW = 0xFFFFFFFF

#: int32 [blocks, 16], one of bytes, two of numbers of sixteen bits.
Lanes = tuple[Tensor, ...]


def fits(way: Way, own: Parts) -> bool:
    """Whether all of a piece's numbers are of eight or sixteen bits that can be read as int32, and its weight has no
    scale, one that is known beforehand, or scales of blocks that it consists of."""
    return (
        own.weight[0].is_cpu
        and own.weight[0].shape[1] % BLOCK == 0
        and _weight_fits(way, own)
        and _gradient_fits(way, own)
        and all(map(_moment_fits, way.moments))
        and all(map(_lies_in_fours, (own.weight[0], own.weight[-1], own.gradient[0], *(m[0] for m in own.moments))))
        and all(scales.is_contiguous() for held in (*own.moments, own.gradient) for scales in held[1:])
    )


def _weight_fits(way: Way, own: Parts) -> bool:
    keeping = way.keeping
    if keeping.spec is None:
        half = own.weight[0].dtype is torch.bfloat16
        return half and not keeping.master and (keeping.kind != "plain" or keeping.stochastic)
    longer = keeping.spec.format == E4M3 and keeping.kind[:8] == "residual"
    return longer and (keeping.spec.per_tensor if way.shared else _blocks_fit(keeping.spec, own.weight[0].shape))


def _blocks_fit(spec: QuantSpec, shape: torch.Size) -> bool:
    high, wide = spec.block
    if high is None or wide is None or spec.two_level or spec.scale == "unit":
        return False
    return shape[0] % high == 0 and shape[1] % wide == 0 and wide % 4 == 0


def _gradient_fits(way: Way, own: Parts) -> bool:
    spec = way.gradient
    if spec is None:
        return own.gradient[0].dtype is torch.bfloat16
    of_bytes = (spec.code, spec.block, spec.scale) == ("e4m3", LONG, "bfloat16")
    return of_bytes and own.weight[0].shape[1] % LONG == 0


def _moment_fits(spec: StateSpec) -> bool:
    if spec.of.kind == "mitchell":
        # The smallest code of a negative number would lose its sign.
        return (spec.block, spec.scale) == (BLOCK, "bfloat16") and not (spec.of.signed and spec.floor)
    return spec.of.kind == "bfloat16" and spec.stochastic


def _lies_in_fours(t: Tensor) -> bool:
    """Whether four elements that follow one another are one integer to torch, here and in the next piece: of one row
    each pieces are contiguous wherever they lie."""
    aligned = t.storage_offset() % 4 == 0 and t.data_ptr() % (4 * t.itemsize) == 0
    return aligned and t.is_contiguous() and t.stride(0) % 4 == 0


def viewed(own: Parts) -> Parts:
    """Lines as float32 [blocks, 16] that have their bits, of sixteen bits as int64, or as float32 [blocks, 32] where
    there are no others; their scales as [blocks], of a gradient half as many."""
    halves = all(
        t.itemsize == 2 for t in (own.weight[0], own.weight[-1], own.gradient[0], *(m[0] for m in own.moments))
    )

    def of(t: Tensor) -> Tensor:
        if halves:
            return t.view(torch.float32).view(-1, 2 * LANES)
        return t.view(torch.float32 if t.itemsize == 1 else torch.int64).view(-1, LANES)

    weight = [of(own.weight[0]), *own.weight[1:]]
    if len(weight) > 1:
        weight[-1] = of(own.weight[-1])
    moments = tuple((of(held[0]), *(scales.view(-1) for scales in held[1:])) for held in own.moments)
    return Parts(tuple(weight), moments, (of(own.gradient[0]), *(scales.view(-1) for scales in own.gradient[1:])))


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
    keeping, spec = way.keeping, way.keeping.spec
    held = [own.weight[0], *own.weight[1 if spec is None else 2 :]]
    weight, gradient = tuple(map(_lanes, held)), _lanes(own.gradient[0])
    moments = [_lanes(each[0]) for each in own.moments]
    # Two planes of pairs where all numbers are of sixteen bits.
    number = 2 if own.gradient[0].shape[1] > LANES else 4
    shares = _shares(way, gradient[0].shape, number, place)
    before = None if spec is None else _spread(decode_scales(own.weight[1], spec, None), spec, gradient[0].shape)
    of_gradient = None
    if way.gradient is not None:
        of_gradient = own.gradient[1].float().unsqueeze(-1).expand(-1, LONG // BLOCK).reshape(-1, 1)
    after = []
    for k in range(number):
        w, g = _weight(keeping, weight, k, number), _above(gradient, k, number)
        g = (g & -0x10000).view(torch.float32) if of_gradient is None else _of_e4m3(g, 24) * of_gradient
        stepped = way.rule(
            w if before is None else w * before,
            g if factor is None else g * factor,
            tuple(
                _moment(lanes, each, one, k, number)
                for lanes, each, one in zip(moments, own.moments, way.moments, strict=True)
            ),
            scalars,
        )
        after.append(stepped)
    new: list[Tensor] = []
    for i, one in enumerate(way.moments):
        planes = [stepped.moments[i] for stepped in after]
        new += _written(planes, one, [share[0] if one.stochastic else None for share in shares])
    lost = [share[-1] if keeping.stochastic else None for share in shares]
    planes = [stepped.weight for stepped in after]
    top, stored = None, None
    if spec is None:
        new = [*_floats(keeping, planes, lost), *new]
    elif way.shared:
        assert amax is not None
        written, top, stored = _coded(keeping, planes, lost, amax)
        new = [*written, *new]
    else:
        held.insert(1, own.weight[1])
        new = [*_coded_in_blocks(keeping, planes, lost, own.weight[1].shape), *new]
    held += [t for one in own.moments for t in one]
    for target, value in zip(held, new, strict=True):
        target.copy_(value if keep is None else torch.where(keep, value, target))
    clamped = None
    if way.counts and after[0].clamped is not None:
        clamped = torch.stack([stepped.clamped.sum() for stepped in after if stepped.clamped is not None]).sum()
    return Written(top, clamped, stored)


def _lanes(held: Tensor) -> Lanes:
    """Of numbers of sixteen bits the first two and the last two of every four. They are read in a loop of their own,
    of twice as many, which no other is joined with: steps of two are taken one after the other."""
    if held.dtype is torch.float32:
        return (held.view(torch.int32),)
    apart = held.view(torch.float32).view(-1, LANES, 2).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return noise.in_memory(apart.view(torch.int32)).unbind(1)


def _above(lanes: Lanes, k: int, number: int) -> Tensor:
    """Element k of every so many in the place of the highest, and others below it."""
    each, lane = number // len(lanes), lanes[k * len(lanes) // number]
    shift = 32 - 32 // each * (k % each + 1)
    return lane << shift if shift else lane


def _joined(planes: list[Tensor], bits: int, mask: Tensor | None = None) -> Tensor:
    """Planes of int32, of which so many of the lowest bits count, as `viewed` has them; mask: int32, of bits that
    are kept."""
    each, lanes = 32 // bits, []
    for i in range(0, len(planes), each):
        lane = planes[i] & (1 << bits) - 1
        for k in range(1, each):
            plane = planes[i + k]
            lane = lane | (plane if k == each - 1 else plane & (1 << bits) - 1) << bits * k
        lanes.append(lane if mask is None else lane & mask)
    if len(lanes) == 1:
        return lanes[0].view(torch.float32)
    # In a loop of its own: beside an int64 a compiler takes twice as many at once, which do not fit its registers.
    low, high = (noise.in_memory(lane).long() for lane in lanes)
    return low & _LOW | high << 32


def _weight(keeping: Keeping, lanes: tuple[Lanes, ...], k: int, number: int) -> Tensor:
    """Weights, of codes as multiples of their scale: `weights.read`."""
    bits = 32 * len(lanes[0]) // number
    value, below = _above(lanes[0], k, number), 32 - bits
    if len(lanes) > 1:
        longer = (value & 0x7FFFFFFF & -(1 << below)) + (_above(lanes[1], k, number) >> bits)
        value = longer.clamp(min=0) | value & -0x80000000
        below -= 32 * len(lanes[1]) // number
    if keeping.spec is not None:
        return _of_e4m3(value, below)
    return (value & -(1 << below) if below else value).view(torch.float32)


def _of_e4m3(number: Tensor, below: int) -> Tensor:
    """Values of E4M3 in the highest bits, with a longer mantissa as far as so many bits below say nothing. They are
    those of a float32 of another bias, subnormals too; NaN's have the scale NaN."""
    return ((number >> 4) & -0x78000000 - (1 << below - 4)).view(torch.float32) * 2.0**120


def _floats(keeping: Keeping, planes: list[Tensor], lost: list[Tensor | None]) -> list[Tensor]:
    """What holds weights that no GEMM reads in codes: `weights.write`."""
    if keeping.kind == "plain":
        return [_joined([_bfloat16(x, drawn) for x, drawn in zip(planes, lost, strict=True)], 16)]
    if keeping.kind == "remainder":
        bits = [torch.where(x != x, weights.NAN_BITS, x.view(torch.int32)) for x in planes]
        return [_joined([x + 0x8000 >> 16 for x in bits], 16), _joined(bits, 16)]
    return _longer(keeping, planes, lost)[0]


def _longer(keeping: Keeping, planes: list[Tensor], lost: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """Codes and residuals of multiples of scales, and the numbers that they are parts of."""
    more = MORE[keeping.kind]
    numbers = [weights.numbers(keeping, x, more, drawn) for x, drawn in zip(planes, lost, strict=True)]
    both = [weights.halves(keeping, number, x, more) for number, x in zip(numbers, planes, strict=True)]
    bits = 16 if keeping.spec is None else 8
    return [_joined([code for code, _ in both], bits), _joined([rest for _, rest in both], more)], numbers


def _coded(
    keeping: Keeping, planes: list[Tensor], lost: list[Tensor | None], amax: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """What holds weights of codes with one scale, the largest of them, and their scale."""
    spec = keeping.spec
    assert spec is not None
    top = reference.given_bits(amax, amax.view(1, 1))
    e = reference.factors(top, spec)
    scaled = [x * e for x in planes]
    written, numbers = _longer(keeping, scaled, lost)
    # The largest number, and far above it what is not finite.
    largest = _most([torch.maximum(number, magnitude_bits(x) - FAR) for number, x in zip(numbers, scaled, strict=True)])
    largest = largest.amax().view(1, 1)
    stored = reference.stored_scale(top, (top < INFINITY_BITS) & (largest < INFINITY_BITS - FAR), e, spec)
    more = MORE[keeping.kind]
    most = (spec.format.max_code << more) + (1 << more - 1) - 1
    halves = weights.halves(keeping, largest.clamp(max=most), torch.zeros_like(e), more)
    reached = weights.worth(keeping, *halves, more) * decode_scales(stored, spec, None)
    return written, torch.where(reached < codes.SMALLEST_NORMAL, 0.0, reached), stored


def _coded_in_blocks(
    keeping: Keeping, planes: list[Tensor], lost: list[Tensor | None], blocks: torch.Size
) -> list[Tensor]:
    """What holds weights of codes with scales of blocks, which are measured: codes, scales and residuals."""
    spec = keeping.spec
    assert spec is not None
    high, wide = spec.block
    assert high is not None and wide is not None
    # In a loop of its own: one that takes rows together reads across lines.
    most = noise.in_memory(_most([x.abs() for x in planes]).view(torch.int32)).view(torch.float32)
    # By magnitude: a compiler's largest of NaN has all bits set.
    top = magnitude_bits(most.view(blocks[0], high, blocks[1], wide // 4).amax((1, 3)))
    top = torch.where(top < SMALLEST_NORMAL_BITS, 0, top)
    e = reference.factors(top, spec)
    each = _spread(e, spec, planes[0].shape)
    (code, rest), _ = _longer(keeping, [x * each for x in planes], lost)
    return [code, reference.stored_scale(top, top < INFINITY_BITS, e, spec), rest]


def _spread(blocks: Tensor, spec: QuantSpec, lanes: torch.Size) -> Tensor:
    """One number a block of weights to one for every four elements, of which one line for all rows of blocks lies in
    memory; one of all stays."""
    high, wide = spec.block
    if high is None or wide is None:
        return blocks
    rows, columns = blocks.shape
    line = blocks.unsqueeze(-1).expand(rows, columns, wide // 4).reshape(rows, -1)
    line = noise.in_memory(line.view(torch.int32)).view(torch.float32)
    return line.view(rows, 1, -1, LANES).expand(rows, high, -1, LANES).reshape(lanes)


def _shares(way: Way, shape: torch.Size, number: int, place: tuple[Tensor, ...] | None) -> list[list[Tensor]]:
    """Noise of each plane for each code that is rounded at random."""
    if place is None:
        return [[] for _ in range(number)]
    words = noise.traced_pairs(shape, *place) if number == 2 else noise.traced_fours(shape, *place)
    return [noise.shares(word, way.draws) for word in words]


def _moment(lanes: Lanes, held: tuple[Tensor, ...], spec: StateSpec, k: int, number: int) -> Tensor:
    if spec.of.kind == "bfloat16":
        return (_above(lanes, k, number) & -0x10000).view(torch.float32)
    c = _above(lanes, k, number) >> 24 if spec.of.signed else (lanes[0] >> 8 * k) & 0xFF
    return codes.values_of(c, spec.of) * held[1].float().unsqueeze(-1)


def _written(planes: list[Tensor], spec: StateSpec, drawn: list[Tensor | None]) -> list[Tensor]:
    """Codes and scales of a moment, or what it is in sixteen bits."""
    if spec.of.kind == "bfloat16":
        return [_joined([_bfloat16(x, u) for x, u in zip(planes, drawn, strict=True)], 16)]
    # In float32: beside a narrower number a compiler takes twice as many at once, which do not fit its registers.
    scale = codes.wide_scale_of(_most([x.abs() for x in planes]).amax(-1), spec)
    wide = scale.unsqueeze(-1)
    usable = (wide > 0) & (wide <= codes.LARGEST)
    inverse = torch.where(usable, wide, 1.0).reciprocal()
    # No code where a block has no scale.
    mask = -usable.to(torch.int32)
    written = [_code(x, inverse, spec, u) for x, u in zip(planes, drawn, strict=True)]
    return [_joined(written, 8, mask), scale.bfloat16()]


def _bfloat16(x: Tensor, drawn: Tensor | None) -> Tensor:
    """bfloat16's bits in the lowest sixteen, rounded at random; infinities and NaN stay: `codes.to_bfloat16`."""
    assert drawn is not None
    bits = x.view(torch.int32)
    return torch.where((bits & 0x7FFFFFFF) < INFINITY_BITS, bits + (drawn << 1), bits) >> 16


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
