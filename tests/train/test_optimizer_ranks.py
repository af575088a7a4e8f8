"""`--optimizer` on several ranks: the single process's losses, resumed bit for bit on as many ranks and on others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quaver.reference.optimizer_state import PRESETS
from quaver.train import checkpoint
from quaver.train import config as recipe_name
from quaver.train.checkpoint import CheckpointError
from quaver.train.generate import generate
from quaver.train.loop import run_training
from quaver.train.memory import training_footprint
from quaver.train.model_config import MODELS
from tests.train.conftest import MakeConfig
from tests.train.test_ranks import BROAD, Resumed, begin_from, farthest, losses_of, norms, plain, recorded, start

COMMON: dict[str, Any] = {"batch": 4, "final_lr": 1.0, "keep": 0, "steps": 4}
COMMON |= {"checkpoint_every": 2, "validate_every": 2}
#: States of one number per parameter, or of amaxes, which are not counted.
NUMBERS = ("/step", "/amax", "/lr_max", "/weight_sum")
#: By run, optimizer and recipe. Matrices are codes under `lean` and `balanced` where the recipe has some of eight bits.
BITWISE = {
    **{"exact": ("exact", "mxfp8"), "balanced": ("balanced", "tensorwise"), "lean": ("lean", "mxfp8")},
    **{"coat": ("coat", "tensorwise"), "blocks": ("lion-lean", "blockwise")},
    "averaged": ("schedulefree-lean", "tensorwise"),
    # In bfloat16: codes are of one recipe.
    "changing": ("lean", "mxfp8 until 2, tensorwise"),
}


def common_of(optimizer: str) -> dict[str, Any]:
    """Common options that have an effect with an optimizer."""
    return {k: v for k, v in COMMON.items() if k != "final_lr" or not optimizer.startswith("schedulefree")}


def store_floats(patch: pytest.MonkeyPatch) -> None:
    """Let a single process store matrices in bfloat16 instead of codes, as ranks that share layers do."""
    for name in ("lean", "balanced"):
        patch.setitem(PRESETS, name, replace(PRESETS[name], weights="bfloat16"))


@pytest.mark.ranks
def test_data_parallel_ranks_match_a_single_process(make_config: MakeConfig, tmp_path: Path) -> None:
    # Without clipping no norm, whose sum is in another order, comes into the weights.
    same = {
        name: make_config(name, fsdp=2, optimizer=optimizer, recipe=recipe, clip=0.0, **common_of(optimizer))
        for name, (optimizer, recipe) in BITWISE.items()
    }
    clipped = make_config("clipped", fsdp=2, optimizer="lean", recipe="mxfp8", clip=0.1, async_save=True, **COMMON)
    resumed = Resumed(replace(clipped, out=str(tmp_path / "resumed")), clipped)
    neox: dict[str, Any] = {
        "fsdp": 2,
        "optimizer": "lean",
        "model": "pair-neox",
        "clip": 0.0,
        **COMMON,
        "steps": 3,
        "validate_every": 1,
    }
    biased, narrowed = make_config("biased", recipe="mxfp8", **neox), make_config("narrowed", **neox)
    start([*same.values(), clipped, resumed, biased, narrowed], tmp_path / "two", 2)

    # Micro-batches of a single process are the ranks' parts of a batch: the same sums.
    one = {"batch": 2, "accumulate": 2}
    for name, config in same.items():
        whole = plain(config, f"{name}-one", **one)
        run_training(whole)
        assert losses_of(recorded(whole)) == losses_of(recorded(config)), name
        ours, its = (checkpoint.load(Path(c.out) / "step-000004", {}) for c in (whole, config))
        tensors = {**its.model, **its.optimizer}
        sizes = [value.nbytes for tensor, value in tensors.items() if not tensor.endswith(NUMBERS)]
        first, *later = recipe_name.parse_phases(config.recipe)
        expected = training_footprint(MODELS["nano"], 256, config.optimizer, first.recipe, "bfloat16", codes=not later)
        assert sum(sizes) == expected.total - expected.gradient, f"{name}: bytes of all ranks' parts"
        quantized = name in ("balanced", "lean", "blocks", "averaged")
        assert any(tensor.endswith(".weight_scale") for tensor in its.model) is quantized, name
        for tensors, others in ((ours.model, its.model), (ours.optimizer, its.optimizer)):
            assert tensors.keys() == others.keys()
            for tensor, value in tensors.items():
                np.testing.assert_array_equal(others[tensor], value, f"{name}: {tensor}")
    assert recorded(resumed.config) == recorded(clipped), "a resumed run equals an uninterrupted one"
    whole = plain(clipped, "clipped-one", **one)
    run_training(whole)
    assert norms(whole)[0] == pytest.approx(norms(clipped)[0], rel=4e-6) and min(norms(whole)) > 0.1
    assert norms(whole) == pytest.approx(norms(clipped), rel=1e-2)
    assert farthest(losses_of(recorded(whole)), losses_of(recorded(clipped))) < 3e-3
    # Biases of matrices in bfloat16 are bfloat16 on ranks, and float32 in one process.
    for config, bound in ((biased, 0.0), (narrowed, 5e-3)):
        whole = plain(config, f"{Path(config.out).name}-one", **one)
        run_training(whole)
        assert farthest(losses_of(recorded(whole)), losses_of(recorded(config))) <= bound
    assert generate(Path(clipped.out), "3 times", tokens=3, device="cpu").tokens

    # One rank resumes from the checkpoint of two.
    back = begin_from(plain(clipped, "back"), clipped)
    run_training(back, resume=True)
    assert farthest(losses_of(recorded(clipped)), losses_of(recorded(back))) < 1e-2


@pytest.mark.ranks
def test_tensor_parallel_runs_resume_on_another_number_of_ranks(make_config: MakeConfig, tmp_path: Path) -> None:
    common = COMMON | {"sequence": 64, "model": BROAD, "dtype": "float32"}
    narrow = common | {"dtype": "bfloat16", "recipe": "mxfp8"}
    few = {"batch": 2, "accumulate": 2, "steps": 3}
    grid = make_config("grid", fsdp=2, tp=2, optimizer="exact", **common | {"steps": 3})
    lean = make_config("lean", fsdp=2, tp=2, sp=True, optimizer="lean", **narrow)
    resumed = Resumed(replace(lean, out=str(tmp_path / "resumed")), lean)
    start([grid, lean, resumed], tmp_path / "of-four", 4)
    assert recorded(resumed.config) == recorded(lean), "a resumed run equals an uninterrupted one"

    layers, piped = (
        begin_from(replace(lean, out=str(tmp_path / name), **{"fsdp": 1, "tp": 1, "sp": False} | options), lean)
        for name, options in (
            ("layers", {"tp": 2, "sp": True}),
            ("piped", {"pp": 2, "batch": 2, "accumulate": 2}),
        )
    )
    muon = make_config("muon", pp=2, optimizer="muon-lean", **narrow | few)
    start([layers, piped, muon], tmp_path / "of-two", 2)
    for config in (layers, piped):
        # A gradient of 64 columns on a rank has scales of its own, and a stage has noise of its own.
        assert farthest(losses_of(recorded(lean)), losses_of(recorded(config))) < 1e-2, config.out
    for config in (grid, lean, muon):
        one = plain(config, f"{Path(config.out).name}-one")
        with pytest.MonkeyPatch.context() as patch:
            if config is lean:
                store_floats(patch)
            run_training(one)
        bound = 1e-5 if config is grid else 2e-2
        assert farthest(losses_of(recorded(one)), losses_of(recorded(config))) < bound, config.out
        assert norms(one)[0] == pytest.approx(norms(config)[0], rel=1e-5 if config is grid else 1e-2), config.out
        assert norms(one) == pytest.approx(norms(config), rel=0.1), config.out


def test_checkpoints_of_codes_and_floats_are_distinguished(make_config: MakeConfig) -> None:
    alone = make_config("alone", optimizer="lean", recipe="tensorwise", steps=2)
    run_training(alone)
    with pytest.raises(CheckpointError, match=r"has matrices as codes, and a run with --tp, of recipes that change or"):
        run_training(replace(alone, recipe="tensorwise until 3, bf16", steps=4), resume=True)


def test_a_run_that_began_with_floats_resumes_with_floats(make_config: MakeConfig) -> None:
    """Where it would keep codes if it began."""
    first = make_config("first", optimizer="lean", **COMMON | {"recipe": "mxfp8 until 3, bf16"})
    run_training(first)
    again = begin_from(replace(first, out=f"{first.out}-again", recipe="mxfp8", steps=3), first)
    with pytest.warns(UserWarning, match="goes on from step 2 with other options: recipe"):
        run_training(again, resume=True)
    ours, its = losses_of(recorded(again)), losses_of(recorded(first))
    assert ours and ours.items() <= its.items(), (ours, its)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "muon-lean"}, "muon-lean orthogonalizes whole matrices, and 2 ranks have parts of each matrix"),
        ({"optimizer": "msamp"}, "optimizer msamp has one scale for a whole matrix, and 2 ranks have parts"),
        ({"optimizer": "te", "cp": 2}, "optimizer te has one scale for a whole matrix, and 2 ranks have parts"),
        ({"optimizer": "lean", "tp": 2, "model": "pair"}, "divides the 64 columns of layers.0.attention.o_proj, and"),
        ({"optimizer": "lean", "framework": "jax"}, "JAX has no optimizer lean yet"),
        ({"optimizer": "lean", "capture": "step"}, "optimizer lean cannot be recorded yet"),
    ],
)
def test_optimizers_unsupported_by_ranks_are_refused_before_anything_is_read(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=message):
        run_training(make_config(recipe="tensorwise", **options))
