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
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import quaver.torch as qt
from quaver.torch.parallel import Checkpoint, ColwiseParallel, RowwiseParallel, gather_quantized, sync_amax_histories
from quaver.torch.quantized_tensor import memory_of
from tests import two_ranks
from tests.close import assert_bitwise, assert_close

#: Of features in and within; whole blocks on two ranks.
WIDE, INNER = 128, 256
#: Those that ranks divide, on two to four.
BATCH = 12
#: With histories, with noise, and two that add nothing to a checkpoint.
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


def alone(model: nn.Module) -> nn.Module:
    return model


def by_fsdp(model: nn.Module) -> nn.Module:
    mesh = two_ranks.mesh(two_ranks.world())
    # Some recipes have no weight to gather as codes.
    with contextlib.suppress(ValueError):
        gather_quantized(model)
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh)
    return model


def by_copies(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def by_tensor(model: nn.Module) -> nn.Module:
    return parallelize_module(
        model, two_ranks.mesh(two_ranks.world()), {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )


def by_both(model: nn.Module) -> nn.Module:
    mesh = two_ranks.mesh(2, 2, names=("fsdp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh["fsdp"])
    return model


Way = Callable[[nn.Module], nn.Module]
Run = tuple[nn.Module, torch.optim.Optimizer]
#: How many parts of a batch the ranks take.
DIVIDED: dict[Way, Callable[[], tuple[int, int]]] = {
    alone: lambda: (0, 1),
    by_fsdp: lambda: (dist.get_rank(), two_ranks.world()),
    by_copies: lambda: (dist.get_rank(), two_ranks.world()),
    by_tensor: lambda: (0, 1),
    by_both: lambda: (dist.get_rank() // 2, 2),
}


def run(recipe: str, way: Way, seed: int = 0) -> Run:
    model = way(net(recipe, seed))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def x_of(number: int) -> Tensor:
    return torch.randn(BATCH, 32, WIDE, generator=torch.Generator().manual_seed(number)) * (1 + number)


def train(of: Run, way: Way, numbers: range) -> list[Tensor]:
    model, optimizer = of
    losses = []
    for number in numbers:
        at, parts = DIVIDED[way]()
        loss = model(x_of(number).chunk(parts)[at]).square().sub(0.5).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        y: Tensor = model(x_of(99))
    return y


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def everything(of: Run) -> dict[str, Any]:
    """All that is saved, put together on each rank, as copies."""
    state = {name: whole(value) for name, value in Checkpoint(*of).state_dict().items()}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def assert_same(state: dict[str, Any], expected: dict[str, Any], label: str) -> None:
    assert state.keys() == expected.keys(), f"{label}: {state.keys() ^ expected.keys()}"
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert_bitwise(state[name], value, f"{label}: {name}")
        else:
            assert state[name] == value, f"{label}: {name}"


def goes_on(recipe: str, way: Way, folder: Path) -> None:
    """Two steps, a checkpoint, two steps more: those of a run that begins elsewhere and loads it."""
    first = run(recipe, way)
    train(first, way, range(2))
    saved = everything(first)
    Checkpoint(*first).save(folder)
    expected = train(first, way, range(2, 4))
    second = run(recipe, way, seed=5)
    train(second, way, range(7, 8))
    Checkpoint(*second).load(folder)
    assert_same(everything(second), saved, f"{recipe}, {way.__name__}")
    for number, (loss, other) in enumerate(zip(expected, train(second, way, range(2, 4)), strict=True)):
        assert_bitwise(other, loss, f"{recipe}, {way.__name__}: loss {number}")
    assert_same(everything(second), everything(first), f"{recipe}, {way.__name__}: at the end")


def folder_of(recipe: str, way: Way, ranks: int | None = None) -> Path:
    return two_ranks.folder() / f"{recipe}-{way.__name__}-{ranks or two_ranks.world()}"


def runs_that_go_on(rank: int) -> None:
    for recipe in RECIPES:
        goes_on(recipe, by_fsdp, folder_of(recipe, by_fsdp))
    for recipe in ("delayed", "nvfp4"):
        for way in (by_copies, by_tensor):
            goes_on(recipe, way, folder_of(recipe, way))


def the_newest_row_is_that_of_all_ranks(rank: int) -> None:
    model, optimizer = run("delayed", by_copies)
    train((model, optimizer), by_copies, range(2))
    rows = two_ranks.gathered(model.module.up.history[0])
    assert not torch.equal(*rows), "ranks have recorded the same: this tests nothing"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            model.state_dict()
    assert [str(each.message)[:45] for each in seen] == ["the newest row of delayed scaling's histories"]
    factor = model.module.up.factor.clone()
    sync_amax_histories(model)
    assert_bitwise(model.module.up.history[0], torch.maximum(*rows))
    assert_bitwise(model.module.up.factor, factor)
    # By torch's own functions, as a loop has them.
    folder = two_ranks.folder() / "by hand"
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder)
    expected = train((model, optimizer), by_copies, range(2, 4))
    other = run("delayed", by_copies, seed=3)
    train(other, by_copies, range(7, 8))
    sync_amax_histories(other[0])
    held = dict(zip(("model", "optimizer"), get_state_dict(*other), strict=True))
    dcp.load(held, checkpoint_id=folder)
    set_state_dict(*other, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    for loss, again in zip(expected, train(other, by_copies, range(2, 4)), strict=True):
        assert_bitwise(again, loss, "by hand")


def before_the_first_step(rank: int) -> None:
    """Saving a run before its first step changes nothing, and the resumed run starts at step 0."""
    folder = two_ranks.folder() / "before the first step"
    expected = train(run("mxfp8", by_fsdp), by_fsdp, range(2))
    first = run("mxfp8", by_fsdp)
    Checkpoint(*first).save(folder)
    assert not first[1].state
    second = run("mxfp8", by_fsdp, seed=6)
    train(second, by_fsdp, range(5, 6))
    Checkpoint(*second).load(folder)
    for of in (first, second):
        for loss, other in zip(expected, train(of, by_fsdp, range(2)), strict=True):
            assert_bitwise(other, loss, "saved before the first step")


def with_gradients_already(rank: int) -> None:
    """An optimizer without states takes those of a checkpoint where a backward has run, and leaves its gradients."""
    folder = two_ranks.folder() / "with gradients"
    first, second = run("mxfp8", by_fsdp), run("mxfp8", by_fsdp, seed=6)
    train(first, by_fsdp, range(2))
    Checkpoint(*first).save(folder)
    second[0](x_of(7)).sum().backward()
    Checkpoint(*second).load(folder)
    assert all(p.grad is not None for p in second[0].parameters())
    second[1].zero_grad()
    expected = train(first, by_fsdp, range(2, 4))
    for loss, other in zip(expected, train(second, by_fsdp, range(2, 4)), strict=True):
        assert_bitwise(other, loss, "loaded after a backward")


def saved_while_training_goes_on(rank: int) -> None:
    folder = two_ranks.folder() / "asynchronous"
    first = run("delayed", by_fsdp)
    train(first, by_fsdp, range(2))
    saved = everything(first)
    whole_soon = Checkpoint(*first).async_save(folder)
    expected = train(first, by_fsdp, range(2, 4))
    whole_soon.result()
    second = run("delayed", by_fsdp, seed=5)
    Checkpoint(*second).load(folder)
    assert_same(everything(second), saved, "asynchronous")
    for loss, other in zip(expected, train(second, by_fsdp, range(2, 4)), strict=True):
        assert_bitwise(other, loss, "asynchronous")
    # What is written is what was there, though all of it changes before anything can be on the disk.
    saved = everything(second)
    whole_soon = Checkpoint(*second).async_save(two_ranks.folder() / "changed")
    with torch.no_grad():
        for value in [*second[0].parameters(), *second[0].buffers()]:
            value.zero_()
    whole_soon.result()
    Checkpoint(*second).load(two_ranks.folder() / "changed")
    assert_same(everything(second), saved, "changed while it was written")
    dist.barrier()
    assert json.loads((folder / "digests.json").read_text())["sha256"].keys() == {
        path.name for path in folder.iterdir() if path.name != "digests.json"
    }


def a_second_save_waits_for_the_first(rank: int) -> None:
    """Ranks write at other times than one another: the later save, or load, begins once the earlier one is whole."""
    of, write = run("mxfp8", by_fsdp), dcp.FileSystemWriter.write_data

    def slowly(*args: Any) -> Any:
        time.sleep(0.3 * (rank == 0))
        return write(*args)

    checkpoint = Checkpoint(*of)
    folders = [two_ranks.folder() / f"one of {number}" for number in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, "write_data", slowly)
        saved = [checkpoint.async_save(folder) for folder in folders[:2]]
        assert saved[0].done()
        checkpoint.save(folders[2])
    assert saved[1].done() and all(each.exception() is None for each in saved)
    expected, loaded = everything(of), run("mxfp8", by_fsdp, seed=5)
    for folder in folders:
        Checkpoint(*loaded).load(folder)
        assert_same(everything(loaded), expected, folder.name)


def a_state_that_one_rank_cannot_take_is_an_error_on_all(rank: int) -> None:
    class Broken(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {}["lost"] if rank == 1 else super().state_dict()

    class NotLoading(Stateful):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            if rank == 1:
                raise RuntimeError("of another version")

    of, where = run("mxfp8", by_fsdp), two_ranks.folder()
    broken = Checkpoint(*of, others={"loader": Broken(1)})
    message = "rank 0: no error; rank 1: could not take the state: KeyError: 'lost'"
    for do in (broken.state_dict, lambda: broken.save(where / "never"), lambda: broken.async_save(where / "never")):
        with pytest.raises(ValueError, match=message):
            do()
    assert not (where / "never").exists()
    Checkpoint(*of, others={"loader": Stateful(1)}).save(where / "good")
    with pytest.raises(ValueError, match=r"rank 1: could not load .*: RuntimeError: of another version"):
        Checkpoint(*of, others={"loader": NotLoading(1)}).load(where / "good")


def other_recipes(rank: int) -> None:
    """A history that the checkpoint has and the model not yet, and one that it has not."""
    folder = folder_of("delayed", by_fsdp)
    bare = by_fsdp(Net())
    for name, value in bare.state_dict().items():
        assert "history" not in name, value
    torch.manual_seed(3)
    plain = Net()
    for part in ("up", "down"):
        old = getattr(plain, part)
        setattr(plain, part, qt.Linear(old.in_features, old.out_features))
    fully_shard(plain, mesh=two_ranks.mesh(two_ranks.world()))
    Checkpoint(plain).load(folder)
    expected = run("delayed", by_fsdp)
    Checkpoint(*expected).load(folder)
    names = {name for name in plain.state_dict() if name.endswith((".history", ".factor"))}
    assert len(names) == 4
    for name in names:
        assert_bitwise(plain.state_dict()[name], expected[0].state_dict()[name], name)
    with qt.autocast("delayed"):
        y = plain(x_of(1))
    expected[0](x_of(1))
    assert_bitwise(y.detach(), expected[0](x_of(1)).detach(), "under an autocast")
    fresh = run("delayed", by_fsdp)
    train(fresh, by_fsdp, range(2))
    Checkpoint(*fresh).load(folder_of("mxfp8", by_fsdp))
    assert not fresh[0].up.history.any() and not fresh[0].up.factor.any()
    Checkpoint(*run("mxfp8", by_fsdp)).load(folder)
    codes = net("tensorwise")
    qt.quantize_weights(codes, "tensorwise")
    Checkpoint(codes).load(folder)
    of_whole = {name: whole(value) for name, value in expected[0].state_dict().items()}
    twin = net("tensorwise")
    twin.load_state_dict({name: of_whole[name] for name in twin.state_dict()})
    qt.quantize_weights(twin, "tensorwise")
    same = [memory_of(each.up.weight).view(torch.uint8) for each in (codes, twin)]
    assert_bitwise(*same, "quantized as it is loaded")


class Stateful:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "of": {"parts": [1, 2]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["of"] == {"parts": [1, 2]}
        self.value = state["value"]


def parts_of_a_pipeline(rank: int) -> None:
    """Each rank has its own layers and only their recipe state."""

    def trainee(seed: int) -> Run:
        torch.manual_seed(seed + rank)
        part = nn.ModuleDict({str(rank): qt.Linear(WIDE, WIDE), "norm" + str(rank): nn.LayerNorm(WIDE)})
        return part, torch.optim.AdamW(part.parameters(), 1e-2)

    def step(of: Run, number: int) -> Tensor:
        with qt.autocast("delayed"):
            loss = of[0][str(rank)](x_of(number + rank)).square().mean()
        loss.backward()
        of[1].step()
        of[1].zero_grad()
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


def a_stage_without_histories(rank: int) -> None:
    """A stage reports all its layers with the first model; others have new layers with the second."""
    for _ in range(2):
        part = nn.ModuleList([qt.Linear(WIDE, WIDE) if rank == 0 else nn.LayerNorm(WIDE)])
        with qt.autocast("delayed"):
            part[0](x_of(0)).sum().backward()
        sync_amax_histories(part)


def bad_input(rank: int) -> None:
    folder = folder_of("delayed", by_fsdp)
    model, optimizer = run("delayed", by_fsdp, seed=8)
    before = everything((model, optimizer))

    def refused(message: str, do: Callable[[], Any]) -> None:
        with pytest.raises(ValueError, match=message):
            do()

    refused("already has a checkpoint", lambda: Checkpoint(model, optimizer).save(folder))
    refused("already has a checkpoint", lambda: Checkpoint(model, optimizer).async_save(folder))
    refused("has no whole checkpoint", lambda: Checkpoint(model, optimizer).load(folder / "none"))
    other = by_fsdp(net("delayed", inner=2 * INNER))
    refused(
        r"another model: model\.up\.weight has shape \[256, 128\] in the checkpoint and \[512, 128\] in the model",
        lambda: Checkpoint(other).load(folder),
    )
    deeper = nn.Sequential(net("mxfp8"))
    refused(r"it lacks model\.0\.down\.bias and 5 more", lambda: Checkpoint(deeper).load(folder))
    smaller = Net()
    del smaller.norm
    refused(r"it has model\.norm\.bias and 1 more, which this model lacks", lambda: Checkpoint(smaller).load(folder))
    bare = two_ranks.folder() / "bare"
    Checkpoint(model).save(bare)
    refused("it has no optimizer: give none", lambda: Checkpoint(model, optimizer).load(bare))
    refused("it lacks others.loader", lambda: Checkpoint(model, others={"loader": Stateful(0)}).load(bare))
    # Kinds of optimizers, by what their options are: of one kind a saved state is taken, of another none silently.
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda p: torch.optim.SGD(p, 1e-2),
        "momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
        "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-2),
    }
    for name, kind in kinds.items():
        of = model, kind(model.parameters())
        train(of, by_fsdp, range(1))
        saved = two_ranks.folder() / name
        Checkpoint(*of).save(saved)
        for other_name, other_kind in kinds.items():
            again = Checkpoint(model, other_kind(model.parameters()))
            if {name, other_name} <= {"SGD", "momentum"} or name == other_name:
                again.load(saved)
            else:
                refused("its optimizer of .* is of another kind, with", lambda of=again, at=saved: of.load(at))
                assert not again.optimizers[0].state, f"{name} into {other_name}"
    Checkpoint(model).load(bare)
    codes = net("tensorwise")
    qt.quantize_weights(codes, "tensorwise")
    coded = two_ranks.folder() / "codes"
    Checkpoint(codes).save(coded)
    refused(
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
    refused(r"its SHA-256 differs.: load another", lambda: Checkpoint(model, optimizer).load(damaged))
    unsealed = two_ranks.folder() / "unsealed"
    if rank == 0:
        (damaged / "digests.json").write_text("{}")
        (unsealed / "digests.json.tmp").mkdir(parents=True)
    dist.barrier()
    refused("it has no digests.: load another", lambda: Checkpoint(model, optimizer).load(damaged))
    refused("could not be written .*: save elsewhere", lambda: Checkpoint(model, optimizer).save(unsealed))
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
    refused(failed, lambda: Checkpoint(model, optimizer).save(file / "within"))
    refused(failed, lambda: Checkpoint(model, optimizer).async_save(file / "within").result())
    refused("could not load .*No such file.*distcp", lambda: Checkpoint(model).load(unsealed))
    refused("could not load .*UnpicklingError", lambda: Checkpoint(model, optimizer).load(damaged))
    some = Checkpoint(model, optimizer) if rank else Checkpoint(model, others={"loader": Stateful(0)})
    for do in (some.save, some.async_save, some.load):
        message = r"rank 0: optimizers none, others \['loader'\]; rank 1: optimizers some, others \[\]; give Checkpoint"
        refused(message, lambda do=do: do(bare if do == some.load else file))
    assert not optimizer.state
    assert_same(everything((model, optimizer)), before, "after errors")


def what_it_puts_out(rank: int) -> None:
    """For ranks of other numbers: what models give that go on from here."""
    for recipe in RECIPES:
        of = run(recipe, by_fsdp)
        Checkpoint(*of).load(folder_of(recipe, by_fsdp))
        state, y = everything(of), output(of[0])
        if rank == 0:
            torch.save((state, y), two_ranks.folder() / f"{recipe}.pt")


def read_by_others(rank: int) -> None:
    """Load what two ranks saved, in each parallelism on this number of ranks: state and outputs are the same."""
    # Three ranks have shards of uneven rows.
    ways: dict[int, list[Way]] = {1: [alone, by_fsdp], 3: [by_fsdp, by_copies], 4: [by_both]}
    few = {alone: RECIPES, by_both: ["delayed", "mxfp8"]}
    for way in ways[two_ranks.world()]:
        for recipe in few.get(way, RECIPES[:3]):
            expected, y = torch.load(two_ranks.folder() / f"{recipe}.pt")
            of, label = run(recipe, way, seed=4), f"{recipe}, {way.__name__} on {two_ranks.world()}"
            Checkpoint(*of).load(folder_of(recipe, by_fsdp, 2))
            assert_same(everything(of), expected, label)
            if way is by_both:
                assert_close(label, output(of[0]), y, 1e-6)
            else:
                assert_bitwise(output(of[0]), y, label)
    for way in ways[two_ranks.world()]:
        goes_on("delayed", way, folder_of("delayed", way))


CASES = {
    1: [read_by_others],
    2: [
        *(runs_that_go_on, the_newest_row_is_that_of_all_ranks, saved_while_training_goes_on, other_recipes),
        *(a_second_save_waits_for_the_first, a_state_that_one_rank_cannot_take_is_an_error_on_all),
        *(before_the_first_step, with_gradients_already, parts_of_a_pipeline, a_stage_without_histories, bad_input),
        what_it_puts_out,
    ],
    3: [read_by_others, parts_of_a_pipeline],
    4: [read_by_others],
}


@pytest.mark.ranks
def test_a_run_resumes_from_a_checkpoint_on_another_number_of_ranks(tmp_path: Path) -> None:
    for ranks in (2, 1, 3, 4):
        two_ranks.run(__name__, tmp_path, ranks)


def test_a_process_without_ranks_saves_and_loads(tmp_path: Path) -> None:
    model = net("delayed")
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    # Without a state, which torch.distributed.checkpoint leaves out.
    others = {"scaler": torch.amp.GradScaler("cpu", enabled=False)}
    train((model, optimizer), alone, range(2))
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
