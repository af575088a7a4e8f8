"""Executable specification of experts in numpy: routing, order of rows, and weighted sums.

Token by token in float64, except for comparisons, which are float32 as in all fast versions.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from quaver.recipes.spec import QuantSpec
from quaver.recipes.text import check_name

#: Functions of logits that give scores.
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
#: Added to the sum of the chosen scores before dividing by it, as in DeepSeek's code.
TINY = 1e-20


class Routing(NamedTuple):
    """Choices of T tokens among E experts."""

    #: Chosen experts [T, k], the best first.
    indices: np.ndarray
    #: Weights, float64 [T, k].
    weights: np.ndarray
    #: Probabilities, float64 [T, E], with rows that sum to 1.
    probabilities: np.ndarray


def score_of(z: np.ndarray, scores: str) -> np.ndarray:
    """Return the scores of one token's logits, float64 [E]."""
    if scores == "sigmoid":
        return np.array([1 / (1 + math.exp(-v)) if v > -700 else 0.0 for v in z])
    if scores == "sqrtsoftplus":
        return np.array([math.sqrt(max(v, 0.0) + math.log1p(math.exp(-abs(v)))) for v in z])
    e = np.exp(z - z.max())
    return e / e.sum()


def probabilities_of(z: np.ndarray, scores: str) -> np.ndarray:
    """Return one token's scores divided by their sum, float64 [E], from logarithms since scores may underflow."""
    if scores == "sigmoid":
        log = np.array([min(v, 0.0) - math.log1p(math.exp(-abs(v))) for v in z])
    elif scores == "sqrtsoftplus":
        log = np.array([v / 2 if v < -700 else math.log(max(v, 0.0) + math.log1p(math.exp(-abs(v)))) / 2 for v in z])
    else:
        log = z
    e = np.exp(log - log.max())
    return e / e.sum()


def descending(x: np.ndarray) -> list[int]:
    """Return indices in descending order of values, compared as float32; ties in order, NaN first."""
    keys = [math.inf if math.isnan(v) else float(v) for v in x.astype(np.float32)]
    return sorted(range(len(keys)), key=lambda i: (not math.isnan(float(x[i])), -keys[i], i))


