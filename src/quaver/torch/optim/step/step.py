"""Step of one parameter, chunk by chunk, so that temporary memory is limited to one chunk.

A chunk is some rows of the parameter. Its weight, moments and gradient are read as float32, the rule is applied, and
the results are written back in place. A state with a single scale, or a rule that needs a whole matrix, makes the whole
parameter one chunk.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quaver.reference.optimizer_state import StateSpec
from quaver.torch.optim import codes, master_weights
from quaver.torch.optim.master_weights import WeightFormat
from quaver.torch.optim.rules import UpdateResult, UpdateRule
from quaver.torch.optim.step import noise
from quaver.torch.optim.step.noise import ShardPosition

#: Elements per chunk; its temporaries fit into a core's caches.
CHUNK_ELEMENTS = 1 << 16
#: Elements per compiled chunk, largest first; a call costs as much as ten thousand elements.
COMPILED_CHUNK_ELEMENTS = (1 << 20, 1 << 18)
#: If rows do not matter, matrices are reshaped to rows whose width is a multiple of this.
ROW_MULTIPLE = 64


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


class StepResult(NamedTuple):
    """New tensors of a chunk after its step."""

    weight: tuple[Tensor, ...]
    moments: tuple[tuple[Tensor, ...], ...]
    #: Amaxes of the weight's blocks as stored, if scales are predicted.
    amax: Tensor | None
    #: Number of clamped updates, int64 []; None if the rule does not clamp.
    clamped: Tensor | None


def compute_step(
    config: StepConfig,
    parts: ParameterTensors,
    scalars: tuple[Tensor, ...],
    factor: Tensor | None,
    word: Tensor | None,
    amax: Tensor | None,
) -> StepResult:
    """Compute the step of a chunk without writing to it.

    Args:
        config: step configuration.
        parts: tensors of the chunk.
        scalars: scalars of the rule, float32 [].
        factor: multiplier of the gradient, float32 [], or None.
        word: int64 random words of the chunk's shape, if the configuration needs noise.
        amax: upper bounds of the weight's blocks, if scales are predicted.
    """
    rounding_noise = [] if word is None else noise.split_noise(word, config.noise_per_element)
    return encode_results(config, parts, apply_rule(config, parts, scalars, factor), rounding_noise, amax)


def encode_results(
    config: StepConfig, parts: ParameterTensors, after: UpdateResult, rounding_noise: list[Tensor], amax: Tensor | None
) -> StepResult:
    """Quantize the results of a step to the storage formats.

    Args:
        config: step configuration.
        parts: previous tensors, for their dtypes.
        after: result of the rule.
        rounding_noise: noise for each stochastically rounded code; emptied to free memory early.
        amax: upper bounds of the weight's blocks, if scales are predicted.
    """
    weight, moments, clamped = after.weight, [*after.moments], after.clamped
    del after
    clamped = clamped.sum() if config.counts_clamped and clamped is not None else None
    weight_noise = rounding_noise.pop() if config.weight_format.stochastic else None
    states = tuple(
        _encoded(moments.pop(0), spec, rounding_noise[0] if spec.stochastic else None) for spec in config.moments
    )
    rounding_noise.clear()
    written = master_weights.write(config.weight_format, weight, parts.weight, weight_noise, amax)
    del weight, weight_noise
    amax_after = None
    if config.predicts_scale:
        assert config.weight_format.code_spec is not None
        amax_after = master_weights.block_amax(
            config.weight_format.code_spec, master_weights.read(config.weight_format, written)
        )
    return StepResult(written, states, amax_after, clamped)


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


class RngKey(NamedTuple):
    """Key of the random words of a parameter's step."""

    seed: int
    parameter: int
    #: Step count, int64 [] or a number.
    step: Tensor | int
    #: Position of this rank's shard in the whole parameter.
    place: ShardPosition


class InplaceStepResult(NamedTuple):
    """Results of a chunk's step in place."""

    #: As in `StepResult`.
    amax: Tensor | None
    clamped: Tensor | None
    #: New scale of the whole weight, if it has a single one.
    scale: Tensor | None


class StepPrograms(Protocol):
    """Interface of compiled steps of chunks."""

    def begin(
        self,
        config: StepConfig,
        scalars: tuple[Tensor, ...],
        factor: Tensor | None,
        rng_key: RngKey,
        apply_step: Tensor | None,
    ) -> Callable[[ParameterTensors, int, Tensor | None], Callable[[], InplaceStepResult | None] | None]:
        """Return a function that prepares steps of a parameter's chunks, given the chunk, the index of its first
        element in the whole parameter, and the weight's bounds as in `compute_step`.

        That function returns None for an unsupported chunk. The step that it prepares returns None if it failed without
        changing anything.
        """


class GlobalAmax(NamedTuple):
    """Amaxes that ranks with shards of a stored weight agreed on before a step."""

    #: Amaxes of gradient and moments, see `largest`, if the rule needs them and scales are predicted.
    gradient_and_moment_amaxes: tuple[Tensor, ...] = ()
    #: Amaxes after the step of blocks that cross shards, or None.
    amax: Tensor | None = None


