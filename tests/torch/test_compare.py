"""`qt.compare`: the runs of a training script, the null run, files, verdicts and errors."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quaver
import quaver.torch as qt


def make_model(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.2), nn.Linear(64, 32))


def train(model: nn.Module, seed: int) -> Iterator[torch.Tensor]:
    """Ten steps whose dropout draws from torch's global generator."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
    for _ in range(10):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def alone(recipe: str | None, seed: int) -> list[float]:
    """The same run by hand."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(seed)
        if recipe is not None:
            qt.convert(model, recipe, seed=seed)
        torch.manual_seed(seed)
        return [loss.item() for loss in train(model, seed)]


def test_every_run_is_that_of_the_script_alone_and_is_written(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    comparison = qt.compare(make_model, train, ["bf16", "mxfp8"], seeds=2, out=tmp_path / "out")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert comparison.recipes == ["bf16", "null", "mxfp8"] and comparison.emulated
    for seed in range(2):
        assert comparison.losses["bf16"][seed] == alone(None, seed)
        assert comparison.losses["mxfp8"][seed] == alone("mxfp8", seed) != alone(None, seed)
    names = {f"{name}-seed{seed}.jsonl" for name in comparison.recipes for seed in range(2)}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {"report.md", "compare.png"}
    records = [json.loads(line) for line in (tmp_path / "out" / "mxfp8-seed1.jsonl").read_text().splitlines()]
    assert records == [{"step": step, "loss": loss} for step, loss in enumerate(alone("mxfp8", 1), 1)]
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| mxfp8 | 2 |" in report and "emulated" in report and "![compare.png](compare.png)" in report
    assert str(comparison).splitlines()[0].endswith("emulated")


def planned_losses(final: dict[str, list[float]]) -> Any:
    """A train function whose runs, all recipes of a seed after another, end with these losses."""
    order = iter([values[seed] for seed in range(2) for values in final.values()])

    def train(model: nn.Module, seed: int) -> Iterator[float]:
        yield from [5.0] * 9
        yield next(order)

    return train


def test_verdicts_of_known_losses_are_those_computed_by_hand() -> None:
    final = {
        "bf16": [2.0, 3.0],
        "null": [2.0, 3.0],
        "near": [2.001, 3.002],
        "far": [2.1, 3.102],
        "unsure": [2.0, 3.02],
    }
    recipes = {"near": "mxfp8", "far": quaver.recipes.get("nvfp4"), "unsure": {"0": None, "*": "rowwise"}}
    comparison = qt.compare(make_model, planned_losses(final), recipes, seeds=2)
    rows = {row["recipe"]: row for row in comparison.rows}
    # Two seeds: 12.7062 times half of the distance between the two differences.
    near, far = rows["near"], rows["far"]
    assert (near["low"], near["high"]) == pytest.approx((0.0015 - 0.0063531, 0.0015 + 0.0063531), abs=1e-6)
    assert (far["low"], far["high"]) == pytest.approx((0.101 - 0.0127062, 0.101 + 0.0127062), abs=1e-6)
    assert near["verdict"] == "equivalent to bf16 within ±0.01 nats (n = 2)" and far["verdict"] == "different"
    assert rows["unsure"]["verdict"] == "undecided: more seeds" and rows["bf16"]["verdict"] == ""
    assert "null has the losses of bf16 bit for bit: no weight was perturbed." in comparison.notes


def test_one_seed_has_no_verdict() -> None:
    comparison = qt.compare(make_model, train, ["nvfp4"], seeds=1)
    assert [row["verdict"] for row in comparison.rows] == ["", "one seed: no verdict", "one seed: no verdict"]
    assert comparison.row("nvfp4")["low"] is None and comparison.row("nvfp4")["difference"] is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_null_run_differs_from_bf16_by_the_perturbation_alone(dtype: torch.dtype) -> None:
    seen = []

    def make_model(seed: int) -> nn.Module:
        model = nn.Linear(256, 512).to(dtype)
        nn.init.zeros_(model.bias)
        return model

    def train(model: nn.Linear, seed: int) -> Iterator[float]:
        seen.append((model.weight.detach().double(), model.bias.detach().clone(), torch.rand(3)))
        yield 1.0

    qt.compare(make_model, train, ["mxfp8"], seeds=1)
    (weight, _, draw), (nulls, bias, null_draw), (converted, _, converted_draw) = seen
    assert torch.equal(weight, converted) and torch.equal(draw, null_draw) and torch.equal(draw, converted_draw)
    assert not bias.any()
    change = (nulls / weight - 1).nan_to_num()
    # The standard error of 131,072 changes is 1 / 362 of their standard deviation.
    if dtype != torch.bfloat16:
        assert change.std().item() == pytest.approx(1e-5, rel=0.01) and abs(change.mean()) < 4 * 1e-5 / 362
        return
    # Few weights move, each by one step of the format, as many up as down.
    moved = change != 0
    assert 0.0005 < moved.double().mean() < 0.005 and change.abs().max() <= 2**-7
    assert abs(change.mean()) < 4 * change.std() / 362


def test_a_run_that_diverges_is_stopped_and_reported(tmp_path: Path) -> None:
    asked = []

    def train(model: nn.Sequential, seed: int) -> Iterator[float]:
        for step in range(1, 6):
            asked.append(step)
            diverges = seed == 1 and step == 3 and isinstance(model[0], qt.Linear)
            yield math.nan if diverges else 2.0

    comparison = qt.compare(make_model, train, {"mine": "mxfp8"}, seeds=2, out=tmp_path / "new" / "out")
    row = comparison.row("mine")
    assert row["verdict"] == "diverged at step 3" and row["low"] is None and row["difference"] is None
    assert comparison.failures == ["mine seed 1 diverged at step 3"] and asked[-1] == 3
    assert len((tmp_path / "new/out/mine-seed1.jsonl").read_text().splitlines()) == 3
    assert "mine seed 1 diverged at step 3" in (tmp_path / "new/out/report.md").read_text()


@pytest.mark.parametrize(
    ("recipes", "options", "message"),
    [
        ("mxfp8", {}, r"recipes is 'mxfp8'; give a list such as \['mxfp8', 'nvfp4'\]"),
        ([], {}, "recipes has none beside bf16"),
        (["bf16"], {}, "recipes has none beside bf16"),
        (["mxpf8"], {}, "no recipe 'mxpf8'; did you mean 'mxfp8'"),
        ({"mine": {"*": "mxpf8"}}, {}, "no recipe 'mxpf8'; did you mean 'mxfp8'"),
        ({"null": "mxfp8"}, {}, "recipes has the name 'null', which is always compared"),
        ({"a b": "mxfp8", "ab": "nvfp4"}, {}, "are too similar for names of files"),
        (
            [quaver.recipes.delayed(history=4), quaver.recipes.delayed(history=8)],
            {},
            "recipes has two named 'delayed'; give a dict",
        ),
        (["mxfp8"], {"seeds": 0}, "seeds is 0; give the number of runs per recipe, 1 or more"),
        (["mxfp8"], {"seeds": [0, 1]}, r"seeds is \[0, 1\]"),
        (["mxfp8"], {"margin": 0}, "margin is 0; give the largest difference"),
        (["mxfp8"], {"margin": math.nan}, "margin is nan"),
        (["mxfp8"], {"out": "used"}, "out is 'used', which exists and is not empty; give a new folder"),
    ],
)
def test_bad_input_gives_one_clear_error_before_any_run(
    recipes: Any, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "report.md").write_text("mine")
    begun: list[int] = []
    with pytest.raises(ValueError, match=message):
        qt.compare(lambda seed: begun.append(seed) or make_model(seed), train, recipes, **options)
    assert not begun and (tmp_path / "used" / "report.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (lambda model, seed: None, "train returned None; let train yield the loss of each step"),
        (lambda model, seed: [], "bf16 seed 0: train yielded no loss"),
        (lambda model, seed: ["2.5"], "bf16 seed 0: train yielded '2.5' at step 1"),
        (lambda model, seed: [2.0, torch.ones(2)], r"bf16 seed 0: train yielded tensor\(\[1., 1.\]\) at step 2"),
        (
            lambda model, seed: [1.0] * (3 if isinstance(model[0], qt.Linear) else 4),
            "bf16 seed 0 has 4 steps up to 4 and mxfp8 seed 0 has 3 steps up to 3",
        ),
    ],
)
def test_a_train_function_without_comparable_losses_gives_one_clear_error(losses: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qt.compare(make_model, losses, ["mxfp8"])


def test_a_model_must_be_new_and_in_high_precision() -> None:
    once = make_model(0)
    with pytest.raises(ValueError, match="make_model returned a model that another run has trained"):
        qt.compare(lambda seed: once, train, ["mxfp8"])
    qt.convert(once, "mxfp8")
    with pytest.raises(ValueError, match="whose layer 0 is converted; return it in high precision"):
        qt.compare(lambda seed: once, train, ["mxfp8"])
    with pytest.raises(TypeError, match=r"compare: make_model\(seed\) is a NoneType; give a Module"):
        qt.compare(lambda seed: None, train, ["mxfp8"])  # type: ignore[arg-type,return-value]
