"""`qt.inspect` finds faults planted into small models of four kinds, and flags nothing in healthy ones."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from tests.torch.inspection import planted

KINDS = tuple(planted.MODEL_KINDS)
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed", "nvfp4")
ATTENTION = "tensorwise(attention=True)"


def measured(model: nn.Module, step: int = 0) -> qt.Inspector:
    """Train one measured step."""
    with qt.inspect(model, every=1) as inspector:
        planted.train(model, [step], inspector.step)
    return inspector


def flagged(inspector: qt.Inspector, layer: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the flagged rows of a layer by GEMM and tensor."""
    return {(row["gemm"], row["tensor"]): row for row in inspector.flagged() if row["layer"] == layer}


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [*itertools.product(KINDS, RECIPES), ("llama", ATTENTION), ("mixtral", ATTENTION)],
)
def test_a_healthy_model_has_no_flag(kind: str, recipe: str) -> None:
    model = planted.model_of(kind, recipe)
    inspector = measured(model)
    assert not inspector.flagged()
    # A tied or skipped head has no rows.
    cores = {name for name, m in model.named_modules() if isinstance(m, qt.DotProductAttention)}
    expected = {*planted.layers_of(model), *(cores if recipe == ATTENTION else ())}
    assert {row["layer"] for row in inspector.rows} == expected


@pytest.mark.parametrize(("kind", "seed"), [*zip(KINDS, (2, 5, 7, 3), strict=True)])
def test_a_large_input_channel_is_named(kind: str, seed: int) -> None:
    model = planted.model_of(kind, "tensorwise")
    layer, channel = planted.plant_large_channel(model, seed)
    inspector = measured(model)
    (worst,) = inspector.worst(1)
    assert (worst["layer"], worst["gemm"], worst["tensor"]) == (layer, "fprop", "input")
    assert worst["outlier_column"] == channel and worst["flushed"] > 0.9
    assert f"column {channel}" in str(inspector) and ("fprop", "output") in flagged(inspector, layer)


@pytest.mark.parametrize(("kind", "seed"), [("llama", 5), ("mixtral", 7), ("huggingface", 2)])
def test_a_gate_beyond_a_stale_history_saturates(kind: str, seed: int) -> None:
    model = planted.model_of(kind, "delayed(history=8)")
    planted.train(model, range(3))
    gate, down = planted.plant_large_gate(model, seed)
    inspector = measured(model, step=3)
    (worst,) = inspector.worst(1)
    assert (worst["layer"], worst["gemm"], worst["tensor"]) == (gate, "fprop", "weight")
    assert "saturated" in worst["flags"][0]
    assert "saturated" in flagged(inspector, down)["fprop", "input"]["flags"][0]


@pytest.mark.parametrize(("kind", "seed"), [*zip(KINDS, (3, 2, 5, 7), strict=True)])
def test_a_large_gradient_row_is_named(kind: str, seed: int) -> None:
    model = planted.model_of(kind, "tensorwise(format='e4m3')")
    layer, row = planted.plant_large_gradient(model, seed)
    inspector = measured(model)
    (worst,) = inspector.worst(1)
    assert (worst["layer"], worst["tensor"], worst["outlier_row"]) == (layer, "grad_output", row)
    assert flagged(inspector, layer).keys() >= {("dgrad", "grad_output"), ("wgrad", "grad_output")}


def test_an_expert_with_few_tokens_is_counted_and_not_a_fault() -> None:
    model = planted.model_of("mixtral", "mxfp8")
    experts = planted.plant_idle_expert(model, 3, tokens=3)
    inspector = measured(model)
    counts = {
        row["expert"]: row["nonzero_rows"]
        for row in inspector.rows
        if row["layer"] == f"{experts}.down_proj" and row["tensor"] == "output"
    }
    choices = planted.BATCH * planted.TOKENS * 2
    assert counts == {None: choices, 0: 3, 1: 84, 2: 85, 3: 84}
    assert not inspector.flagged()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("llama", "delayed(history=4, attention=True)"),
        ("mixtral", "mxfp8"),
        ("mamba2", "nvfp4"),
        ("huggingface", "delayed(history=4)"),
    ],
)
def test_no_bit_of_the_training_changes(kind: str, recipe: str, recompute: bool) -> None:
    def run(sampled: bool) -> list[Tensor]:
        model = planted.model_of(kind, recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        seen = []
        with qt.inspect(model, every=1, start=0 if sampled else 100) as inspector:
            for step in range(2):
                for tokens in planted.tokens_of(step).chunk(2):
                    arguments = (planted.loss_of, model, tokens)
                    loss: Tensor = qt.checkpoint(*arguments) if recompute else planted.loss_of(model, tokens)
                    loss.backward()
                    seen.append(loss.detach())
                seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
                inspector.step()
        assert {row["step"] for row in inspector.rows} == ({0, 1} if sampled else set())
        return [*seen, *model.state_dict().values(), *qt.scaling_state_dict(model).values()]

    plain, sampled = run(False), run(True)
    assert len(plain) == len(sampled) and all(map(torch.equal, plain, sampled))
