"""`qt.inspect(fallback=)`: a failing layer gets safer recipes, the same after a resume and under torch.compile."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from tests.torch.inspection import planted
from tests.torch.inspection.planted import model_of

LADDER = qt.Fallback(recipes=["rowwise", "bf16"], steps=2)


class Faulty(nn.Module):
    """Two layers; the second reads a huge channel that its weight ignores, from step 3 on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("calls", torch.zeros(()))
        with torch.no_grad():
            self.second.weight[:, 3] = 0
        self.second.weight.register_hook(lambda g: g * (torch.arange(64) != 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            self.calls += 1
        huge = 1e6 * (torch.arange(64) == 3) * (self.calls > 3)
        return self.second(torch.where(torch.arange(64) == 3, huge, h))  # type: ignore[no-any-return]


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained(model: nn.Module, inspector: qt.Inspector, steps: range) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    with inspector:
        for step in steps:
            losses.append(step_of(model, optimizer, step).item())
            inspector.step()
    return losses


def test_a_failing_layer_falls_back_after_some_sampled_steps() -> None:
    model = Faulty()
    qt.convert(model, "tensorwise")
    inspector = qt.inspect(model, every=2, fallback=LADDER)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("quaver").addHandler(handler)
    trained(model, inspector, range(12))
    logging.getLogger("quaver").removeHandler(handler)
    # Failures in steps 4 and 6; a row-wise scale does not help against a huge column, so steps 8 and 10 fail too.
    assert [(s["step"], s["layer"], s["before"], s["after"]) for s in inspector.switches] == [
        (6, "second", "tensorwise", "rowwise"),
        (10, "second", "rowwise", "bf16"),
    ]
    assert messages[0] == "step 6: second falls back from tensorwise to rowwise (fprop, input)"
    assert str(model.first.recipe) == "tensorwise"
    assert str(model.second.recipe) == "bf16"


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed(history=4)", "nvfp4"])
def test_a_resumed_run_has_the_same_bits(recipe: str) -> None:
    def new() -> tuple[nn.Module, qt.Inspector]:
        model = Faulty()
        qt.convert(model, recipe, seed=1)
        return model, qt.inspect(model, every=2, fallback=LADDER)

    model, inspector = new()
    whole = trained(model, inspector, range(14))
    assert inspector.switches
    first, inspector = new()
    before = trained(first, inspector, range(9))
    saved = copy.deepcopy((first.state_dict(), inspector.state_dict()))
    second, inspector = new()
    inspector.load_state_dict(saved[1])
    second.load_state_dict(saved[0])
    after = trained(second, inspector, range(9, 14))
    assert before + after == whole
    assert qt.first_difference(model, second) is None


def test_a_healthy_model_keeps_its_recipes() -> None:
    model = model_of("llama", "mxfp8")
    with qt.inspect(model, every=1, fallback=qt.Fallback(steps=1)) as inspector:
        planted.train(model, range(3), inspector.step)
    assert not inspector.switches


def test_experts_fall_back_together() -> None:
    model = model_of("mixtral", "tensorwise")
    layer, _ = planted.plant_large_channel(model, 1)
    with qt.inspect(model, every=1, fallback=qt.Fallback(recipes=["bf16"], steps=1)) as inspector:
        planted.train(model, range(2), inspector.step)
    assert [switch["layer"] for switch in inspector.switches] == [layer]
    module: Any = model.get_submodule(layer)
    assert str(module.recipe) == "bf16"
    planted.train(model, range(2))


def test_a_compiled_model_recompiles_once_per_switch() -> None:
    graphs = 0

    def count(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    model = Faulty()
    qt.convert(model, "tensorwise")
    compiled = torch.compile(model, backend=count)
    plain = Faulty()
    qt.convert(plain, "tensorwise")
    losses, seen = [], []
    for each in (compiled, plain):
        inspector = qt.inspect(each, every=3, start=3, fallback=qt.Fallback(recipes=["bf16"], steps=1))
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-2)
        with inspector:
            for step in range(9):
                losses.append(step_of(each, optimizer, step).item())
                inspector.step()
                seen.append(graphs)
        assert len(inspector.switches) == 1
    assert losses[:9] == pytest.approx(losses[9:], rel=1e-3)
    # The first sampled step, 3, is the first with the fault.
    assert seen[:9] == [1] * 4 + [2] * 5


def test_weights_stored_quantized_are_rejected() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    qt.quantize_weights(model, "mxfp8")
    with pytest.raises(ValueError, match="stored quantized"):
        qt.inspect(model, fallback=LADDER).start()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipes": []}, "give a list"),
        ({"recipes": "bf16"}, "give a list"),
        ({"recipes": iter(["bf16"])}, "give a list"),
        ({"recipes": ["rowwise", "bf16", "rowwise"]}, "each recipe once"),
        ({"error": "large"}, "give a share"),
        ({"recipes": ["bf17"]}, "bf17"),
        ({"error": 0}, "give a share"),
        ({"flushed": 1.5}, "give a share"),
        ({"steps": 0}, "1 or more"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        qt.Fallback(**options)


def test_a_fallback_of_another_type_is_rejected() -> None:
    model: Any = qt.Linear(32, 32, recipe="mxfp8")
    with pytest.raises(TypeError, match="fallback is a list"):
        qt.inspect(model, fallback=["rowwise"])  # type: ignore[arg-type]


def test_a_state_of_another_run_is_rejected() -> None:
    model = Faulty()
    qt.convert(model, "tensorwise")
    inspector = qt.inspect(model, every=1, fallback=qt.Fallback(recipes=["bf16"], steps=1))
    trained(model, inspector, range(6))
    other = Faulty()
    qt.convert(other, "mxfp8")
    with pytest.raises(ValueError, match="convert the model as before"):
        qt.inspect(other, fallback=qt.Fallback(recipes=["bf16"])).load_state_dict(inspector.state_dict())
    with pytest.raises(ValueError, match="give the same fallback="):
        qt.inspect(other).load_state_dict(inspector.state_dict())
