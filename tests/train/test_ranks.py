"""A run on several ranks agrees with one of a single process: losses, checkpoints, and one sentence for an error.

The ranks of one start train several runs one after the other; the single process's are trained here.
"""

import json
import math
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.train import checkpoint, mesh
from quaver.train.checkpoint import CheckpointError
from quaver.train.config import TrainConfig, read_toml, to_toml
from quaver.train.generate import generate
from quaver.train.loop import run_training
from quaver.train.metrics import losses, read, validation_losses
from quaver.train.model_config import GEMMA2, MODELS, NEOX
from quaver.train.torch import decoder
from quaver.train.torch.decoder import quantize_layers
from tests import forked
from tests.conftest import ROOT
from tests.torch.parallel.tensor import page
from tests.torch.parallel.tensor.split import SplitLinear, high
from tests.torch.parallel.tensor.vocabulary import SplitLoss
from tests.train.conftest import MakeConfig

#: The smallest model whose heads, groups and layers two ranks can share.
PAIR = "pair"
#: The same with more layers, for two stages on each of two ranks, and for four ranks.
FOUR, EIGHT = "four", "eight"
MODELS.setdefault(PAIR, replace(MODELS["nano"], layers=2, groups=2))
MODELS.setdefault(FOUR, replace(MODELS[PAIR], layers=4))
MODELS.setdefault(EIGHT, replace(MODELS[PAIR], layers=8))
#: A model whose columns are sharded in blocks of 64.
BROAD = "broad"
MODELS.setdefault(BROAD, replace(MODELS[PAIR], head_dim=64))
#: Model features that the first lacks: biases and parallel norms; a tied head, norms of heads and after sublayers.
MODELS.setdefault("pair-neox", replace(MODELS[PAIR], **NEOX))
MODELS.setdefault("pair-gemma", replace(MODELS[PAIR], qk_norm="RMSNorm", windows=(7, -1), **GEMMA2))
#: Seconds that a start of ranks takes at most.
LONGEST = 240


class Resumed(NamedTuple):
    """A run that resumes from a step of an earlier run of the same start."""

    config: TrainConfig
    source: TrainConfig
    step: int = 2


