import errno
import json
from pathlib import Path

import numpy as np
import pytest

from quaver.train import checkpoint
from quaver.train.checkpoint import CheckpointError

ABOUT = {"model": "nano"}


Tensors = dict[str, np.ndarray]


def trained(seed: int = 0) -> tuple[Tensors, Tensors]:
    """A matrix, a state that lies column by column and a count; moments and a number."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((8, 4), np.float32)
    history = np.arange(6, dtype=np.float32).reshape(2, 3).T + seed
    model = {"0.weight": weight, "0.history": history, "0.count": np.array([seed, 0, -1])}
    return model, {"0.weight/exp_avg": weight * 0.1, "0.weight/step": np.array(7, np.float32)}


def equal(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and np.array_equal(left[name], right[name]) for name in left
    )


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
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
    assert [path.name for path in checkpoint.all_in(tmp_path)] == ["step-1000000", "step-1000001"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1000001"


@pytest.mark.parametrize("fails_at", ["model.safetensors", "optimizer.safetensors"])
def test_a_full_disk_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    model, optimizer = trained()
    good = checkpoint.save(tmp_path, 1, model, optimizer, ABOUT, keep=1)
    save_file = checkpoint.save_file

    def full(tensors: Tensors, path: Path) -> None:
        save_file(tensors, path)
        if path.name == fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left on device; the last good checkpoint is .*step-000001"):
        checkpoint.save(tmp_path, 2, model, optimizer, ABOUT, keep=1)
    assert list(tmp_path.iterdir()) == [good]
    assert checkpoint.load(good, ABOUT).step == 1


def interrupted(path: Path) -> None:
    raise KeyboardInterrupt


def test_what_a_killed_save_left_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    model, optimizer = trained()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "flush", interrupted)
        checkpoint.save(tmp_path, 1, model, optimizer, ABOUT)
    assert len(list(tmp_path.iterdir())) == 1 and checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path, 2, model, optimizer, ABOUT)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "gone"])
def test_a_broken_checkpoint_is_one_sentence(tmp_path: Path, name: str, damage: str) -> None:
    model, optimizer = trained()
    path = checkpoint.save(tmp_path, 1, model, optimizer, ABOUT)
    whole = (path / name).read_bytes()
    if damage == "gone":
        (path / name).unlink()
    else:
        (path / name).write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"garbage " * 8)
    with pytest.raises(CheckpointError, match="step-000001 is broken"):
        checkpoint.load(path, ABOUT)


def test_another_runs_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = checkpoint.save(tmp_path, 1, model, optimizer, ABOUT)
    with pytest.raises(CheckpointError, match="made with model 'nano', and this run has 'tiny'"):
        checkpoint.load(path, {"model": "tiny"})


@pytest.mark.parametrize("state", ["[]", "{}", "3", json.dumps({"format": 3, "step": 1})])
def test_a_foreign_state_is_one_sentence(tmp_path: Path, state: str) -> None:
    model, optimizer = trained()
    path = checkpoint.save(tmp_path, 1, model, optimizer, ABOUT)
    (path / "state.json").write_text(state)
    with pytest.raises(CheckpointError, match="step-000001"):
        checkpoint.load(path, ABOUT)


def test_a_checkpoint_from_before_the_blocks_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = checkpoint.save(tmp_path, 1, model, optimizer, ABOUT)
    (path / "state.json").write_text(json.dumps({"format": 1, "step": 1}))
    with pytest.raises(CheckpointError, match="format 1, and this quaver reads 2; train that run again"):
        checkpoint.load(path, ABOUT)
