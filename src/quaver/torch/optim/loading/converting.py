"""One parameter's state of a state dict, as this optimizer keeps it: through float32 where it was kept otherwise."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quaver.core.states.codes import StateSpec
from quaver.torch.optim import codes, weights
from quaver.torch.optim.loading import earlier, moments
from quaver.torch.optim.loading.rules import CODES, DAMAGED, key_of
from quaver.torch.optim.stepping import layout
from quaver.torch.optim.stepping.pieces import Way
from quaver.torch.optim.weights import Keeping


def states_of(
    p: Tensor, saved: Mapping[str, Any], way: Way, before: Way | None, weight: tuple[Tensor, ...]
) -> tuple[dict[str, Tensor], str]:
    """A parameter's state, and what was not taken up of it, in words; "" for all.

    Args:
        p: the parameter, whose weight has been loaded.
        saved: its entry of the state dict.
        way: how it steps here.
        before: how it stepped there, if our optimizer wrote it.
        weight: the weight and its scales, as matrices.
    Raises:
        ValueError: a state of another shape.
    """
    rows_of = layout.leading(p, way.rule.whole)
    held = {name: saved.get(name + CODES, saved.get(name)) for name in way.rule.names}
    begun = all(kept is not None for kept in held.values())
    # Where steps are not counted, the next one is not the first.
    step = saved.get("step", 1.0) if begun else 0.0
    state = {"step": torch.as_tensor(step, dtype=torch.float32, device="cpu").clone()}
    for index, ((name, kept), spec) in enumerate(zip(held.items(), way.moments, strict=True)):
        if kept is not None:
            written = None if before is None else before.moments[index]
            state |= _moment(p, name, kept, saved.get(f"{name}_scale"), spec, written, rows_of)
    lost = ""
    for name, tensor in _beside(p, saved, way.keeping, None if before is None else before.keeping, weight).items():
        state[name] = tensor
    if way.keeping.states and way.keeping.states[0] not in state:
        lost = f"no {way.keeping.states[0]} was saved for weights that are kept as {way.keeping.kind}: it begins anew"
    return state, lost


def _moment(
    p: Tensor, name: str, kept: Any, scale: Any, spec: StateSpec, before: StateSpec | None, rows_of: int
) -> dict[str, Tensor]:
    kept, scale = layout.local(kept), None if scale is None else layout.local(scale)
    if before is not None and scale is not None:
        moments.check_scales(name, kept, scale, before)
    own = layout.local(p)
    here, every = (layout.flat(t.shape, rows_of) for t in (own, p))
    # Other blocks are those of a release that did not flatten dimensions.
    converts = before != spec or (
        scale is not None and scale.shape != codes.scale_shape(here, spec.block, spec.of.numbers)
    )
    if converts:
        kept = moments.values(kept, scale, before)
    if tuple(kept.shape) != tuple(own.shape):
        raise ValueError(f"{name} has shape {tuple(kept.shape)}, and its parameter {tuple(own.shape)}")
    if converts:
        # To nearest: what is read is what was meant.
        kept, scale = codes.encode(kept.reshape(here), replace(spec, stochastic=False))
        kept = kept.reshape(own.shape)
    state = {key_of(name, spec): layout.like(p, kept.to(own.device, copy=True), p.shape)}
    if scale is not None:
        shape = codes.scale_shape(every, spec.block, spec.of.numbers)
        state[f"{name}_scale"] = layout.like(p, scale.to(own.device, copy=True), shape)
    return state


def _beside(
    p: Tensor, saved: Mapping[str, Any], keeping: Keeping, before: Keeping | None, weight: tuple[Tensor, ...]
) -> dict[str, Tensor]:
    """What is kept beside the weight; nothing where that was not saved."""
    if before is None or not all(name in saved for name in before.states):
        return {}
    tensors = [layout.local(saved[name]).to(p.device, copy=True) for name in before.states]
    for name, tensor in zip(before.states[:1], tensors, strict=False):
        if tensor.dtype != before.dtype or tensor.numel() != layout.local(p).numel():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, and its parameter "
                f"{tuple(layout.local(p).shape)} and {before.dtype}; {DAMAGED}"
            )
    if not _same(keeping, before):
        held = (*weight, *(layout.rows(tensor) for tensor in tensors))
        if not _reads(before, p):
            return {}
        first = weights.first_states(keeping, layout.local(p), earlier.read(before, held).view(layout.local(p).shape))
        beside = (*weight, *(layout.rows(tensor) for tensor in first))
        # The codes stay: what else is kept is written around them.
        tensors = [*weights.around(keeping, earlier.read(before, held), beside)]
    shapes = [t.shape if t.dim() == 0 else p.shape for t in tensors]
    own = layout.local(p).shape
    return {
        name: layout.like(p, t if t.dim() == 0 else t.reshape(own), shape)
        for name, t, shape in zip(keeping.states, tensors, shapes, strict=True)
    }


def _same(keeping: Keeping, before: Keeping) -> bool:
    return (keeping.kind, keeping.spec) == (before.kind, before.spec)


def _reads(before: Keeping, p: Tensor) -> bool:
    """Whether what was kept says the weight, given the parameter as it is."""
    return before.kind in ("float32", "float16") or (before.spec is None) == (p.dtype is torch.bfloat16)
