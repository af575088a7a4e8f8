"""Operands of grouped GEMMs: rows that lie group by group, each group quantized as if there were no other.

Where no scale reaches over two rows all groups are one operand, quantized at once; else every group is one of its own.
"""

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.torch.numerics import philox
from quaver.torch.numerics.groups import Groups, Offsets
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops

#: The noise of each group's stochastic rounding, by its number.
Noise = Callable[[int], philox.Noise]


def together(spec: QuantSpec, height: int) -> bool:
    """True if groups may be quantized at once: with a multiple of `height` rows in each, no block has rows of two."""
    rows = spec.block[0]
    return rows is not None and height % rows == 0 and spec.rounding == "nearest" and not spec.two_level


def quantize_tokens(x: Tensor, spec: QuantSpec, offsets: Offsets, noise: Noise | None = None) -> Groups:
    """x [T, k], the tokens of group 0 first."""
    if together(spec, 1):
        # Rows that can be taken apart.
        return Groups(ops.QUANTIZE(x if x.stride(1) == 1 else x.contiguous(), spec), ())
    return Groups(None, list(_one_by_one((x[s:e] for s, e in offsets.bounds()), spec, noise)))


def quantize_features(x: Tensor, spec: QuantSpec, offsets: Offsets, noise: Noise | None = None) -> Groups:
    """x [T, k] as operands [k, tokens of a group], which are summed over tokens."""
    return Groups(None, list(_one_by_one((x[s:e].t() for s, e in offsets.bounds()), spec, noise)))


def quantize_experts(w: Tensor, spec: QuantSpec) -> Groups:
    """w [groups, rows, k], a matrix of each group's."""
    rows = w.shape[1]
    if together(spec, rows):
        return Groups(ops.QUANTIZE(w.reshape(w.shape[0] * rows, w.shape[2]), spec), (), rows)
    return Groups(None, list(_one_by_one(w.unbind(0), spec, None)), rows)


def transposed(groups: Groups, count: int) -> Groups:
    """Every group's transpose, of specs that have one: an expert's, or a group's of its own."""
    parts = [groups.of(group) for group in range(count)]
    return Groups(None, [None if q is None else q.T for q in parts])


def _one_by_one(xs: Iterable[Tensor], spec: QuantSpec, noise: Noise | None) -> Iterator[Quantized | None]:
    for group, x in enumerate(xs):
        if not x.numel():
            yield None
        elif noise is None or spec.rounding == "nearest":
            yield ops.QUANTIZE(x, spec)
        else:
            yield ops.QUANTIZE(x, spec, None, None, noise(group))
