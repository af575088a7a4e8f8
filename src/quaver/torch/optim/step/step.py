"""A parameter's step, piece by piece, so that what it needs besides its state is as large as one piece.

A piece is some rows of the parameter: what its codes, moments and gradient are there is read, the rule is applied in
float32, and all is written back in place. A state with one scale in all, and a rule that needs a whole matrix, make the
piece the whole parameter.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quaver.reference.optimizer_state import StateSpec
from quaver.torch.optim import codes, master_weights
from quaver.torch.optim.master_weights import MasterFormat
from quaver.torch.optim.rules import UpdateResult, UpdateRule
from quaver.torch.optim.step import noise
from quaver.torch.optim.step.noise import Place

#: Elements of a piece. Its temporaries stay in a core's caches.
PIECE = 1 << 16
#: And of those that are compiled, largest first: a call costs as much as ten thousand elements.
COMPILED = (1 << 20, 1 << 18)
#: Lines of a matrix that is read without regard to its rows are as wide as a multiple of this.
LINE = 64


@dataclass(frozen=True)
class StepConfig:
    """How a parameter steps. Equal ways are one to a compiler."""

    rule: UpdateRule
    master_format: MasterFormat
    #: Of each moment.
    moments: tuple[StateSpec, ...]
    #: Of gradients kept in few bits; None: a float.
    gradient: StateSpec | None = None
    #: Whether the scales of the weight are known before the step, by the rule's bound.
    predicts: bool = False
    #: Whether updates that are held to their bound are counted.
    counts: bool = True

    @property
    def draws(self) -> int:
        """How many shares of a random word are needed: one for all moments, and one for the weight.

        Moments that are rounded up together leave a smaller error in their quotient than by noise of their own.
        """
        return any(spec.stochastic for spec in self.moments) + self.master_format.stochastic

    @property
    def shared(self) -> bool:
        """Whether all of the weight has one scale, that of before for every piece."""
        return self.predicts and self.master_format.spec is not None and self.master_format.spec.block[0] is None

    @property
    def whole(self) -> bool:
        """Whether the parameter is one piece."""
        in_all = any(spec.of.scaled and spec.block is None for spec in self.moments)
        measured = not self.predicts and self.master_format.spec is not None and None in self.master_format.spec.block
        return self.rule.whole or in_all or self.master_format.whole or measured


class ParameterTensors(NamedTuple):
    """All tensors of a parameter, or of one piece of it, [rows, K] each, scales [rows, blocks]."""

    #: As `Keeping` has them.
    weight: tuple[Tensor, ...]
    #: Codes and scale of each moment.
    moments: tuple[tuple[Tensor, ...], ...]
    #: A float, or codes and scale.
    gradient: tuple[Tensor, ...]


class StepResult(NamedTuple):
    """What a piece's step gives."""

    weight: tuple[Tensor, ...]
    moments: tuple[tuple[Tensor, ...], ...]
    #: Of the weight's blocks as they are stored, if the way predicts scales.
    amax: Tensor | None
    #: How many updates were held to their bound, int64 []; None where nothing is held.
    clamped: Tensor | None


def move(
    way: StepConfig,
    parts: ParameterTensors,
    scalars: tuple[Tensor, ...],
    factor: Tensor | None,
    word: Tensor | None,
    amax: Tensor | None,
) -> StepResult:
    """One step of a piece; nothing is written to.

    Args:
        scalars: the rule's, float32 [].
        factor: what gradients are multiplied by, float32 []; None: they stay.
        word: int64 random words of the piece's shape, if the way draws any.
        amax: of the weight's blocks, which none will exceed, if the way predicts scales.
    """
    shares = [] if word is None else noise.shares(word, way.draws)
    return kept(way, parts, stepped(way, parts, scalars, factor), shares, amax)


def kept(
    way: StepConfig, parts: ParameterTensors, after: UpdateResult, shares: list[Tensor], amax: Tensor | None
) -> StepResult:
    """What holds a piece after its step.

    Args:
        shares: noise of each code that is rounded at random; emptied, so that none outlives its use.
    """
    weight, moments, clamped = after.weight, [*after.moments], after.clamped
    del after
    clamped = clamped.sum() if way.counts and clamped is not None else None
    lost = shares.pop() if way.master_format.stochastic else None
    states = tuple(_encoded(moments.pop(0), spec, shares[0] if spec.stochastic else None) for spec in way.moments)
    shares.clear()
    written = master_weights.write(way.master_format, weight, parts.weight, lost, amax)
    del weight, lost
    top = None
    if way.predicts:
        assert way.master_format.spec is not None
        top = master_weights.block_amax(way.master_format.spec, master_weights.read(way.master_format, written))
    return StepResult(written, states, top, clamped)