def route(
    logits: np.ndarray,
    k: int,
    *,
    scores: str = "softmax",
    softmax_first: bool = False,
    groups: int | None = None,
    top_groups: int | None = None,
    best_of_group: int | None = None,
    bias: np.ndarray | None = None,
    scale: float = 1.0,
    normalize: bool | None = None,
) -> Routing:
    """Choose experts for finite logits [T, E]; options as in `quaver.torch.route`."""
    route_options = groups, top_groups, best_of_group, None if bias is None else bias.shape, normalize
    check_route(logits.shape, k, scores, softmax_first, *route_options)
    experts = logits.shape[1]
    rows: list[tuple[list[int], np.ndarray, np.ndarray]] = []
    for z in logits.astype(np.float64):
        late = scores == "softmax" and not softmax_first
        s = z if late else score_of(z, scores)
        by = (z if bias is None and groups is None else s) + (0.0 if bias is None else bias)
        if groups is not None and top_groups is not None:
            size, count = experts // groups, best_of_group or max(1, k // top_groups)
            parts = by.reshape(groups, size)
            sums = np.array([np.sort(part)[::-1][:count].sum() for part in parts])
            taken = descending(sums)[:top_groups]
            by = np.array([v if e // size in taken else -math.inf for e, v in enumerate(by)])
        chosen = descending(by)[:k]
        w = score_of(s[chosen], "softmax") if late else s[chosen]
        if not late and (normalize or (normalize is None and scores != "softmax" and k > 1)):
            w = w / (w.sum() + TINY)
        rows.append((chosen, w * scale, probabilities_of(z, scores)))
    return Routing(
        np.array([row[0] for row in rows], dtype=np.int64).reshape(-1, k),
        np.array([row[1] for row in rows]).reshape(-1, k),
        np.array([row[2] for row in rows]).reshape(-1, experts),
    )


def places(
    indices: np.ndarray, experts: int, pad: int = 1, capacity: int | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the row of every choice, the end of every expert's rows, and the number of rows.

    Args:
        indices: [T, k]; a number outside of [0, experts) means no expert here.
        pad: each expert's number of rows is a multiple of this.
        capacity: maximum number of choices per expert; the first ones are taken.

    Returns:
        int64 [T × k], -1 for a choice without a row; int32 [experts]; the number of rows, the last of which may be
        unused.
    """
    flat = indices.reshape(-1)
    row, ends, end = np.full(len(flat), -1, np.int64), [], 0
    for expert in range(experts):
        own = [at for at, e in enumerate(flat) if e == expert][:capacity]
        for number, at in enumerate(own):
            row[at] = end + number
        end += -(-len(own) // pad) * pad
        ends.append(end)
    return row, np.array(ends, np.int32), rows_of(len(flat), experts, pad, capacity)


def rows_of(choices: int, experts: int, pad: int = 1, capacity: int | None = None) -> int:
    """Return a number of rows that suffices for any distribution of this many choices."""
    most = choices + min(choices, experts) * (pad - 1)
    if capacity is not None:
        most = min(most, experts * (-(-capacity // pad) * pad))
    return most // pad * pad


def permute(
    x: np.ndarray, indices: np.ndarray, experts: int, pad: int = 1, capacity: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copy tokens x [T, H] to rows sorted by expert, with zeros as padding; ends and places are those of `places`."""
    row, ends, count = places(indices, experts, pad, capacity)
    y = np.zeros((count, x.shape[1]), x.dtype)
    for at, to in enumerate(row):
        if to >= 0:
            y[to] = x[at // indices.shape[1]]
    return y, ends, row


def unpermute(y: np.ndarray, row: np.ndarray, k: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Sum each token's rows, times its weights, in order of its choices, in float32 (float64 for float64 rows).

    A choice without a row counts as zeros.
    """
    wide = np.promote_types(y.dtype, np.float32).type
    out = np.zeros((len(row) // k, y.shape[1]), y.dtype)
    for token in range(len(out)):
        parts = []
        for choice in range(k):
            to = row[token * k + choice]
            part = (y[to] if to >= 0 else np.zeros(y.shape[1], y.dtype)).astype(wide)
            parts.append(part if weights is None or to < 0 else part * wide(weights[token, choice]))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        out[token] = total.astype(y.dtype)
    return out


def check_route(
    shape: tuple[int, ...],
    k: int,
    scores: str,
    softmax_first: bool,
    groups: int | None,
    top_groups: int | None,
    best_of_group: int | None,
    bias: tuple[int, ...] | None,
    normalize: bool | None,
) -> None:
    """Raise ValueError if options of `route` do not fit.

    Args:
        shape: shape of the logits; bias: its shape; others as in `route`.
    """
    check_name("scores", scores, SCORES)
    if len(shape) != 2:
        raise ValueError(f"logits are [tokens, experts]; these are {tuple(shape)}: flatten batch and sequence first")
    experts = shape[1]
    _whole(k=k, groups=groups, top_groups=top_groups, best_of_group=best_of_group)
    if not 1 <= k <= experts:
        raise ValueError(f"k is {k}, and there are {experts} experts: a token chooses at least 1 and at most all")
    if scores != "softmax" and softmax_first:
        raise ValueError(f"softmax_first belongs to scores='softmax', and scores are {scores!r}: leave it out")
    if normalize is False and scores == "softmax" and not softmax_first:
        raise ValueError(
            "the softmax over the chosen experts already sums to 1: leave out normalize, or give softmax_first"
        )
    if bias is not None and bias != (experts,):
        raise ValueError(f"bias is {bias}; give one number for each of the {experts} experts")
    if (groups is None) != (top_groups is None):
        raise ValueError(
            "give groups and top_groups together: the number of groups, and the number of groups to choose"
        )
    if groups is None or top_groups is None:
        if best_of_group is not None:
            raise ValueError("best_of_group says how a group is scored; give groups and top_groups too")
        return
    if groups < 1 or experts % groups:
        raise ValueError(f"{groups} groups do not divide {experts} experts: give a number that does")
    size = experts // groups
    if not 1 <= top_groups <= groups:
        raise ValueError(f"top_groups is {top_groups} of {groups} groups: give at least 1 and at most all")
    if k > top_groups * size:
        raise ValueError(
            f"{top_groups} groups of {size} experts have fewer than the {k} that a token chooses: raise top_groups"
        )
    count = best_of_group if best_of_group is not None else max(1, k // top_groups)
    if not 1 <= count <= size:
        raise ValueError(f"a group is scored by its {count} best, and has {size} experts: give best_of_group={size}")


def check_permute(indices: tuple[int, ...], integers: bool, experts: int, pad: int, capacity: int | None) -> None:
    """Raise ValueError if arguments of `permute` do not fit.

    Args:
        indices: shape of the indices; integers: True if they are integers.
    """
    if len(indices) != 2 or not integers:
        raise ValueError(
            f"indices are integers [T, k], the experts of each token, of shape {indices} here: give those of route"
        )
    _whole(experts=experts, pad=pad, capacity=capacity)
    if experts < 1 or not indices[1]:
        raise ValueError(f"there are {experts} experts and {indices[1]} choices per token: give at least one of each")
    if pad < 1:
        raise ValueError(f"pad is {pad}: give the number of which each expert's rows are a multiple, 1 for no padding")
    if capacity is not None and capacity < 1:
        raise ValueError(f"a capacity of {capacity} drops every token: give at least 1, or None to drop none")


def _whole(**sizes: int | None) -> None:
    """Raise ValueError for sizes that are not whole numbers."""
    for name, size in sizes.items():
        if isinstance(size, bool | float | str):
            raise ValueError(f"{name} is {size!r}; give a whole number")


def check_unpermute(
    rows: tuple[int, ...], places: tuple[int, ...], integers: bool, k: int, weights: tuple[int, ...] | None
) -> None:
    """Raise ValueError if arguments of `unpermute` with these shapes do not fit.

    Args:
        integers: True if the places are integers.
    """
    _whole(k=k)
    if not integers:
        raise ValueError("places are integers, the row of each choice: give those of permute")
    if len(rows) != 2 or len(places) != 1 or k < 1 or places[0] % k:
        raise ValueError(f"rows are [rows, H] and places [tokens * {k}]; these are {rows} and {places}")
    if weights is not None and weights != (places[0] // k, k):
        raise ValueError(f"weights are one for each of {places[0] // k} tokens and {k} choices, not {weights}")


def why_not_rows(spec: QuantSpec) -> str:
    """Return why moving rows and quantizing them do not commute under a spec, or ""."""
    if not (spec.per_tensor or spec.block[0] == 1):
        return (
            f"rows can be moved only with one scale per row or per tensor, and {spec} has other blocks: quantize "
            "after moving them"
        )
    if spec.rounding != "nearest":
        return (
            f"the noise depends on a row's position, and {spec} rounds stochastically: quantize after moving the rows"
        )
    return ""


def capacity_of(capacity: float | None, tokens: int, k: int, experts: int) -> int | None:
    """Return the maximum number of choices per expert, at least 1; None for no limit.

    Args:
        capacity: multiple of an even share of the choices, rounded up, or None.
        tokens, k, experts: numbers of tokens, of choices per token and of experts.
    """
    if capacity is None:
        return None
    # Integer arithmetic only, which torch.compile can trace for any number of tokens.
    parts, of = Fraction(capacity).limit_denominator(1 << 16).as_integer_ratio()
    return max(1, -(-parts * tokens * k // (of * experts)))


def check_mixture_extras(shared: int, shared_gate: bool, capacity: float | None) -> None:
    """Raise ValueError for options of a shared expert or a capacity that do not fit."""
    if shared < 0 or (shared_gate and not shared):
        raise ValueError(
            f"shared is {shared}, the hidden features of the shared expert: give a positive number, or 0 "
            "and no shared_gate"
        )
    if capacity is not None and not (math.isfinite(capacity) and capacity > 0):
        raise ValueError(
            f"capacity is {capacity}, which drops every token: it is a multiple of an even share of the "
            "choices; give more than 0, such as 1.25, or None"
        )
