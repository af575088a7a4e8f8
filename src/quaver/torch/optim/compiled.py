"""Optimizer step of a chunk as a compiled program, shared by chunks of one shape of all matrices.

If rows do not matter to the step, matrices are reshaped to rows of equal width, so that matrices of every shape share a
program. The rest at a matrix's end steps in eager mode, with the same bits.
"""

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from quaver.recipes.formats import E4M3
from quaver.recipes.spec import QuantSpec
from quaver.reference.optimizer_state import StateSpec
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import FLOAT8, decode_scales
from quaver.torch.numerics.rounding import (
    INFINITY_BITS,
    SMALLEST_NORMAL_BITS,
    magnitude_bits,
    noise_stream,
    round_keys,
    traced,
)
from quaver.torch.optim import codes, master_weights
from quaver.torch.optim.master_weights import WeightFormat
from quaver.torch.optim.step import (
    LOW,
    ChunkResult,
    ParameterTensors,
    RngKey,
    StepConfig,
    split_noise,
    step_chunk,
    stored,
    swap_halves,
    write,
)

# ---- packed4 ----
# Steps of chunks whose tensors are all 8 or 16 bits wide, viewed as int32, so that a CPU compiler can vectorize them.
#
# A compiler loads, widens and narrows bytes one by one or through memory, but extracts them from an int32 by shifts. So
# every tensor of a chunk is viewed as [blocks, 16]: for each block of 64 elements sixteen int32, or two times sixteen
# for 16-bit elements. Element k of every four forms plane k. Four planes step by the formulas of `step.apply_rule` and
# share the scales of their blocks. If all tensors are 16 bits wide, they are read as [blocks, 32] and there are two
# planes. Random words are drawn per plane. The views are float32, which Inductor loads in full vectors; it loads int32
# in halves that wait for each other. The bits are those of an ordinary step.

#: Elements per scale of a moment, elements per scale of a gradient, and int32 lanes per block of 64 bytes.
BLOCK, LONG, LANES = 64, 128, 16
#: Bits of a residual by its kind.
MORE = {"residual8": 8, "residual16": 16}
#: Larger than the bits of any finite multiple of a scale.
FAR = 0x70000000

#: int32 [blocks, 16]: one tensor for bytes, two for 16-bit elements.
Lanes = tuple[Tensor, ...]


def fits(config: StepConfig, own: ParameterTensors) -> bool:
    """True if a chunk can step as packed4.

    All its tensors must be 8 or 16 bits wide and readable as int32. Its weight must have no scale, a predicted scale,
    or scales of blocks that lie within the chunk.
    """
    return (
        own.weight[0].is_cpu
        and own.weight[0].shape[1] % BLOCK == 0
        and _weight_fits(config, own)
        and _gradient_fits(config, own)
        and all(map(_moment_fits, config.moments))
        and all(map(_lies_in_packed4, (own.weight[0], own.weight[-1], own.gradient[0], *(m[0] for m in own.moments))))
        and all(
            scales.is_contiguous() for moment_tensors in (*own.moments, own.gradient) for scales in moment_tensors[1:]
        )
    )


def _weight_fits(config: StepConfig, own: ParameterTensors) -> bool:
    weight_format = config.weight_format
    if weight_format.code_spec is None:
        half = own.weight[0].dtype is torch.bfloat16
        return half and not weight_format.master and (weight_format.kind != "plain" or weight_format.stochastic)
    longer = weight_format.code_spec.format == E4M3 and weight_format.kind[:8] == "residual"
    return longer and (
        weight_format.code_spec.per_tensor
        if config.single_scale
        else _blocks_fit(weight_format.code_spec, own.weight[0].shape)
    )


def _blocks_fit(spec: QuantSpec, shape: torch.Size) -> bool:
    high, wide = spec.block
    if high is None or wide is None or spec.two_level or spec.scale == "unit":
        return False
    return shape[0] % high == 0 and shape[1] % wide == 0 and wide % 4 == 0


