"""Checkpoints on one to four gloo ranks: a run that goes on is the one that was not stopped, whoever reads it."""

import contextlib
import json
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import quaver.torch as qt
from quaver.torch.parallel import Checkpoint, ColwiseParallel, RowwiseParallel, gather_quantized
from tests import two_ranks
from tests.close import assert_bitwise, assert_close

#: Input and hidden features, with whole blocks on each of two ranks.
WIDE, INNER = 128, 256
#: Batch size, divisible by two, three and four ranks.
BATCH = 12
#: A recipe with histories, one with noise, and two without state in a checkpoint.
RECIPES = ["delayed", "nvfp4", "mxfp8", "tensorwise"]


class Net(nn.Module):
    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDE, inner), nn.Linear(inner, WIDE), nn.LayerNorm(WIDE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.down(nn.functional.gelu(self.up(x))))
        return y


def net(recipe: str, seed: int = 0, inner: int = INNER) -> nn.Module:
    torch.manual_seed(seed)
    model = Net(inner)
    qt.convert(model, recipe)
    return model


def single_process(model: nn.Module) -> nn.Module:
    return model


def with_fsdp(model: nn.Module) -> nn.Module:
    mesh = two_ranks.mesh(two_ranks.world())
    # Some recipes gather no weight as codes.
    with contextlib.suppress(ValueError):
        gather_quantized(model)
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh)
    return model


