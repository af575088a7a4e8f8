"""`quaver plan --offload`: a row for each saved tensor, its choice, sums and sentences."""

import json

import pytest
import torch
from typer.testing import CliRunner, Result

import quaver.torch as qt
from quaver.costs.hardware import GPUS
from quaver.recipes import RECIPES
from quaver.train.commands import cli
from quaver.train.commands.cli import app
from quaver.train.commands.offloading import as_json, cells, notes, price
from quaver.train.model_config import KNOWN
from tests.torch.offload.simulated import Simulated


def quaver(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", "--offload", *map(str, arguments)], env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker of pytest-xdist takes for its terminal is narrower."""
    monkeypatch.setattr(cli.out, "_width", 160)


def test_a_fast_gpu_recomputes_and_a_slow_one_moves() -> None:
    fast = quaver("--gpu", "h100", "--model", "llama3-8b", "--recipe", "tensorwise")
    assert fast.exit_code == 0, fast.output
    assert "Copies of all are not hidden" in fast.stdout
    row = next(line for line in fast.stdout.splitlines() if "mlp: result of gate_proj" in line)
    assert row.split()[-1] == "recompute"
    slow = quaver("--gpu", "l4", "--model", "llama3-8b", "--recipe", "tensorwise")
    assert "Copies of all are hidden: quaver.torch.offload(model) costs no time." in slow.stdout


@pytest.mark.parametrize("model", KNOWN)
def test_every_model_is_planned(model: str) -> None:
    for recipe, gpu in zip(RECIPES, [*GPUS, *GPUS], strict=False):
        planned = price(model, recipe, gpu, tokens=2048, sequence=1024)
        assert sum(count for count, _ in planned.layers.values()) == KNOWN[model].layers
        assert planned.bytes() == pytest.approx(planned.bytes("keep", "offload", "recompute"))
        assert len(notes(planned)) in (3, 4) and all(len(row) == 5 for row in cells(planned))
        json.dumps(as_json(planned), allow_nan=False)


def test_few_tokens_save_little() -> None:
    few, many = (notes(price("llama3-8b", "bf16", "h100", tokens=n, sequence=n)) for n in (512, 16384))
    assert any("Offloading saves little: weights, gradients and AdamW's states take 112 GB" in line for line in few)
    assert not any("saves little" in line for line in many)


def test_fewer_bits_move_fewer_bytes_and_a_second_sequence_hides_less() -> None:
    bf16, eight = (price("llama3-8b", recipe, "h100", tokens=8192, sequence=8192) for recipe in ("bf16", "tensorwise"))
    assert 0.7 < eight.bytes() / bf16.bytes() < 0.95
    short = price("llama3-8b", "bf16", "h100", tokens=8192, sequence=1024)
    assert short.total("forward") < bf16.total("forward") and short.total("stall_all") > bf16.total("stall_all")


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "nvfp4"])
def test_predicted_bytes_are_those_that_a_layer_moves(recipe: str) -> None:
    config, tokens = KNOWN["llama-tiny"], 512
    layer = qt.TransformerLayer(
        config.dim, config.heads, config.hidden, activation="swiglu", groups=config.groups, dtype=torch.bfloat16
    )
    simulated, model = Simulated(), torch.nn.ModuleList([layer])
    with qt.offload(model, _transfers=simulated, layers="0"), qt.autocast(recipe):
        layer(torch.randn(1, tokens, config.dim, dtype=torch.bfloat16))
    planned = price("llama-tiny", recipe, "h100", tokens=tokens, sequence=tokens)
    ((_, placed),) = planned.layers.values()
    # In bf16 the output projection saves the attention's result itself.
    shared = "attention: result" if recipe == "bf16" else ""
    predicted = sum(p.activation.bytes for p in placed.placements if p.activation.name != shared)
    (moved,) = (size for way, size in simulated.log if way == "out")
    assert predicted == pytest.approx(moved, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "llama3-8c"), "did you mean 'llama3-8b'"),
        (("--tokens", 0), "tokens is 0; pass 1 or more"),
        (("--gpus", 8), "--offload plans the layers of one GPU; leave out --gpus"),
    ],
)
def test_wrong_options(options: tuple[object, ...], message: str) -> None:
    result = quaver("--gpu", "h100", "--model", "llama3-8b", "--recipe", "bf16", *options)
    assert result.exit_code != 0
    assert message in result.output
