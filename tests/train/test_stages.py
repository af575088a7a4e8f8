"""Pipeline stages with every schedule agree with a single process, and a run resumes with any other division."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quaver.train import checkpoint
from quaver.train.config import PIPELINE_SCHEDULES, TrainConfig, stage_ranks, stages_per_rank
from quaver.train.loop import TrainResult, run_training
from tests.train.conftest import MakeConfig
from tests.train.test_ranks import (
    DELAYED,
    EIGHT,
    FOUR,
    PAIR,
    Resumed,
    farthest,
    losses_of,
    norms,
    plain,
    recorded,
    start,
)

COMMON: dict[str, Any] = {
    "dtype": "float32",
    "model": FOUR,
    "batch": 2,
    "final_lr": 1.0,
    "keep": 0,
    "steps": 2,
    "warmup": 1,
}


def assert_weights(config: TrainConfig, trained: TrainResult) -> None:
    """Compare the weights that ranks have saved last with those of a single process."""
    last = checkpoint.latest(Path(config.out))
    assert last is not None
    saved = checkpoint.load(last, {})
    for tensor, value in trained.model.state_dict().items():
        np.testing.assert_array_equal(saved.model[tensor], value.numpy(), f"{config.pp_schedule}: {tensor}")


@pytest.mark.ranks
def test_every_schedule_gives_the_single_process_s_bits(make_config: MakeConfig, tmp_path: Path) -> None:
    """Losses, those of validation, and weights; delayed scaling rolls once a step in each."""
    common = COMMON | {"pp": 2, "accumulate": 4, "clip": 0.0}
    runs = {
        (name, recipe): make_config(f"{name}-{number}", pp_schedule=name, recipe=recipe, **common)
        for name in PIPELINE_SCHEDULES
        for number, recipe in enumerate(("mxfp8", DELAYED))
        if recipe == "mxfp8" or name in ("1F1B", "ZBVZeroBubble")
    }
    start([*runs.values()], tmp_path / "of-two", 2)
    first = runs["1F1B", "mxfp8"]
    one = plain(first, "one")
    trained = run_training(one)
    for (name, recipe), config in runs.items():
        if recipe == "mxfp8":
            assert recorded(config) == recorded(one), name
            assert_weights(config, trained)
        else:
            assert recorded(config) == recorded(runs["1F1B", recipe]), name


@pytest.mark.ranks
def test_pipeline_schedules_combine_with_other_parallelism_and_resume_in_any_layout(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    few = COMMON | {"sequence": 64, "accumulate": 4}
    others = [
        make_config(f"beside-{number}", pp=2, **few | options)
        for number, options in enumerate(
            (
                {
                    "tp": 2,
                    "sp": True,
                    "pp_schedule": "Interleaved1F1B",
                    "pp_stages": 4,
                    "model": EIGHT,
                    "accumulate": 2,
                },
                {"cp": 2, "loss_chunk": 32, "pp_schedule": "InterleavedZeroBubble", "accumulate": 2},
                {"fsdp": 2, "recompute": "full", "pp_schedule": "DualPipeV"},
            )
        )
    ]
    # Half of a run on 2 x 2 ranks, and the rest of it on other meshes.
    grid = make_config("grid", fsdp=2, tp=2, **COMMON | {"model": PAIR, "batch": 4, "steps": 4, "checkpoint_every": 2})
    alone = {"fsdp": 1, "tp": 1}
    elsewhere = {
        name: replace(grid, out=str(tmp_path / name), **alone | options)
        for name, options in (
            ("batches", {"fsdp": 4}),
            ("stages", {"fsdp": 2, "pp": 2, "batch": 2, "accumulate": 2}),
        )
    }
    # Other stages on other ranks, with the same sums.
    whole = make_config(
        "whole", fsdp=2, pp=2, recipe="mxfp8", clip=0.0, **few | {"accumulate": 2, "steps": 4, "checkpoint_every": 2}
    )
    transposed = replace(whole, pp_schedule="ZBVZeroBubble", out=str(tmp_path / "transposed"))
    resumed = [*(Resumed(config, grid) for config in elsewhere.values()), Resumed(transposed, whole)]
    start([*others, grid, whole, *resumed], tmp_path / "of-four", 4)
    for config in others:
        one = plain(config, f"{Path(config.out).name}-one")
        run_training(one)
        assert farthest(recorded(one), recorded(config)) < 1e-6, config.out
        assert max(abs(a / b - 1) for a, b in zip(norms(one), norms(config), strict=True)) < 1e-5, config.out
    for name, config in elsewhere.items():
        # Validation's batches are of as many sequences as a micro-batch's.
        assert farthest(losses_of(recorded(grid)), losses_of(recorded(config))) < 1e-6, name
    assert recorded(transposed) == recorded(whole)
    saved = [checkpoint.load(Path(config.out) / "step-000004", {}) for config in (whole, transposed)]
    for tensor, value in saved[0].model.items():
        np.testing.assert_array_equal(saved[1].model[tensor], value, tensor)


def test_each_stage_has_one_rank_and_schedules_take_turns_as_torch_s_do() -> None:
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    for name, order in PIPELINE_SCHEDULES.items():
        each = stages_per_rank(name, 0)
        assert order.least <= each <= order.most
        expected = generate_stage_to_rank_mapping(4, 4 * each, style="v" if order.v_shaped else "loop")
        assert stage_ranks(name, 4, each) == [expected[stage] for stage in range(4 * each)], name


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pp_schedule": "GPipe"}, "pp_schedule is GPipe, and pp is 1; give --pp, or --pp-schedule 1F1B"),
        ({"pp_stages": 2}, "pp_stages is 2, and pp is 1; give --pp, or --pp-stages 0"),
        (
            {"pp": 2, "pp_stages": 3, "pp_schedule": "ZBVZeroBubble"},
            "pp_stages is 3, and ZBVZeroBubble takes 2 on each rank; leave out --pp-stages",
        ),
        (
            {"pp": 2, "pp_stages": 2},
            "pp_stages is 2, and 1F1B takes 1 on each rank; leave out --pp-stages",
        ),
        (
            {"pp": 2, "pp_stages": 1, "pp_schedule": "Interleaved1F1B"},
            "pp_stages is 1, and Interleaved1F1B takes 2 or more stages; leave out --pp-stages",
        ),
        (
            {"pp": 2, "pp_stages": 3, "pp_schedule": "Interleaved1F1B"},
            "pp is 2 with 3 stages on each, which cannot share the 4 layers of four; give another, or --pp-schedule",
        ),
        (
            {"pp": 2, "accumulate": 5, "pp_schedule": "InterleavedZeroBubble"},
            "accumulate is 5, and InterleavedZeroBubble takes micro-batches by rounds of as many, .* a multiple of 2",
        ),
        (
            {"pp": 2, "accumulate": 3, "pp_schedule": "DualPipeV"},
            "pp is 2 with 2 stages on each, and a step has 3 micro-batches, .* give --accumulate 4 or more",
        ),
        (
            {"pp": 2, "tp": 2, "pp_schedule": "ZBVZeroBubble"},
            "pp_schedule is ZBVZeroBubble, .* and tp is 2: tensor-parallel layers compute all gradients at once",
        ),
    ],
)
def test_invalid_schedules_are_refused_before_anything_is_read(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(options.get("pp", 1) * options.get("tp", 1)))
    with pytest.raises(ValueError, match=sentence):
        run_training(make_config(**COMMON | {"accumulate": 4} | options))


def test_an_unknown_schedule_is_answered_with_the_nearest(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match=r"pp_schedule 'Interleaved' is not known; .*Interleaved1F1B"):
        make_config(pp_schedule="Interleaved")
