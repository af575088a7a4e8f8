"""Step of one parameter, chunk by chunk, so that temporary memory is limited to one chunk.

A chunk is some rows of the parameter. Its weight, moments and gradient are read as float32, the rule is applied, and
the results are written back in place: `step_chunk`, eager and compiled. A state with a single scale, or a rule that
needs a whole matrix, makes the whole parameter one chunk.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm, prod
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.reference.optim import NOISE_BITS
from quaver.reference.optimizer_state import StateSpec
from quaver.torch.numerics.rounding import noise_stream, philox2x32
from quaver.torch.optim import codes, master_weights
from quaver.torch.optim.master_weights import WeightFormat
from quaver.torch.optim.rules import UpdateResult, UpdateRule

#: Elements per chunk; its temporaries fit into a core's caches.
CHUNK_ELEMENTS = 1 << 16
#: Elements per compiled chunk, largest first; a call costs as much as ten thousand elements.
COMPILED_CHUNK_ELEMENTS = (1 << 20, 1 << 18)
#: If rows do not matter, matrices are reshaped to rows whose width is a multiple of this.
ROW_MULTIPLE = 64
LOW = 0xFFFFFFFF


class ShardPosition(NamedTuple):
    """Position of a shard in the whole parameter."""

    #: First index of the shard along each dimension.
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """True if the shard's elements are consecutive in the whole parameter."""
        return self.local_shape[1:] == self.global_shape[1:]

    def narrowed(self, columns: slice) -> "ShardPosition":
        """Return the position of some columns of the shard."""
        if columns == slice(0, self.local_shape[-1] if self.local_shape else 1):
            return self
        offset = (*self.global_offset[:-1], self.global_offset[-1] + columns.start)
        return ShardPosition(offset, (*self.local_shape[:-1], columns.stop - columns.start), self.global_shape)

    @property
    def flat_offset(self) -> int:
        """Index of the shard's first element in the whole parameter."""
        return sum(at * prod(self.global_shape[dim + 1 :]) for dim, at in enumerate(self.global_offset))


@dataclass(frozen=True)
class StepConfig:
    """Rule and formats by which a parameter steps. Equal configurations share compiled code."""

    rule: UpdateRule
    weight_format: WeightFormat
    #: Format of each moment.
    moments: tuple[StateSpec, ...]
    #: Format of quantized gradients; None if they are floats.
    gradient: StateSpec | None = None
    #: True if the weight's scales are predicted from the rule's bound before the step.
    predicts_scale: bool = False
    #: True if clamped updates are counted.
    counts_clamped: bool = True

    @property
    def noise_per_element(self) -> int:
        """Number of noise values per element: one shared by all moments, and one for the weight.

        Moments that are rounded up together have a smaller error in their quotient than with separate noise.
        """
        return any(spec.stochastic for spec in self.moments) + self.weight_format.stochastic

    @property
    def single_scale(self) -> bool:
        """True if the whole weight has a single scale, predicted before the step for all chunks."""
        return (
            self.predicts_scale
            and self.weight_format.code_spec is not None
            and self.weight_format.code_spec.block[0] is None
        )

    @property
    def single_chunk(self) -> bool:
        """True if the parameter must be one chunk."""
        in_all = any(spec.of.scaled and spec.block is None for spec in self.moments)
        measured = (
            not self.predicts_scale
            and self.weight_format.code_spec is not None
            and None in self.weight_format.code_spec.block
        )
        return self.rule.needs_matrix or in_all or self.weight_format.needs_whole_weight or measured


class ParameterTensors(NamedTuple):
    """All tensors of a parameter, or of one chunk, as matrices [rows, K], and scales [rows, blocks]."""

    #: Tensors of the weight in the order of `WeightFormat`.
    weight: tuple[Tensor, ...]
    #: Codes and scale of each moment, or a float tensor.
    moments: tuple[tuple[Tensor, ...], ...]
    #: A float tensor, or codes and scale.
    gradient: tuple[Tensor, ...]

    def to(self, device: torch.device) -> "ParameterTensors":
        """Return all tensors on one device, those of other devices as copies."""
        moments = tuple(tuple(t.to(device) for t in each) for each in self.moments)
        return ParameterTensors(
            tuple(t.to(device) for t in self.weight), moments, tuple(t.to(device) for t in self.gradient)
        )


def stored(parts: ParameterTensors) -> tuple[Tensor, ...]:
    """Return the tensors that a step writes: those of the weight and of all moments."""
    return (*parts.weight, *(t for moment_tensors in parts.moments for t in moment_tensors))