def with_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def with_tensor_parallelism(model: nn.Module) -> nn.Module:
    return parallelize_module(
        model, two_ranks.mesh(two_ranks.world()), {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )


def with_fsdp_and_tensor_parallelism(model: nn.Module) -> nn.Module:
    mesh = two_ranks.mesh(2, 2, names=("fsdp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh["fsdp"])
    return model


Parallelism = Callable[[nn.Module], nn.Module]
Run = tuple[nn.Module, torch.optim.Optimizer]
#: Into how many shards the ranks split a batch.
DIVIDED: dict[Parallelism, Callable[[], tuple[int, int]]] = {
    single_process: lambda: (0, 1),
    with_fsdp: lambda: (dist.get_rank(), two_ranks.world()),
    with_ddp: lambda: (dist.get_rank(), two_ranks.world()),
    with_tensor_parallelism: lambda: (0, 1),
    with_fsdp_and_tensor_parallelism: lambda: (dist.get_rank() // 2, 2),
}


def start_run(recipe: str, parallelism: Parallelism, seed: int = 0) -> Run:
    model = parallelism(net(recipe, seed))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def input_at(number: int) -> Tensor:
    return torch.randn(BATCH, 32, WIDE, generator=torch.Generator().manual_seed(number)) * (1 + number)


def train(run_state: Run, parallelism: Parallelism, numbers: range) -> list[Tensor]:
    model, optimizer = run_state
    losses = []
    for number in numbers:
        at, parts = DIVIDED[parallelism]()
        loss = model(input_at(number).chunk(parts)[at]).square().sub(0.5).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        y: Tensor = model(input_at(99))
    return y


def full_tensor(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def full_state(run_state: Run) -> dict[str, Any]:
    """The complete saved state as unsharded copies on each rank."""
    state = {name: full_tensor(value) for name, value in Checkpoint(*run_state).state_dict().items()}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def assert_same(state: dict[str, Any], expected: dict[str, Any], label: str) -> None:
    assert state.keys() == expected.keys(), f"{label}: {state.keys() ^ expected.keys()}"
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert_bitwise(state[name], value, f"{label}: {name}")
        else:
            assert state[name] == value, f"{label}: {name}"


def assert_resumes(recipe: str, parallelism: Parallelism, folder: Path) -> None:
    """Train two steps, save and train two more; another run that loads the checkpoint repeats these two."""
    first = start_run(recipe, parallelism)
    train(first, parallelism, range(2))
    saved = full_state(first)
    Checkpoint(*first).save(folder)
    expected = train(first, parallelism, range(2, 4))
    second = start_run(recipe, parallelism, seed=5)
    train(second, parallelism, range(7, 8))
    Checkpoint(*second).load(folder)
    assert_same(full_state(second), saved, f"{recipe}, {parallelism.__name__}")
    for number, (loss, other) in enumerate(zip(expected, train(second, parallelism, range(2, 4)), strict=True)):
        assert_bitwise(other, loss, f"{recipe}, {parallelism.__name__}: loss {number}")
    assert_same(full_state(second), full_state(first), f"{recipe}, {parallelism.__name__}: at the end")


def folder_of(recipe: str, parallelism: Parallelism, ranks: int | None = None) -> Path:
    return two_ranks.folder() / f"{recipe}-{parallelism.__name__}-{ranks or two_ranks.world()}"


def runs_resume_from_checkpoints(rank: int) -> None:
    for recipe in RECIPES:
        assert_resumes(recipe, with_fsdp, folder_of(recipe, with_fsdp))
    for recipe in ("delayed", "nvfp4"):
        for parallelism in (with_ddp, with_tensor_parallelism):
            assert_resumes(recipe, parallelism, folder_of(recipe, parallelism))


def before_the_first_step(rank: int) -> None:
    """Saving a run before its first step changes nothing, and the resumed run starts at step 0."""
    folder = two_ranks.folder() / "before the first step"
    expected = train(start_run("mxfp8", with_fsdp), with_fsdp, range(2))
    first = start_run("mxfp8", with_fsdp)
    Checkpoint(*first).save(folder)
    assert not first[1].state
    second = start_run("mxfp8", with_fsdp, seed=6)
    train(second, with_fsdp, range(5, 6))
    Checkpoint(*second).load(folder)
    for run_state in (first, second):
        for loss, other in zip(expected, train(run_state, with_fsdp, range(2)), strict=True):
            assert_bitwise(other, loss, "saved before the first step")


def saved_while_training_goes_on(rank: int) -> None:
    folder = two_ranks.folder() / "asynchronous"
    first = start_run("delayed", with_fsdp)
    train(first, with_fsdp, range(2))
    saved = full_state(first)
    whole_soon = Checkpoint(*first).async_save(folder)
    expected = train(first, with_fsdp, range(2, 4))
    whole_soon.result()
    second = start_run("delayed", with_fsdp, seed=5)
    Checkpoint(*second).load(folder)
    assert_same(full_state(second), saved, "asynchronous")
    for loss, other in zip(expected, train(second, with_fsdp, range(2, 4)), strict=True):
        assert_bitwise(other, loss, "asynchronous")
    # The saved values are those at the call, although all of them change before the write.
    saved = full_state(second)
    whole_soon = Checkpoint(*second).async_save(two_ranks.folder() / "changed")
    with torch.no_grad():
        for value in [*second[0].parameters(), *second[0].buffers()]:
            value.zero_()
    whole_soon.result()
    Checkpoint(*second).load(two_ranks.folder() / "changed")
    assert_same(full_state(second), saved, "changed while it was written")
    dist.barrier()
    assert json.loads((folder / "digests.json").read_text())["sha256"].keys() == {
        path.name for path in folder.iterdir() if path.name != "digests.json"
    }


def a_second_save_waits_for_the_first(rank: int) -> None:
    """Ranks write at different times: a later save or load starts only after the earlier save is complete."""
    run_state, write = start_run("mxfp8", with_fsdp), dcp.FileSystemWriter.write_data

    def slowly(*args: Any) -> Any:
        time.sleep(0.3 * (rank == 0))
        return write(*args)

    checkpoint = Checkpoint(*run_state)
    folders = [two_ranks.folder() / f"one of {number}" for number in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, "write_data", slowly)
        saved = [checkpoint.async_save(folder) for folder in folders[:2]]
        assert saved[0].done()
        checkpoint.save(folders[2])
    assert saved[1].done() and all(each.exception() is None for each in saved)
    expected, loaded = full_state(run_state), start_run("mxfp8", with_fsdp, seed=5)
    for folder in folders:
        Checkpoint(*loaded).load(folder)
        assert_same(full_state(loaded), expected, folder.name)


def a_state_that_one_rank_cannot_take_is_an_error_on_all(rank: int) -> None:
    class Broken(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {}["lost"] if rank == 1 else super().state_dict()

    class NotLoading(Stateful):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            if rank == 1:
                raise RuntimeError("of another version")

    run_state, where = start_run("mxfp8", with_fsdp), two_ranks.folder()
    broken = Checkpoint(*run_state, others={"loader": Broken(1)})
    message = "rank 0: no error; rank 1: could not take the state: KeyError: 'lost'"
    for do in (broken.state_dict, lambda: broken.save(where / "never"), lambda: broken.async_save(where / "never")):
        with pytest.raises(ValueError, match=message):
            do()
    assert not (where / "never").exists()
    Checkpoint(*run_state, others={"loader": Stateful(1)}).save(where / "good")
    with pytest.raises(ValueError, match=r"rank 1: could not load .*: RuntimeError: of another version"):
        Checkpoint(*run_state, others={"loader": NotLoading(1)}).load(where / "good")


class Stateful:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "of": {"parts": [1, 2]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["of"] == {"parts": [1, 2]}
        self.value = state["value"]


def pipeline_stages(rank: int) -> None:
    """Each rank has its own layers and only their recipe state."""

    def trainee(seed: int) -> Run:
        torch.manual_seed(seed + rank)
        part = nn.ModuleDict({str(rank): qt.Linear(WIDE, WIDE), "norm" + str(rank): nn.LayerNorm(WIDE)})
        return part, torch.optim.AdamW(part.parameters(), 1e-2)

    def step(run_state: Run, number: int) -> Tensor:
        with qt.autocast("delayed"):
            loss = run_state[0][str(rank)](input_at(number + rank)).square().mean()
        loss.backward()
        run_state[1].step()
        run_state[1].zero_grad()
        return loss.detach()

    first, second = trainee(0), trainee(5)
    for number in range(2):
        step(first, number)
    folder = two_ranks.folder() / f"stages-{two_ranks.world()}"
    Checkpoint(*first, others={"loader": Stateful(7)}).save(folder)
    loader = Stateful(0)
    Checkpoint(*second, others={"loader": loader}).load(folder)
    assert loader.value == 7
    for name, value in get_model_state_dict(first[0]).items():
        assert_bitwise(second[0].state_dict()[name], value, name)
    norms = (
        dict(second[0].named_parameters())[f"norm{rank}.weight"],
        dict(first[0].named_parameters())[f"norm{rank}.weight"],
    )
    assert not any(optimizer.state.get(p) for p, (_, optimizer) in zip(norms, (second, first), strict=True)), (
        "no gradient"
    )
    assert_bitwise(step(second, 3), step(first, 3), "stages")


def bad_input(rank: int) -> None:
    folder = folder_of("delayed", with_fsdp)
    model, optimizer = start_run("delayed", with_fsdp, seed=8)
    before = full_state((model, optimizer))

    def raises(message: str, do: Callable[[], Any]) -> None:
        with pytest.raises(ValueError, match=message):
            do()

    raises("already has a checkpoint", lambda: Checkpoint(model, optimizer).save(folder))
    raises("already has a checkpoint", lambda: Checkpoint(model, optimizer).async_save(folder))
    raises("has no whole checkpoint", lambda: Checkpoint(model, optimizer).load(folder / "none"))
    other = with_fsdp(net("delayed", inner=2 * INNER))
    raises(
        r"another model: model\.up\.weight has shape \[256, 128\] in the checkpoint and \[512, 128\] in the model",
        lambda: Checkpoint(other).load(folder),
    )
    deeper = nn.Sequential(net("mxfp8"))
    raises(r"it lacks model\.0\.down\.bias and 5 more", lambda: Checkpoint(deeper).load(folder))
    smaller = Net()
    del smaller.norm
    raises(r"it has model\.norm\.bias and 1 more, which this model lacks", lambda: Checkpoint(smaller).load(folder))
    bare = two_ranks.folder() / "bare"
    Checkpoint(model).save(bare)
    raises("it has no optimizer: give none", lambda: Checkpoint(model, optimizer).load(bare))
    raises("it lacks others.loader", lambda: Checkpoint(model, others={"loader": Stateful(0)}).load(bare))
    # A saved state loads into an optimizer of the same kind of options; another kind raises.
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda p: torch.optim.SGD(p, 1e-2),
        "momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    }
    for name, kind in kinds.items():
        run_state = model, kind(model.parameters())
        train(run_state, with_fsdp, range(1))
        saved = two_ranks.folder() / name
        Checkpoint(*run_state).save(saved)
        for other_name, other_kind in kinds.items():
            again = Checkpoint(model, other_kind(model.parameters()))
            if {name, other_name} <= {"SGD", "momentum"} or name == other_name:
                again.load(saved)
            else:
                raises(
                    "its optimizer of .* is of another kind, with", lambda run_state=again, at=saved: run_state.load(at)
                )
                assert not again.optimizers[0].state, f"{name} into {other_name}"
    Checkpoint(model).load(bare)
    codes = net("tensorwise")
    qt.quantize_weights(codes, "tensorwise")
    coded = two_ranks.folder() / "codes"
    Checkpoint(codes).save(coded)
    raises(
        "up.weight is in high precision in the model and stored as codes",
        lambda: Checkpoint(net("tensorwise")).load(coded),
    )
    damaged = two_ranks.folder() / "damaged"
    if rank == 0:
        shutil.copytree(folder, damaged)
        victim = max(damaged.glob("*.distcp"))
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    dist.barrier()
    raises(r"its SHA-256 differs.: load another", lambda: Checkpoint(model, optimizer).load(damaged))
    unsealed = two_ranks.folder() / "unsealed"
    if rank == 0:
        (damaged / "digests.json").write_text("{}")
        (unsealed / "digests.json.tmp").mkdir(parents=True)
    dist.barrier()
    raises("it has no digests.: load another", lambda: Checkpoint(model, optimizer).load(damaged))
    raises("could not be written .*: save elsewhere", lambda: Checkpoint(model, optimizer).save(unsealed))
    file = two_ranks.folder() / "file"
    if rank == 0:
        file.touch()
        shutil.copytree(folder, unsealed, dirs_exist_ok=True)
        (unsealed / "digests.json").unlink()
        max(unsealed.glob("*.distcp")).unlink()
        (damaged / "digests.json").unlink()
        (damaged / ".metadata").write_bytes(b"nothing")
    dist.barrier()
    failed = "could not save into .*, rank 0 has failed: .*Error: "
    raises(failed, lambda: Checkpoint(model, optimizer).save(file / "within"))
    raises(failed, lambda: Checkpoint(model, optimizer).async_save(file / "within").result())
    raises("could not load .*No such file.*distcp", lambda: Checkpoint(model).load(unsealed))
    raises("could not load .*UnpicklingError", lambda: Checkpoint(model, optimizer).load(damaged))
    some = Checkpoint(model, optimizer) if rank else Checkpoint(model, others={"loader": Stateful(0)})
    for do in (some.save, some.async_save, some.load):
        message = r"rank 0: optimizers none, others \['loader'\]; rank 1: optimizers some, others \[\]; give Checkpoint"
        raises(message, lambda do=do: do(bare if do == some.load else file))
    assert not optimizer.state
    assert_same(full_state((model, optimizer)), before, "after errors")


def save_outputs_for_other_ranks(rank: int) -> None:
    """Save the outputs of these models for runs on another number of ranks."""
    for recipe in RECIPES:
        run_state = start_run(recipe, with_fsdp)
        Checkpoint(*run_state).load(folder_of(recipe, with_fsdp))
        state, y = full_state(run_state), output(run_state[0])
        if rank == 0:
            torch.save((state, y), two_ranks.folder() / f"{recipe}.pt")


def load_on_another_number_of_ranks(rank: int) -> None:
    """Load what two ranks saved, in each parallelism on this number of ranks: state and outputs are the same."""
    # Three ranks have shards of uneven rows.
    parallelisms: dict[int, list[Parallelism]] = {
        3: [with_fsdp, with_ddp],
        4: [with_fsdp_and_tensor_parallelism],
    }
    few = {with_fsdp_and_tensor_parallelism: ["delayed", "mxfp8"]}
    for parallelism in parallelisms[two_ranks.world()]:
        for recipe in few.get(parallelism, RECIPES[:3]):
            expected, y = torch.load(two_ranks.folder() / f"{recipe}.pt")
            run_state, label = (
                start_run(recipe, parallelism, seed=4),
                f"{recipe}, {parallelism.__name__} on {two_ranks.world()}",
            )
            Checkpoint(*run_state).load(folder_of(recipe, with_fsdp, 2))
            assert_same(full_state(run_state), expected, label)
            if parallelism is with_fsdp_and_tensor_parallelism:
                assert_close(label, output(run_state[0]), y, 1e-6)
            else:
                assert_bitwise(output(run_state[0]), y, label)
    for parallelism in parallelisms[two_ranks.world()]:
        assert_resumes("delayed", parallelism, folder_of("delayed", parallelism))


CASES = {
    2: [
        *(runs_resume_from_checkpoints, saved_while_training_goes_on, a_second_save_waits_for_the_first),
        *(a_state_that_one_rank_cannot_take_is_an_error_on_all, before_the_first_step, pipeline_stages, bad_input),
        save_outputs_for_other_ranks,
    ],
    3: [load_on_another_number_of_ranks, pipeline_stages],
    4: [load_on_another_number_of_ranks],
}


@pytest.mark.ranks
def test_a_run_resumes_from_a_checkpoint_on_another_number_of_ranks(tmp_path: Path) -> None:
    for ranks in (2, 3, 4):
        two_ranks.run(__name__, tmp_path, ranks)


def test_a_process_without_ranks_saves_and_loads(tmp_path: Path) -> None:
    model = net("delayed")
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    # Without optimizer states, which torch.distributed.checkpoint omits.
    others = {"scaler": torch.amp.GradScaler("cpu", enabled=False)}
    train((model, optimizer), single_process, range(2))
    with warnings.catch_warnings():
        # That there is one process.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        Checkpoint(model, optimizer, others=others).save(tmp_path / "sync")
        Checkpoint(model, optimizer, others=others).async_save(tmp_path / "async").result()
        for name in ("sync", "async"):
            other = net("delayed", seed=3)
            Checkpoint(other, torch.optim.SGD(other.parameters(), 1e-2), others=others).load(tmp_path / name)
            for key, value in get_model_state_dict(model).items():
                assert_bitwise(other.state_dict()[key], value, key)


if __name__ == "__main__":
    two_ranks.main(CASES[two_ranks.world()])
