"""A converted model's state dict in two parts: what the unconverted model has, and what recipes add to that.

    model.state_dict() == {**plain_state_dict(model), **scaling_state_dict(model)}

bit for bit. The parts come from torch's own walk over the model, so that what wrappers and hooks do to names holds for
both.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from quaver.core.text.given import instance
from quaver.torch.linear.layer import Quantizable
from quaver.torch.linear.stored.stored import SCALES
from quaver.torch.state.buffers import STATE, saving

#: Last names of what recipes add. A weight is among them where it is codes, which have their scales beside them.
ADDED = (*STATE, *SCALES)


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the unconverted model: its keys, shapes and dtypes.

    It loads strictly into the unconverted model, and into the converted one without a warning: histories and counts
    start fresh there, since what they hold is of other weights, and weights that are codes are quantized anew. To go on
    with what was recorded, and with the very codes, load `scaling_state_dict` after it.

    Args:
        model: any module; layers inside of it that are `quaver.torch.Linear` from the beginning give nn.Linear's.
    Returns:
        As `model.state_dict()`, sharing its memory, without histories, factors, counts and scales. Weights that exist
        only in eight or four bits are tensors of their own, in the dtype that they had. Names of tied weights stay
        both. Sharded parameters are what `model.state_dict()` has for them, each rank's part.
    Raises:
        ValueError: codes that are sharded; no rank can decode its part alone.
    Exact: the numbers that GEMMs see, rounded once to the weight's dtype.
    """
    instance("plain_state_dict", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    before, saving.decoded = saving.decoded, {}
    try:
        state: dict[str, Tensor] = model.state_dict()
    finally:
        saving.decoded = before
    return state


def scaling_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """What `plain_state_dict` leaves out: histories, factors and counts, and codes and scales of stored weights.

    It has the names that `model.state_dict()` has for them, and is empty where the recipe keeps no state. Save it
    beside a plain checkpoint to resume with the very bits of an uninterrupted run.
    """
    instance("scaling_state_dict", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    plain = plain_state_dict(model)
    whole: dict[str, Tensor] = model.state_dict()
    return {name: value for name, value in whole.items() if name not in plain or _differs(value, plain[name])}


def load_scaling_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `scaling_state_dict` gave into a model that is converted the same way; parameters stay as they are.

    Args:
        model: converted with the recipe of the state; stored weights are stored as they were.
        state: of the whole model. A layer whose state is not in it starts fresh, as after a plain checkpoint.
    Raises:
        ValueError: names that the model has no layer for, and parameters, before anything is loaded.
        RuntimeError: codes of another recipe, or of a weight that is not stored in few bits here; the sentence says
            what to do.
    """
    instance("load_scaling_state_dict", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    layers = {name.rpartition(".")[0] for name in model.state_dict()}
    unknown = [name for name in state if name.rpartition(".")[0] not in layers or not _is_added(name, state)]
    if unknown:
        others = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ValueError(
            f"this model has no layer for {unknown[0]!r}{others}, or that is no scaling state; give what "
            "scaling_state_dict gave for a model of the same layers, and load weights by model.load_state_dict"
        )
    if state and not any(isinstance(module, Quantizable) for module in model.modules()):
        raise ValueError("no layer of this model is converted; call quaver.torch.convert(model, recipe) before loading")
    model.load_state_dict(dict(state), strict=False)


def _is_added(name: str, state: Mapping[str, Any]) -> bool:
    """Whether recipes add a name of a state: of buffers, and of codes."""
    layer, dot, last = name.rpartition(".")
    return last in ADDED or (last == "weight" and any(f"{layer}{dot}{scale}" in state for scale in SCALES))


def _differs(value: Any, plain: Any) -> bool:
    """Whether a value is codes, and the plain one what they are of."""
    return isinstance(value, Tensor) and value.dtype is not plain.dtype
