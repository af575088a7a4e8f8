"""Twenty steps of every optimizer and preset, then a state dict that another one loads and steps on with."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

import quaver.torch as qt
from quaver.torch import optim
from tests.golden.inputs import values
from tests.golden.record import Record

RULES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "Adam": {"lr": 1e-3, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
    "Lion": {"lr": 1e-4},
    "Muon": {"lr": 1e-3},
}
#: Of the weights: floats, or codes of a recipe.
WEIGHTS = ("float32", "bfloat16", "float16", "tensorwise", "mxfp8")
STEPS = 20


def cases() -> dict[str, Callable[[Record], None]]:
    rows = [(rule, preset, weights) for preset, weights in product(optim.PRESETS, WEIGHTS) for rule in ("AdamW",)]
    rows += [(rule, preset, "float32") for rule, preset in product(RULES, optim.PRESETS) if rule != "AdamW"]
    return {f"{rule}, {preset}, {weights}": partial(steps, rule, preset, weights) for rule, preset, weights in rows}


def made(rule: str, preset: str, weights: str, n_in: int = 96, n_out: int = 64) -> tuple[nn.Module, Any]:
    if weights in ("float32", "bfloat16", "float16"):
        model: nn.Module = nn.Linear(n_in, n_out, dtype=getattr(torch, weights))
    else:
        with qt.quantized_init(weights):
            model = qt.Linear(n_in, n_out, recipe=weights)
        model.set_weight(torch.from_numpy(values(n_out, n_in, seed=1)))  # type: ignore[operator]
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            if (
                p.dtype.is_floating_point
                and p.element_size() > 1
                and not (number == 0 and isinstance(model, qt.Linear))
            ):
                p.copy_(torch.from_numpy(values(*p.shape, seed=1 + number)))
    parameters = [p for p in model.parameters() if rule != "Muon" or p.dim() == 2]
    return model, getattr(optim, rule)(parameters, preset=preset, **RULES[rule])


def step(optimizer: Any, number: int) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.from_numpy(values(*p.shape, seed=100 + number)).to(p.grad_dtype)
    optimizer.step()
    optimizer.zero_grad()


def steps(rule: str, preset: str, weights: str, record: Record) -> None:
    model, optimizer = made(rule, preset, weights)
    for number in range(STEPS):
        step(optimizer, number)
    record.keys(optimizer.state_dict(), "keys of the optimizer")
    other, loaded = made(rule, preset, weights)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    step(optimizer, STEPS)
    step(loaded, STEPS)
    for name, each in (("", model), (" after loading", other)):
        state = {key: value for key, value in each.state_dict().items() if isinstance(value, torch.Tensor)}
        record.sum(**{f"{key}{name}": value for key, value in state.items()})
    for after, each in (("", optimizer), (" after loading", loaded)):
        for key, state in each.state_dict()["state"].items():
            found = {f"state {key} {name}{after}": value for name, value in state.items()}
            record.sum(**{name: value for name, value in found.items() if isinstance(value, torch.Tensor)})
