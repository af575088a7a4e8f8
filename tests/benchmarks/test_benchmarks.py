"""The benchmarks run: every case when quick, the writer of results, and `accept` on a model that trains in a second."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import quaver.torch as qt
from benchmarks.acceptance import command, report, training
from benchmarks.acceptance.report import BASELINE, CLOSE, RULES, Acceptance
from benchmarks.acceptance.training import CONTROL, Outcome
from benchmarks.cases import CASES
from benchmarks.cases.host import host_cost
from benchmarks.cases.ranks import PARALLEL, started
from benchmarks.cpu import CPU, RANKS, Suite, chosen, run, summary, written
from benchmarks.measuring import machine
from benchmarks.measuring.figure import (
    DECIMALS,
    Case,
    Figure,
    NotMeasurable,
    Result,
    at_most,
)
from benchmarks.measuring.memory import Peak, peak
from benchmarks.measuring.products import WideProducts
from benchmarks.measuring.timing import interleave, interleave_with_first
from benchmarks.pages import ranks
from quaver.torch.backends.gpu import interpreter
from quaver.train import TrainResult
from quaver.train.model_config import MODELS
from quaver.train.torch.decoder import build_decoder
from tests import forked


@pytest.mark.parametrize("case", PARALLEL, ids=lambda case: case.name)
@pytest.mark.ranks
def test_every_multi_rank_case_runs_quickly_and_reports_traffic(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started, "subprocess", forked.quick)
    figures = list(case.measure(True))
    assert all(math.isfinite(figure.value) and figure.value > 0 for figure in figures)
    columns = {figure.column for figure in figures}
    assert {"time, ratio", "processor, ratio", "step"} < columns and any(name.endswith(", sent") for name in columns)
    # What does not depend on sizes: few scales, and one all-reduce of their bits.
    shares = {f.subject: f.value for f in figures if f.column.endswith(", bytes")}
    assert max(shares.values()) < {"ranks-tensor": 85}.get(case.name, 53), shares


def test_the_page_has_the_newest_results_of_ranks(tmp_path: Path) -> None:
    page = ranks.PAGE.read_text(encoding="utf-8")
    between = page.partition(ranks.BEGIN)[2].partition(ranks.END)[0].strip()
    assert between == ranks.table(ranks.newest()), "write it by python -m benchmarks.pages.ranks"
    assert ranks.table(ranks.newest(tmp_path)) == ranks.NONE
    case = dataclasses.replace(PARALLEL[0], measure=lambda quick: [])
    figures = (Figure("mxfp8", "time, ratio", 1.4, "x", at_most(1.3)), Figure("mxfp8", "weights, bytes", 51.6, "%"))
    results = [Result(case=case, figures=figures, seconds=1.0)]
    written(results, True, None, machine.describe(), tmp_path, 1, RANKS)
    assert ranks.newest(tmp_path) is None, "small sizes are no results"
    written(results, False, None, machine.describe(), tmp_path, 1, RANKS)
    shown = ranks.table(ranks.newest(tmp_path))
    assert "| mxfp8 | 1.40 (missed) | 51.6 % |" in shown and machine.today() in shown


#: Half a minute of compiling, or the sizes or the framework of another case.
SLOW = (
    "jax",
    "block-small",
    "small-bf16",
    "large-float32",
    "memory-mlp-compiled",
    "peak-llama",
    "host-cost",
    "grouped-many",
    "grouped-large",
    "grouped-ragged",
    "block",
    "blocks-llama",
    "llama-float32",
    "imports",
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.name in SLOW else []) for c in CASES],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_every_case_runs_quickly_and_gives_finite_figures(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # Users' processes interpret no kernel, so a CPU's benchmark may launch none.
    monkeypatch.setattr(interpreter, "run", lambda *_: pytest.fail("a kernel is launched on a CPU"))
    figures = list(case.measure(True))
    assert figures
    if case.name.startswith(("memory", "frozen")):  # what depends on no machine
        assert not [(f.subject, f.column, str(f)) for f in figures if f.passed is False]
    for figure in figures:
        assert figure.instead or math.isfinite(figure.value), figure
        assert figure.unit in DECIMALS
    cells = [(figure.subject, figure.column) for figure in figures]
    assert len(set(cells)) == len(cells), "two figures in one cell"
    assert any(subject.startswith(("quaver", "import quaver")) for subject, _ in cells)


# Half of a minute of compiling kernels: the case above has two of the recipes.
@pytest.mark.slow
@pytest.mark.parametrize(("arch", "names"), [(90, "tensorwise blockwise"), (100, "rowwise rowwise_bf16_wgrad nvfp4")])
def test_the_hosts_cost_has_a_row_for_every_recipe(arch: int, names: str) -> None:
    (rows,) = host_cost.run(arch, {**host_cost.QUICK, "recipes": names}).values()
    for kind in ("quaver", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"):
        assert {f"{kind} {name}" for name in names.split()} <= rows.keys()
    assert all(math.isfinite(value) for row in rows.values() for value in row)


@pytest.mark.parametrize("timed", [interleave, interleave_with_first])
def test_interleaved_timing_finds_a_function_twice_as_slow(timed: Any) -> None:
    a = torch.randn(128, 128)

    def once() -> None:
        a @ a

    def twice() -> None:
        a @ a
        a @ a

    timings = timed({"once": once, "twice": twice}, rounds=9, steps=10)
    assert timings["once"].ratio == 1.0
    assert 1.3 < timings["twice"].ratio < 3.0


def toy(name: str, value: float) -> Case:
    figures = [Figure("quaver", "time", value, "ms", at_most(2.0)), Figure("nn.Linear", "time", 1.0, "ms")]
    return Case(name=name, title=name, notes="A toy.", measure=lambda quick: figures)


def suite_of(*cases: Case) -> Suite:
    return CPU._replace(cases=cases)


def test_results_are_written_for_reading_and_for_computing(tmp_path: Path) -> None:
    def absent(quick: bool) -> list[Figure]:
        raise NotMeasurable("not measurable here: no such CPU")

    def broken(quick: bool) -> list[Figure]:
        raise RuntimeError("it broke")

    hidden = dataclasses.replace(toy("hidden", 0.0), measure=absent)
    broke = dataclasses.replace(toy("broke", 0.0), measure=broken)
    suite = suite_of(toy("good", 1.5), toy("bad", math.inf), hidden, broke)
    done = run(True, None, True, Console(quiet=True), tmp_path, suite=suite)
    assert summary(done).startswith("1 of 2 targets met.")
    stem = f"cpu-{machine.today()}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{stem}.json", f"{stem}.md"]
    text = (tmp_path / f"{stem}.md").read_text(encoding="utf-8")
    assert "| quaver | 1.50 ms (≤ 2) PASS |" in text
    assert "MISS" in text and "not measurable here: no such CPU" in text and "failed: RuntimeError: it broke" in text
    assert torch.__version__ in text and "commit" in text
    data = json.loads((tmp_path / f"{stem}.json").read_text(encoding="utf-8"))
    assert [case["name"] for case in data["cases"]] == ["good", "bad", "hidden", "broke"]
    assert data["cases"][0]["figures"][0] == {
        **{"subject": "quaver", "column": "time", "value": 1.5, "unit": "ms"},
        **{"target": "≤ 2", "passed": True},
    }
    assert data["cases"][1]["figures"][0]["value"] == "inf"
    assert set(data["machine"]) >= {"cpu", "flags", "torch", "torchao", "python", "commit"}


def test_a_row_is_written_as_it_ends(tmp_path: Path) -> None:
    path = tmp_path / f"cpu-{machine.today()}.md"

    def measure(quick: bool) -> Iterator[Figure]:
        yield Figure("one", "time", 1.0, "ms")
        yield Figure("two", "time", 2.0, "ms")
        assert "| one | 1.00 ms |" in path.read_text("utf-8") and "two" not in path.read_text("utf-8")
        yield Figure("three", "time", 0.0, "ms", instead="does not run: no card")
        raise RuntimeError("it broke")

    suite = suite_of(
        dataclasses.replace(toy("long", 0.0), measure=measure),
    )
    run(True, None, True, Console(quiet=True), tmp_path, suite=suite)
    text = path.read_text("utf-8")
    assert "| two | 2.00 ms |" in text and "| three | does not run: no card |" in text
    assert "failed: RuntimeError: it broke" in text
    last = json.loads(path.with_suffix(".json").read_text("utf-8"))["cases"][0]["figures"][-1]
    assert last["instead"] == "does not run: no card" and "value" not in last


def test_a_memory_peak_covers_only_its_own_step() -> None:
    buffers: list[torch.Tensor] = []

    def step() -> None:
        # The buffer of this step replaces that of the step before.
        buffers[:] = [torch.empty(1 << 20, dtype=torch.uint8)]
        torch.empty(1 << 22, dtype=torch.uint8)

    for _ in range(3):
        assert peak(step) == Peak((1 << 20) + (1 << 22), 1 << 20)
        # Freed outside of the measured steps.
        buffers.clear()


def test_wide_products_are_sums_in_float32_rounded_once() -> None:
    a, b = torch.randn(3, 5, 40).bfloat16(), torch.randn(3, 40, 7).bfloat16()
    ones = torch.ones(64, 64).bfloat16()
    with WideProducts(1 << 10):
        matrices, batches, too_large = a[0] @ b[0], a @ b, ones @ ones
        out = torch.mm(a[0], b[0], out=torch.empty(5, 7, dtype=torch.bfloat16))
    expected = (a.float() @ b.float()).bfloat16()
    assert torch.equal(matrices, expected[0]) and torch.equal(out, expected[0])
    assert torch.equal(batches, expected) and (too_large == 64).all()


def test_an_unknown_pattern_names_the_nearest_case() -> None:
    assert [case.name for case in chosen("memory*")] == [c.name for c in CASES if c.name.startswith("memory")]
    with pytest.raises(ValueError, match="did you mean 'frozen'"):
        chosen("frozne")


def acceptance(**losses: float | None) -> Acceptance:
    """Two seeds each, the second 0.001 above the first; None is a run that failed."""
    outcomes = {
        (recipe, seed): Outcome(failure="it became NaN") if loss is None else Outcome(loss=loss + 0.001 * seed)
        for recipe, loss in losses.items()
        for seed in range(2)
    }
    names = tuple(losses)
    return Acceptance(steps=1, seeds=2, model="nano", text="none", recipes=names, outcomes=outcomes)


@pytest.mark.parametrize(
    ("recipe", "loss", "accepted"),
    [
        ("mxfp8", 2.0099, True),
        ("mxfp8", 1.9899, False),
        ("mxfp8", None, False),
        ("nvfp4", 2.0399, True),
        ("nvfp4", 2.05, False),
        (CONTROL, 2.2, False),
        (CONTROL, 2.4, True),
        (CONTROL, None, True),
    ],
)
def test_verdicts(recipe: str, loss: float | None, accepted: bool) -> None:
    done = acceptance(bf16=2.0, **{recipe: loss})
    assert done.accepted == accepted
    row = done.row(recipe)
    assert row.accepted == accepted
    if loss is not None:
        assert row.difference == pytest.approx(loss - 2.0)
        assert row.error == pytest.approx(0.0, abs=1e-12)
    assert ("**Not accepted.**" in "\n".join(report.markdown(done))) == (not accepted)


def test_a_null_model_widens_the_tolerance_by_two_standard_errors() -> None:
    """Seeds of the null model differ by 0.002: a standard error of 0.001. The control has none."""
    outcomes = dict(acceptance(bf16=2.0, mxfp8=2.0119, nvfp4=2.041, unit_scales=2.301).outcomes)
    outcomes |= {
        (training.NULL, seed): Outcome(loss=2.0 + 0.001 * seed + shift) for seed, shift in enumerate((0.003, 0.005))
    }
    outcomes["mxfp8", 0] = dataclasses.replace(outcomes["mxfp8", 0], choices_differ=0.03)
    names = (BASELINE, training.NULL, "mxfp8", "nvfp4", CONTROL)
    done = Acceptance(steps=1, seeds=2, model="nano", text="none", recipes=names, outcomes=outcomes)
    assert done.chance == pytest.approx(0.002)
    assert [row.accepted for row in done.rows()] == [True, True, True, False, True]
    page = "\n".join(report.markdown(done))
    assert "standard errors, 0.0020." in page and report.CHOICES in page and "| 3.00 |" in page
    assert report.CHOICES not in "\n".join(report.markdown(acceptance(bf16=2.0)))
    tighter = dataclasses.replace(done, recipes=tuple(name for name in names if name != training.NULL))
    assert not tighter.row("mxfp8").accepted


def test_a_null_model_is_bf16_from_perturbed_weights() -> None:
    runs = command.Plan(seeds=1, recipes=command.BESIDE_CHANCE, batch=4, sequence=64).runs()
    assert [run.row for run in runs] == [*command.BESIDE_CHANCE] and len({run.folder for run in runs}) == len(runs)
    null = next(run for run in runs if run.row == training.NULL)
    assert (null.recipe, null.nudge) == (BASELINE, training.NUDGE)
    assert all(run.nudge == 0 for run in runs if run is not null)
    assert all((run.batch, run.sequence) == (4, 64) for run in runs)


def test_every_recipe_that_is_judged_exists() -> None:
    assert RULES["tensorwise"] is CLOSE
    for name in (BASELINE, *RULES):
        training.find(name)
    for control in training.CONTROLS:
        specs = training.find(control).operands().values()
        assert all(spec is not None and spec.scale == "unit" for spec in specs)


def trained(weight: float | None, skip: list[str]) -> TrainResult:
    model = build_decoder(MODELS["nano"], 256, 0, torch.device("cpu"))
    conversion = qt.convert(model, "mxfp8", skip=skip, head=True)
    if weight is not None:
        torch.nn.init.constant_(model.layers[0].mlp.up_proj.weight, weight)
    return TrainResult(folder=Path(), losses={}, validation_losses={1: 1.0}, model=model, conversion=conversion)


def test_weight_errors_are_of_every_converted_layer_and_not_zero() -> None:
    recipe = training.find("mxfp8")
    errors = training.weight_errors(trained(None, ["head"]), recipe)
    assert len(errors) == 7 and all(0.01 < error < 0.05 for error in errors.values())
    with pytest.raises(RuntimeError, match="up_proj has a quantization error of 0"):
        training.weight_errors(trained(1.0, ["head"]), recipe)
    with pytest.raises(RuntimeError, match="head"):
        training.weight_errors(trained(None, []), recipe)
    with pytest.raises(RuntimeError, match="up_proj"):
        training.weight_errors(trained(None, ["head", "up_proj"]), recipe)


def test_attention_must_be_quantized_where_the_recipe_says_so_and_nowhere_else() -> None:
    attending, linear = training.find("mxfp8(attention=True)"), training.find("mxfp8")
    model = build_decoder(MODELS["nano"], 256, 0, torch.device("cpu"))
    for recipe, other in ((attending, linear), (linear, attending)):
        qt.convert(model, recipe, skip=["head"])
        training.check_attention(model, recipe)
        with pytest.raises(RuntimeError, match="quantized under mxfp8"):
            training.check_attention(model, other)
    with pytest.raises(RuntimeError, match="no layer has an attention"):
        training.check_attention(torch.nn.Linear(4, 4), attending)


ATTENDING = "tensorwise(attention=True)"


@pytest.mark.parametrize(
    ("framework", "recipes"),
    [
        pytest.param("torch", (BASELINE, ATTENDING, CONTROL), id="torch"),
        pytest.param("jax", (BASELINE, CONTROL), id="jax", marks=pytest.mark.slow),
    ],
)
def test_accept_trains_judges_and_does_not_train_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: str, recipes: tuple[str, ...]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{n} and {n + 1} make {2 * n + 1}." for n in range(2000)), encoding="utf-8")
    plan = command.Plan(
        steps=2,
        seeds=1,
        model="nano",
        text=(str(text),),
        recipes=recipes,
        framework=framework,
        folder=tmp_path / "runs",
    )
    monkeypatch.setattr(command, "checksum", lambda: "these sources")
    monkeypatch.setattr(command, "subprocess", forked.quick)
    done = command.accept(plan, 2, Console(quiet=True), tmp_path / "results")
    assert all(math.isfinite(loss) for recipe in plan.recipes for loss in done.losses(recipe).values())
    assert done.row(CONTROL).weight_errors is not None and not done.accepted  # two steps cannot ruin the control
    written = {path.suffix: path.read_text(encoding="utf-8") for path in (tmp_path / "results").iterdir()}
    assert CONTROL in written[".md"] and json.loads(written[".json"])["accepted"] is False

    monkeypatch.setattr(command, "start", lambda run: pytest.fail(f"{run.label} was trained again"))
    again = command.accept(plan, 2, Console(quiet=True), tmp_path / "results")
    assert again.outcomes == done.outcomes
