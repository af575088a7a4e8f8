"""`qt.inspect`: planted faults are found, nothing else is flagged, and no bit changes."""

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.state import observer

RECIPES = [name for name in recipes.RECIPES if name != "bf16"]


class Mlp(nn.Module):
    """A gated MLP, as a layer of a Llama has it."""

    def __init__(self, dim: int = 64, hidden: int = 96) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate_proj, self.up_proj = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim)
        #: Changes the input of down_proj.
        self.fault: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down_proj(self.fault(nn.functional.silu(self.gate_proj(y)) * self.up_proj(y)))


def model_of(recipe: Any, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp() for _ in range(layers)), nn.Linear(64, 64))
    qt.convert(model, recipe)
    return model


def inspected(model: nn.Module, steps: int = 1, **options: Any) -> qt.Inspector:
    """Train for some steps and inspect them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    with qt.inspect(model, every=1, **options) as inspector:
        for _ in range(steps):
            x = torch.randn(4, 32, 64, generator=generator)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            inspector.step()
    return inspector


def faults(inspector: qt.Inspector) -> set[tuple[str, str, str]]:
    return {(row["layer"], row["gemm"], row["tensor"]) for row in inspector.flagged()}


# ---- planted faults ----


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_flagged_without_a_fault(recipe: str) -> None:
    assert not faults(inspected(model_of(recipe), steps=2))


def test_values_beyond_a_stale_history_are_saturated() -> None:
    model = model_of("delayed(history=4)")
    inspected(model, steps=4)
    mlp: Any = model[2]
    mlp.fault = lambda x: 30 * x
    inspector = inspected(model)
    saturated = {(r["layer"], r["tensor"]): r["saturated"] for r in inspector.flagged() if r.get("saturated")}
    assert saturated["2.down_proj", "input"] > 0.02
    assert inspector.worst()[0]["layer"] == "2.down_proj"


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "nvfp4"])
def test_a_wrong_gemm_is_named_alone(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from quaver.torch.linear import general  # the plan is private; its fault cannot be planted from outside

    model = model_of(recipe)
    layer, wgrad = model[1].up_proj, general.wgrad

    def doubled(call: Any, *arguments: Any) -> Tensor:
        y = wgrad(call, *arguments)
        return y * 2 if call.layer is layer else y

    monkeypatch.setattr(general, "wgrad", doubled)
    monkeypatch.setattr(general, "_plans", {})
    assert faults(inspected(model)) == {("1.up_proj", "wgrad", "grad_weight")}


def test_the_first_of_many_tensors_with_nan_is_the_worst() -> None:
    model = model_of("mxfp8")
    with torch.no_grad():
        model[1].up_proj.weight[3, 3] = torch.nan
    worst = inspected(model).worst()[0]
    assert (worst["layer"], worst["tensor"], worst["nonfinite"]) == ("1.up_proj", "weight", 1)


def test_an_expert_with_three_tokens_is_counted_and_not_flagged() -> None:
    layer = qt.GroupedLinear(3, 64, 64, recipe="mxfp8")
    with qt.inspect(layer, every=1) as inspector:
        layer(
            torch.randn(64, 64, requires_grad=True), torch.tensor([3, 64, 64], dtype=torch.int32)
        ).square().mean().backward()
        inspector.step()
    outputs = {
        r["expert"]: r["nonzero_rows"] for r in inspector.rows if r["tensor"] == "output" and r["expert"] is not None
    }
    assert outputs == {0: 3, 1: 61, 2: 0} and not inspector.flagged()
    assert {(r["gemm"], r["tensor"]) for r in inspector.rows} == {
        *(("fprop", tensor) for tensor in ("input", "weight", "output")),
        *(("dgrad", tensor) for tensor in ("grad_output", "weight", "grad_input")),
        *(("wgrad", tensor) for tensor in ("grad_output", "input", "grad_weight")),
    }


@pytest.mark.parametrize("recipe", ["tensorwise(format='e4m3')", "rowwise"])
def test_a_faulty_gradient_is_named_where_it_first_appears(recipe: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(qt.Linear(64, 64, recipe=recipe) for _ in range(4)))

    def grow(_: Any, grads: tuple[Tensor, ...]) -> tuple[Tensor]:
        g = grads[0].clone()
        g[0] *= 1e8
        return (g,)

    model[2].register_full_backward_pre_hook(grow)
    assert inspected(model).worst()[0]["layer"] == "2"


# ---- what a row says ----


@pytest.mark.parametrize("scale", [1e-44, 1e-39, 1e-20, 1e38])
def test_values_of_any_size_give_numbers(scale: float) -> None:
    layer = qt.Linear(32, 32, bias=False, recipe="rowwise")
    with qt.inspect(layer, every=1) as inspector:
        (layer(scale * torch.rand(8, 32)) * min(scale, 1.0)).sum().backward()
        inspector.step()
    assert all(0 <= row["error"] <= 1 for row in inspector.rows)
    json.dumps(inspector.rows, allow_nan=False)


def test_each_expert_and_transposed_operands_keep_their_indices() -> None:
    layer = qt.GroupedLinear(3, 64, 64, recipe="mxfp8")
    x = torch.randn(96, 64)
    x[5, 7] = 1e4
    with qt.inspect(layer, every=1) as inspector:
        layer(x, torch.tensor([32, 64, 96], dtype=torch.int32)).sum().backward()
        inspector.step()
    rows = {(r["gemm"], r["tensor"], r["expert"]): r for r in inspector.rows}
    for gemm in ("fprop", "wgrad"):
        row = rows[gemm, "input", None]
        assert (row["outlier_row"], row["outlier_column"]) == (5, 7)
    assert {expert for _, _, expert in rows} == {None, 0, 1, 2}


@pytest.mark.parametrize("grouped", [False, True])
def test_a_weight_gradient_that_is_computed_later_has_a_row(grouped: bool) -> None:
    layer: Any = qt.GroupedLinear(1, 32, 32, recipe="mxfp8") if grouped else qt.Linear(32, 32, recipe="mxfp8")
    arguments = (torch.randn(8, 32), torch.tensor([8], dtype=torch.int32))[: 1 + grouped]
    later = qt.weight_gradients(later=True)
    with qt.inspect(layer, every=1) as inspector:
        with later:
            y = layer(*arguments)
        y.sum().backward()
        later.compute()
        inspector.step()
    assert ("wgrad", "grad_weight") in {(r["gemm"], r["tensor"]) for r in inspector.rows}


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_operand_of_each_gemm_has_a_row(recipe: str) -> None:
    rows = inspected(model_of(recipe, 1)).rows
    recipe_ = recipes.get(recipe)
    operands = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
    results = {"fprop": "output", "dgrad": "grad_input", "wgrad": "grad_weight"}
    expected = {(gemm, tensor) for gemm, spec in recipe_.gemms.items() if spec.a for tensor in operands[gemm]}
    expected |= set(results.items())
    assert {(r["gemm"], r["tensor"]) for r in rows if r["layer"] == "0.down_proj"} == expected


def test_statistics_of_an_operand() -> None:
    x = torch.tensor([[1.0, 0.0, -448.0, 1e-4], [0.0, 2.0, 4.0, math.inf]])
    layer = qt.Linear(4, 4, recipe="rowwise")
    with qt.inspect(layer, every=1) as inspector:
        layer(x)
        inspector.step()
    row = next(r for r in inspector.rows if r["tensor"] == "input")
    assert (row["elements"], row["nonfinite"], row["amax"]) == (8, 1, 448.0)
    assert row["flushed"] == 1 / 5 and row["dynamic_range"] == pytest.approx(math.log2(448e4))


def test_a_histogram_counts_the_nonzero_values_by_the_exponent_that_is_stored() -> None:
    layer = qt.Linear(4, 4, recipe="tensorwise(format='e4m3')")
    with qt.inspect(layer, every=1) as inspector:
        # The scale is 1. E4M3 ends at 2**-9; all below 2**-21 is counted there.
        for x in ([[448.0, 256.0, -1.5, 0.0], [1.0, 2.0**-9, 2.0**-30, -1e-44]], [[448.0, 2.0, 0.0, 3.0]]):
            layer(torch.tensor(x))
        inspector.step()
    row = next(r for r in inspector.rows if r["tensor"] == "input")
    counts = dict(enumerate(row["histogram"], row["histogram_start"]))
    assert {e: n for e, n in counts.items() if n} == {8: 3, 1: 2, 0: 2, -9: 1, -21: 2}


def test_a_histogram_goes_beyond_the_format_if_the_scale_is_stale() -> None:
    layer, x = qt.Linear(64, 32, recipe="delayed(history=4)"), torch.rand(48, 64) + 0.5
    with qt.inspect(layer, every=1) as inspector:
        for factor in (1.0, 1000.0):
            layer(x * factor).sum().backward()
            inspector.step()
    row = next(r for r in inspector.rows if (r["step"], r["tensor"]) == (1, "input"))
    assert row["histogram_start"] > 8 and sum(row["histogram"]) == x.numel() and row["saturated"] == 1


def test_a_histogram_leaves_out_zeros_and_blocks_without_a_scale() -> None:
    layer = qt.Linear(32, 16, recipe="nvfp4")
    x = torch.zeros(64, 32)
    x[:8, :16] = torch.randn(8, 16)
    with qt.inspect(layer, every=1) as inspector:
        layer(x).sum().backward()
        inspector.step()
    row = next(r for r in inspector.rows if (r["gemm"], r["tensor"]) == ("fprop", "input"))
    assert sum(row["histogram"]) == 8 * 16


def test_micro_batches_of_a_step_are_pooled() -> None:
    layer = qt.Linear(32, 32, recipe="mxfp8")
    with qt.inspect(layer, every=1) as inspector:
        for _ in range(3):
            layer(torch.randn(8, 32)).sum().backward()
        inspector.step()
    elements = {r["tensor"]: r["elements"] for r in inspector.rows if r["gemm"] == "fprop"}
    assert elements == {"input": 3 * 8 * 32, "weight": 32 * 32, "output": 3 * 8 * 32}


@pytest.mark.parametrize("how", ["quaver", "torch"])
def test_a_recomputed_forward_is_counted_once(how: str) -> None:
    model = model_of("tensorwise", 1)
    x = torch.randn(8, 64, requires_grad=True)
    with qt.inspect(model, every=1) as inspector:
        if how == "quaver":
            y = qt.checkpoint(model, x)
        else:
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        y.sum().backward()
        inspector.step()
    elements = {r["tensor"]: r["elements"] for r in inspector.rows if (r["layer"], r["gemm"]) == ("1", "fprop")}
    assert elements == {"input": 8 * 64, "weight": 64 * 64, "output": 8 * 64}


@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4"])
def test_a_recipe_of_an_autocast_has_the_rows_of_the_layers_own(recipe: str) -> None:
    rows = []
    for own in (recipe, None):
        layer = qt.Linear(32, 32, recipe=own)
        with qt.inspect(layer, every=1) as inspector:
            with qt.autocast(recipe):
                layer(torch.randn(8, 32, requires_grad=True)).sum().backward()
            inspector.step()
        rows.append({(r["gemm"], r["tensor"]) for r in inspector.rows})
    assert rows[0] == rows[1]


# ---- the loop around it ----


def test_observers_may_begin_and_end_in_any_order() -> None:
    layer, other = qt.Linear(32, 32, recipe="mxfp8"), qt.Linear(32, 32, recipe="mxfp8")
    x = torch.randn(4, 32)
    compiled = torch.compile(nn.Sequential(qt.Linear(32, 32, recipe="mxfp8")), backend="eager", dynamic=False)
    first, second = qt.inspect(layer, every=2), qt.inspect(other, every=1)
    first.start()
    second.start()
    with qt.count(layer) as counters:
        layer(x).sum().backward()
        other(x).sum().backward()
        first.step()
    second.step()
    layer(x).sum().backward()
    first.close()
    second.close()
    assert {row["step"] for row in first.rows} == {0} and {row["layer"] for row in second.rows} == {"(root)"}
    assert counters.table[""]["input"].elements == 4 * 32
    assert first.rows and second.rows and not observer.active.observers
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1, "compiled functions run eagerly"


@pytest.mark.parametrize("recipe", ["delayed(history=4)", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("recompute", [False, True])
def test_no_bit_of_the_training_changes(recipe: str, recompute: bool) -> None:
    def train(every: int) -> list[Tensor]:
        model = model_of(recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        losses = []
        inspector = qt.inspect(model, every=every) if every else None
        if inspector:
            inspector.start()
        for seed in range(5):
            for part in range(2):
                x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2 * seed + part))
                y = qt.checkpoint(model, x) if recompute else model(x)
                loss = y.square().mean()
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            if inspector:
                inspector.step()
        state = {**model.state_dict(), **qt.scaling_state_dict(model)}
        return [*losses, *state.values()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, sampled = train(0), train(2)
    assert len(plain) == len(sampled)
    assert all(torch.equal(one, other) for one, other in zip(plain, sampled, strict=True))


def test_only_sampled_steps_are_measured() -> None:
    model = nn.Sequential(qt.Linear(32, 32, recipe="mxfp8"))
    with qt.inspect(model, every=3, start=2, stop=9) as inspector:
        for _ in range(12):
            model(torch.randn(4, 32)).sum().backward()
            inspector.step()
    assert sorted({row["step"] for row in inspector.rows}) == [2, 5, 8]


def test_layers_selects_by_pattern() -> None:
    rows = inspected(model_of("mxfp8"), layers=["*.down_proj"]).rows
    assert {row["layer"] for row in rows} == {"0.down_proj", "1.down_proj", "2.down_proj"}


def test_rows_are_written_as_json_lines(tmp_path: Path) -> None:
    inspector = inspected(model_of("mxfp8"), steps=2, out=tmp_path / "new" / "folder")
    lines = (tmp_path / "new" / "folder" / "inspect.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == inspector.rows


def test_a_resumed_loop_continues_the_file(tmp_path: Path) -> None:
    model = nn.Sequential(qt.Linear(32, 32, recipe="mxfp8"))

    def run(first: int, last: int, resume: int | None) -> list[dict[str, Any]]:
        with qt.inspect(model, every=2, out=tmp_path, resume=resume) as inspector:
            for seed in range(first, last):
                x = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
                model(x).sum().backward()
                inspector.step()
        return inspector.rows

    whole = run(0, 6, None)
    with (tmp_path / "inspect.jsonl").open("a") as file:
        file.write('{"step": 6, "unf')
    again = run(3, 6, 3)
    assert again == [row for row in whole if row["step"] >= 3]
    assert [json.loads(line) for line in (tmp_path / "inspect.jsonl").read_text().splitlines()] == whole
    (tmp_path / "inspect.jsonl").write_text("not a row\n")
    with pytest.raises(ValueError, match="has a line that is no row of inspect"):
        run(3, 6, 3)


def test_a_file_that_was_deleted_is_not_begun_again(tmp_path: Path) -> None:
    model = nn.Sequential(qt.Linear(32, 32, recipe="mxfp8"))
    with qt.inspect(model, every=1, out=tmp_path) as inspector:
        for step in range(3):
            model(torch.randn(4, 32)).sum().backward()
            if step == 1:
                (tmp_path / "inspect.jsonl").unlink()
                with pytest.warns(UserWarning, match="statistics stay in memory"):
                    inspector.step()
            else:
                inspector.step()
    assert not (tmp_path / "inspect.jsonl").exists() and {row["step"] for row in inspector.rows} == {0, 1, 2}


def test_a_validation_can_be_left_out() -> None:
    model = nn.Sequential(qt.Linear(32, 32, recipe="mxfp8"))
    with qt.inspect(model, every=1) as inspector:
        with inspector.pause(), torch.no_grad():
            model(torch.full((4, 32), 1e9))
        model(torch.ones(4, 32)).sum().backward()
        with inspector.pause():
            model(torch.full((4, 32), 1e9))
        inspector.step()
    rows = {(row["gemm"], row["tensor"]): row for row in inspector.rows}
    assert rows["fprop", "input"]["amax"] == 1.0 and rows["fprop", "input"]["elements"] == 4 * 32
    assert rows["fprop", "weight"]["elements"] == 32 * 32


def test_a_shared_operand_has_rows_of_the_gemms_that_ran() -> None:
    for needs_gradient in (False, True):
        layer = qt.Linear(32, 32, recipe="tensorwise")
        with qt.inspect(layer, every=1) as inspector:
            layer(torch.randn(8, 32, requires_grad=needs_gradient)).sum().backward()
            inspector.step()
        gemms = {row["gemm"] for row in inspector.rows}
        assert gemms == {"fprop", "wgrad", *(["dgrad"] if needs_gradient else [])}
    with qt.inspect(layer, every=1) as inspector:
        layer(torch.randn(8, 32))
        inspector.step()
    assert {row["tensor"] for row in inspector.rows} == {"input", "weight", "output"}


def test_summary_has_the_extremes_of_the_last_step() -> None:
    inspector = inspected(model_of("tensorwise"), steps=2)
    rows = [row for row in inspector.rows if row["step"] == 1]
    assert inspector.summary() == {
        "snr": min(row["snr"] for row in rows if row["snr"] is not None),
        "error": max(row["error"] for row in rows),
        "flushed": max(row.get("flushed", 0) for row in rows),
        "saturated": max(row.get("saturated", 0) for row in rows),
        "flagged": 0,
    }
    assert qt.inspect(model_of("mxfp8")).summary() == {}


def test_a_full_disk_warns_once_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(qt.Linear(32, 32, recipe="mxfp8"))
    with qt.inspect(model, every=1, out=tmp_path) as inspector:

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "open", full)
        model(torch.randn(4, 32)).sum().backward()
        with pytest.warns(UserWarning, match="No space left"):
            inspector.step()
        model(torch.randn(4, 32)).sum().backward()
        inspector.step()
    assert {row["step"] for row in inspector.rows} == {0, 1}


def test_a_compiled_model_runs_eagerly_in_a_sampled_step() -> None:
    model = nn.Sequential(qt.Linear(32, 32, recipe="mxfp8"))
    compiled = torch.compile(model, backend="eager")
    with qt.inspect(compiled, every=2) as inspector:
        for _ in range(3):
            compiled(torch.randn(4, 32)).sum().backward()
            inspector.step()
    assert {row["step"] for row in inspector.rows} == {0, 2}


def test_a_layer_added_during_training_is_measured() -> None:
    model = nn.Sequential(qt.Linear(32, 32, recipe="mxfp8"))
    with qt.inspect(model, every=1) as inspector:
        model(torch.randn(4, 32)).sum().backward()
        model.append(qt.Linear(32, 32, recipe="mxfp8"))
        inspector.step()
        model(torch.randn(4, 32)).sum().backward()
        inspector.step()
    assert {(row["step"], row["layer"]) for row in inspector.rows} == {(0, "0"), (1, "0"), (1, "1")}


# ---- bad input ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": True}, "every is True"),
        ({"stop": 0}, "stop is 0"),
        ({"start": 5, "stop": 5}, "no step would be sampled"),
        ({"every": 0}, "every is 0; give a whole number, 1 or more"),
        ({"start": -1}, "start is -1"),
        ({"resume": -1}, "resume is -1"),
        ({"layers": ["*.donw_proj"]}, "did you mean 'down_proj'"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("*", r"\*")):
        qt.inspect(model_of("mxfp8"), **options)


def test_a_model_without_quantized_layers() -> None:
    with pytest.raises(ValueError, match=r"call qt.convert\(model, recipe\) first"):
        qt.inspect(nn.Linear(4, 4))


def test_a_model_without_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(qt.Linear(32, 32, recipe="mxfp8"))
    with pytest.raises(ValueError, match="0 is on the meta device"), qt.inspect(model):
        pass
    assert not observer.active.observers


def test_a_folder_with_statistics_is_not_overwritten(tmp_path: Path) -> None:
    inspected(model_of("mxfp8"), out=tmp_path)
    before = (tmp_path / "inspect.jsonl").read_text()
    with pytest.raises(ValueError, match="statistics of another run"), qt.inspect(model_of("mxfp8"), out=tmp_path):
        pass
    assert (tmp_path / "inspect.jsonl").read_text() == before


def test_a_step_outside_of_the_context() -> None:
    with pytest.raises(RuntimeError, match=r"with qt\.inspect"):
        qt.inspect(model_of("mxfp8")).step()
