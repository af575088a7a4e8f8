"""Test `quaver train --optimizer`: saving, resuming, errors and generation."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quaver.reference.optimizer_state import PRESETS, SMALL
from quaver.torch.optim import Optimizer, host, layout, master_weights
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.train import checkpoint, loop
from quaver.train import config as recipe_name
from quaver.train.config import TrainConfig
from quaver.train.generate import generate
from quaver.train.loop import folder_of, run_training
from quaver.train.memory import initial_values
from quaver.train.metrics import phase_starts, read
from quaver.train.model_config import MODELS
from quaver.train.torch.learner import TorchLearner
from tests.torch.offload.simulated import Simulated
from tests.train.conftest import MakeConfig

#: The stored formats of a layer's matrix, of the head and of its state.
KEPT = {
    ("lean", "tensorwise"): (
        "uint8",
        "bfloat16",
        {"exp_avg_codes": "int8", "exp_avg_sq_codes": "uint8", "residual": "int8"},
    ),
    ("balanced", "mxfp8(weight_2d=True)"): (
        "uint8",
        "bfloat16",
        {"exp_avg_codes": "int8", "exp_avg_sq_codes": "uint8", "residual": "int16"},
    ),
    ("exact", "blockwise"): (
        "bfloat16",
        "bfloat16",
        {"exp_avg": "bfloat16", "exp_avg_sq": "bfloat16", "remainder": "int16"},
    ),
    ("lean", "bf16"): (
        "bfloat16",
        "bfloat16",
        {"exp_avg_codes": "int8", "exp_avg_sq_codes": "uint8", "residual": "int8"},
    ),
    ("lion-lean", "tensorwise"): ("uint8", "bfloat16", {"exp_avg_codes": "int8", "residual": "int8"}),
    ("schedulefree-lean", "tensorwise"): (
        "uint8",
        "bfloat16",
        {
            **{"z_minus_y_codes": "int8", "exp_avg_sq_codes": "uint8", "residual": "int8"},
            **{"lr_max": "float64", "weight_sum": "float64"},
        },
    ),
    ("sgd", "tensorwise"): ("float32", "float32", {"momentum_buffer": "float32"}),
    ("lean", "mxfp8 until 50%, bf16"): (
        "bfloat16",
        "bfloat16",
        {"exp_avg_codes": "int8", "exp_avg_sq_codes": "uint8", "residual": "int8"},
    ),
    ("muon-lean", "tensorwise"): ("uint8", "bfloat16", {"momentum_buffer_codes": "int8", "residual": "int8"}),
    ("coat", "tensorwise"): ("float32", "float32", {"exp_avg_codes": "uint8", "exp_avg_sq_codes": "uint8"}),
}


def kind(array: Any) -> str:
    return "bfloat16" if array.dtype == checkpoint.BFLOAT16 else str(array.dtype)


def recorded(out: str | Path) -> list[dict[str, Any]]:
    times = ("seconds", "tokens_per_second")
    return [{k: v for k, v in r.items() if k not in times} for r in read(Path(out) / "metrics.jsonl")]


@pytest.mark.parametrize(("optimizer", "recipe"), KEPT)
def test_a_resumed_run_is_the_one_never_stopped(make_config: MakeConfig, optimizer: str, recipe: str) -> None:
    whole = make_config(optimizer=optimizer, recipe=recipe, accumulate=2, steps=6, checkpoint_every=3, keep=0)
    run_training(whole)
    out = Path(whole.out)
    matrix, head, states = KEPT[optimizer, recipe]
    saved = [
        checkpoint.read_tensors_whole([out / "step-000006" / f"{name}.safetensors"]) for name in ("model", "optimizer")
    ]
    name = "layers.0.mlp.up_proj.weight"
    assert kind(saved[0][name]) == matrix and kind(saved[0]["head.weight"]) == head
    own = {key.rpartition("/")[2]: kind(value) for key, value in saved[1].items() if key.startswith(name)}
    assert own.items() >= states.items()
    rest = {"step", "exp_avg_scale", "exp_avg_sq_scale", "momentum_buffer_scale", "z_minus_y_scale", "amax"}
    assert set(own) - set(states) <= rest

    halted = out.with_name("halted")
    halted.mkdir()
    shutil.copytree(out / "step-000003", halted / "step-000003")
    shutil.copy(out / "config.toml", halted)
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (halted / "metrics.jsonl").write_text("".join(lines[:3]))
    run_training(replace(whole, out=str(halted)), resume=True)
    assert recorded(halted) == recorded(out)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (halted / "step-000006" / file).read_bytes() == (out / "step-000006" / file).read_bytes()
    for other in ("", "bf16"):
        assert generate(out, "3 times", tokens=3, recipe=other, device="cpu").tokens


@pytest.mark.parametrize(("before", "after"), [("none", "cpu"), ("cpu", "stream"), ("stream", "none")])
def test_a_run_resumes_with_its_states_in_other_memory(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    """A simulated device, whose states are in host memory; losses and files are those of states on the device."""
    devices: list[Simulated] = []

    def create() -> Simulated:
        devices.append(Simulated())
        return devices[-1]

    monkeypatch.setattr(host, "Transfers", create)
    monkeypatch.setattr(loop, "WHY_IDLE", {})
    whole = make_config(optimizer="lean", recipe="tensorwise", steps=4, checkpoint_every=2, keep=0)
    run_training(whole)
    assert not devices
    out = Path(whole.out)
    halted = replace(whole, out=f"{whole.out}-halted", optimizer_offload=before)
    run_training(halted)
    shutil.rmtree(Path(halted.out) / "step-000004")
    result = run_training(replace(halted, optimizer_offload=after), resume=True)
    assert len(devices) == (before != "none") + (after != "none")
    assert all(sum(way == "back" for way, _ in device.log) for device in devices)
    assert recorded(halted.out) == recorded(out)
    assert result.losses == {record["step"]: record["loss"] for record in recorded(out) if "loss" in record}
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, its = (Path(folder) / "step-000004" / file for folder in (halted.out, out))
        assert ours.read_bytes() == its.read_bytes(), file


def test_streamed_states_stay_pinned_after_resuming(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = set[int]()

    class Pinning(Simulated):
        def pin(self, x: torch.Tensor) -> torch.Tensor:
            copy = x.clone()
            pinned.add(copy.data_ptr())
            return copy

    config = make_config(optimizer="lean", recipe="tensorwise", dtype="float32")
    first = TorchLearner(config, recipe_name.find_recipe("tensorwise"), 256)
    first.step(torch.randint(256, (1, 1, 33)).numpy(), 1e-3)
    monkeypatch.setattr(host, "Transfers", Pinning)
    learner = TorchLearner(replace(config, optimizer_offload="stream"), recipe_name.find_recipe("tensorwise"), 256)
    learner.load(*first.tensors())
    assert isinstance(learner.optimizer, Optimizer)
    large = {p: state for p, state in learner.optimizer.state.items() if p.numel() >= SMALL}
    assert large and all(
        state[name].data_ptr() in pinned for state in large.values() for name in state if name not in ("step", "amax")
    )


#: Optimizers that `KEPT` lacks, one with codes and one with another rule.
CHANGING = [*(name for name in PRESETS if name not in {optimizer for optimizer, _ in KEPT}), "lean", "muon-lean"]


@pytest.mark.parametrize("optimizer", CHANGING)
def test_a_run_is_resumed_before_and_after_its_recipe_changes(make_config: MakeConfig, optimizer: str) -> None:
    """Switch by learning rate, which falls from step 2 of 6 on."""
    recipe = "nvfp4 until lr<60%, tensorwise"
    whole = make_config(optimizer=optimizer, recipe=recipe, steps=6, checkpoint_every=1, keep=0, validate_every=0)
    run_training(whole)
    (change,) = phase_starts(read(Path(whole.out) / "metrics.jsonl"))
    assert 2 < change < 6
    for step in (change - 1, change):
        halted = replace(whole, out=f"{whole.out}-{step}")
        shutil.copytree(whole.out, halted.out)
        for later in range(step + 1, 7):
            shutil.rmtree(Path(halted.out) / f"step-00000{later}")
        run_training(halted, resume=True)
        assert recorded(halted.out) == recorded(whole.out), step
        for file in ("model.safetensors", "optimizer.safetensors"):
            ours, its = (Path(config.out) / "step-000006" / file for config in (halted, whole))
            assert ours.read_bytes() == its.read_bytes(), f"{step}: {file}"


@pytest.mark.parametrize("optimizer", ["lean", "balanced", "msamp", "muon-lean"])
def test_residuals_begin_at_the_initial_weights(make_config: MakeConfig, optimizer: str) -> None:
    """Codes alone would lose up to half a step of each: losses were 0.005 to 0.011 nats above torch's AdamW."""
    config = make_config(optimizer=optimizer, recipe="tensorwise")
    learner = TorchLearner(config, recipe_name.find_recipe("tensorwise"), 256)
    assert isinstance(learner.optimizer, Optimizer)
    first = dict(initial_values(MODELS["nano"], 256, config.seed))
    for name, p in learner.model.named_parameters():
        group = next(g for g in learner.optimizer.param_groups if any(p is each for each in g["params"]))
        if "layers" in name and p.dim() > 1:
            own = learner.optimizer
            master = master_weights.read(
                own.config(p, group).weight_format, layout.tensors_of_weight(p, own.config(p, group), own.state[p])
            )
            difference = (master - torch.from_numpy(first[name])).abs().max().item()
            # Parts of 1/128 of half a step, and 11 bits of float16.
            assert difference <= torch.from_numpy(first[name]).abs().max().item() * 2**-11, name
            assert isinstance(p, QuantizedTensor) and p.codes.dtype is torch.float8_e4m3fn, name


