"""A piece's step as one compiled program, for pieces of one shape of all matrices.

Where nothing in the way depends on rows, matrices are read as lines of equal width, so that those of every shape
share a program; what is left at a matrix's end steps without one, by the same bits.
"""

import warnings
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.recipes.formats import E4M3
from quaver.recipes.spec import QuantSpec
from quaver.reference.optimizer_state import StateSpec
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import FLOAT8, decode_scales
from quaver.torch.numerics.rounding import INFINITY_BITS, SMALLEST_NORMAL_BITS, magnitude_bits
from quaver.torch.optim import codes, master_weights
from quaver.torch.optim.master_weights import MasterFormat
from quaver.torch.optim.step import noise
from quaver.torch.optim.step.step import InplaceStepResult, ParameterTensors, RngKey, StepConfig, move, put

# ---- fours -----------------------------------------------------------------------------------------------
# A piece whose numbers are of eight or sixteen bits, four at once in an int32 or in two of them: what a compiler for
# CPUs makes vectors of.
#
# It loads, widens and narrows bytes one after the other, or through memory; of an int32 it takes each by a shift. So
# every tensor of a piece is read as [blocks, 16], for each block of 64 elements sixteen int32, of sixteen bits two
# times sixteen, and of every four elements number k is plane k: four planes step by the formulas of `pieces.move`, and
# share the scales of their blocks. Where all numbers are of sixteen bits they are read as they lie, [blocks, 32], and
# planes are two. Random words come as many at a time, one for each plane. What lies in memory is float32 of
# these bits, which Inductor loads whole, int32 by halves that wait for each other. The bits are those of a step without
# it.

#: Elements that share a scale of a moment, and of a gradient; of every four elements, how many a block has.
BLOCK, LONG, LANES = 64, 128, 16
#: Bits of a residual.
MORE = {"residual8": 8, "residual16": 16}
#: More than the bits of a finite multiple of a scale.
FAR = 0x70000000
_LOW = 0xFFFFFFFF

#: int32 [blocks, 16], one of bytes, two of numbers of sixteen bits.
Lanes = tuple[Tensor, ...]


def fits(way: StepConfig, own: ParameterTensors) -> bool:
    """Whether all of a piece's numbers are of eight or sixteen bits that can be read as int32, and its weight has no
    scale, one that is known beforehand, or scales of blocks that it consists of."""
    return (
        own.weight[0].is_cpu
        and own.weight[0].shape[1] % BLOCK == 0
        and _weight_fits(way, own)
        and _gradient_fits(way, own)
        and all(map(_moment_fits, way.moments))
        and all(map(_lies_in_packed4, (own.weight[0], own.weight[-1], own.gradient[0], *(m[0] for m in own.moments))))
        and all(scales.is_contiguous() for held in (*own.moments, own.gradient) for scales in held[1:])
    )


def _weight_fits(way: StepConfig, own: ParameterTensors) -> bool:
    master_format = way.master_format
    if master_format.spec is None:
        half = own.weight[0].dtype is torch.bfloat16
        return half and not master_format.master and (master_format.kind != "plain" or master_format.stochastic)
    longer = master_format.spec.format == E4M3 and master_format.kind[:8] == "residual"
    return longer and (
        master_format.spec.per_tensor if way.shared else _blocks_fit(master_format.spec, own.weight[0].shape)
    )


def _blocks_fit(spec: QuantSpec, shape: torch.Size) -> bool:
    high, wide = spec.block
    if high is None or wide is None or spec.two_level or spec.scale == "unit":
        return False
    return shape[0] % high == 0 and shape[1] % wide == 0 and wide % 4 == 0


def _gradient_fits(way: StepConfig, own: ParameterTensors) -> bool:
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


def _lies_in_packed4(t: Tensor) -> bool:
    """Whether four elements that follow one another are one integer to torch, here and in the next piece: of one row
    each pieces are contiguous wherever they lie."""
    aligned = t.storage_offset() % 4 == 0 and t.data_ptr() % (4 * t.itemsize) == 0
    return aligned and t.is_contiguous() and t.stride(0) % 4 == 0


def viewed(own: ParameterTensors) -> ParameterTensors:
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
    return ParameterTensors(
        tuple(weight), moments, (of(own.gradient[0]), *(scales.view(-1) for scales in own.gradient[1:]))
    )