class RngKey(NamedTuple):
    """Key of the random words of a parameter's step."""

    seed: int
    parameter: int
    #: Step count, int64 [] or a number.
    step: Tensor | int
    #: Position of this rank's shard in the whole parameter.
    place: ShardPosition


# ---- one chunk ----


class ChunkResult(NamedTuple):
    """Results of a chunk's step besides the tensors that it writes."""

    #: Amaxes of the weight's blocks as stored, if scales are predicted.
    amax: Tensor | None
    #: Number of clamped updates, int64 []; None if the rule does not clamp.
    clamped: Tensor | None
    #: New scale of the whole weight, if it has a single one.
    scale: Tensor | None


def step_chunk(
    config: StepConfig,
    own: ParameterTensors,
    scalars: tuple[Tensor, ...],
    factor: Tensor | None,
    words: Callable[[], Tensor],
    bound: Tensor | None,
    apply_step: Tensor | None,
) -> ChunkResult:
    """Step a chunk in place.

    Args:
        config: step configuration.
        own: tensors of the chunk; a single scale of the weight is returned instead of written.
        scalars: scalars of the rule, float32 [].
        factor: multiplier of the gradient, float32 [], or None.
        words: returns the chunk's random words, int32 or int64 of its shape; called after the rule, so that its
            temporaries and the words are not in memory together.
        bound: upper bounds of the weight's blocks, or None to measure them.
        apply_step: bool []; False leaves everything unchanged; None always steps.
    """
    weight, moments, clamped = apply_rule(config, own, scalars, factor)
    rest = [*moments]
    del moments
    clamped = clamped.sum() if config.counts_clamped and clamped is not None else None
    noise = split_noise(words(), config.noise_per_element) if config.noise_per_element else []
    weight_noise = noise.pop() if config.weight_format.stochastic else None
    new = [_encoded(rest.pop(0), spec, noise[0] if spec.stochastic else None) for spec in config.moments]
    noise.clear()
    written = master_weights.write(config.weight_format, weight, own.weight, weight_noise, bound)
    del weight, weight_noise
    amax, spec = None, config.weight_format.code_spec
    if config.predicts_scale:
        assert spec is not None
        amax = master_weights.block_amax(spec, master_weights.read(config.weight_format, written))
    targets, values = [*stored(own)], [*written, *(t for moment_tensors in new for t in moment_tensors)]
    scale = None
    if config.single_scale:
        targets.pop(1)
        scale = values.pop(1)
    write(targets, values, apply_step)
    return ChunkResult(amax, clamped, scale)


def write(targets: Sequence[Tensor], values: Sequence[Tensor], apply_step: Tensor | None) -> None:
    """Copy values to tensors in place, unless `apply_step`, bool [], is False."""
    for target, value in zip(targets, values, strict=True):
        target.copy_(value if apply_step is None else torch.where(apply_step, value, target))


def apply_rule(
    config: StepConfig, parts: ParameterTensors, scalars: tuple[Tensor, ...], factor: Tensor | None
) -> UpdateResult:
    """Apply the rule to a chunk in float32."""
    # Pass temporaries without names, so that the rule can free them; calling the instance would hold its arguments.
    return config.rule.__call__(
        master_weights.read(config.weight_format, parts.weight),
        _gradient(config, parts, factor),
        tuple(
            _decoded(moment_tensors, spec) for moment_tensors, spec in zip(parts.moments, config.moments, strict=True)
        ),
        scalars,
    )


def _gradient(config: StepConfig, parts: ParameterTensors, factor: Tensor | None) -> Tensor:
    gradient = parts.gradient[0].float()
    if config.gradient is not None:
        gradient = codes.decode(parts.gradient[0], parts.gradient[1], config.gradient)
    return gradient if factor is None else gradient * factor


def _decoded(moment_tensors: tuple[Tensor, ...], spec: StateSpec) -> Tensor:
    return codes.decode(moment_tensors[0], moment_tensors[1] if len(moment_tensors) > 1 else None, spec)


def _encoded(moment: Tensor, spec: StateSpec, noise_bits: Tensor | None) -> tuple[Tensor, ...]:
    written, scale = codes.encode(moment, spec, noise_bits)
    return (written,) if scale is None else (written, scale)


# ---- one parameter ----