class ParameterStepResult(NamedTuple):
    """Results of a parameter's step."""

    amax: Tensor | None
    clamped: Tensor | None


def begin(
    config: StepConfig,
    parts: ParameterTensors,
    scalars: tuple[Tensor, ...],
    factor: Tensor | None,
    rng_key: RngKey,
    amax: Tensor | None = None,
    apply_step: Tensor | None = None,
    programs: StepPrograms | None = None,
    global_amax: GlobalAmax | None = None,
) -> Callable[[], ParameterStepResult]:
    """Prepare a parameter's step, and return a function that carries it out in place; nothing is written before.

    Arguments of compiled programs are created here. After a chunk's step the Python interpreter is no longer in a
    core's caches, so starting several parameters together saves a fifteenth of the time.

    Args:
        config: step configuration.
        parts: all tensors of the parameter.
        scalars: scalars of the rule.
        factor: multiplier of the gradient, or None.
        rng_key: key of the random words.
        amax: amaxes of its blocks before the step, if scales are predicted.
        apply_step: bool []; False leaves everything unchanged; None always steps.
        programs: compiled steps of large chunks; None runs all in eager mode.
        global_amax: amaxes agreed between ranks; None if this rank has the whole parameter or whole blocks.
    """
    weight_bound = None if global_amax is None else global_amax.amax
    if config.predicts_scale:
        assert amax is not None
        gradient_and_moment_amaxes = (
            largest(config, parts, factor) if config.rule.bound_needs_amaxes and global_amax is None else ()
        )
        weight_bound = config.rule.weight_bound(
            amax, scalars, gradient_and_moment_amaxes if global_amax is None else global_amax.gradient_and_moment_amaxes
        )
    if programs is not None and rng_key.place.contiguous:
        parts, rng_key = reshape_rows(config, parts, rng_key)
    columns = parts.weight[0].shape[1]
    run = (
        None
        if programs is None or not rng_key.place.contiguous
        else programs.begin(config, scalars, factor, rng_key, apply_step)
    )
    prepared: list[tuple[Callable[[], InplaceStepResult | None] | None, Sequence[slice]]] = []
    for large, small in split_into_chunks(config, parts, run is not None):
        by_program = None
        if large is not None and run is not None:
            bound = bounds_of_rows(weight_bound, config, parts, large)
            flat_offset = rng_key.place.flat_offset + large.start * columns
            by_program = run(cut(config, parts, large), flat_offset, bound)
        prepared.append((by_program, small))

    def finish() -> ParameterStepResult:
        done: list[InplaceStepResult] = []
        for by_program, small in prepared:
            result = None if by_program is None else by_program()
            if result is not None:
                done.append(result)
                continue
            for rows, across in [(some, across) for some in small for across in column_chunks(config, parts, some)]:
                done.append(
                    _step_eagerly(config, parts, rows, across, scalars, factor, rng_key, weight_bound, apply_step)
                )
        return _combine_chunks(config, parts, done, apply_step)

    return finish


def _step_eagerly(
    config: StepConfig,
    parts: ParameterTensors,
    rows: slice,
    across: slice,
    scalars: tuple[Tensor, ...],
    factor: Tensor | None,
    rng_key: RngKey,
    weight_bound: Tensor | None,
    apply_step: Tensor | None,
) -> InplaceStepResult:
    """Step some rows and columns of a parameter in eager mode."""
    bound, own = bounds_of_rows(weight_bound, config, parts, rows), cut(config, parts, rows)
    if across != slice(0, parts.weight[0].shape[1]):
        own = cut_across(config, own, across)
        bound = None if bound is None else of_columns(bound, config.weight_format.code_spec.block[1], across)  # type: ignore[union-attr]
    # This order avoids having the float32 temporaries and the random words in memory together.
    after, rounding_noise = [apply_rule(config, own, scalars, factor)], list[Tensor]()
    if config.noise_per_element:
        place = rng_key.place.narrowed(across)
        words = noise.words_at(place, rows, *rng_key[:3], parts.weight[0].device)
        rounding_noise = noise.split_noise(words, config.noise_per_element)
        del words
    return write_results(config, own, encode_results(config, own, after.pop(), rounding_noise, bound), apply_step)


def _combine_chunks(
    config: StepConfig, parts: ParameterTensors, done: list[InplaceStepResult], apply_step: Tensor | None
) -> ParameterStepResult:
    """Combine the results of a parameter's chunks, and write a single scale."""
    scale = _max_over_chunks([chunk_result.scale for chunk_result in done if chunk_result.scale is not None])
    if scale is not None:
        # NaN if a chunk has a value that is not finite.
        target = parts.weight[1]
        target.copy_(scale if apply_step is None else torch.where(apply_step, scale, target))
    amaxes = [chunk_result.amax for chunk_result in done if chunk_result.amax is not None]
    amax = None
    if amaxes:
        assert config.weight_format.code_spec is not None
        amax = _max_over_chunks(amaxes) if config.weight_format.code_spec.block[0] is None else torch.cat(amaxes)
    clamped = [chunk_result.clamped for chunk_result in done if chunk_result.clamped is not None]
    return ParameterStepResult(amax, torch.stack(clamped).sum() if clamped else None)


