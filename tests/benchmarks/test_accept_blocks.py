"""Models with experts and with state spaces train under every recipe as in bf16: what `make accept-blocks` judges."""

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.acceptance import command, report
from benchmarks.acceptance.report import BASELINE, BLOCKS, CLOSE, Acceptance
from benchmarks.acceptance.training import NARROW, NULL


def trained(plan: command.Plan, results: Path) -> Acceptance:
    return command.accept(plan, 2, Console(), results)


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("model", ["mixtral-tiny", "mamba2-tiny"])
def test_six_seeds_pass_the_acceptance_rules(model: str, tmp_path: Path) -> None:
    """300 steps, six seeds, nine runs of each: 28 minutes of two cores that multiply bf16 (AVX512-BF16) for
    `mixtral-tiny`, 18 for `mamba2-tiny`; several times that of others.

    A run that `make accept-blocks` has trained from the same sources is not trained again.
    """
    plan = command.of_blocks(model)
    assert plan.steps == 300 and plan.seeds >= 6 and plan.recipes == (BASELINE, NULL, *BLOCKS)
    done = trained(plan, tmp_path)
    refused = {row.recipe: row.difference for row in done.rows() if not row.accepted}
    assert not refused and done.accepted, report.markdown(done)
    counted = [row.choices_differ for row in done.rows() if row.recipe not in (BASELINE, NULL)]
    assert all((share is not None and share > 0) is (model == "mixtral-tiny") for share in counted)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["mixtral-tiny", "mamba2-tiny"])
def test_few_steps_reject_only_a_planted_bad_recipe(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 steps of two seeds by the same way, with the control judged as a recipe: six minutes of two cores that have
    no AVX-512."""
    monkeypatch.setitem(report.RULES, NARROW, CLOSE)  # type: ignore[arg-type]
    recipes = (BASELINE, NULL, "tensorwise", NARROW)
    done = trained(command.of_blocks(model, steps=100, seeds=2, recipes=recipes, folder=tmp_path / "runs"), tmp_path)
    control, sound = done.row(NARROW), done.row("tensorwise")
    assert control.difference is not None and control.difference > 0.1 and not control.accepted
    assert sound.difference is not None and abs(sound.difference) < control.difference / 4
    assert not done.accepted and all(len(done.losses(recipe)) == 2 for recipe in recipes)
