"""Convert one parameter's state from a state dict to the formats of this optimizer, through float32 if they differ."""

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


def convert_state(
    p: Tensor, saved: Mapping[str, Any], way: Way, saved_way: Way | None, weight: tuple[Tensor, ...]
) -> tuple[dict[str, Tensor], str]:
    """Convert a parameter's state.

    Args:
        p: the parameter, with its weight already loaded.
        saved: its entry of the state dict.
        way: how this optimizer steps it, with the formats of its states.
        saved_way: the same for the optimizer that wrote the state dict; None for another library's.
        weight: the weight and its scales, as matrices.
    Returns:
        The state, and a warning if a part of it was not saved; "" if nothing is missing.
    Raises:
        ValueError: a state of another shape.
    """
    rows_of = layout.leading(p, way.rule.whole)
    saved_moments = {name: saved.get(name + CODES, saved.get(name)) for name in way.rule.names}
    complete = all(moment is not None for moment in saved_moments.values())
    # A state dict with moments but without a count has stepped, so the next step is not the first.
    step = saved.get("step", 1.0) if complete else 0.0
    state = {"step": torch.as_tensor(step, dtype=torch.float32, device="cpu").clone()}
    for index, ((name, moment), spec) in enumerate(zip(saved_moments.items(), way.moments, strict=True)):
        if moment is not None:
            saved_spec = None if saved_way is None else saved_way.moments[index]
            state |= _convert_moment(p, name, moment, saved.get(f"{name}_scale"), spec, saved_spec, rows_of)
    if saved_way is not None:
        state |= _convert_weight_states(p, saved, way.keeping, saved_way.keeping, weight)
    missing = ""
    if way.keeping.states and way.keeping.states[0] not in state:
        missing = (
            f"no {way.keeping.states[0]} was saved for weights that are stored as {way.keeping.kind}: it is made anew "
            "from the weight"
        )
    return state, missing


def _convert_moment(
    p: Tensor, name: str, moment: Any, scale: Any, spec: StateSpec, saved_spec: StateSpec | None, rows_of: int
) -> dict[str, Tensor]:
    """A moment and its scale in the format `spec`, by their keys in the state.

    Args:
        moment: as saved, with its `scale` or None.
        saved_spec: its format; None for another library's.
        rows_of: how many leading dimensions of p are rows of the matrix that blocks divide.
    """
    moment, scale = layout.local(moment), None if scale is None else layout.local(scale)
    if saved_spec is not None and scale is not None:
        moments.check_scales(name, moment, scale, saved_spec)
    own = layout.local(p)
    local_shape, full_shape = (layout.flat(t.shape, rows_of) for t in (own, p))
    # Earlier releases did not flatten trailing dimensions, so they had other blocks for the same spec.
    converts = saved_spec != spec or (
        scale is not None and scale.shape != codes.scale_shape(local_shape, spec.block, spec.of.numbers)
    )
    if converts:
        moment = moments.values(moment, scale, saved_spec)
    if tuple(moment.shape) != tuple(own.shape):
        raise ValueError(
            f"{name} has shape {tuple(moment.shape)}, and its parameter {tuple(own.shape)}; nothing was loaded: give "
            "the state dict of the same model"
        )
    if converts:
        # Round to nearest: loading must not add noise.
        moment, scale = codes.encode(moment.reshape(local_shape), replace(spec, stochastic=False))
        moment = moment.reshape(own.shape)
    state = {key_of(name, spec): layout.like(p, moment.to(own.device, copy=True), p.shape)}
    if scale is not None:
        shape = codes.scale_shape(full_shape, spec.block, spec.of.numbers)
        state[f"{name}_scale"] = layout.like(p, scale.to(own.device, copy=True), shape)
    return state


def _convert_weight_states(
    p: Tensor, saved: Mapping[str, Any], keeping: Keeping, saved_keeping: Keeping, weight: tuple[Tensor, ...]
) -> dict[str, Tensor]:
    """The master, remainder or residual of a weight, by name; {} if the state dict has none that can be used."""
    if not all(name in saved for name in saved_keeping.states):
        return {}
    tensors = [layout.local(saved[name]).to(p.device, copy=True) for name in saved_keeping.states]
    for name, tensor in zip(saved_keeping.states[:1], tensors, strict=False):
        if tensor.dtype != saved_keeping.dtype or tensor.numel() != layout.local(p).numel():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; a parameter of shape "
                f"{tuple(layout.local(p).shape)} needs one in {saved_keeping.dtype}; {DAMAGED}"
            )
    if (keeping.kind, keeping.spec) != (saved_keeping.kind, saved_keeping.spec):
        if not _determines_weight(saved_keeping, p):
            return {}
        value = earlier.read(saved_keeping, (*weight, *(layout.rows(tensor) for tensor in tensors)))
        first = weights.first_states(keeping, layout.local(p), value.view(layout.local(p).shape))
        # The loaded weight stays as it is; only the states beside it are made from the value.
        tensors = [*weights.around(keeping, value, (*weight, *(layout.rows(tensor) for tensor in first)))]
    shapes = [t.shape if t.dim() == 0 else p.shape for t in tensors]
    own = layout.local(p).shape
    return {
        name: layout.like(p, t if t.dim() == 0 else t.reshape(own), shape)
        for name, t, shape in zip(keeping.states, tensors, shapes, strict=True)
    }


def _determines_weight(saved_keeping: Keeping, p: Tensor) -> bool:
    """Whether saved states give the weight in high precision.

    A master does so alone. A remainder or residual extends a weight in bfloat16 or in codes, and p must be that still.
    """
    return saved_keeping.master or (saved_keeping.spec is None) == (p.dtype is torch.bfloat16)