def _gradient_fits(config: StepConfig, own: ParameterTensors) -> bool:
    spec = config.gradient
    if spec is None:
        return own.gradient[0].dtype is torch.bfloat16
    byte_states = (spec.code, spec.block, spec.scale) == ("e4m3", LONG, "bfloat16")
    return byte_states and own.weight[0].shape[1] % LONG == 0


def _moment_fits(spec: StateSpec) -> bool:
    if spec.of.kind == "mitchell":
        # The smallest code of a negative number would lose its sign.
        return (spec.block, spec.scale) == (BLOCK, "bfloat16") and not (spec.of.signed and spec.floor)
    return spec.of.kind == "bfloat16" and spec.stochastic


def _lies_in_packed4(t: Tensor) -> bool:
    """True if every four consecutive elements can be viewed as one integer, in this chunk and the next.

    A chunk of a single row is always contiguous, so strides and offsets are checked too.
    """
    aligned = t.storage_offset() % 4 == 0 and t.data_ptr() % (4 * t.itemsize) == 0
    return aligned and t.is_contiguous() and t.stride(0) % 4 == 0


def viewed(own: ParameterTensors) -> ParameterTensors:
    """View a chunk as float32 [blocks, 16], its 16-bit tensors as int64.

    If all are 16 bits wide, view them as float32 [blocks, 32]. Scales become [blocks], those of a gradient half as
    many.
    """
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
    moments = tuple(
        (of(moment_tensors[0]), *(scales.view(-1) for scales in moment_tensors[1:])) for moment_tensors in own.moments
    )
    return ParameterTensors(
        tuple(weight), moments, (of(own.gradient[0]), *(scales.view(-1) for scales in own.gradient[1:]))
    )