def stepped(
    way: StepConfig, parts: ParameterTensors, scalars: tuple[Tensor, ...], factor: Tensor | None
) -> UpdateResult:
    """What the rule gives for a piece, float32; see `move`."""
    # No name here holds what a rule lets go of; a call of an instance would hold its arguments to the end.
    return way.rule.__call__(
        master_weights.read(way.master_format, parts.weight),
        _gradient(way, parts, factor),
        tuple(_decoded(held, spec) for held, spec in zip(parts.moments, way.moments, strict=True)),
        scalars,
    )


def _gradient(way: StepConfig, parts: ParameterTensors, factor: Tensor | None) -> Tensor:
    gradient = parts.gradient[0].float()
    if way.gradient is not None:
        gradient = codes.decode(parts.gradient[0], parts.gradient[1], way.gradient)
    return gradient if factor is None else gradient * factor


def _decoded(held: tuple[Tensor, ...], spec: StateSpec) -> Tensor:
    return codes.decode(held[0], held[1] if len(held) > 1 else None, spec)


def _encoded(moment: Tensor, spec: StateSpec, drawn: Tensor | None) -> tuple[Tensor, ...]:
    written, scale = codes.encode(moment, spec, drawn)
    return (written,) if scale is None else (written, scale)


class RngKey(NamedTuple):
    """What the random words of a parameter's step are keyed by."""

    seed: int
    parameter: int
    #: int64 [].
    step: Tensor | int
    #: Where this rank's part lies in the whole parameter.
    place: Place


class InplaceStepResult(NamedTuple):
    """What is known after a piece's step in place."""

    #: As `Moved` has them.
    amax: Tensor | None
    clamped: Tensor | None
    #: That the weight shall have, where all of it shares one.
    scale: Tensor | None


class StepPrograms(Protocol):
    """Pieces' steps, compiled."""

    def begin(
        self,
        way: StepConfig,
        scalars: tuple[Tensor, ...],
        factor: Tensor | None,
        drawn: RngKey,
        keep: Tensor | None,
    ) -> Callable[[ParameterTensors, int, Tensor | None], Callable[[], InplaceStepResult | None] | None]:
        """What makes steps in place of a parameter's pieces, of one shape; None for those that it does not take.

        Its arguments are the piece, the number of its first element in the whole parameter, and amax as `move` takes
        it. A step that could not be taken, and changed nothing, gives None.
        """


class GlobalAmax(NamedTuple):
    """What ranks that have parts of a weight of codes agree on before a step."""

    #: As `largest` gives them, if the rule asks and the way predicts scales.
    others: tuple[Tensor, ...] = ()
    #: Of the blocks after the step, of which other ranks have rows, too; None where none have.
    amax: Tensor | None = None


class ParameterStepResult(NamedTuple):
    """What is known after a parameter's step."""

    amax: Tensor | None
    clamped: Tensor | None


def begin(
    way: StepConfig,
    parts: ParameterTensors,
    scalars: tuple[Tensor, ...],
    factor: Tensor | None,
    drawn: RngKey,
    amax: Tensor | None = None,
    keep: Tensor | None = None,
    programs: StepPrograms | None = None,
    told: GlobalAmax | None = None,
) -> Callable[[], ParameterStepResult]:
    """A parameter's step in place, which what is returned takes. Nothing is written to before.

    What programs are called with is made here: after a piece's step nothing of Python is in a core's caches, so that
    several parameters that begin together take a fifteenth less time.

    Args:
        parts: all of it.
        amax: of its blocks before the step, if the way predicts scales.
        keep: bool [], False leaves everything as it is; None steps.
        programs: what steps large pieces; None: they step here.
        told: what this rank's rows alone do not say; None where they are all, or whole blocks.
    """
    reach = None if told is None else told.amax
    if way.predicts:
        assert amax is not None
        others = largest(way, parts, factor) if way.rule.asks and told is None else ()
        reach = way.rule.reach(amax, scalars, others if told is None else told.others)
    if programs is not None and drawn.place.joined:
        parts, drawn = lines(way, parts, drawn)
    columns = parts.weight[0].shape[1]
    run = None if programs is None or not drawn.place.joined else programs.begin(way, scalars, factor, drawn, keep)
    begun: list[tuple[Callable[[], InplaceStepResult | None] | None, Sequence[slice]]] = []
    for large, small in divided(way, parts, run is not None):
        by_program = None
        if large is not None and run is not None:
            bound, first = of_reach(reach, way, parts, large), drawn.place.first + large.start * columns
            by_program = run(cut(way, parts, large), first, bound)
        begun.append((by_program, small))

    def finish() -> ParameterStepResult:
        done: list[InplaceStepResult] = []
        for by_program, small in begun:
            taken = None if by_program is None else by_program()
            if taken is not None:
                done.append(taken)
                continue
            for rows, across in [(some, across) for some in small for across in stretches(way, parts, some)]:
                done.append(_step_here(way, parts, rows, across, scalars, factor, drawn, reach, keep))
        return _outcome(way, parts, done, keep)

    return finish


