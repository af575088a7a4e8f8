"""Blocks of a Transformer: norms, MLPs, attention, caches, experts, state spaces; forward, backward and decoding."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import quaver.torch as qt
from tests.golden.cases.linear import fill, note
from tests.golden.inputs import values
from tests.golden.names import find
from tests.golden.record import Record
from tests.golden.rows import rows

RECIPES = ("bf16", "delayed", "tensorwise", "rowwise", "mxfp8", "nvfp4")
ATTENTIONS: dict[str, dict[str, Any]] = {
    "causal": {"mask_type": "causal"},
    "grouped, window": {"mask_type": "causal", "groups": 2, "window": (8, 0)},
    "soft cap, sinks": {"mask_type": "causal", "soft_cap": 20.0, "sinks": "learnable"},
    "alibi": {"mask_type": "causal", "alibi": True},
    "none": {"mask_type": "none"},
}


def cases() -> dict[str, Callable[[Record], None]]:
    makes: dict[str, Callable[[str], nn.Module]] = {
        "MLP swiglu": lambda recipe: qt.MLP(64, 96, "swiglu", recipe=recipe),
        "LayerNormMLP gelu": lambda recipe: qt.LayerNormMLP(64, 96, recipe=recipe),
        "LayerNormMLP in eight bits": lambda recipe: qt.LayerNormMLP(64, 96, eight_bit_activations=True, recipe=recipe),
        "LayerNormLinear": lambda recipe: qt.LayerNormLinear(64, 96, normalization="RMSNorm", recipe=recipe),
        "attention": lambda recipe: qt.MultiheadAttention(64, 4, mask_type="causal", recipe=recipe),
        "layer": lambda recipe: qt.TransformerLayer(
            64, 4, 96, normalization="RMSNorm", activation="swiglu", recipe=recipe
        ),
        "parallel layer": lambda recipe: qt.TransformerLayer(64, 4, 96, parallel=True, recipe=recipe),
        "MoE": lambda recipe: qt.MoE(64, 48, find("quaver.torch", "MixtureConfig")(experts=4, k=2), recipe=recipe),
        "Mamba2": lambda recipe: qt.Mamba2(64, head_dim=16, state=16, recipe=recipe),
    }
    found: dict[str, Callable[[Record], None]] = {}
    for recipe, name, mode in rows(RECIPES, makes, ("eager", "recompute", "reference")):
        found[f"{name}, {recipe}, {mode}"] = partial(block, makes[name], recipe, mode)
    for name in ("LayerNorm", "RMSNorm"):
        for dtype in (torch.float32, torch.bfloat16):
            found[f"{name} {str(dtype).removeprefix('torch.')}"] = partial(norm, name, dtype)
    for name, options in ATTENTIONS.items():
        for dtype in (torch.float32, torch.bfloat16):
            found[f"attention {name} {str(dtype).removeprefix('torch.')}"] = partial(attention, options, dtype)
    for recipe in ("bf16", "tensorwise", "mxfp8"):
        found[f"decoding, {recipe}"] = partial(decoding, recipe)
    for name in qt.ACTIVATIONS:
        found[f"activation {name}"] = partial(activation, name)
    return found


def block(make: Callable[[str], nn.Module], recipe: str, mode: str, record: Record) -> None:
    model = make(recipe)
    fill(model)
    for step in range(2):
        x = torch.from_numpy(values(2, 16, 64, seed=step)).requires_grad_()
        if mode == "reference":
            with qt.only("reference"):
                y = first(model(x))
                y.backward(torch.from_numpy(values(*y.shape, seed=60)))
        else:
            y = first(qt.checkpoint(model, x) if mode == "recompute" else model(x))
            y.backward(torch.from_numpy(values(*y.shape, seed=60)))
        record.sum(**{f"y{step}": y, f"dx{step}": x.grad})
    note(record, model)


def first(y: Any) -> torch.Tensor:
    return y[0] if isinstance(y, tuple) else y


def norm(name: str, dtype: torch.dtype, record: Record) -> None:
    model = getattr(qt, name)(96, dtype=dtype)
    fill(model)
    x = torch.from_numpy(values(24, 96, seed=1)).to(dtype).requires_grad_()
    y = model(x)
    y.backward(torch.from_numpy(values(24, 96, seed=2)).to(dtype))
    note(record, model, y=y, dx=x.grad)


def attention(options: dict[str, Any], dtype: torch.dtype, record: Record) -> None:
    groups = options.get("groups", 4)
    model = qt.DotProductAttention(4, 32, dtype=dtype, **options)
    fill(model)
    q, k, v = (
        torch.from_numpy(values(2, 24, heads, 32, seed=seed)).to(dtype).requires_grad_()
        for seed, heads in ((1, 4), (2, groups), (3, groups))
    )
    y = model(q, k, v)
    y.backward(torch.from_numpy(values(*y.shape, seed=4)).to(dtype))
    note(record, model, y=y, dq=q.grad, dk=k.grad, dv=v.grad)


def decoding(recipe: str, record: Record) -> None:
    model = qt.TransformerLayer(64, 4, 96, normalization="RMSNorm", rope=qt.RotaryEmbedding(16), recipe=recipe)
    fill(model)
    x = torch.from_numpy(values(2, 12, 64, seed=1))
    cache = qt.KVCache(1, 16)
    with torch.no_grad():
        for number, part in enumerate(x.split([8, 1, 3], 1)):
            record.sum(**{f"part {number}": first(model(part, cache=cache))})


def activation(name: str, record: Record) -> None:
    inputs = [torch.from_numpy(values(16, 64, seed=seed)).requires_grad_() for seed in range(2)]
    inputs = inputs if qt.ACTIVATIONS[name].gated else inputs[:1]
    y = qt.activate(name, *inputs)
    y.backward(torch.from_numpy(values(*y.shape, seed=2)))
    record.sum(y=y, **{f"dx{number}": x.grad for number, x in enumerate(inputs)})