def step_parameter(
    config: StepConfig,
    parts: ParameterTensors,
    scalars: tuple[Tensor, ...],
    factor: Tensor | None,
    rng_key: RngKey,
    amax: Tensor | None = None,
    apply_step: Tensor | None = None,
    compiled_step: Callable[..., ChunkResult | None] | None = None,
    agreed: tuple[Tensor, ...] | None = None,
    bound: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Step a parameter in place.

    Args:
        config: step configuration.
        parts: all tensors of the parameter.
        scalars: scalars of the rule.
        factor: multiplier of the gradient, or None.
        rng_key: key of the random words.
        amax: amaxes of its blocks before the step, if scales are predicted.
        apply_step: as in `step_chunk`.
        compiled_step: `compiled.CompiledSteps.step`, for large chunks; None runs all in eager mode.
        agreed: amaxes of gradient and moments over all ranks, see `largest`; None if this rank has the whole parameter.
        bound: amaxes after the step of blocks that cross shards, or None.
    Returns:
        The amaxes of its blocks after the step, and the number of clamped updates, each None if there are none.
    """
    if config.predicts_scale:
        assert amax is not None
        if agreed is None:
            agreed = largest(config, parts, factor) if config.rule.bound_needs_amaxes else ()
        bound = config.rule.weight_bound(amax, scalars, agreed)
    if not rng_key.place.contiguous:
        compiled_step = None
    if compiled_step is not None:
        parts, rng_key = reshape_rows(config, parts, rng_key)
    done: list[ChunkResult] = []
    for large, small in split_into_chunks(config, parts, compiled_step is not None):
        result = None
        if large is not None and compiled_step is not None:
            first = rng_key.place.flat_offset + large.start * parts.weight[0].shape[1]
            own_bound = bounds_of_rows(bound, config, large)
            result = compiled_step(
                config, cut(config, parts, large), scalars, factor, rng_key, first, own_bound, apply_step
            )
        if result is not None:
            done.append(result)
            continue
        for rows, columns in [(some, columns) for some in small for columns in column_chunks(config, parts, some)]:
            own, own_bound = cut(config, parts, rows), bounds_of_rows(bound, config, rows)
            if columns != slice(0, parts.weight[0].shape[1]):
                own = cut_across(config, own, columns)
                if own_bound is not None:
                    own_bound = slice_columns(own_bound, config.weight_format.code_spec.block[1], columns)  # type: ignore[union-attr]
            place, device = rng_key.place.narrowed(columns), own.weight[0].device
            words = partial(words_at, place, rows, *rng_key[:3], device)
            done.append(step_chunk(config, own, scalars, factor, words, own_bound, apply_step))
    return _combine_chunks(config, parts, done, apply_step)


def _combine_chunks(
    config: StepConfig, parts: ParameterTensors, done: list[ChunkResult], apply_step: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Combine the results of a parameter's chunks, and write a single scale."""
    scales = [result.scale for result in done if result.scale is not None]
    if scales:
        # NaN if a chunk has a value that is not finite.
        write([parts.weight[1]], [torch.stack(scales).amax(0)], apply_step)
    amaxes, amax = [result.amax for result in done if result.amax is not None], None
    if amaxes:
        assert config.weight_format.code_spec is not None
        by_rows = config.weight_format.code_spec.block[0] is not None
        amax = torch.cat(amaxes) if by_rows else torch.stack(amaxes).amax(0)
    clamped = [result.clamped for result in done if result.clamped is not None]
    return amax, torch.stack(clamped).sum() if clamped else None


def reshape_rows(config: StepConfig, parts: ParameterTensors, rng_key: RngKey) -> tuple[ParameterTensors, RngKey]:
    """Reshape a matrix to rows of a common width if rows do not matter; else return it unchanged."""
    spec = config.weight_format.code_spec
    rows, columns = parts.weight[0].shape
    specs = (*config.moments, *(() if config.gradient is None else (config.gradient,)))
    width = lcm(ROW_MULTIPLE, *(s.block for s in specs if s.block is not None))
    by_rows = config.single_chunk or (spec is not None and spec.block != (None, None))
    contiguous = all(t.is_contiguous() for t in (*stored(parts), *parts.gradient))
    if by_rows or columns % width or not rows or not contiguous:
        return parts, rng_key
    number = rows * columns // width

    def of(t: Tensor) -> Tensor:
        return t.view(number, -1)

    weight = tuple(t if spec is not None and i == 1 else of(t) for i, t in enumerate(parts.weight))
    moments = tuple(tuple(map(of, moment_tensors)) for moment_tensors in parts.moments)
    place = ShardPosition((0, rng_key.place.flat_offset), (number, width), (number, width))
    return ParameterTensors(weight, moments, tuple(map(of, parts.gradient))), rng_key._replace(place=place)


def split_into_chunks(
    config: StepConfig, parts: ParameterTensors, compiled: bool
) -> Iterator[tuple[slice | None, Sequence[slice]]]:
    """Yield each compiled chunk's rows, or None, and the rows of the small chunks that it consists of."""
    if not compiled or config.single_chunk:
        yield None, row_chunks(config, parts)
        return
    first, (rows, columns) = 0, parts.weight[0].shape
    for size in COMPILED_CHUNK_ELEMENTS:
        for large in row_chunks(config, parts, size, slice(first, rows)):
            # If blocks are higher than such a chunk, only the last may be one; earlier rows would be skipped.
            if large.start == first and (large.stop - first) * columns == size:
                yield large, row_chunks(config, parts, CHUNK_ELEMENTS, large)
                first = large.stop
    yield None, row_chunks(config, parts, CHUNK_ELEMENTS, slice(first, rows))


def largest(config: StepConfig, parts: ParameterTensors, factor: Tensor | None) -> tuple[Tensor, ...]:
    """Return the amaxes of the gradient and of each moment: float32 []."""
    gradient, *scales = parts.gradient
    gradient_amax = _amax(gradient)
    if config.gradient is not None:
        gradient_amax = _amax(codes.decode(gradient, scales[0], config.gradient))
    moment_amaxes = [
        _amax(_decoded(moment_tensors, spec))
        for moment_tensors, spec in zip(parts.moments, config.moments, strict=True)
    ]
    return (gradient_amax if factor is None else gradient_amax * factor, *moment_amaxes)


def _amax(x: Tensor) -> Tensor:
    """Return the largest magnitude, 0 for no elements: float32 []."""
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def row_chunks(
    config: StepConfig, parts: ParameterTensors, size: int | None = None, within: slice | None = None
) -> Sequence[slice]:
    """Split all rows, or those in `within`, into chunks of about `size` elements that begin at block boundaries."""
    rows, columns = parts.weight[0].shape
    size = CHUNK_ELEMENTS if size is None else size
    first, last = (0, rows) if within is None else (within.start, within.stop)
    if config.single_chunk or (last - first) * columns <= size:
        return [slice(first, last)] if (last - first) * columns else []
    block = 1
    if config.weight_format.code_spec is not None:
        block = config.weight_format.code_spec.block[0] or 1
    high = max(size // columns // block, 1) * block
    return [slice(at, min(at + high, last)) for at in range(first, last, high)]


def column_chunks(config: StepConfig, parts: ParameterTensors, rows: slice) -> Sequence[slice]:
    """Split the columns of a chunk if its block rows exceed the chunk size; chunks contain whole blocks."""
    columns, spec = parts.weight[0].shape[1], config.weight_format.code_spec
    height = rows.stop - rows.start
    if spec is None or None in spec.block or config.single_chunk or height * columns <= CHUNK_ELEMENTS:
        return [slice(0, columns)]
    specs = (*config.moments, *(() if config.gradient is None else (config.gradient,)))
    unit = lcm(spec.block[1] or 1, *(s.block for s in specs if s.block is not None))
    wide = max(CHUNK_ELEMENTS // height // unit, 1) * unit
    return [slice(at, min(at + wide, columns)) for at in range(0, columns, wide)]


def cut_across(config: StepConfig, parts: ParameterTensors, columns: slice) -> ParameterTensors:
    """Select columns of a chunk with block scales; they must begin at block boundaries of every tensor."""
    assert config.weight_format.code_spec is not None
    weight = [t[:, columns] for t in parts.weight]
    weight[1] = slice_columns(parts.weight[1], config.weight_format.code_spec.block[1], columns)
    moments = tuple(
        (
            moment_tensors[0][:, columns],
            *(slice_columns(t, spec.block, columns, spec.of.numbers) for t in moment_tensors[1:]),
        )
        for moment_tensors, spec in zip(parts.moments, config.moments, strict=True)
    )
    codes, *scale = parts.gradient
    block = None if config.gradient is None else config.gradient.block
    gradient = (codes[:, columns], *(slice_columns(t, block, columns) for t in scale))
    return ParameterTensors(tuple(weight), moments, gradient)


def slice_columns(blocks: Tensor, block: int | None, columns: slice, numbers: int = 1) -> Tensor:
    """Select the columns of a tensor that stores `numbers` values for each block of columns."""
    assert block is not None
    return blocks[:, columns.start // block * numbers : -(-columns.stop // block) * numbers]


def cut(config: StepConfig, parts: ParameterTensors, rows: slice) -> ParameterTensors:
    """Select a chunk's rows from all tensors of a parameter."""
    if rows == slice(0, parts.weight[0].shape[0]):
        return parts
    weight = [t[rows] if config.weight_format.code_spec is None or i != 1 else t for i, t in enumerate(parts.weight)]
    if config.weight_format.code_spec is not None:
        weight[1] = slice_rows(parts.weight[1], config, rows)
    moments = tuple(tuple(t[rows] for t in moment_tensors) for moment_tensors in parts.moments)
    return ParameterTensors(tuple(weight), moments, tuple(t[rows] for t in parts.gradient))


def slice_rows(blocks: Tensor, config: StepConfig, rows: slice) -> Tensor:
    """Select the rows of a tensor that stores one value for each block of the weight."""
    assert config.weight_format.code_spec is not None
    block = config.weight_format.code_spec.block[0]
    return blocks if block is None else blocks[rows.start // block : -(-rows.stop // block)]


def bounds_of_rows(bound: Tensor | None, config: StepConfig, rows: slice) -> Tensor | None:
    """Select the bounds of some rows' blocks."""
    return None if bound is None else slice_rows(bound, config, rows)


# ---- noise ----
# Random bits for stochastic rounding, one word per element and step, shared by its codes.
#
# Two words of Philox serve four elements, 16 bits each. An element reads its word starting at its own half. A code then
# has 15 bits of noise, the upper ones from its own half, the lower ones from its neighbour's. The counter is the
# element's position in the whole parameter, so sharded parameters draw the same noise as unsharded ones.


def words_at(
    place: ShardPosition, rows: slice, seed: int, parameter: int, step: Tensor | int, device: torch.device
) -> Tensor:
    """Return the words of some rows of a shard, whose leading dimensions are flattened: int64 [rows, K]. See
    `words`.
    """
    columns, number = place.local_shape[-1] if place.local_shape else 1, rows.stop - rows.start
    if place.contiguous:
        drawn = words(place.flat_offset + rows.start * columns, number * columns, seed, parameter, step, device)
        return drawn.view(number, columns)
    at = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device)
    firsts = torch.full_like(at, place.flat_offset)
    for dim in range(len(place.local_shape) - 2, -1, -1):
        firsts += at % place.local_shape[dim] * prod(place.global_shape[dim + 1 :])
        at = at // place.local_shape[dim]
    # Groups of four that cover a row, wherever it starts within its first group.
    g = firsts[:, None] // 4 + torch.arange((columns + 6) // 4, dtype=torch.int64, device=device)
    inside = firsts[:, None] % 4 + torch.arange(columns, dtype=torch.int64, device=device)
    return _drawn(g.view(-1), seed, parameter, step).view(g.shape[0], 4 * g.shape[1]).gather(1, inside)


def words(first: int, number: int, seed: int, parameter: int, step: Tensor | int, device: torch.device) -> Tensor:
    """Return the random words of elements first, first + 1, ... of a parameter: int64 [number], below 2**32.

    Args:
        first: index of the first element.
        number: number of elements.
        seed: 64 bits.
        parameter: index of the parameter in the optimizer.
        step: step count; an int64 tensor of one element stays on its device.
        device: device of the result.
    Exact: word e % 4 / 2 of Philox2x32-10 at (e / 4, its upper half xor the upper word of `noise_stream`) under its
    key; for an odd e with its halves swapped.
    """
    begin, end = first // 4, -(-(first + number) // 4)
    g = torch.arange(begin, max(end, begin), dtype=torch.int64, device=device)
    return _drawn(g, seed, parameter, step)[first - 4 * begin :][:number]


def _drawn(g: Tensor, seed: int, parameter: int, step: Tensor | int) -> Tensor:
    """Return the words of groups of four elements: int64 [4 * groups]."""
    key, upper = noise_stream(seed, parameter, step, g.device)
    first, second = philox2x32(g & LOW, (g >> 32).bitwise_xor_(upper), key)
    return torch.stack([first, swap_halves(first) & LOW, second, swap_halves(second) & LOW], -1).view(-1)


def swap_halves(word: Tensor) -> Tensor:
    """Swap the 16-bit halves of a word, in the lower 32 bits."""
    return word << 16 | (word >> 16) & 0xFFFF


def split_noise(word: Tensor, number: int) -> list[Tensor]:
    """Extract noise for `number` (one or two) codes from words: each int32 below 2**15, of the words' shape.

    Each is 15 bits, and the second starts eight bits below the first. So each is uniform, and their correlation is at
    most 1/256.
    """
    return [(word >> (17 - 16 // number * i)).bitwise_and_(2**NOISE_BITS - 1).to(torch.int32) for i in range(number)]