def _step_here(
    way: StepConfig,
    parts: ParameterTensors,
    rows: slice,
    across: slice,
    scalars: tuple[Tensor, ...],
    factor: Tensor | None,
    drawn: RngKey,
    reach: Tensor | None,
    keep: Tensor | None,
) -> InplaceStepResult:
    """The step of a piece of some rows and columns in plain operations."""
    bound, own = of_reach(reach, way, parts, rows), cut(way, parts, rows)
    if across != slice(0, parts.weight[0].shape[1]):
        own = cut_across(way, own, across)
        bound = None if bound is None else of_columns(bound, way.master_format.spec.block[1], across)  # type: ignore[union-attr]
    # In this order a piece's float32 numbers and the words that it draws are not there together.
    after, shares = [stepped(way, own, scalars, factor)], list[Tensor]()
    if way.draws:
        place = drawn.place.narrowed(across)
        words = noise.words_at(place, rows, *drawn[:3], parts.weight[0].device)
        shares = noise.shares(words, way.draws)
        del words
    return put(way, own, kept(way, own, after.pop(), shares, bound), keep)


def _outcome(
    way: StepConfig, parts: ParameterTensors, done: list[InplaceStepResult], keep: Tensor | None
) -> ParameterStepResult:
    """What all pieces of a parameter gave; a scale that they share is written."""
    scale = _largest([one.scale for one in done if one.scale is not None])
    if scale is not None:
        # NaN where a piece has a number that is not finite.
        target = parts.weight[1]
        target.copy_(scale if keep is None else torch.where(keep, scale, target))
    amax_values = [one.amax for one in done if one.amax is not None]
    top = None
    if amax_values:
        assert way.master_format.spec is not None
        top = _largest(amax_values) if way.master_format.spec.block[0] is None else torch.cat(amax_values)
    clamped = [one.clamped for one in done if one.clamped is not None]
    return ParameterStepResult(top, torch.stack(clamped).sum() if clamped else None)


def _largest(each: list[Tensor]) -> Tensor | None:
    """Of numbers of pieces; NaN counts as the largest, None if there are none."""
    return torch.stack(each).amax(0) if len(each) > 1 else each[0] if each else None


def put(way: StepConfig, own: ParameterTensors, moved: StepResult, keep: Tensor | None) -> InplaceStepResult:
    """Write what a piece's step gives to where it was read."""
    old = [*own.weight, *(t for held in own.moments for t in held)]
    new = [*moved.weight, *(t for held in moved.moments for t in held)]
    scale = None
    if way.shared:
        old.pop(1)
        scale = new.pop(1)
    for target, value in zip(old, new, strict=True):
        target.copy_(value if keep is None else torch.where(keep, value, target))
    return InplaceStepResult(moved.amax, moved.clamped, scale)


def lines(way: StepConfig, parts: ParameterTensors, drawn: RngKey) -> tuple[ParameterTensors, RngKey]:
    """A matrix as lines of one width, if its rows mean nothing to the way; else as it is."""
    spec = way.master_format.spec
    rows, columns = parts.weight[0].shape
    specs = (*way.moments, *(() if way.gradient is None else (way.gradient,)))
    width = lcm(LINE, *(s.block for s in specs if s.block is not None))
    tensors = (*parts.weight, *(t for held in parts.moments for t in held), *parts.gradient)
    by_rows = way.whole or (spec is not None and spec.block != (None, None))
    if by_rows or columns % width or not rows or not all(t.is_contiguous() for t in tensors):
        return parts, drawn
    number = rows * columns // width

    def of(t: Tensor) -> Tensor:
        return t.view(number, -1)

    weight = tuple(t if spec is not None and i == 1 else of(t) for i, t in enumerate(parts.weight))
    moments = tuple(tuple(map(of, held)) for held in parts.moments)
    place = noise.Place((0, drawn.place.first), (number, width), (number, width))
    return ParameterTensors(weight, moments, tuple(map(of, parts.gradient))), drawn._replace(place=place)


def divided(way: StepConfig, parts: ParameterTensors, compiled: bool) -> Iterator[tuple[slice | None, Sequence[slice]]]:
    """Rows of each piece that may be compiled, None where there is none, and of the small ones that it is made of."""
    if not compiled or way.whole:
        yield None, in_pieces(way, parts)
        return
    first, (rows, columns) = 0, parts.weight[0].shape
    for size in COMPILED:
        for large in in_pieces(way, parts, size, slice(first, rows)):
            # Where blocks are higher than such a piece, the last alone may be one: rows before it would be left out.
            if large.start == first and (large.stop - first) * columns == size:
                yield large, in_pieces(way, parts, PIECE, large)
                first = large.stop
    yield None, in_pieces(way, parts, PIECE, slice(first, rows))


