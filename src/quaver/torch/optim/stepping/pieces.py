"""A parameter's step, piece by piece, so that what it needs besides its state is as large as one piece.

A piece is some rows of the parameter: what its codes, moments and gradient are there is read, the rule is applied in
float32, and all is written back in place. A state with one scale in all, and a rule that needs a whole matrix, make the
piece the whole parameter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.core.states.codes import StateSpec
from quaver.torch.optim import codes, weights
from quaver.torch.optim.rules.rule import Rule
from quaver.torch.optim.stepping import noise
from quaver.torch.optim.stepping.noise import Place
from quaver.torch.optim.weights import Keeping

#: Elements of a piece. Its temporaries stay in a core's caches.
PIECE = 1 << 16


@dataclass(frozen=True)
class Way:
    """How a parameter steps. Equal ways are one to a compiler."""

    rule: Rule
    keeping: Keeping
    #: Of each moment.
    moments: tuple[StateSpec, ...]
    #: Of gradients kept in few bits; None: a float.
    gradient: StateSpec | None = None
    #: Whether the scales of the weight are known before the step, by the rule's bound.
    predicts: bool = False

    @property
    def draws(self) -> int:
        """How many codes are rounded at random."""
        return sum(spec.stochastic for spec in self.moments) + self.keeping.stochastic

    @property
    def whole(self) -> bool:
        """Whether the parameter is one piece."""
        in_all = any(spec.of.scaled and spec.block is None for spec in self.moments)
        measured = not self.predicts and self.keeping.spec is not None and None in self.keeping.spec.block
        return self.rule.whole or in_all or self.keeping.whole or measured


class Parts(NamedTuple):
    """All tensors of a parameter, or of one piece of it, [rows, K] each, scales [rows, blocks]."""

    #: As `Keeping` has them.
    weight: tuple[Tensor, ...]
    #: Codes and scale of each moment.
    moments: tuple[tuple[Tensor, ...], ...]
    #: A float, or codes and scale.
    gradient: tuple[Tensor, ...]


class Moved(NamedTuple):
    """What a piece's step gives."""

    weight: tuple[Tensor, ...]
    moments: tuple[tuple[Tensor, ...], ...]
    #: Of the weight's blocks as they are stored, if the way predicts scales.
    amax: Tensor | None
    #: How many updates were held to their bound, int64 []; None where nothing is held.
    clamped: Tensor | None


def move(
    way: Way,
    parts: Parts,
    scalars: tuple[Tensor, ...],
    factor: Tensor | None,
    word: Tensor | None,
    amax: Tensor | None,
) -> Moved:
    """One step of a piece; nothing is written to.

    Args:
        scalars: the rule's, float32 [].
        factor: what gradients are multiplied by, float32 []; None: they stay.
        word: int64 random words of the piece's shape, if the way draws any.
        amax: of the weight's blocks, which none will exceed, if the way predicts scales.
    """
    gradient = parts.gradient[0].float()
    if way.gradient is not None:
        gradient = codes.decode(parts.gradient[0], parts.gradient[1], way.gradient)
    if factor is not None:
        gradient = gradient * factor
    before = weights.read(way.keeping, parts.weight)
    moments = tuple(_decoded(held, spec) for held, spec in zip(parts.moments, way.moments, strict=True))
    after = way.rule(before, gradient, moments, scalars)
    drawn = iter(() if word is None else noise.shares(word, way.draws))
    states = tuple(
        _encoded(moment, spec, next(drawn) if spec.stochastic else None)
        for moment, spec in zip(after.moments, way.moments, strict=True)
    )
    lost = next(drawn) if way.keeping.stochastic else None
    weight = weights.write(way.keeping, after.weight, parts.weight, lost, amax)
    top = None
    if way.predicts:
        assert way.keeping.spec is not None
        top = weights.block_amax(way.keeping.spec, weights.read(way.keeping, weight))
    return Moved(weight, states, top, None if after.clamped is None else after.clamped.sum())


def _decoded(held: tuple[Tensor, ...], spec: StateSpec) -> Tensor:
    return codes.decode(held[0], held[1] if len(held) > 1 else None, spec)


def _encoded(moment: Tensor, spec: StateSpec, drawn: Tensor | None) -> tuple[Tensor, ...]:
    written, scale = codes.encode(moment, spec, drawn)
    return (written,) if scale is None else (written, scale)