def start(runs: Sequence[TrainConfig | Resumed], folder: Path, world: int) -> None:
    """Train runs one after the other on `world` ranks, which use a store of this process, as those of torchrun do."""
    folder.mkdir()
    for number, run in enumerate(runs):
        config = run.config if isinstance(run, Resumed) else run
        (folder / f"{number}.toml").write_text(to_toml(config), encoding="utf-8")
        if isinstance(run, Resumed):
            (folder / f"{number}.source").write_text(f"{run.step} {run.source.out}", encoding="utf-8")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(world):
        environment = {**os.environ, **rank_environment(rank, world, store.port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.train.test_ranks", str(folder), str(len(runs))]
        processes.append(forked.quick.Popen(command, cwd=ROOT, env=environment, stderr=forked.quick.PIPE))
    codes, errors = ended(processes)
    assert codes == [0] * world, errors


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    return {**{name: str(number) for name, number in numbers.items()}, "MASTER_ADDR": "127.0.0.1"}


def ended(processes: Sequence[Any]) -> tuple[list[int], str]:
    """Return the exit codes and stderr of processes; as under torchrun, one that fails ends the others."""
    end = time.monotonic() + LONGEST
    try:
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            assert time.monotonic() < end, "the ranks hang"
            time.sleep(0.02)
        after = time.monotonic() + 10
        while any(p.poll() is None for p in processes) and time.monotonic() < after:
            time.sleep(0.02)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
    errors = b"".join(process.communicate()[1] for process in processes).decode()
    return [process.returncode for process in processes], errors


def main() -> None:
    """Train the runs of a folder, as one of the ranks."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    for number in range(count):
        config = TrainConfig(**read_toml(folder / f"{number}.toml"))
        out, source = Path(config.out), folder / f"{number}.source"
        if source.exists() and os.environ["RANK"] == "0":
            step, _, path = source.read_text(encoding="utf-8").partition(" ")
            copy_until(int(step), Path(path), out)
        while source.exists() and not out.exists():
            time.sleep(0.01)
        run_training(config, resume=(out / "config.toml").exists())


def copy_until(step: int, source: Path, out: Path) -> None:
    """Copy a run's folder as it was after a step, atomically."""
    part = out.with_name(f"{out.name}.part")
    shutil.copytree(source, part)
    for path in part.glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    part.rename(out)


def begin_from(config: TrainConfig, source: TrainConfig, step: int = 2) -> TrainConfig:
    """Give a run the folder of another one as it was after a step."""
    copy_until(step, Path(source.out), Path(config.out))
    return config


def recorded(config: TrainConfig) -> dict[str, float]:
    """Return every loss of a run by its step, and those of validation."""
    records = read(Path(config.out) / "metrics.jsonl")
    own = {f"step {step}": loss for step, loss in losses(records).items()}
    return own | {f"validation {step}": loss for step, loss in validation_losses(records).items()}


def farthest(a: dict[str, float], b: dict[str, float]) -> float:
    """Return the largest relative difference of two runs' losses."""
    assert a.keys() == b.keys() and len(a) > 2
    return max(abs(b[name] / a[name] - 1) for name in a)


#: Options of a single process.
ALONE: dict[str, Any] = {"fsdp": 0, "pp": 1, "pp_schedule": "1F1B", "pp_stages": 0, "cp": 1, "tp": 1, "sp": False}
#: Options that have no effect on a single process, where they cause a warning.
ALONE |= {"cp_how": "gather", "async_save": False, "timeout": 0}


def plain(config: TrainConfig, name: str, **options: Any) -> TrainConfig:
    """Return the options of the same run on a single process, in a neighbouring folder."""
    out = str(Path(config.out).with_name(name))
    return replace(config, **ALONE | {"out": out} | options)


DELAYED = "delayed(history=4)"
#: A run with a checkpoint in its middle.
HALVES: dict[str, Any] = {"steps": 4, "checkpoint_every": 2, "validate_every": 2}
#: Relative to a loss: where a scale is that of a part of the batch, or a sum is in another order, codes flip. Seen over
#: 10 steps of nano: 6e-4 and 1.1e-7.
DRIFT = {"tensorwise": 5e-3, DELAYED: 1e-3}


@pytest.mark.ranks
def test_runs_of_two_and_four_ranks_are_the_single_process_s(make_config: MakeConfig, tmp_path: Path) -> None:
    common: dict[str, Any] = {"dtype": "float32", "batch": 4, "final_lr": 1.0, "keep": 0, **HALVES}
    bf16 = make_config("bf16", fsdp=2, **common)
    resumed = Resumed(make_config("resumed", fsdp=2, **common), bf16)
    # No clipping, since the norm is summed in another order.
    tensorwise = make_config("tensorwise", fsdp=2, recipe="tensorwise", clip=0.0, **common)
    delayed = make_config("delayed", fsdp=2, recipe=DELAYED, **common)
    start([bf16, resumed, tensorwise, delayed], tmp_path / "two", 2)

    whole = plain(bf16, "whole")
    run_training(whole)
    assert farthest(recorded(whole), recorded(bf16)) < 1e-6
    assert recorded(resumed.config) == recorded(bf16), "a resumed run equals an uninterrupted one"
    # Micro-batches of a single process are the ranks' parts of a batch: the same sums.
    same = plain(tensorwise, "tensorwise-split", batch=2, accumulate=2)
    trained = run_training(same)
    assert losses_of(recorded(same)) == losses_of(recorded(tensorwise))
    saved = checkpoint.load(Path(tensorwise.out) / "step-000004", {})
    for tensor, value in trained.model.state_dict().items():
        np.testing.assert_array_equal(saved.model[tensor], value.numpy(), tensor)
    for config in (tensorwise, delayed):
        unsplit = plain(config, f"{config.recipe}-unsplit")
        run_training(unsplit)
        assert farthest(recorded(unsplit), recorded(config)) < DRIFT[config.recipe], config.recipe

    # From two ranks to four, from four to one, from one to four.
    four, back = replace(bf16, fsdp=4, out=str(tmp_path / "four")), plain(bf16, "back")
    begun = replace(bf16, fsdp=4, out=str(tmp_path / "begun"))
    for config, source in ((four, bf16), (begun, whole)):
        begin_from(config, source)
    # With another recipe, histories of another length start again, as in one process.
    other = replace(delayed, fsdp=4, recipe="delayed(history=8)", out=f"{delayed.out}-otherwise")
    begin_from(other, delayed)
    start([four, begun, other], tmp_path / "ranks", 4)
    one = plain(other, "otherwise-one")
    begin_from(one, delayed)
    with pytest.warns(UserWarning) as warned:
        run_training(one, resume=True)
    assert "goes on from step 2 with other options: recipe" in str(warned[-1].message)
    assert farthest(recorded(one), recorded(other)) < DRIFT[DELAYED]
    assert recorded(other) != recorded(delayed), "the recipe is another one"
    begin_from(back, four)
    run_training(back, resume=True)
    for config in (four, begun, back):
        assert farthest(recorded(bf16), recorded(config)) < 1e-6
    assert generate(Path(four.out), "3 times", tokens=5).tokens
    damaged = Path(four.out) / "step-000004"
    shard = sorted(damaged.glob("shard-*"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match=r"shard-00004-.* is not the file that was saved"):
        checkpoint.load(damaged, {})


def losses_of(seen: dict[str, float]) -> dict[str, float]:
    """Return the losses of training; validation's depend on the number of its batches."""
    return {name: loss for name, loss in seen.items() if name.startswith("step")}


@pytest.mark.ranks
def test_tensor_parallel_ranks_match_a_single_process(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    common: dict[str, Any] = {"dtype": "float32", "batch": 4, "final_lr": 1.0, "keep": 0, **HALVES}
    common |= {"sequence": 64, "model": PAIR}
    grid = make_config("grid", fsdp=2, tp=2, **common)
    resumed = Resumed(make_config("grid-resumed", fsdp=2, tp=2, async_save=True, **common), grid)
    few = common | {"steps": 2, "warmup": 1}
    inspected = few | {"inspect_every": 2}
    quantized = [make_config(f"grid-{name}", fsdp=2, tp=2, recipe=name, clip=0.0, **inspected) for name in GRID]
    across = [
        make_config(f"across-{how}", cp=2, cp_how=how, **few | options)
        for how, options in (
            ("gather", {"tp": 2, "sp": True, "model": "pair-gemma"}),
            ("ring", {"fsdp": 2, "loss_chunk": 64}),
        )
    ]
    few |= {"batch": 2, "accumulate": 2, "model": "pair-neox"}
    staged = make_config("staged", pp=2, tp=2, sp=True, **few)
    start([grid, resumed, *quantized, *across, staged], tmp_path / "of-four", 4)

    whole = plain(grid, "one")
    run_training(whole)
    assert farthest(recorded(whole), recorded(grid)) < 1e-6
    assert recorded(resumed.config) == recorded(grid), "a resumed run equals an uninterrupted one"
    for config in (*across, staged):
        one = plain(config, f"{Path(config.out).name}-one")
        run_training(one)
        assert farthest(recorded(one), recorded(config)) < 1e-6, config.out
        assert max(abs(a / b - 1) for a, b in zip(norms(one), norms(config), strict=True)) < 1e-5, config.out
    for config in quantized:
        # Its ranks' parts of each sum, one after the other.
        one = plain(
            config, f"{Path(config.out).name}-split", batch=2, accumulate=2, loss_chunk=1 << 20, inspect_every=0
        )
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "quantize_layers", split_layers)
            run_training(one)
        assert losses_of(recorded(one)) == losses_of(recorded(config)), config.recipe
        rows = [json.loads(line) for line in (Path(config.out) / "inspect.jsonl").read_text().splitlines()]
        results = {(row["layer"], row["tensor"]) for row in rows if "format" not in row}
        assert len(results) == 2 * 7 * 3, "three GEMMs of seven layers in two blocks"

    # From two times two ranks to two of --tp, and to one; test_stages.py resumes on four.
    layers, back = (replace(grid, out=str(tmp_path / str(tp)), fsdp=1, tp=tp) for tp in (2, 1))
    for config in (layers, back):
        begin_from(config, grid)
    # A run with a tied head resumes without --tp, and one of a single process with it.
    gemma = across[0]
    tied = replace(gemma, steps=4, cp=1, fsdp=2, tp=1, sp=False, out=str(tmp_path / "tied-batches"))
    again = replace(gemma, steps=4, cp=1, fsdp=1, out=str(tmp_path / "tied-layers"))
    one_tied = plain(gemma, f"{Path(gemma.out).name}-one", steps=4)
    shutil.copytree(gemma.out, tied.out)
    shutil.copytree(one_tied.out, again.out)
    run_training(one_tied, resume=True)
    start([layers, tied, again], tmp_path / "of-two", 2)
    for config in (tied, again):
        assert farthest(losses_of(recorded(one_tied)), losses_of(recorded(config))) < 1e-6, config.out
    run_training(back, resume=True)
    for config in (layers, back):
        # Validation's batches are of as many sequences as a micro-batch's.
        assert farthest(losses_of(recorded(grid)), losses_of(recorded(config))) < 1e-6


#: One recipe with a scale for all of a tensor, and one with blocks.
GRID = ("tensorwise", "mxfp8")


def norms(config: TrainConfig) -> list[float]:
    """Return the gradient's norm of each step of a run."""
    return [record["grad_norm"] for record in read(Path(config.out) / "metrics.jsonl") if "grad_norm" in record]


def split_layers(model: Any, recipe: Recipe, seed: int) -> Any:
    """Let a decoder split its sums as two tensor-parallel ranks do, by heads, features and vocabulary."""
    report = quantize_layers(model, recipe, seed)
    model.head.__class__ = HeadOfTwo
    for layer in model.layers:
        for part in (layer.attention, layer.mlp):
            for name, child in [*part.named_children()]:
                if isinstance(child, torch.nn.Linear):
                    column = name not in ("o_proj", "down_proj")
                    part._modules[name] = SplitLinear(child, recipe, 2, column, False)
    return report


class HeadOfTwo(torch.nn.Linear):
    @staticmethod
    def loss_over_ranks(head: Any, x: torch.Tensor, targets: torch.Tensor, *_: Any) -> torch.Tensor:
        loss: torch.Tensor = LossOfTwo.apply(x, head.weight, targets)
        return loss


class LossOfTwo(torch.autograd.Function):
    """Mean loss over a vocabulary in two parts; gradients are made in forward and scaled in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        flat = x.detach().flatten(0, 1)
        logits = F.linear(flat, weight.detach()).requires_grad_()
        with torch.enable_grad():
            losses = SplitLoss.apply(logits, targets.flatten(), {}, "none")
            (g,) = torch.autograd.grad(losses, logits, torch.ones_like(losses))
        first, second = (
            high(a, b.t(), torch.float32) for a, b in zip(g.chunk(2, 1), weight.detach().chunk(2), strict=True)
        )
        ctx.save_for_backward((first + second).view(x.shape), g.t() @ flat)
        ctx.count = len(flat)
        return losses.detach().sum() / len(flat)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad * (g / ctx.count), weight_grad * (g / ctx.count), None


def test_the_vocabulary_must_divide_among_ranks() -> None:
    mesh.check_words(288, 4)
    with pytest.raises(
        ValueError, match=r"tp is 64, .* the 288 entries of the vocabulary; .* --vocab a multiple of 64"
    ):
        mesh.check_words(288, 64)


def test_an_error_on_one_rank_is_reported_once_without_a_hang(
    make_config: MakeConfig, text: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(text, other)
    (other / "30.txt").write_text("something else " * 200, encoding="utf-8")
    alike = make_config("run", text=(str(text),))
    with_timeout = replace(alike, timeout=8)
    # The config of the first rank, that of rank 1, the working folder of rank 1, and the message.
    ways = (
        (alike, replace(alike, text=(str(other),)), ROOT, "rank 1: this rank has a text of fingerprint "),
        (alike, replace(alike, lr=0.25), ROOT, "lr is 0.0, and on rank 1 0.25; give every rank the same options"),
        (with_timeout, with_timeout, other, "rank 1: this rank does not see the folder "),
    )
    begun, starts = time.monotonic(), []
    for number, (first, second, cwd, _) in enumerate(ways):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for rank, (own, where) in enumerate(((first, ROOT), (second, cwd))):
            path = tmp_path / f"{number}-{rank}.toml"
            out = os.path.relpath(tmp_path / f"run-{number}", ROOT)
            path.write_text(to_toml(replace(own, out=out)), encoding="utf-8")
            environment = {**os.environ, **rank_environment(rank, 2, port), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "quaver.train", "train", "--config", str(path)]
            processes.append(forked.quick.Popen(command, cwd=where, env=environment, stderr=forked.quick.PIPE))
        starts.append(processes)
    for number, (_, _, _, sentence) in enumerate(ways):
        codes, errors = ended(starts[number])
        assert codes == [1, 1] and time.monotonic() - begun < 60
        assert errors.count("\n") == 1 and errors.startswith(sentence), errors
        assert not (tmp_path / f"run-{number}").exists()


@pytest.mark.parametrize(
    ("world", "options", "sentence"),
    [
        (
            1,
            {"fsdp": 2, "batch": 2},
            "fsdp is 2, and the number of ranks is 1; give --fsdp 1, or start",
        ),
        (4, {"tp": 2, "fsdp": 4}, "fsdp is 4 and tp is 2, and the number of ranks is 4; give --fsdp 2, or start"),
        (2, {"tp": 2}, "tp is 2, which cannot share the 2 heads of nano and its 1 of keys and values; leave out --tp"),
        (
            2,
            {"tp": 2, "model": PAIR, "recipe": "blockwise"},
            "tp is 2, with 64 of 128 features of pair on each rank, and blockwise quantizes them in blocks of 128;",
        ),
        (
            2,
            {"tp": 2, "model": PAIR, "recipe": "mxfp8", "sp": True},
            "sequence is 32, which 2 ranks cannot share under mxfp8; give --sequence a multiple of 64, or leave out",
        ),
        (
            4,
            {"cp": 2, "tp": 4},
            "cp is 2 and tp is 4, and the number of ranks is 4; start them by: torchrun --nproc-per-node 8 ",
        ),
        (
            2,
            {"cp": 2, "sequence": 34},
            "sequence is 34, and each of 2 ranks of cp takes a piece .* a multiple of 4, or",
        ),
        (
            2,
            {"cp": 2, "cp_how": "all_to_all"},
            "all_to_all, and 2 ranks cannot share the 2 heads of nano and its 1 of keys and values; take --cp-how ",
        ),
        (
            2,
            {"cp": 2, "recipe": "mxfp8(attention=True)"},
            "mxfp8 quantizes attention, which --cp-how gather cuts in pieces of other scales; take --cp-how all_to_all",
        ),
        (2, {"pp": 2}, "pp is 2, which cannot share the 1 layers of nano; give another"),
        (2, {"pp": 2, "model": PAIR}, "pp is 2, and a step has 1 micro-batches, .* give --accumulate 2 or more"),
        (2, {"pp": 2, "model": "pair-gemma", "accumulate": 2}, "the head of pair-gemma is its embedding, which the"),
        (2, {"sp": True}, "sp divides tokens among the ranks of tp, and tp is 1; give --tp, or leave out --sp"),
        (4, {"batch": 6}, "batch is 6, which 4 ranks cannot share; give --batch a multiple of 4"),
        (2, {"framework": "jax"}, "JAX trains in a single process here; take --framework torch"),
        (2, {"capture": "step"}, "capture step records one process's step; leave it out"),
    ],
)
def test_options_unsupported_by_ranks_are_refused_before_anything_is_read(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    world: int,
    options: dict[str, Any],
    sentence: str,
) -> None:
    if world > 1:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(ValueError, match=sentence):
        run_training(make_config(**options))


@pytest.mark.parametrize("name", sorted(recipes.RECIPES))
def test_part_requirements_match_the_layers(name: str) -> None:
    recipe = recipes.get(name)
    multiples = [page.needed(recipe, layout, tokens) for layout in page.LAYOUTS for tokens in (False, True)]
    assert mesh.block_multiple(recipe) == math.lcm(*multiples)


@pytest.mark.ranks
def test_ranks_that_are_killed_while_they_save_leave_a_whole_checkpoint(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(
        "killed", fsdp=2, dtype="float32", steps=500, checkpoint_every=1, keep=0, async_save=True, final_lr=1.0
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (tmp_path / "go").mkdir()
    (tmp_path / "go" / "0.toml").write_text(to_toml(config), encoding="utf-8")
    processes = []
    for rank in range(2):
        environment = {**os.environ, **rank_environment(rank, 2, store.port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.train.test_ranks", str(tmp_path / "go"), "1"]
        processes.append(forked.quick.Popen(command, cwd=ROOT, env=environment, stderr=forked.quick.PIPE))
    folder, end = Path(config.out), time.monotonic() + LONGEST
    try:
        # A file of an incomplete checkpoint, and one of a complete checkpoint.
        while not (checkpoint.list_checkpoints(folder) and [*folder.glob(".*/shard-*")]):
            assert time.monotonic() < end and not any(p.poll() for p in processes), "no save was seen on its way"
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
    ended(processes)
    whole = checkpoint.list_checkpoints(folder)
    for path in whole:
        checkpoint.load(path, {})
    last = int(whole[-1].name[5:])
    again = replace(config, fsdp=0, steps=last + 2, async_save=False)
    run_training(again, resume=True)
    straight = plain(again, "straight")
    run_training(straight)
    assert farthest(losses_of(recorded(straight)), losses_of(recorded(again))) < 1e-6


def test_a_checkpoint_with_missing_parts_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    from quaver.train import checkpoint as parts

    where = {"format": "pt", parts.WHERE: '{"w": {"saved_offsets": [2, 0]}}'}
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"w": np.ones((2, 3), np.float32)}, first)
    save_file({"w": np.full((1, 3), 2, np.float32), "e": np.ones((), np.int64)}, second, where)
    np.testing.assert_array_equal(parts.read_tensors_whole([first, second])["w"], [[1] * 3] * 2 + [[2] * 3])
    assert parts.read_shapes([first, second])["w"].shape == (3, 3)
    with pytest.raises(ValueError, match="the parts of 'w' do not make a whole"):
        parts.read_tensors_whole([second])


if __name__ == "__main__":
    main()