def test_float32_states_are_torchs_losses(make_config: MakeConfig) -> None:
    """The rule is torch's AdamW; what differs is the order of float32 operations."""
    ours = run_training(make_config("ours", optimizer="float32", dtype="float32"))
    torchs = run_training(make_config("torchs", dtype="float32"))
    for step, loss in torchs.losses.items():
        assert ours.losses[step] == pytest.approx(loss, abs=1e-4), step


def test_a_checkpoint_of_another_optimizer_is_refused(make_config: MakeConfig) -> None:
    config = make_config(optimizer="lean", recipe="tensorwise", steps=2)
    run_training(config)
    for other in ("adamw", "balanced"):
        with pytest.raises(ValueError, match=f"made with --optimizer lean, and this run has {other}"):
            run_training(replace(config, optimizer=other, steps=3), resume=True)
    with pytest.raises(ValueError, match=r"does not fit this model: .*"):
        run_training(replace(config, recipe="mxfp8", steps=3), resume=True)


def test_the_folder_says_the_optimizer() -> None:
    assert folder_of(TrainConfig(optimizer="lean")).name == "tiny-bf16-lean-seed0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "nvfp4"}, "stores weights as eight-bit codes"),
        ({"framework": "jax"}, "JAX has no optimizer lean yet"),
        ({"capture": "step", "device": "cpu"}, "cannot be recorded yet"),
        ({"optimizer_offload": "gpu"}, "optimizer_offload 'gpu' is not known"),
        ({"optimizer_offload": "cpu", "framework": "jax"}, "JAX cannot store optimizer states in host memory yet"),
        ({"optimizer_offload": "cpu", "optimizer": "adamw"}, "adamw is torch's, .*; take --optimizer lean"),
        ({"optimizer_offload": "stream", "capture": "step"}, "leave out --capture or --optimizer-offload"),
    ],
)
def test_unsupported_optimizer_options_give_a_clear_error(
    make_config: MakeConfig, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_training(make_config(**{"optimizer": "lean", "recipe": "tensorwise", **options}))


def test_a_checkpoint_in_another_layout_is_refused(make_config: MakeConfig) -> None:
    config = make_config(optimizer="lean", recipe="tensorwise", steps=2)
    run_training(config)
    path = Path(config.out) / "step-000002"
    state = checkpoint.read_state(path)
    assert state.pop("states") == 2
    checkpoint.write_state(path, {key: value for key, value in state.items() if key not in ("files", "digest")})
    with pytest.raises(checkpoint.CheckpointError, match="optimizer states in a layout of another version"):
        run_training(replace(config, steps=4), resume=True)


@pytest.mark.parametrize("optimizer", ["lean", "balanced"])
def test_a_gradient_that_is_not_finite_updates_nothing_and_is_named(make_config: MakeConfig, optimizer: str) -> None:
    config = make_config(optimizer=optimizer, recipe="tensorwise", accumulate=2)
    learner = TorchLearner(config, recipe_name.find_recipe("tensorwise"), 256)
    batch = torch.randint(256, (2, 2, 33)).numpy()
    learner.step(batch, 1e-3)
    before, saved = ({n: v.copy() for n, v in each.items()} for each in learner.tensors())
    layer = learner.model.layers[0].mlp.up_proj
    handle = layer.weight.register_hook(lambda gradient: gradient / 0)
    loss, norm = learner.step(batch, 1e-3)
    handle.remove()
    assert loss == loss and not norm < float("inf")
    assert "layers.0.mlp.up_proj.weight" in learner.first_gradient(batch)
    after, states = learner.tensors()
    assert all((after[n] == v).all() for n, v in before.items())
    assert all((states[n] == v).all() for n, v in saved.items())
    assert isinstance(learner.optimizer, Optimizer)
    assert learner.step(batch, 1e-3)[1] < float("inf"), "the next step goes on"


@pytest.mark.parametrize("optimizer", ["lean", "balanced", "exact"])
def test_clipping_is_the_optimizers(make_config: MakeConfig, optimizer: str) -> None:
    """The norm is that of all gradients; above the limit the weights move as far as at the limit."""
    batch = torch.randint(256, (1, 2, 33)).numpy()
    norms = {}
    for clip in (0.0, 1e-3):
        config = make_config(optimizer=f"sgd-{optimizer}", recipe="tensorwise", clip=clip, beta1=0.0, weight_decay=0.0)
        learner = TorchLearner(config, recipe_name.find_recipe("tensorwise"), 256)
        before = learner.model.embedding.weight.detach().clone()
        norms[clip] = learner.step(batch, 1.0)[1]
        moved = (learner.model.embedding.weight.detach() - before).norm().item()
        assert moved > 0
        if clip:
            assert moved <= clip * 1.001
    assert norms[0.0] == pytest.approx(norms[1e-3]) and norms[0.0] > 0.1
