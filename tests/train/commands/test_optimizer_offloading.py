"""`quaver plan --optimizer-offload`: bytes by hand, bytes of a real optimizer, and errors."""

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from quaver.costs.host_optimizer import PIECE_BYTES
from quaver.reference.optimizer_state import SMALL
from quaver.torch.optim import Optimizer, host
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.train import config as recipe_name
from quaver.train.commands import cli, optimizer_offloading
from quaver.train.commands.cli import app
from quaver.train.commands.optimizer_offloading import cells, notes, price
from quaver.train.commands.scaling import VOCAB, Cluster
from quaver.train.model_config import KNOWN
from quaver.train.torch.learner import TorchLearner
from tests.torch.offload.simulated import Simulated
from tests.train.conftest import MakeConfig


def quaver(*arguments: object) -> Result:
    command = ["plan", "--optimizer-offload", "--gpu", "h100", *map(str, arguments)]
    return CliRunner().invoke(app, command, env={"COLUMNS": "80", "NO_COLOR": "1"})


LEAN = ("--model", "llama3-8b", "--recipe", "tensorwise", "--optimizer", "lean")


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of eighty columns, into which the table fits."""
    monkeypatch.setattr(cli.out, "_width", 80)


def plan_of(*arguments: object) -> Any:
    result = quaver(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_bytes_and_seconds_are_those_computed_by_hand() -> None:
    read = plan_of(*LEAN, "--host-cores", 16)
    matrices = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    head, norms = VOCAB * 4096, 65 * 4096
    # Codes with a scale for each of 7 matrices of a layer, the head in bfloat16, embedding and norms in float32.
    weights = matrices + 4 * 7 * 32 + 2 * head + 4 * (head + norms)
    gradients = (matrices + head) * (1 + 2 / 128) + 4 * (head + norms)
    # Residual, and two moments with a scale for each 64.
    states = (matrices + head) * (1 + 2 * (1 + 2 / 64)) + 8 * (head + norms)
    on_gpu, cpu, stream = read["placements"]
    assert on_gpu["device"] == weights + gradients + states and on_gpu["host"] == 0
    assert cpu["device"] == weights + gradients
    assert (cpu["to_host"], cpu["to_device"]) == (weights + gradients, weights)
    assert stream["host"] == stream["to_host"] == stream["to_device"] == states
    # Head and embedding are larger than the 256 MiB of a piece, so each is one, in a buffer of its own.
    assert stream["device"] == weights + gradients + head * (1 + 2 * (1 + 2 / 64)) + 8 * head
    assert stream["copying"] == pytest.approx(2 * states / 55.6e9)
    arithmetic = ((matrices + head) * 8.7e-9 + (head + norms) * 3.9e-9) / 16
    assert cpu["stepping"] == pytest.approx(arithmetic)
    assert on_gpu["stepping"] == pytest.approx((2 * (weights + states) + gradients) / 3.01e12)
    assert cpu["longer"] == pytest.approx(arithmetic - on_gpu["stepping"]) and on_gpu["longer"] == 0
    assert all(rate["source"] for rate in read["rates"].values())


def test_the_table_fits_a_terminal_and_sentences_interpret_it() -> None:
    result = quaver(*LEAN)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["memory", "of", "the", "GPU,", "GB", "47.04", "19.86", "25.67"] in rows
    assert "5.08 bytes, 2.02 of them on the GPU" in result.stdout
    assert 'offload="cpu" frees 27.2 GB of the GPU' in result.stdout
    assert "The time on the CPU is an estimate" in result.stdout and "torchrun" not in result.stdout


def test_ranks_share_weights_cores_and_memory() -> None:
    one, eight = plan_of(*LEAN), plan_of(*LEAN, "--gpus", 16)
    assert eight["mesh"]["fsdp"] == 16 and eight["ranks_of_a_node"] == 8
    for alone, shared in zip(one["placements"], eight["placements"], strict=True):
        assert shared["to_host"] == pytest.approx(alone["to_host"] / 16)
        assert shared["node"] == 8 * shared["host"]
    # A sixteenth of the parameters, and an eighth of the cores.
    assert eight["placements"][1]["stepping"] == pytest.approx(one["placements"][1]["stepping"] / 2)
    replicated = plan_of(*LEAN, "--gpus", 16, "--fsdp", 4)
    assert replicated["placements"][0]["device"] == pytest.approx(one["placements"][0]["device"] / 4)
    assert "--threads 8" in quaver(*LEAN, "--gpus", 16).stdout
    # Tensor parallelism stores weights in bfloat16 instead of codes.
    assert "6.08 bytes, 3.02 of them" in quaver(*LEAN, "--gpus", 8, "--tp", 8).stdout


@pytest.mark.parametrize("model", KNOWN)
def test_every_model_is_planned(model: str) -> None:
    planned = price(model, "tensorwise", "h200", Cluster(), optimizer="lean", cores=64)
    on_gpu, cpu, stream = planned.placements
    assert cpu.device < on_gpu.device and 0 < stream.host <= cpu.host
    assert len({len(row) for row in cells(planned)}) == 1 and len(notes(planned)) == 5


@pytest.mark.parametrize(
    ("optimizer", "recipe"), [("lean", "tensorwise"), ("exact", "bf16"), ("lion-balanced", "mxfp8")]
)
@pytest.mark.parametrize("offload", ["none", "cpu", "stream"])
def test_bytes_match_those_of_a_real_optimizer(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, offload: str, optimizer: str, recipe: str
) -> None:
    buffers = {"cpu": 0, "stream": 0}

    class Counting(Simulated):
        def allocate_host(self, size: int) -> torch.Tensor:
            buffers["cpu"] += size
            return super().allocate_host(size)

        def allocate(self, size: int, device: torch.device) -> torch.Tensor:
            buffers["stream"] += size
            return super().allocate(size, device)

    monkeypatch.setattr(host, "Transfers", Counting)
    monkeypatch.setattr(optimizer_offloading, "VOCAB", 4096)
    config = make_config(optimizer=optimizer, recipe=recipe, optimizer_offload=offload)
    learner = TorchLearner(config, recipe_name.find_recipe(recipe), 4096)
    learner.step(torch.randint(4096, (1, 1, 9)).numpy(), 1e-3)
    assert isinstance(learner.optimizer, Optimizer)
    moved, stay = 0, [value for name, value in learner.model.named_buffers() if name.endswith("weight_scale")]
    for p, state in learner.optimizer.state.items():
        stay += p.tensors() if isinstance(p, QuantizedTensor) else (p,)
        gradient = getattr(p.grad, "contents", None)
        stay += gradient.codes if gradient else (p.grad,)
        if offload != "none" and p.numel() >= SMALL:
            moved += sum(value.nbytes for value in state.values())
        else:
            stay += state.values()
    planned = price("nano", recipe, "h100", Cluster(), optimizer=optimizer, cores=1)
    (predicted,) = (one for one in planned.placements if one.where == {"none": "device"}.get(offload, offload))
    assert predicted.device == pytest.approx(sum(t.nbytes for t in stay) + buffers["stream"], rel=0.02)
    assert predicted.host == pytest.approx(moved + buffers["cpu"], rel=0.02)


def test_pieces_are_those_of_the_optimizer() -> None:
    assert PIECE_BYTES == host.PIECE_BYTES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--optimizer", "adamw"),
            "adamw is torch's, which has no states in host memory; give --optimizer one of lean",
        ),
        (("--optimizer", "msamp"), "msamp has an unknown time on a CPU; give --optimizer one of lean"),
        (("--optimizer", "muon-lean"), "its time on a CPU is not known; give --optimizer lean"),
        (("--model", "llama3-8c"), "did you mean 'llama3-8b'"),
        (("--recipe", "nvfp4"), "stores weights as eight-bit codes"),
        (("--host-cores", 0), "host_cores is 0; give 1 or more"),
        (("--fsdp", 4), "leave 1 of 1 GPUs; fsdp is 4"),
        (("--offload",), "--offload and --optimizer-offload are two plans; leave out one of them"),
    ],
)
def test_wrong_options(options: tuple[object, ...], message: str) -> None:
    result = quaver(*LEAN, *options)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
