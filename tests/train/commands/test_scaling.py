"""`quaver plan --gpus`: a table, JSON, sentences; without torch, jax or a GPU."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from quaver import recipes
from quaver.costs.decoder import llama
from quaver.train import memory
from quaver.train.commands import cli
from quaver.train.commands.cli import app
from quaver.train.commands.scaling import OTHERS, PARTS, VOCAB, Cluster, cells, decoder, price
from quaver.train.memory import projections
from quaver.train.model_config import KNOWN, MODELS
from tests.pairs import pairs

LLAMA = ("--gpu", "h100", "--model", "llama3-70b", "--recipe", "tensorwise", "--gpus", 512)


def quaver(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker of pytest-xdist takes for its terminal is narrower."""
    monkeypatch.setattr(cli.out, "_width", 160)


def test_the_table_shows_times_and_traffic() -> None:
    result = quaver(*LLAMA, "--fsdp", 64, "--tp", 8, "--tokens", 16384, "--checkpoints", "full")
    assert result.exit_code == 0, result.output
    for text in ("fsdp 64 x tp 8", "2 sequences of 8192", "tensor parallelism, shown", "weights on the wire", "memory"):
        assert text in result.stdout
    assert "--overlap would make it 1." in result.stdout
    assert "predicted, not measured" in result.stdout and "pipeline" not in result.stdout


def test_the_json_has_both_steps_and_sources() -> None:
    result = quaver(*LLAMA, "--pp", 4, "--micro-batches", 8, "--json")
    read: dict[str, Any] = json.loads(result.stdout)
    assert read["mesh"] == {"tp": 1, "cp": 1, "fsdp": 128, "replicas": 1, "pp": 4, "ep": 1, "gpus": 512}
    assert read["speedup"] == pytest.approx(read["predicted"]["tokens_per_second"] / read["bf16"]["tokens_per_second"])
    assert set(read["bf16"]["parts"]) == set(PARTS) and all(rate["source"] for rate in read["rates"].values())


def test_the_decoders_are_the_models() -> None:
    for name, config in KNOWN.items():
        if config.state is not None:
            with pytest.raises(ValueError, match=f"{name} has state-space layers"):
                decoder(name)
            continue
        blocks = decoder(name).blocks
        assert sum(count * block.parameters for count, block in blocks) == sum(
            math.prod(shape) for shape in projections(config).values()
        )
    assert decoder("llama3-8b") == llama("llama3-8b", 32, 4096, 32, 8, 128, 14_336)
    assert decoder("deepseek-v3-like") == OTHERS["deepseek-v3-like"]()
    assert replace(decoder("deepseek-v3"), name="deepseek-v3-like") == OTHERS["deepseek-v3-like"]()


OPTIMIZERS = ("adamw", "exact", "balanced", "lean", "lion-lean", "sgd", "flashoptim")
MESHES = ({"gpus": 1}, {"gpus": 4}, {"gpus": 4, "fsdp": 2, "tp": 2})


@pytest.mark.parametrize(("optimizer", "model", "mesh"), pairs(OPTIMIZERS, ["tiny", "125m", "8b"], MESHES))
def test_a_rank_has_its_share_of_live_tensor_memory(optimizer: str, model: str, mesh: dict[str, int]) -> None:
    """`memory.training_footprint`, which test_memory.py compares with tensors, test_optimizer_ranks.py with files."""
    planned = price(model, "tensorwise", "h100", Cluster(**mesh), optimizer=optimizer)
    whole = memory.training_footprint(
        MODELS[model], VOCAB, optimizer, recipes.get("tensorwise"), "bfloat16", codes=mesh.get("tp", 1) == 1
    )
    # Norms are left out.
    total = planned.recipe.memory["weights and optimizer"] * mesh["gpus"]
    assert total == pytest.approx(whole.total, rel=5e-4) and total <= whole.total


def test_optimizers_that_ranks_cannot_step_are_refused() -> None:
    for options, message in (
        (("--optimizer", "muon-lean", "--gpus", 8), "orthogonalizes whole matrices, and 8 ranks have parts"),
        (("--optimizer", "msamp", "--gpus", 8), "has one scale for a whole matrix"),
        (
            ("--optimizer", "lean", "--model", "tiny", "--gpus", 4, "--tp", 4),
            "which divides the 128 columns of layers.0",
        ),
        (("--optimizer", "leen", "--gpus", 8), "is not known; did you mean 'lean'"),
    ):
        result = quaver(*LLAMA, *options)
        assert result.exit_code == 1 and re.search(message, result.stderr), (options, result.output)
    result = quaver(*LLAMA, "--optimizer", "lean")
    assert "--optimizer lean, 5.08 bytes a parameter of the blocks' matrices" in result.stdout, result.output
    assert json.loads(quaver(*LLAMA, "--optimizer", "lean", "--json").stdout)["optimizer"] == "lean"


def test_a_mixture_of_experts_is_planned() -> None:
    planned = price("deepseek-v3-like", "blockwise", "h100", Cluster(gpus=64, ep=64))
    assert any("experts" in row[0] for row in cells(planned)) and planned.speedup > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tp", 7), "512 GPUs are no multiple of tp 7"),
        (("--interconnect", "hgx_h100"), "did you mean 'hgx-h100'"),
        (("--tokens", 10_000), "not whole sequences"),
        (("--checkpoints", "ful"), "did you mean 'full'"),
        (("--model", "deepseek-v3-lik"), "did you mean 'deepseek-v3-like'"),
        (("--fsdp", 3), "does not divide"),
        (("--interleaved", 0), "interleaved is 0"),
        (("--gpus", -1), "gpus is -1"),
        (("--ep", 8), "has no experts"),
    ],
)
def test_bad_input_gives_a_clear_error(arguments: tuple[object, ...], message: str) -> None:
    result = quaver(*LLAMA, *arguments)
    assert result.exit_code == 1 and message in result.stderr, result.output
