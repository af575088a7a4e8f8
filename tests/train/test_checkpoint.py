import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from quaver.train import checkpoint, files
from quaver.train.checkpoint import CheckpointError
from quaver.train.torch import learner

ABOUT = {"model": "nano"}


Tensors = dict[str, np.ndarray]


def trained(seed: int = 0) -> tuple[Tensors, Tensors]:
    """A matrix, a column-major state and a count; moments and a number."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((8, 4), np.float32)
    history = np.arange(6, dtype=np.float32).reshape(2, 3).T + seed
    model = {"0.weight": weight, "0.history": history, "0.count": np.array([seed, 0, -1])}
    return model, {"0.weight/exp_avg": weight * 0.1, "0.weight/step": np.array(7, np.float32)}


def equal(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and np.array_equal(left[name], right[name]) for name in left
    )


def test_saved_tensors_load_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = checkpoint.save(tmp_path, 12, model, optimizer, ABOUT)
    saved = checkpoint.load(path, ABOUT)
    assert saved.step == 12
    assert equal(model, saved.model) and equal(optimizer, saved.optimizer)


def test_the_newest_is_the_highest_number_and_old_ones_go(tmp_path: Path) -> None:
    model, optimizer = trained()
    for step in (999_999, 1_000_000, 1_000_001):
        checkpoint.save(tmp_path, step, model, optimizer, ABOUT, keep=2)
    (tmp_path / "step-abc").mkdir()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-1000000", "step-1000001"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1000001"


def test_files_match_safetensors_and_bfloat16_has_its_type(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.int8, torch.uint8, torch.bool)
    given = {str(dtype): torch.randn(5, 3).mul(100).to(dtype) for dtype in dtypes}
    given |= {"column": torch.randn(4, 6).t(), "empty": torch.zeros(0, 3), "one": torch.tensor(7.0)}
    checkpoint.write(tmp_path / "ours", learner.arrays(given))
    theirs = load_torch(tmp_path / "ours")
    assert theirs.keys() == given.keys()
    for name, tensor in given.items():
        assert theirs[name].dtype is tensor.dtype and torch.equal(theirs[name], tensor), name
    save_torch({name: tensor.contiguous() for name, tensor in given.items()}, tmp_path / "theirs")
    for name, tensor in learner.tensors_of(checkpoint.read_tensors_whole([tmp_path / "theirs"])).items():
        assert tensor.dtype is given[name].dtype and torch.equal(tensor, given[name]), name


@pytest.mark.parametrize("fails_at", ["model.safetensors", "optimizer.safetensors"])
def test_a_full_disk_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    model, optimizer = trained()
    good = checkpoint.save(tmp_path, 1, model, optimizer, ABOUT, keep=1)
    write = checkpoint.write

    def full(path: Path, tensors: Tensors) -> None:
        write(path, tensors)
        if path.name == fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", full)
    with pytest.raises(CheckpointError, match=r"No space left on device; the last good checkpoint is .*step-000001"):
        checkpoint.save(tmp_path, 2, model, optimizer, ABOUT, keep=1)
    assert list(tmp_path.iterdir()) == [good]
    assert checkpoint.load(good, ABOUT).step == 1


def interrupted(path: Path) -> None:
    raise KeyboardInterrupt


def test_leftovers_of_a_killed_save_are_no_checkpoint(tmp_path: Path) -> None:
    model, optimizer = trained()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "sync_to_disk", interrupted)
        checkpoint.save(tmp_path, 1, model, optimizer, ABOUT)
    assert len(list(tmp_path.iterdir())) == 1 and checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path, 2, model, optimizer, ABOUT)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "gone"])
def test_a_broken_checkpoint_gives_one_clear_error(tmp_path: Path, name: str, damage: str) -> None:
    model, optimizer = trained()
    path = checkpoint.save(tmp_path, 1, model, optimizer, ABOUT)
    whole = (path / name).read_bytes()
    if damage == "gone":
        (path / name).unlink()
    else:
        (path / name).write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"garbage " * 8)
    with pytest.raises(CheckpointError, match="step-000001 is broken"):
        checkpoint.load(path, ABOUT)


def test_another_runs_checkpoint_gives_one_clear_error(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = checkpoint.save(tmp_path, 1, model, optimizer, ABOUT)
    with pytest.raises(CheckpointError, match="made with model 'nano', and this run has 'tiny'"):
        checkpoint.load(path, {"model": "tiny"})


@pytest.mark.parametrize("state", ["[]", "{}", "3", json.dumps({"format": 3, "step": 1})])
def test_a_foreign_state_gives_one_clear_error(tmp_path: Path, state: str) -> None:
    model, optimizer = trained()
    path = checkpoint.save(tmp_path, 1, model, optimizer, ABOUT)
    (path / "state.json").write_text(state)
    with pytest.raises(CheckpointError, match="step-000001"):
        checkpoint.load(path, ABOUT)


def test_a_checkpoint_from_before_the_blocks_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = checkpoint.save(tmp_path, 1, model, optimizer, ABOUT)
    (path / "state.json").write_text(json.dumps({"format": 1, "step": 1}))
    with pytest.raises(CheckpointError, match=r"format 1, of an earlier .* formats 3 and 4: train that run again"):
        checkpoint.load(path, ABOUT)
    (path / "state.json").write_text(json.dumps({"format": 5, "step": 1}))
    with pytest.raises(CheckpointError, match=r"format 5, of a later version .* go on with that version"):
        checkpoint.load(path, ABOUT)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_every_flipped_bit_is_seen(tmp_path: Path, name: str) -> None:
    path = checkpoint.save(tmp_path, 1, *trained(), {**ABOUT, "config": {"clip": float("inf"), "text": ["ü"]}})
    whole = (path / name).read_bytes()
    for place in np.random.default_rng(0).integers(0, 8 * len(whole), 60):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        (path / name).write_bytes(flipped)
        with pytest.raises(CheckpointError, match="step-000001"):
            checkpoint.load(path, ABOUT)
    (path / name).write_bytes(whole)
    assert checkpoint.load(path, ABOUT).step == 1


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_another_steps_file_is_refused(tmp_path: Path, name: str) -> None:
    one, two = (checkpoint.save(tmp_path, step, *trained(step), ABOUT) for step in (1, 2))
    shutil.copy(one / name, two / name)
    message = "rename it to .*step-000001" if name == "state.json" else f"{name} is not the file that was saved"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(two, ABOUT)


def test_a_renamed_folder_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, *trained(), ABOUT)
    renamed = path.rename(tmp_path / "step-000007")
    with pytest.raises(CheckpointError, match=r"holds the checkpoint of step 1; rename it to .*step-000001"):
        checkpoint.load(renamed, ABOUT)


def test_an_emptied_optimizer_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, *trained(), ABOUT)
    save_file({}, path / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is not the file that was saved"):
        checkpoint.load(path, ABOUT)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn, torch.complex64])
def test_a_type_that_numpy_lacks_gives_one_clear_error(tmp_path: Path, dtype: torch.dtype) -> None:
    path = checkpoint.save(tmp_path, 1, *trained(), ABOUT)
    save_torch({"0.weight": torch.zeros(4, dtype=dtype)}, path / "model.safetensors")
    checkpoint.write_state(path, {"format": checkpoint.FORMAT, "step": 1, **ABOUT})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: '0\.weight' is of type"):
        checkpoint.load(path, ABOUT)


@pytest.mark.parametrize("name", ["step-²", "step-1", "step-", "step--00001", "step-000001.partial"])
def test_other_folders_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert checkpoint.latest(tmp_path) is None


def test_no_deletion_leaves_a_folder_without_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step, *trained(step), ABOUT, keep=2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files.shutil, "rmtree", lambda path, **options: interrupted(path))
        checkpoint.save(tmp_path, 3, *trained(3), ABOUT, keep=2)
    assert [checkpoint.load(path, ABOUT).step for path in checkpoint.list_checkpoints(tmp_path)] == [2, 3]
    checkpoint.save(tmp_path, 4, *trained(4), ABOUT, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"step-000003", "step-000004"}


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    precious, run = tmp_path / "mine", tmp_path / "run"
    precious.write_text("precious")
    run.mkdir()
    for name in ("config.toml.partial", ".step-000001.partial", "config.toml"):
        (run / name).symlink_to(precious)
    files.write(run / "config.toml", "steps = 1")
    assert checkpoint.save(run, 1, *trained(), ABOUT).is_dir()
    assert precious.read_text() == "precious" and (run / "config.toml").read_text() == "steps = 1"