def largest(way: StepConfig, parts: ParameterTensors, factor: Tensor | None) -> tuple[Tensor, ...]:
    """The largest of the gradient and of each moment: float32 []."""
    gradient, *scales = parts.gradient
    top = _top(gradient)
    if way.gradient is not None:
        top = _top(codes.decode(gradient, scales[0], way.gradient))
    amax_values = [_top(_decoded(held, spec)) for held, spec in zip(parts.moments, way.moments, strict=True)]
    return (top if factor is None else top * factor, *amax_values)


def _top(x: Tensor) -> Tensor:
    """The largest magnitude, 0 of no elements: float32 []."""
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def in_pieces(
    way: StepConfig, parts: ParameterTensors, size: int | None = None, within: slice | None = None
) -> Sequence[slice]:
    """Rows of each piece of so many elements, of all rows or of some, which begin where a block does."""
    rows, columns = parts.weight[0].shape
    size = PIECE if size is None else size
    first, last = (0, rows) if within is None else (within.start, within.stop)
    if way.whole or (last - first) * columns <= size:
        return [slice(first, last)] if (last - first) * columns else []
    block = 1
    if way.master_format.spec is not None:
        block = way.master_format.spec.block[0] or 1
    high = max(size // columns // block, 1) * block
    return [slice(at, min(at + high, last)) for at in range(first, last, high)]


def stretches(way: StepConfig, parts: ParameterTensors, rows: slice) -> Sequence[slice]:
    """Columns of each piece of some rows: all of them, or, where a block has so many rows that these would be more than
    a piece, as many blocks side by side as a piece has room for."""
    columns, spec = parts.weight[0].shape[1], way.master_format.spec
    height = rows.stop - rows.start
    if spec is None or None in spec.block or way.whole or height * columns <= PIECE:
        return [slice(0, columns)]
    specs = (*way.moments, *(() if way.gradient is None else (way.gradient,)))
    unit = lcm(spec.block[1] or 1, *(s.block for s in specs if s.block is not None))
    wide = max(PIECE // height // unit, 1) * unit
    return [slice(at, min(at + wide, columns)) for at in range(0, columns, wide)]


def cut_across(way: StepConfig, parts: ParameterTensors, columns: slice) -> ParameterTensors:
    """Some columns of a piece of codes in blocks, which begin where blocks of every kind do."""
    assert way.master_format.spec is not None
    weight = [t[:, columns] for t in parts.weight]
    weight[1] = of_columns(parts.weight[1], way.master_format.spec.block[1], columns)
    moments = tuple(
        (held[0][:, columns], *(of_columns(t, spec.block, columns, spec.of.numbers) for t in held[1:]))
        for held, spec in zip(parts.moments, way.moments, strict=True)
    )
    codes, *scale = parts.gradient
    block = None if way.gradient is None else way.gradient.block
    gradient = (codes[:, columns], *(of_columns(t, block, columns) for t in scale))
    return ParameterTensors(tuple(weight), moments, gradient)


def of_columns(blocks: Tensor, block: int | None, columns: slice, numbers: int = 1) -> Tensor:
    """Of what has so many numbers for each block of columns, those of some."""
    assert block is not None
    return blocks[:, columns.start // block * numbers : -(-columns.stop // block) * numbers]


def cut(way: StepConfig, parts: ParameterTensors, rows: slice) -> ParameterTensors:
    """A piece of all tensors."""
    if rows == slice(0, parts.weight[0].shape[0]):
        return parts
    weight = list(parts.weight)
    if way.master_format.spec is not None:
        weight[1] = of_rows(weight[1], way, parts, rows)
    of_spec = [0, 2] if way.master_format.spec is not None else range(len(weight))
    for index in of_spec:
        weight[index] = weight[index][rows]
    moments = tuple(tuple(t[rows] for t in held) for held in parts.moments)
    return ParameterTensors(tuple(weight), moments, tuple(t[rows] for t in parts.gradient))


def of_rows(blocks: Tensor, way: StepConfig, parts: ParameterTensors, rows: slice) -> Tensor:
    """Of what has a number for each block of the weight, those of some rows."""
    assert way.master_format.spec is not None
    block = way.master_format.spec.block[0]
    if block is None:
        return blocks
    return blocks[rows.start // block : -(-rows.stop // block)]


def of_reach(reach: Tensor | None, way: StepConfig, parts: ParameterTensors, rows: slice) -> Tensor | None:
    """The bound of some rows' blocks."""
    return None if reach is None else of_rows(reach, way, parts, rows)