def run_packed4(
    way: StepConfig,
    own: ParameterTensors,
    scalars: tuple[Tensor, ...],
    factor: Tensor | None,
    place: tuple[Tensor, ...] | None,
    amax: Tensor | None,
    keep: Tensor | None,
) -> InplaceStepResult:
    """A step in place: `pieces.move` and `pieces.put` of what `viewed` gives."""
    master_format, spec = way.master_format, way.master_format.spec
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
        w, g = _weight(master_format, weight, k, number), _above(gradient, k, number)
        g = (g & -0x10000).view(torch.float32) if of_gradient is None else _of_e4m3(g, 24) * of_gradient
        stepped = way.rule(
            w if before is None else w * before,
            g if factor is None else g * factor,
            tuple(
                _moment(packed, each, one, k, number)
                for packed, each, one in zip(moments, own.moments, way.moments, strict=True)
            ),
            scalars,
        )
        after.append(stepped)
    new: list[Tensor] = []
    for i, one in enumerate(way.moments):
        unpacked = [stepped.moments[i] for stepped in after]
        new += _written(unpacked, one, [share[0] if one.stochastic else None for share in shares])
    lost = [share[-1] if master_format.stochastic else None for share in shares]
    unpacked = [stepped.weight for stepped in after]
    top, stored = None, None
    if spec is None:
        new = [*_floats(master_format, unpacked, lost), *new]
    elif way.shared:
        assert amax is not None
        written, top, stored = _coded(master_format, unpacked, lost, amax)
        new = [*written, *new]
    else:
        held.insert(1, own.weight[1])
        new = [*_coded_in_blocks(master_format, unpacked, lost, own.weight[1].shape), *new]
    held += [t for one in own.moments for t in one]
    for target, value in zip(held, new, strict=True):
        target.copy_(value if keep is None else torch.where(keep, value, target))
    clamped = None
    if way.counts and after[0].clamped is not None:
        clamped = torch.stack([stepped.clamped.sum() for stepped in after if stepped.clamped is not None]).sum()
    return InplaceStepResult(top, clamped, stored)


def _lanes(held: Tensor) -> Lanes:
    """Of numbers of sixteen bits the first two and the last two of every four. They are read in a loop of their own,
    of twice as many, which no other is joined with: steps of two are taken one after the other."""
    if held.dtype is torch.float32:
        return (held.view(torch.int32),)
    apart = held.view(torch.float32).view(-1, LANES, 2).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return noise.in_memory(apart.view(torch.int32)).unbind(1)


def _above(packed: Lanes, k: int, number: int) -> Tensor:
    """Element k of every so many in the place of the highest, and others below it."""
    each, lane = number // len(packed), packed[k * len(packed) // number]
    shift = 32 - 32 // each * (k % each + 1)
    return lane << shift if shift else lane


def _joined(unpacked: list[Tensor], bits: int, mask: Tensor | None = None) -> Tensor:
    """Planes of int32, of which so many of the lowest bits count, as `viewed` has them; mask: int32, of bits that
    are kept."""
    each, packed = 32 // bits, []
    for i in range(0, len(unpacked), each):
        lane = unpacked[i] & (1 << bits) - 1
        for k in range(1, each):
            plane = unpacked[i + k]
            lane = lane | (plane if k == each - 1 else plane & (1 << bits) - 1) << bits * k
        packed.append(lane if mask is None else lane & mask)
    if len(packed) == 1:
        return packed[0].view(torch.float32)
    # In a loop of its own: beside an int64 a compiler takes twice as many at once, which do not fit its registers.
    low, high = (noise.in_memory(lane).long() for lane in packed)
    return low & _LOW | high << 32


def _weight(master_format: MasterFormat, packed: tuple[Lanes, ...], k: int, number: int) -> Tensor:
    """Weights, of codes as multiples of their scale: `weights.read`."""
    bits = 32 * len(packed[0]) // number
    value, below = _above(packed[0], k, number), 32 - bits
    if len(packed) > 1:
        longer = (value & 0x7FFFFFFF & -(1 << below)) + (_above(packed[1], k, number) >> bits)
        value = longer.clamp(min=0) | value & -0x80000000
        below -= 32 * len(packed[1]) // number
    if master_format.spec is not None:
        return _of_e4m3(value, below)
    return (value & -(1 << below) if below else value).view(torch.float32)


def _of_e4m3(number: Tensor, below: int) -> Tensor:
    """Values of E4M3 in the highest bits, with a longer mantissa as far as so many bits below say nothing. They are
    those of a float32 of another bias, subnormals too; NaN's have the scale NaN."""
    return ((number >> 4) & -0x78000000 - (1 << below - 4)).view(torch.float32) * 2.0**120


