"""Plan of exported weights: the scheme of each, the groups that a server fuses, and the tensors of a group.

`quaver.torch.export` writes these tensors to files, and `quaver.torch.serving_stream` sends them to a running server.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from quaver.torch.conversion.export.check import Written
from quaver.torch.conversion.export.layouts import (
    FORMATS,
    FileFormat,
    Inputs,
    Scheme,
    UnsupportedByFormat,
    check_width,
    cut,
    fused_groups,
    layout_of,
    with_one_factor,
)
from quaver.torch.conversion.export.operands import DisassembledModel, StoredOperand, decoded
from quaver.torch.numerics.quantized import Quantized


def plan_weights(
    kind: FileFormat, parts: DisassembledModel, seen: Mapping[tuple[nn.Module, str], float]
) -> list[Written]:
    """Return each quantized weight with its scheme in a format and the known statistics of its layer's input.

    Args:
        kind: the format.
        parts: the parts of the model.
        seen: input amaxes that `calibrate` measured, by layer and parameter name.
    Raises:
        ValueError: the format cannot store a weight; the message lists formats that can.
    """
    plan: list[Written] = []
    for one in parts.collected:
        known = one.inputs(seen)
        with _advising(kind, one, known):
            plan.append((one, _scheme(kind, one, known), known))
    return plan


def _scheme(kind: FileFormat, one: StoredOperand, known: Inputs) -> Scheme:
    """Return the scheme in which a format stores a weight.

    Raises:
        UnsupportedByFormat: the format cannot store it.
    """
    if kind.stacked != bool(one.stack):
        holds = "only stacks of experts as one tensor" if kind.stacked else "no stack of experts as one tensor"
        raise UnsupportedByFormat(f"it stores {holds}")
    return kind.scheme(layout_of(one.spec), one.spec, known)


@contextmanager
def _advising(kind: FileFormat, one: StoredOperand, known: Inputs) -> Iterator[None]:
    """Context that completes the message of `UnsupportedByFormat` with the formats that can store the weight."""
    try:
        yield
    except UnsupportedByFormat as error:
        others = []
        for other in FORMATS.values():
            with suppress(UnsupportedByFormat):
                if other is not kind:
                    _scheme(other, one, known)
                    others.append(other.name)
        advice = f"use format={' or '.join(map(repr, others))}" if others else "no other format can store it either"
        layer = one.module_name
        raise ValueError(
            f"{kind.name!r} cannot store the codes of {layer}: {error}; {advice}, or write it in high precision with "
            f"high_precision=[{layer!r}]"
        ) from error


def group_fused(plan: Sequence[Written], matrices: Sequence[str]) -> list[list[Written]]:
    """Group the weights to write so that those that a server fuses are in one list.

    Args:
        plan: the weights, with their schemes.
        matrices: names of linear layers in high precision.
    Raises:
        ValueError: layers that a server fuses have different schemes, or some are in high precision.
    """
    by_name = {piece.prefix.rstrip("."): written for written in plan for piece in written[0].pieces}
    groups: dict[int, list[Written]] = {}
    for names in fused_groups([*by_name, *matrices]):
        schemes = {by_name[name][1] if name in by_name else None for name in names}
        if len(schemes) > 1:
            each = [f"{n} ({by_name[n][1].name if n in by_name else 'high precision'})" for n in sorted(names)]
            raise ValueError(
                f"vLLM and SGLang fuse these layers into one weight with one scheme: {', '.join(each)}. Use one "
                "recipe for all of them, or write all in high precision with "
                f"high_precision={sorted(set(names) & set(by_name))}"
            )
        # A weight with several pieces, such as stacked gate and up, is written only once.
        written = list({id(by_name[n]): by_name[n] for n in names if n in by_name}.values())
        if written and id(written[0]) not in groups:
            groups[id(written[0])] = written
    return list(groups.values())


def tensors_of_group(
    kind: FileFormat, group: Sequence[Written], operands: Sequence[Quantized], *, verified: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of weights that a server fuses; two-level ones share one tensor factor.

    Args:
        kind: the format.
        group: the weights, from `group_fused`.
        operands: their codes and scales.
        verified: True decodes each weight from its tensors and compares it with the operand bit for bit.
    Raises:
        ValueError: a weight is not finite, the format cannot store it, or no tensor factor fits all of them, so a
            server would decode some with the wrong factor.
    """
    if len(group) > 1 and all(scheme.layout == "nv" for _, scheme, _ in group):
        finite = all(q.scales().isfinite().all() for q in operands)
        shared = with_one_factor(operands) if finite else operands
        if shared is None:
            names = sorted(one.name.removesuffix(".weight") for one, _, _ in group)
            raise ValueError(
                f"a server fuses {', '.join(names)} and reads them with one tensor scale, but their magnitudes "
                f"differ too much for that: write them in high precision with high_precision={names}"
            )
        operands = shared
    for each, q in zip(group, operands, strict=True):
        yield from _tensors(kind, *each, q, verified)


def _tensors(
    kind: FileFormat, one: StoredOperand, scheme: Scheme, known: Inputs, q: Quantized, verified: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a weight's pieces."""
    if not bool(q.scales().isfinite().all()):
        raise ValueError(
            f"{one.name} contains infinities or NaN, so a server would compute NaN: export an earlier checkpoint"
        )
    for piece in one.pieces:
        with _advising(kind, one, known):
            part = cut(q, piece.start, piece.stop)
            check_width(part, scheme.layout)
        tensors = kind.tensors(part, scheme, known)
        if verified:
            _verify(piece.prefix, part, tensors, kind)
        for suffix, tensor in tensors.items():
            yield piece.prefix + suffix, tensor.unflatten(0, (one.stack, -1)) if one.stack else tensor


def _verify(name: str, q: Quantized, tensors: Mapping[str, Tensor], kind: FileFormat) -> None:
    """Decode a weight from the tensors to write and raise if any bit differs from the operand."""
    read = decoded({suffix: tensor.cpu() for suffix, tensor in tensors.items()}, kind.method).dense()
    wrong = int((read.view(torch.int32) != q.dequantize().cpu().contiguous().view(torch.int32)).sum())
    if wrong:
        raise ValueError(
            f"{name}weight in {kind.name!r} would decode to different numbers in {wrong} of {read.numel()} places, "
            "because its scales are outside the range in which the format's products are exact; write it in high "
            f"precision with high_precision=[{name.rstrip('.')!r}]"
        )