def run_packed4(
    config: StepConfig,
    own: ParameterTensors,
    scalars: tuple[Tensor, ...],
    factor: Tensor | None,
    place: tuple[Tensor, ...] | None,
    amax: Tensor | None,
    apply_step: Tensor | None,
) -> ChunkResult:
    """Step a chunk in place: `step.step_chunk` on the views of `viewed`."""
    weight_format, spec = config.weight_format, config.weight_format.code_spec
    moment_tensors = [own.weight[0], *own.weight[1 if spec is None else 2 :]]
    weight, gradient = tuple(map(_lanes, moment_tensors)), _lanes(own.gradient[0])
    moments = [_lanes(each[0]) for each in own.moments]
    # Two planes if all tensors are 16 bits wide.
    number = 2 if own.gradient[0].shape[1] > LANES else 4
    rounding_noise = _plane_noise(config, gradient[0].shape, number, place)
    before = None if spec is None else _spread(decode_scales(own.weight[1], spec, None), spec, gradient[0].shape)
    gradient_scale = None
    if config.gradient is not None:
        gradient_scale = own.gradient[1].float().unsqueeze(-1).expand(-1, LONG // BLOCK).reshape(-1, 1)
    after = []
    for k in range(number):
        w, g = _weight(weight_format, weight, k, number), _above(gradient, k, number)
        g = (g & -0x10000).view(torch.float32) if gradient_scale is None else _of_e4m3(g, 24) * gradient_scale
        result = config.rule(
            w if before is None else w * before,
            g if factor is None else g * factor,
            tuple(
                _moment(packed, each, moment_spec, k, number)
                for packed, each, moment_spec in zip(moments, own.moments, config.moments, strict=True)
            ),
            scalars,
        )
        after.append(result)
    new: list[Tensor] = []
    for i, moment_spec in enumerate(config.moments):
        unpacked = [result.moments[i] for result in after]
        new += _written(
            unpacked,
            moment_spec,
            [plane_noise[0] if moment_spec.stochastic else None for plane_noise in rounding_noise],
        )
    weight_noise = [plane_noise[-1] if weight_format.stochastic else None for plane_noise in rounding_noise]
    unpacked = [result.weight for result in after]
    amax_after, new_scale = None, None
    if spec is None:
        new = [*_floats(weight_format, unpacked, weight_noise), *new]
    elif config.single_scale:
        assert amax is not None
        written, amax_after, new_scale = _coded(weight_format, unpacked, weight_noise, amax)
        new = [*written, *new]
    else:
        moment_tensors.insert(1, own.weight[1])
        new = [*_coded_in_blocks(weight_format, unpacked, weight_noise, own.weight[1].shape), *new]
    moment_tensors += [t for each in own.moments for t in each]
    write(moment_tensors, new, apply_step)
    clamped = None
    if config.counts_clamped and after[0].clamped is not None:
        clamped = torch.stack([result.clamped.sum() for result in after if result.clamped is not None]).sum()
    return ChunkResult(amax_after, clamped, new_scale)


def _lanes(tensor: Tensor) -> Lanes:
    """Split 16-bit elements into the first two and the last two of every four.

    The split is materialized in a loop of its own, because stride-2 loads are not vectorized and would slow down a
    fused loop.
    """
    if tensor.dtype is torch.float32:
        return (tensor.view(torch.int32),)
    lanes = tensor.view(torch.float32).view(-1, LANES, 2).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return in_memory(lanes.view(torch.int32)).unbind(1)


def _above(packed: Lanes, k: int, number: int) -> Tensor:
    """Shift element k of every `number` elements to the highest bits; lower bits contain other elements."""
    each, lane = number // len(packed), packed[k * len(packed) // number]
    shift = 32 - 32 // each * (k % each + 1)
    return lane << shift if shift else lane


def _joined(unpacked: list[Tensor], bits: int, mask: Tensor | None = None) -> Tensor:
    """Pack planes of int32, of which the lowest `bits` count, into the layout of `viewed`.

    Args:
        unpacked: the planes.
        bits: 8 or 16.
        mask: int32, bits to keep; None keeps all.
    """
    each, packed = 32 // bits, []
    for i in range(0, len(unpacked), each):
        lane = unpacked[i] & (1 << bits) - 1
        for k in range(1, each):
            plane = unpacked[i + k]
            lane = lane | (plane if k == each - 1 else plane & (1 << bits) - 1) << bits * k
        packed.append(lane if mask is None else lane & mask)
    if len(packed) == 1:
        return packed[0].view(torch.float32)
    # In a loop of its own: with int64 in a loop, the compiler unrolls twice as far and runs out of registers.
    low, high = (in_memory(lane).long() for lane in packed)
    return low & LOW | high << 32


def _weight(weight_format: WeightFormat, packed: tuple[Lanes, ...], k: int, number: int) -> Tensor:
    """Read plane k of the weights as float32, of codes as multiples of their scale; equals `master_weights.read`."""
    bits = 32 * len(packed[0]) // number
    value, dropped_bits = _above(packed[0], k, number), 32 - bits
    if len(packed) > 1:
        longer = (value & 0x7FFFFFFF & -(1 << dropped_bits)) + (_above(packed[1], k, number) >> bits)
        value = longer.clamp(min=0) | value & -0x80000000
        dropped_bits -= 32 * len(packed[1]) // number
    if weight_format.code_spec is not None:
        return _of_e4m3(value, dropped_bits)
    return (value & -(1 << dropped_bits) if dropped_bits else value).view(torch.float32)


def _of_e4m3(number: Tensor, dropped_bits: int) -> Tensor:
    """Convert E4M3 codes in the highest bits to float32. Lower bits extend the mantissa; the lowest `dropped_bits` are
    ignored.

    The bits are those of a float32 with another exponent bias, subnormals included. NaN codes have the scale NaN.
    """
    return ((number >> 4) & -0x78000000 - (1 << dropped_bits - 4)).view(torch.float32) * 2.0**120


def _floats(weight_format: WeightFormat, unpacked: list[Tensor], weight_noise: list[Tensor | None]) -> list[Tensor]:
    """Write weights that are not codes; equals `master_weights.write`."""
    if weight_format.kind == "plain":
        return [_joined([_bfloat16(x, noise_bits) for x, noise_bits in zip(unpacked, weight_noise, strict=True)], 16)]
    if weight_format.kind == "remainder":
        bits = [torch.where(x != x, master_weights.NAN_BITS, x.view(torch.int32)) for x in unpacked]
        return [_joined([x + 0x8000 >> 16 for x in bits], 16), _joined(bits, 16)]
    return _longer(weight_format, unpacked, weight_noise)[0]


def _longer(
    weight_format: WeightFormat, unpacked: list[Tensor], weight_noise: list[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return packed codes and residuals of multiples of scales, and the integers that they represent."""
    residual_bits = MORE[weight_format.kind]
    numbers = [
        master_weights.to_integers(weight_format, x, residual_bits, noise_bits)
        for x, noise_bits in zip(unpacked, weight_noise, strict=True)
    ]
    both = [
        master_weights.split_integers(weight_format, number, x, residual_bits)
        for number, x in zip(numbers, unpacked, strict=True)
    ]
    bits = 16 if weight_format.code_spec is None else 8
    return [_joined([code for code, _ in both], bits), _joined([rest for _, rest in both], residual_bits)], numbers


def _coded(
    weight_format: WeightFormat, unpacked: list[Tensor], weight_noise: list[Tensor | None], amax: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Write weights as codes with a single, predicted scale: returns tensors, the new amax, and the scale."""
    spec = weight_format.code_spec
    assert spec is not None
    amax_bits = reference.override_bits(amax, amax.view(1, 1))
    e = reference.factors(amax_bits, spec)
    scaled = [x * e for x in unpacked]
    written, numbers = _longer(weight_format, scaled, weight_noise)
    # Largest integer, or far above it if a value is not finite.
    largest = _max_over_planes(
        [torch.maximum(number, magnitude_bits(x) - FAR) for number, x in zip(numbers, scaled, strict=True)]
    )
    largest = largest.amax().view(1, 1)
    stored = reference.stored_scale(amax_bits, (amax_bits < INFINITY_BITS) & (largest < INFINITY_BITS - FAR), e, spec)
    residual_bits = MORE[weight_format.kind]
    max_integer = (spec.format.max_code << residual_bits) + (1 << residual_bits - 1) - 1
    halves = master_weights.split_integers(
        weight_format, largest.clamp(max=max_integer), torch.zeros_like(e), residual_bits
    )
    reached = master_weights.from_code_and_residual(weight_format, *halves, residual_bits) * decode_scales(
        stored, spec, None
    )
    return written, torch.where(reached < codes.SMALLEST_NORMAL, 0.0, reached), stored


def _coded_in_blocks(
    weight_format: WeightFormat, unpacked: list[Tensor], weight_noise: list[Tensor | None], blocks: torch.Size
) -> list[Tensor]:
    """Write weights as codes with measured block scales: returns codes, scales and residuals."""
    spec = weight_format.code_spec
    assert spec is not None
    high, wide = spec.block
    assert high is not None and wide is not None
    # In a loop of its own: fused, it would read across rows.
    maxima = in_memory(_max_over_planes([x.abs() for x in unpacked]).view(torch.int32)).view(torch.float32)
    # Use magnitude bits: in compiled code the maximum of NaN has all bits set.
    amax_bits = magnitude_bits(maxima.view(blocks[0], high, blocks[1], wide // 4).amax((1, 3)))
    amax_bits = torch.where(amax_bits < SMALLEST_NORMAL_BITS, 0, amax_bits)
    e = reference.factors(amax_bits, spec)
    each = _spread(e, spec, unpacked[0].shape)
    (code, rest), _ = _longer(weight_format, [x * each for x in unpacked], weight_noise)
    return [code, reference.stored_scale(amax_bits, amax_bits < INFINITY_BITS, e, spec), rest]


def _spread(blocks: Tensor, spec: QuantSpec, packed: torch.Size) -> Tensor:
    """Expand block scales to one number for every four weights.

    Only one row per row of blocks is materialized. A per-tensor scale is returned unchanged.
    """
    high, wide = spec.block
    if high is None or wide is None:
        return blocks
    rows, columns = blocks.shape
    line = blocks.unsqueeze(-1).expand(rows, columns, wide // 4).reshape(rows, -1)
    line = in_memory(line.view(torch.int32)).view(torch.float32)
    return line.view(rows, 1, -1, LANES).expand(rows, high, -1, LANES).reshape(packed)


def _plane_noise(
    config: StepConfig, shape: torch.Size, number: int, place: tuple[Tensor, ...] | None
) -> list[list[Tensor]]:
    """Return the noise of each plane, for each stochastically rounded code."""
    if place is None:
        return [[] for _ in range(number)]
    words = traced_pairs(shape, *place) if number == 2 else traced_packed4(shape, *place)
    return [split_noise(word, config.noise_per_element) for word in words]


def _moment(packed: Lanes, moment_tensors: tuple[Tensor, ...], spec: StateSpec, k: int, number: int) -> Tensor:
    if spec.of.kind == "bfloat16":
        return (_above(packed, k, number) & -0x10000).view(torch.float32)
    c = _above(packed, k, number) >> 24 if spec.of.signed else (packed[0] >> 8 * k) & 0xFF
    return codes.values_of(c, spec.of) * moment_tensors[1].float().unsqueeze(-1)


def _written(unpacked: list[Tensor], spec: StateSpec, noise_bits: list[Tensor | None]) -> list[Tensor]:
    """Return codes and scales of a moment, or its bfloat16 bits."""
    if spec.of.kind == "bfloat16":
        return [_joined([_bfloat16(x, u) for x, u in zip(unpacked, noise_bits, strict=True)], 16)]
    # Use float32: with a narrower dtype in a loop, the compiler unrolls twice as far and runs out of registers.
    scale = codes.wide_scale_of(_max_over_planes([x.abs() for x in unpacked]).amax(-1), spec)
    wide = scale.unsqueeze(-1)
    usable = (wide > 0) & (wide <= codes.LARGEST)
    inverse = torch.where(usable, wide, 1.0).reciprocal()
    # Codes are 0 where a block has no scale.
    mask = -usable.to(torch.int32)
    written = [_code(x, inverse, spec, u) for x, u in zip(unpacked, noise_bits, strict=True)]
    return [_joined(written, 8, mask), scale.bfloat16()]


def _bfloat16(x: Tensor, noise_bits: Tensor | None) -> Tensor:
    """Round stochastically to bfloat16 bits in the lowest 16; infinities and NaN stay. Equals `codes.to_bfloat16`."""
    assert noise_bits is not None
    bits = x.view(torch.int32)
    return torch.where((bits & 0x7FFFFFFF) < INFINITY_BITS, bits + (noise_bits << 1), bits) >> 16


def _code(x: Tensor, inverse: Tensor, spec: StateSpec, noise_bits: Tensor | None) -> Tensor:
    """Return codes of kind "mitchell" in the lowest byte of int32; equals `codes.encode` for blocks with a scale."""
    bits = x.view(torch.int32) & 0x7FFFFFFF
    c = codes.mitchell(bits.view(torch.float32) * inverse, spec.of.halvings, noise_bits)
    if spec.of.signed:
        c = (c.view(torch.int32) | (x.view(torch.int32) & -0x80000000)).view(torch.float32)
    # Adding 1.5 × 2**23 rounds a number to an integer in the lowest bits.
    c = (c + 1.5 * 2.0**23).view(torch.int32)
    return torch.maximum(c & 0xFF, bits.clamp(max=1)) if spec.floor else c


def _max_over_planes(unpacked: list[Tensor]) -> Tensor:
    a, b, c, d = unpacked
    return torch.maximum(torch.maximum(a, b), torch.maximum(c, d))


# ---- noise ----


def traced_words(number: int, first: Tensor, keys: Tensor, upper: Tensor) -> Tensor:
    """`step.words` for compiled code: values that change are tensors, not constants of the program.

    Args:
        number: a multiple of four.
        first: int64 [], a multiple of four.
        keys, upper: int64 or int32 [10] and []: round keys and upper counter word of `noise_stream`. With AVX-512,
            int64 takes two thirds of the time of int32; with AVX2, one and a half times.
    """
    g = torch.arange(number // 4, dtype=torch.int64, device=first.device) + first // 4
    drawn = traced((g & LOW).to(keys.dtype), (g >> 32).to(keys.dtype) ^ upper, keys)
    # The lower 32 bits are enough for `split_noise`.
    low, high = (word.to(torch.int32) for word in drawn)
    return torch.stack([low, swap_halves(low), high, swap_halves(high)], -1).view(-1)


def traced_packed4(
    shape: torch.Size, first: Tensor, keys: Tensor, upper: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Like `traced_words`, but separate tensors for elements 4 i, 4 i + 1, 4 i + 2 and 4 i + 3: int32 of the given
    shape.

    Args:
        shape: shape of each result.
        first: [] in the dtype of the keys, lower word of the first counter; no later counter may have another upper
            word.
        keys, upper: int64 or int32 [10] and []: round keys, and the upper word of these counters.
    """
    low, high = (in_memory(word.view(shape)) for word in _traced_from(first, shape.numel(), keys, upper))
    return low, swap_halves(low), high, swap_halves(high)


def traced_pairs(shape: torch.Size, first: Tensor, keys: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Like `traced_packed4`, for elements 2 i and 2 i + 1."""
    drawn = _traced_from(first, shape.numel() // 2, keys, upper)
    word = in_memory(torch.stack([each.view(torch.float32) for each in drawn], -1).view(shape).view(torch.int32))
    return word, swap_halves(word)


def _traced_from(first: Tensor, number: int, keys: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return both words of `number` consecutive counters: int32 [number]."""
    c0 = torch.arange(number, dtype=keys.dtype, device=first.device) + first
    if keys.dtype is torch.int64:
        c0 = c0 & LOW
    low, high = traced(c0, upper.expand(c0.shape), keys)
    return low.to(torch.int32), high.to(torch.int32)


def in_memory(word: Tensor) -> Tensor:
    """Make a compiler materialize an int32 tensor, so that its users do not compute it again.

    A strided view forces a tensor into memory. It is viewed as float32, since compilers read int32 in half vectors.
    """
    bits = word.view(torch.float32)
    return bits.as_strided(bits.shape, bits.stride()).view(torch.int32)


# ---- compilation ----

#: Maximum number of programs of one optimizer, one for each shape of a chunk; further shapes step in eager mode.
MAX_PROGRAMS = 16
#: No guards: chunks step a thousand times a second, and a program's key has already compared everything.
OPTIONS: dict[str, Any] = {
    "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
    "size_asserts": False,
    "alignment_asserts": False,
}
#: Size of a tensor that is allocated and freed once. glibc returns freed memory to the system if it exceeds twice the
#: largest block that was mapped and freed before. Without this, some processes had 3,000 page faults per chunk, two
#: fifths of a step.
TEMPORARIES = 1 << 24
#: Programs of this process, shared by all optimizers: by step configuration, whether the chunk is packed4, absent
#: arguments, and shape, strides, dtype and device of each tensor.
_programs: dict[tuple[Any, ...], Callable[..., ChunkResult]] = {}


class CompiledSteps:
    """Programs of an optimizer, compiled at first use."""

    def __init__(self) -> None:
        self.programs: set[tuple[Any, ...]] = set()
        self.failed = False
        torch.empty(TEMPORARIES, dtype=torch.uint8, device="cpu")

    def step(
        self,
        config: StepConfig,
        own: ParameterTensors,
        scalars: tuple[Tensor, ...],
        factor: Tensor | None,
        rng_key: RngKey,
        first: int,
        bound: Tensor | None,
        apply_step: Tensor | None,
    ) -> ChunkResult | None:
        """Step a chunk in place by a program: see `step.step_chunk`.

        Args:
            rng_key: key of the parameter's random words.
            first: index of the chunk's first element in the whole parameter.
        Returns:
            None if no program can step the chunk; nothing was changed then.
        """
        # A program has no guards and would misread scalars of another dtype; it reads memory, which fake tensors lack.
        numbers = scalars if factor is None else (*scalars, factor)
        readable = all(number.dtype is torch.float32 and not number.dim() for number in numbers)
        readable = readable and all(type(t) is Tensor for t in (*stored(own), *own.gradient))
        if self.failed or not readable or (config.noise_per_element and first % 4):
            return None
        packed4 = fits(config, own)
        # The upper counter word must be the same for the whole chunk.
        if packed4 and first >> 34 != (first + own.weight[0].numel() - 1) >> 34:
            return None
        own = viewed(own) if packed4 else _typed(config, own)
        kinds = tuple((t.shape, t.stride(), t.dtype, t.device) for t in (*stored(own), *own.gradient))
        key = (config, packed4, factor is None, apply_step is None, kinds)
        if key not in self.programs and len(self.programs) >= MAX_PROGRAMS:
            return None
        self.programs.add(key)
        if key not in _programs:
            # The compiler caches by code object, so each program gets its own copy.
            run = run_packed4 if packed4 else _run
            code = run.__code__.replace(co_name=f"optimizer_step_{len(_programs)}")
            copy = FunctionType(code, run.__globals__)
            _programs[key] = torch.compile(copy, dynamic=False, fullgraph=True, options=OPTIONS)
        place = _place(config, own.weight[0], packed4, first, rng_key)
        try:
            return _programs[key](config, own, scalars, factor, place, bound, apply_step)
        except Exception as error:
            # Compilation fails before anything is written.
            self.failed = True
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            warnings.warn(
                f"the optimizer's step was not compiled ({type(error).__name__}: {reason}); it continues "
                "without compilation: the same numbers, slower",
                stacklevel=2,
            )
            return None


def _place(
    config: StepConfig, weight: Tensor, packed4: bool, first: int, rng_key: RngKey
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the tensors that locate a chunk's noise: the first element, round keys and upper counter word; for
    packed4 the lower word of the first counter. None without noise.
    """
    if not config.noise_per_element:
        return None
    dtype = torch.int32 if in_bytes(weight) else torch.int64
    key, upper = noise_stream(*rng_key[:3], weight.device)
    keys, upper = round_keys(key.view(())).to(dtype), upper.view(()).to(dtype)
    if not packed4:
        return torch.tensor(first, dtype=torch.int64, device=weight.device), keys, upper
    high, low = divmod(first // 4, 1 << 32)
    low = (low ^ 1 << 31) - (1 << 31) if dtype is torch.int32 else low
    return torch.tensor(low, dtype=dtype, device=weight.device), keys, upper ^ high if high else upper


def _typed(config: StepConfig, own: ParameterTensors) -> ParameterTensors:
    """View a chunk's codes in the dtype that a CPU compiler can vectorize.

    That is the dtype of their format, or bytes for E4M3 if `in_bytes`. A view as another dtype inside the program would
    be processed element by element.
    """
    gradient, weight, weight_format = own.gradient, own.weight, config.weight_format
    if config.gradient is not None and config.gradient.of.format is not None:
        fmt = config.gradient.of.format
        bytes = fmt == E4M3 and in_bytes(gradient[0])
        gradient = (gradient[0].view(torch.uint8 if bytes else FLOAT8.get(fmt.name, torch.uint8)), *gradient[1:])
    if (
        weight_format.code_spec is not None
        and weight_format.code_spec.format == E4M3
        and weight_format.kind[:8] == "residual"
    ):
        weight = (weight[0].view(torch.uint8), *weight[1:])
    return own._replace(gradient=gradient, weight=weight)


def in_bytes(t: Tensor) -> bool:
    """True if a compiler converts float8 element by element and has no int64 vector products: on CPUs without
    AVX-512.
    """
    return t.is_cpu and torch.backends.cpu.get_cpu_capability() != "AVX512"


def _run(
    config: StepConfig,
    own: ParameterTensors,
    scalars: tuple[Tensor, ...],
    factor: Tensor | None,
    place: tuple[Tensor, ...] | None,
    bound: Tensor | None,
    apply_step: Tensor | None,
) -> ChunkResult:
    def words() -> Tensor:
        assert place is not None
        shape = own.weight[0].shape
        return traced_words(shape.numel(), *place).view(shape)

    return step_chunk(config, own, scalars, factor, words, bound, apply_step)