class Drawn(NamedTuple):
    """What the random words of a parameter's step are keyed by."""

    seed: int
    parameter: int
    #: int64 [].
    step: Tensor | int
    #: Where this rank's part lies in the whole parameter.
    place: Place


class Outcome(NamedTuple):
    """What is known after a parameter's step."""

    amax: Tensor | None
    clamped: Tensor | None


def step(
    way: Way,
    parts: Parts,
    scalars: tuple[Tensor, ...],
    factor: Tensor | None,
    drawn: Drawn,
    amax: Tensor | None = None,
    keep: Tensor | None = None,
) -> Outcome:
    """A parameter's step in place.

    Args:
        parts: all of it.
        amax: of its blocks before the step, if the way predicts scales.
        keep: bool [], False leaves everything as it is; None steps.
    """
    reach = None
    if way.predicts:
        assert amax is not None
        reach = way.rule.reach(amax, scalars, largest(way, parts, factor) if way.rule.asks else ())
    # Every piece reads the scales of before where all of them share one.
    shared = way.predicts and way.keeping.spec is not None and way.keeping.spec.block[0] is None
    tops, clamped, scales = [], [], []
    for piece in in_pieces(way, parts):
        own = cut(way, parts, piece)
        word = None
        if way.draws:
            word = noise.words_at(drawn.place, piece, *drawn[:3], own.weight[0].device)
        bound = None if reach is None else of_rows(reach, way, parts, piece)
        moved = move(way, own, scalars, factor, word, bound)
        old = [*own.weight, *(t for held in own.moments for t in held)]
        new = [*moved.weight, *(t for held in moved.moments for t in held)]
        if shared:
            old.pop(1)
            scales.append(new.pop(1))
        for target, value in zip(old, new, strict=True):
            target.copy_(value if keep is None else torch.where(keep, value, target))
        tops += [] if moved.amax is None else [moved.amax]
        clamped += [] if moved.clamped is None else [moved.clamped]
    if scales:
        # NaN where a piece has a number that is not finite.
        target, scale = parts.weight[1], torch.stack(scales).amax(0)
        target.copy_(scale if keep is None else torch.where(keep, scale, target))
    top = None
    if tops:
        assert way.keeping.spec is not None
        one = way.keeping.spec.block[0] is None
        top = torch.stack(tops).amax(0) if one else torch.cat(tops)
    return Outcome(top, torch.stack(clamped).sum() if clamped else None)


def largest(way: Way, parts: Parts, factor: Tensor | None) -> tuple[Tensor, ...]:
    """The largest of the gradient and of each moment: float32 []."""
    gradient, *scales = parts.gradient
    top = gradient.abs().amax().float()
    if way.gradient is not None:
        top = codes.decode(gradient, scales[0], way.gradient).abs().amax()
    tops = [_decoded(held, spec).abs().amax() for held, spec in zip(parts.moments, way.moments, strict=True)]
    return (top if factor is None else top * factor, *tops)


def in_pieces(way: Way, parts: Parts) -> Sequence[slice]:
    """Rows of each piece."""
    rows, columns = parts.weight[0].shape
    if way.whole or rows * columns <= PIECE:
        return [slice(0, rows)] if rows * columns else []
    block = 1
    if way.keeping.spec is not None:
        block = way.keeping.spec.block[0] or 1
    high = max(PIECE // columns // block, 1) * block
    return [slice(at, min(at + high, rows)) for at in range(0, rows, high)]


def cut(way: Way, parts: Parts, rows: slice) -> Parts:
    """A piece of all tensors."""
    if rows == slice(0, parts.weight[0].shape[0]):
        return parts
    weight = list(parts.weight)
    if way.keeping.spec is not None:
        weight[1] = of_rows(weight[1], way, parts, rows)
    of_spec = [0, 2] if way.keeping.spec is not None else range(len(weight))
    for index in of_spec:
        weight[index] = weight[index][rows]
    moments = tuple(tuple(t[rows] for t in held) for held in parts.moments)
    return Parts(tuple(weight), moments, tuple(t[rows] for t in parts.gradient))


def of_rows(blocks: Tensor, way: Way, parts: Parts, rows: slice) -> Tensor:
    """Of what has a number for each block of the weight, those of some rows."""
    assert way.keeping.spec is not None
    block = way.keeping.spec.block[0]
    if block is None:
        return blocks
    return blocks[rows.start // block : -(-rows.stop // block)]
