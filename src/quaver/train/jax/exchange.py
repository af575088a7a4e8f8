"""Conversion between JAX arrays and PyTorch's checkpoint format: names, shapes, layout and recipe state.

A layer's `history` and `factor` (delayed scaling) are float32 in both. PyTorch rolls a history at the start of the next
step and JAX at the end of backward, so histories are rolled on loading; rolling twice changes nothing. `count`
(stochastic rounding) is int64 [3] in a checkpoint, with -1 last for layers that draw noise by name, and float32 [2] in
JAX.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from quaver.recipes.spec import Recipe
from quaver.reference import operations
from quaver.train.learner import Tensors

#: Recipe state of a layer, as the last part of a tensor's name.
STATE = ("history", "factor", "count")


def weights(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return the parameters. Raises: ValueError unless names and shapes are those of the model."""
    parameters = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in STATE}
    for name in [*shapes, *parameters]:
        expected, actual = shapes.get(name), parameters[name].shape if name in parameters else None
        if expected != actual:
            raise ValueError(f"{name} has shape {actual} in the checkpoint and {expected} in the model")
    return {name: parameters[name].astype(np.float32) for name in shapes}


def write_state(state: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Return every layer's state by its full name."""
    arrays = {f"{layer}.{key}": np.asarray(value) for layer, own in state.items() for key, value in own.items()}
    return {name: np.array([*a, -1], np.int64) if name.endswith(".count") else a for name, a in arrays.items()}


def read_state(
    tensors: Tensors, fresh: Mapping[str, Mapping[str, Any]], recipe: Recipe
) -> dict[str, dict[str, np.ndarray]]:
    """Return every layer's state; missing entries, or those of another length, start fresh with a single warning.

    Args:
        tensors: the checkpoint's tensors.
        fresh: the state of a new model, by layer.
        recipe: recipe of the layers.
    """
    state = {layer: {key: np.asarray(value) for key, value in own.items()} for layer, own in fresh.items()}
    missing: list[str] = []
    for layer, own in state.items():
        own_tensors = {key: tensors.get(f"{layer}.{key}") for key in own}
        saved_history, count = own_tensors.get("history"), own_tensors.get("count")
        if "count" in own:
            if count is None:
                missing.append(f"{layer}.count")
            else:
                own["count"] = count[:2].astype(np.float32)
        if "history" in own:
            if saved_history is None or own_tensors["factor"] is None or saved_history.shape != own["history"].shape:
                missing.append(f"{layer}.history")
            else:
                own["history"], own["factor"] = rolled(saved_history, own_tensors["factor"], recipe)
    if missing:
        warnings.warn(
            f"{missing[0]} is not in the checkpoint, or of another length (another recipe wrote it): it starts fresh, "
            "as do missing entries of other layers",
            stacklevel=2,
        )
    return state


def rolled(window: np.ndarray, factor: np.ndarray, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Roll history [length, 3] and factor [3] with the amaxes that the last step recorded in row 0."""
    assert recipe.delayed is not None
    after = [
        operations.roll(window[:, i], factor[i], recipe.delayed, spec.format, spec.power_of_two)
        for i, spec in enumerate(recipe.history_specs)
    ]
    return np.stack([own for own, _ in after], axis=1), np.array([e for _, e in after], np.float32)


def write_moments(first: Tensors, second: Tensors, updates: int) -> dict[str, np.ndarray]:
    """Return the optimizer's state in torch.optim.AdamW's form; empty before the first update."""
    if updates == 0:
        return {}
    moments = {"exp_avg": first, "exp_avg_sq": second}
    arrays = {f"{name}/{key}": np.asarray(value) for key, own in moments.items() for name, value in own.items()}
    return arrays | {f"{name}/step": np.array(updates, np.float32) for name in first}


def read_moments(
    tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]:
    """Return both moments and the number of updates. Raises: ValueError unless they fit the model."""
    if not tensors:
        nothing = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        return nothing, dict(nothing), 0
    steps = {int(value) for value in _take(tensors, "step", dict.fromkeys(shapes, ())).values()}
    if len(steps) != 1:
        raise ValueError(f"the parameters were updated {sorted(steps)} times, not equally often")
    return _take(tensors, "exp_avg", shapes), _take(tensors, "exp_avg_sq", shapes), steps.pop()


def _take(tensors: Tensors, key: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    slots = {name.rpartition("/")[0]: tensor for name, tensor in tensors.items() if name.endswith(f"/{key}")}
    return weights(slots, shapes)