def _floats(master_format: MasterFormat, unpacked: list[Tensor], lost: list[Tensor | None]) -> list[Tensor]:
    """What holds weights that no GEMM reads in codes: `weights.write`."""
    if master_format.kind == "plain":
        return [_joined([_bfloat16(x, drawn) for x, drawn in zip(unpacked, lost, strict=True)], 16)]
    if master_format.kind == "remainder":
        bits = [torch.where(x != x, master_weights.NAN_BITS, x.view(torch.int32)) for x in unpacked]
        return [_joined([x + 0x8000 >> 16 for x in bits], 16), _joined(bits, 16)]
    return _longer(master_format, unpacked, lost)[0]


def _longer(
    master_format: MasterFormat, unpacked: list[Tensor], lost: list[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Codes and residuals of multiples of scales, and the numbers that they are parts of."""
    more = MORE[master_format.kind]
    numbers = [master_weights.numbers(master_format, x, more, drawn) for x, drawn in zip(unpacked, lost, strict=True)]
    both = [master_weights.halves(master_format, number, x, more) for number, x in zip(numbers, unpacked, strict=True)]
    bits = 16 if master_format.spec is None else 8
    return [_joined([code for code, _ in both], bits), _joined([rest for _, rest in both], more)], numbers


def _coded(
    master_format: MasterFormat, unpacked: list[Tensor], lost: list[Tensor | None], amax: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """What holds weights of codes with one scale, the largest of them, and their scale."""
    spec = master_format.spec
    assert spec is not None
    top = reference.given_bits(amax, amax.view(1, 1))
    e = reference.factors(top, spec)
    scaled = [x * e for x in unpacked]
    written, numbers = _longer(master_format, scaled, lost)
    # The largest number, and far above it what is not finite.
    largest = _most([torch.maximum(number, magnitude_bits(x) - FAR) for number, x in zip(numbers, scaled, strict=True)])
    largest = largest.amax().view(1, 1)
    stored = reference.stored_scale(top, (top < INFINITY_BITS) & (largest < INFINITY_BITS - FAR), e, spec)
    more = MORE[master_format.kind]
    most = (spec.format.max_code << more) + (1 << more - 1) - 1
    halves = master_weights.halves(master_format, largest.clamp(max=most), torch.zeros_like(e), more)
    reached = master_weights.worth(master_format, *halves, more) * decode_scales(stored, spec, None)
    return written, torch.where(reached < codes.SMALLEST_NORMAL, 0.0, reached), stored


def _coded_in_blocks(
    master_format: MasterFormat, unpacked: list[Tensor], lost: list[Tensor | None], blocks: torch.Size
) -> list[Tensor]:
    """What holds weights of codes with scales of blocks, which are measured: codes, scales and residuals."""
    spec = master_format.spec
    assert spec is not None
    high, wide = spec.block
    assert high is not None and wide is not None
    # In a loop of its own: one that takes rows together reads across lines.
    most = noise.in_memory(_most([x.abs() for x in unpacked]).view(torch.int32)).view(torch.float32)
    # By magnitude: a compiler's largest of NaN has all bits set.
    top = magnitude_bits(most.view(blocks[0], high, blocks[1], wide // 4).amax((1, 3)))
    top = torch.where(top < SMALLEST_NORMAL_BITS, 0, top)
    e = reference.factors(top, spec)
    each = _spread(e, spec, unpacked[0].shape)
    (code, rest), _ = _longer(master_format, [x * each for x in unpacked], lost)
    return [code, reference.stored_scale(top, top < INFINITY_BITS, e, spec), rest]


def _spread(blocks: Tensor, spec: QuantSpec, packed: torch.Size) -> Tensor:
    """One number a block of weights to one for every four elements, of which one line for all rows of blocks lies in
    memory; one of all stays."""
    high, wide = spec.block
    if high is None or wide is None:
        return blocks
    rows, columns = blocks.shape
    line = blocks.unsqueeze(-1).expand(rows, columns, wide // 4).reshape(rows, -1)
    line = noise.in_memory(line.view(torch.int32)).view(torch.float32)
    return line.view(rows, 1, -1, LANES).expand(rows, high, -1, LANES).reshape(packed)


def _shares(way: StepConfig, shape: torch.Size, number: int, place: tuple[Tensor, ...] | None) -> list[list[Tensor]]:
    """Noise of each plane for each code that is rounded at random."""
    if place is None:
        return [[] for _ in range(number)]
    words = noise.traced_pairs(shape, *place) if number == 2 else noise.traced_packed4(shape, *place)
    return [noise.shares(word, way.draws) for word in words]


def _moment(packed: Lanes, held: tuple[Tensor, ...], spec: StateSpec, k: int, number: int) -> Tensor:
    if spec.of.kind == "bfloat16":
        return (_above(packed, k, number) & -0x10000).view(torch.float32)
    c = _above(packed, k, number) >> 24 if spec.of.signed else (packed[0] >> 8 * k) & 0xFF
    return codes.values_of(c, spec.of) * held[1].float().unsqueeze(-1)


def _written(unpacked: list[Tensor], spec: StateSpec, drawn: list[Tensor | None]) -> list[Tensor]:
    """Codes and scales of a moment, or what it is in sixteen bits."""
    if spec.of.kind == "bfloat16":
        return [_joined([_bfloat16(x, u) for x, u in zip(unpacked, drawn, strict=True)], 16)]
    # In float32: beside a narrower number a compiler takes twice as many at once, which do not fit its registers.
    scale = codes.wide_scale_of(_most([x.abs() for x in unpacked]).amax(-1), spec)
    wide = scale.unsqueeze(-1)
    usable = (wide > 0) & (wide <= codes.LARGEST)
    inverse = torch.where(usable, wide, 1.0).reciprocal()
    # No code where a block has no scale.
    mask = -usable.to(torch.int32)
    written = [_code(x, inverse, spec, u) for x, u in zip(unpacked, drawn, strict=True)]
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


def _most(unpacked: list[Tensor]) -> Tensor:
    a, b, c, d = unpacked
    return torch.maximum(torch.maximum(a, b), torch.maximum(c, d))


# ---- compiled --------------------------------------------------------------------------------------------

#: Programs of one optimizer, one for each size of a piece; matrices that would need another step without one.
MOST = 16

#: A tensor of a piece to a compiler.
Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


class Program(NamedTuple):
    """What is compiled: the way, what a piece consists of, which numbers are not given, and whether four bytes step at
    once."""

    way: StepConfig
    kinds: tuple[Kind, ...]
    no_factor: bool
    no_keep: bool
    four: bool


#: A piece is called a thousand times a second with what `Program` has compared, so the compiler compares nothing.
OPTIONS: dict[str, Any] = {
    "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
    "size_asserts": False,
    "alignment_asserts": False,
}
#: Bytes of what a program computes with, at least. glibc gives what is freed back to the system where that is more than
#: twice the largest block that was mapped and freed before, and the next piece has it mapped anew: in some processes
#: that have freed no large tensor 3,000 page faults a piece, two fifths of a step.
TEMPORARIES = 1 << 24
#: Of this process: an optimizer's program is another's.
_programs: dict[Program, Callable[..., InplaceStepResult]] = {}


class CompiledSteps:
    """The programs of an optimizer, compiled when they are first needed."""

    def __init__(self) -> None:
        self.programs: set[Program] = set()
        self.failed = False
        torch.empty(TEMPORARIES, dtype=torch.uint8, device="cpu")

    def program(self, key: Program) -> Callable[..., InplaceStepResult] | None:
        """What steps such pieces; None if there are too many programs."""
        if self.failed or (key not in self.programs and len(self.programs) >= MOST):
            return None
        self.programs.add(key)
        if key not in _programs:
            # What the compiler knows of a function belongs to its code: each program has one of its own.
            run = run_packed4 if key.four else _run
            code = run.__code__.replace(co_name=f"optimizer_step_{len(_programs)}")
            own = FunctionType(code, run.__globals__)
            _programs[key] = torch.compile(own, dynamic=False, fullgraph=True, options=OPTIONS)
        return _programs[key]

    def begin(
        self,
        way: StepConfig,
        scalars: tuple[Tensor, ...],
        factor: Tensor | None,
        drawn: RngKey,
        keep: Tensor | None,
    ) -> Callable[[ParameterTensors, int, Tensor | None], Callable[[], InplaceStepResult | None] | None]:
        """What makes steps of a parameter's pieces, as `Programs` says it."""
        # Of one parameter pieces differ in how many rows they have: whether those are read in fours, what steps them.
        runs: dict[int, tuple[bool, Callable[..., InplaceStepResult] | None]] = {}
        # A program compares nothing, and would read the bits of another dtype.
        numbers = scalars if factor is None else (*scalars, factor)
        read = all(number.dtype is torch.float32 and not number.dim() for number in numbers)
        given: tuple[Tensor, Tensor] | None = None

        def step_of(
            own: ParameterTensors, first: int, amax: Tensor | None
        ) -> Callable[[], InplaceStepResult | None] | None:
            nonlocal given
            if self.failed or not read or (way.draws and first % 4):
                return None
            rows, elements = own.weight[0].shape[0], own.weight[0].numel()
            if rows not in runs and not all(type(t) is Tensor for t in _tensors(own)):
                # A program reads memory, which a fake tensor has none of.
                runs[rows] = False, None
            four = runs[rows][0] if rows in runs else fits(way, own)
            # Counters of four elements each: beyond it the upper word is another one.
            if four and first >> 34 != (first + elements - 1) >> 34:
                return None
            own = viewed(own) if four else _typed(way, own)
            if rows not in runs:
                kinds = tuple((t.shape, t.stride(), t.dtype, t.device) for t in _tensors(own))
                runs[rows] = four, self.program(Program(way, kinds, factor is None, keep is None, four))
            run = runs[rows][1]
            if run is None:
                return None
            place = None
            if way.draws:
                device = own.weight[0].device
                if given is None:
                    given = noise.keyed(*drawn[:3], device, torch.int32 if in_bytes(own.weight[0]) else torch.int64)
                place = _place(first, four, *given)
            return partial(self._run, run, (way, own, scalars, factor, place, amax, keep))

        return step_of

    def _run(self, program: Callable[..., InplaceStepResult], given: tuple[Any, ...]) -> InplaceStepResult | None:
        """A piece's step by its program; None if that cannot be compiled."""
        if self.failed:
            return None
        try:
            return program(*given)
        except Exception as error:
            # Compilation fails before anything is written to.
            self.failed = True
            said = (str(error).strip() or "no reason given").splitlines()[0]
            warnings.warn(
                f"the optimizer's step was not compiled ({type(error).__name__}: {said}); its steps go on without: "
                "the same numbers, slower",
                stacklevel=2,
            )
            return None


def _tensors(own: ParameterTensors) -> tuple[Tensor, ...]:
    return (*own.weight, *(t for held in own.moments for t in held), *own.gradient)


def _place(first: int, four: bool, keys: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a program is given of a piece's noise: of four elements at once the lower word of its first counter."""
    if not four:
        return torch.tensor(first, dtype=torch.int64, device=keys.device), keys, upper
    high, low = divmod(first // 4, 1 << 32)
    low = (low ^ 1 << 31) - (1 << 31) if keys.dtype is torch.int32 else low
    at = torch.tensor(low, dtype=keys.dtype, device=keys.device)
    return at, keys, upper ^ high if high else upper


def _typed(way: StepConfig, own: ParameterTensors) -> ParameterTensors:
    """A piece whose codes have the dtype of which a compiler for CPUs makes vectors: their format's; bytes, where they
    are E4M3 and `in_bytes`. What it views as another dtype itself it takes one after the other."""
    gradient, weight, master_format = own.gradient, own.weight, way.master_format
    if way.gradient is not None and way.gradient.of.format is not None:
        fmt = way.gradient.of.format
        bytes = fmt == E4M3 and in_bytes(gradient[0])
        gradient = (gradient[0].view(torch.uint8 if bytes else FLOAT8.get(fmt.name, torch.uint8)), *gradient[1:])
    if master_format.spec is not None and master_format.spec.format == E4M3 and master_format.kind[:8] == "residual":
        weight = (weight[0].view(torch.uint8), *weight[1:])
    return own._replace(gradient=gradient, weight=weight)


def in_bytes(t: Tensor) -> bool:
    """Whether a compiler converts float8 one number after the other, and has no products of vectors of int64: on CPUs
    without AVX-512."""
    return t.is_cpu and torch.backends.cpu.get_cpu_capability() != "AVX512"


def _run(
    way: StepConfig,
    own: ParameterTensors,
    scalars: tuple[Tensor, ...],
    factor: Tensor | None,
    place: tuple[Tensor, ...] | None,
    amax: Tensor | None,
    keep: Tensor | None,
) -> InplaceStepResult:
    shape = own.weight[0].shape
    word = None if place is None else noise.traced_words(shape.numel(), *place).view(shape)
    moved = move(way, own, scalars, factor, word, amax)
    return put(way, own, moved, keep)
