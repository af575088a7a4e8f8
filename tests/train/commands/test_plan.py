"""`quaver plan`: a table, its sums, JSON, sentences; without torch, jax or a GPU."""

import json
import math
import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

from quaver.costs import ledger
from quaver.costs.hardware import GPUS
from quaver.recipes import RECIPES, get
from quaver.train.commands import cli
from quaver.train.commands.cli import app
from quaver.train.commands.plan import as_json, cells, plan, verdict_text
from quaver.train.memory import projections
from quaver.train.model_config import KNOWN, MODELS
from tests.pairs import alternating


def quaver(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker of pytest-xdist takes for its terminal is narrower."""
    monkeypatch.setattr(cli.out, "_width", 160)


LLAMA = ("--gpu", "h100", "--model", "llama3-8b", "--recipe", "tensorwise")


def test_the_table_has_a_row_a_shape_and_the_sums() -> None:
    result = quaver(*LLAMA)
    assert result.exit_code == 0, result.output
    for text in ("q_proj, o_proj", "k_proj, v_proj", "gate_proj, up_proj", "down_proj", "14336", "32 layers"):
        assert text in result.stdout
    assert "Every matrix gains under tensorwise on h100." in result.stdout
    assert "predicted, not measured" in result.stdout


@pytest.mark.parametrize(("model", "recipe"), alternating(KNOWN, RECIPES, ["llama3-8b", "deepseek-v3"]))
def test_every_model_is_planned_under_every_recipe(model: str, recipe: str) -> None:
    planned = plan(model, recipe, "h200", tokens=1024)
    counted = sum(
        len(row.names) * row.layers * row.experts * row.cost.in_features * row.cost.out_features for row in planned.rows
    )
    assert counted == sum(map(math.prod, projections(KNOWN[model]).values()))
    assert len(list(cells(planned))) == len(planned.rows) + 2 and verdict_text(planned)
    json.dumps(as_json(planned))


def test_the_sums_are_sums() -> None:
    planned = plan("llama3-8b", "rowwise", "h100", tokens=4096, micro_batches=4)
    alone = [
        ledger.layer(get("rowwise"), 4096, k, n, "h100", micro_batches=4)
        for name, (n, k) in projections(MODELS["llama3-8b"]).items()
        if name.startswith("layers.0.")
    ]
    assert planned.seconds == pytest.approx(sum(cost.seconds for cost in alone))
    assert planned.bytes == pytest.approx(sum(cost.bytes for cost in alone))
    assert planned.speedup == pytest.approx(sum(c.bf16_seconds for c in alone) / planned.seconds)


def test_fusing_and_micro_batches_gain() -> None:
    plain, shared, fused = (
        plan("llama3-8b", "delayed", "h100", micro_batches=n, fused=f).speedup
        for n, f in ((1, False), (8, False), (8, True))
    )
    assert plain < shared < fused


def test_matrices_that_do_not_gain_are_named_with_advice() -> None:
    result = quaver("--gpu", "h100", "--model", "qwen3-0.6b", "--recipe", "rowwise", "--tokens", 1024)
    assert "under rowwise on h100: q_proj" in result.stdout
    assert "skip=quaver.rules.unprofitable('h100', tokens=1024)" in result.stdout


def test_omitted_layers_and_column_meanings_are_printed() -> None:
    output = " ".join(quaver(*LLAMA).stdout.split())
    assert "Left out: attention's own products (its four projections are in the table), norms" in output
    assert '"more MB" is what quantizing reads and writes beyond what a bf16 layer does' in output


@pytest.mark.parametrize(
    ("gpu", "recipe", "what"),
    [
        ("l40s", "blockwise", "blocks of 128"),
        ("a100", "tensorwise", "one scale a tensor"),
        ("rtx3090", "mxfp8", "MXFP8's blocks of 32"),
    ],
)
def test_missing_gpu_features_are_printed(gpu: str, recipe: str, what: str) -> None:
    result = quaver("--gpu", gpu, "--model", "llama3-8b", "--recipe", recipe)
    assert f"{gpu} has no GEMM for {what}: fprop, dgrad, wgrad decode their operands" in result.stdout


@pytest.mark.parametrize(
    ("recipe", "operands"), [("mxfp4", "e2m1[1x32]:e8m0"), ("mxfp6", "e2m3[1x32]:e8m0 or e3m2[1x32]:e8m0 by e2m3")]
)
def test_operands_that_no_gpu_multiplies_are_named(recipe: str, operands: str) -> None:
    output = quaver("--gpu", "b200", "--model", "llama3-8b", "--recipe", recipe).stdout
    assert f"b200 has no GEMM for {operands}" in output and "other:" not in output


def test_bf16_gains_nothing() -> None:
    assert "bf16 quantizes nothing, so nothing gains." in quaver(*LLAMA[:4], "--recipe", "bf16").stdout


def test_json_has_the_rates_with_their_sources() -> None:
    result = quaver(*LLAMA, "--micro-batches", 2, "--fused", "--json")
    data = json.loads(result.stdout)
    assert data["gpu"] == "h100" and data["micro_batches"] == 2 and data["fused"] is True and data["layers"] == 32
    assert data["layer"]["speedup"] == pytest.approx(data["layer"]["bf16_seconds"] / data["layer"]["seconds"])
    assert set(data["rates"]) == {"copy", *GPUS["h100"].rates}
    assert all(rate["source"] and rate["how"] for rate in data["rates"].values())
    assert {name for row in data["matrices"] for name in row["names"]} >= {"q_proj", "down_proj"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--gpu", "h10"), "did you mean 'h100'?"),
        (("--model", "llama3-9b"), "did you mean 'llama3-8b'?"),
        (("--recipe", "tensor-wise"), "cannot be read"),
        (("--recipe", "tensorwis"), "did you mean 'tensorwise'?"),
        (("--tokens", 0), "tokens is 0"),
        (("--micro-batches", 0), "micro_batches is 0"),
    ],
)
def test_bad_input_gives_one_clear_error(changed: tuple[str, object], message: str) -> None:
    result = quaver(*LLAMA, *changed)
    assert result.exit_code == 1 and message in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_it_needs_neither_torch_nor_jax() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'jax', 'flax', 'triton'): sys.modules[name] = None\n"
        "from quaver.train.commands.cli import app\n"
        f"app(['plan', *{LLAMA!r}])"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "32 layers" in done.stdout, done.stderr