def _max_over_chunks(each: list[Tensor]) -> Tensor | None:
    """Return the maximum over chunks; NaN counts as the largest. None if there are none."""
    return torch.stack(each).amax(0) if len(each) > 1 else each[0] if each else None


def write_results(
    config: StepConfig, own: ParameterTensors, result: StepResult, apply_step: Tensor | None
) -> InplaceStepResult:
    """Write the results of a chunk's step to its tensors."""
    old = [*own.weight, *(t for moment_tensors in own.moments for t in moment_tensors)]
    new = [*result.weight, *(t for moment_tensors in result.moments for t in moment_tensors)]
    scale = None
    if config.single_scale:
        old.pop(1)
        scale = new.pop(1)
    for target, value in zip(old, new, strict=True):
        target.copy_(value if apply_step is None else torch.where(apply_step, value, target))
    return InplaceStepResult(result.amax, result.clamped, scale)


def reshape_rows(config: StepConfig, parts: ParameterTensors, rng_key: RngKey) -> tuple[ParameterTensors, RngKey]:
    """Reshape a matrix to rows of a common width if rows do not matter; else return it unchanged."""
    spec = config.weight_format.code_spec
    rows, columns = parts.weight[0].shape
    specs = (*config.moments, *(() if config.gradient is None else (config.gradient,)))
    width = lcm(ROW_MULTIPLE, *(s.block for s in specs if s.block is not None))
    tensors = (*parts.weight, *(t for moment_tensors in parts.moments for t in moment_tensors), *parts.gradient)
    by_rows = config.single_chunk or (spec is not None and spec.block != (None, None))
    if by_rows or columns % width or not rows or not all(t.is_contiguous() for t in tensors):
        return parts, rng_key
    number = rows * columns // width

    def of(t: Tensor) -> Tensor:
        return t.view(number, -1)

    weight = tuple(t if spec is not None and i == 1 else of(t) for i, t in enumerate(parts.weight))
    moments = tuple(tuple(map(of, moment_tensors)) for moment_tensors in parts.moments)
    place = noise.ShardPosition((0, rng_key.place.flat_offset), (number, width), (number, width))
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
    weight[1] = of_columns(parts.weight[1], config.weight_format.code_spec.block[1], columns)
    moments = tuple(
        (
            moment_tensors[0][:, columns],
            *(of_columns(t, spec.block, columns, spec.of.numbers) for t in moment_tensors[1:]),
        )
        for moment_tensors, spec in zip(parts.moments, config.moments, strict=True)
    )
    codes, *scale = parts.gradient
    block = None if config.gradient is None else config.gradient.block
    gradient = (codes[:, columns], *(of_columns(t, block, columns) for t in scale))
    return ParameterTensors(tuple(weight), moments, gradient)


def of_columns(blocks: Tensor, block: int | None, columns: slice, numbers: int = 1) -> Tensor:
    """Select the columns of a tensor that stores `numbers` values for each block of columns."""
    assert block is not None
    return blocks[:, columns.start // block * numbers : -(-columns.stop // block) * numbers]


def cut(config: StepConfig, parts: ParameterTensors, rows: slice) -> ParameterTensors:
    """Select a chunk's rows from all tensors of a parameter."""
    if rows == slice(0, parts.weight[0].shape[0]):
        return parts
    weight = list(parts.weight)
    if config.weight_format.code_spec is not None:
        weight[1] = of_rows(weight[1], config, parts, rows)
    of_spec = [0, 2] if config.weight_format.code_spec is not None else range(len(weight))
    for index in of_spec:
        weight[index] = weight[index][rows]
    moments = tuple(tuple(t[rows] for t in moment_tensors) for moment_tensors in parts.moments)
    return ParameterTensors(tuple(weight), moments, tuple(t[rows] for t in parts.gradient))


def of_rows(blocks: Tensor, config: StepConfig, parts: ParameterTensors, rows: slice) -> Tensor:
    """Select the rows of a tensor that stores one value for each block of the weight."""
    assert config.weight_format.code_spec is not None
    block = config.weight_format.code_spec.block[0]
    if block is None:
        return blocks
    return blocks[rows.start // block : -(-rows.stop // block)]


def bounds_of_rows(
    weight_bound: Tensor | None, config: StepConfig, parts: ParameterTensors, rows: slice
) -> Tensor | None:
    """Select the bounds of some rows' blocks."""
    return None if weight_bound is None else of_rows(weight_bound, config, parts, rows)
