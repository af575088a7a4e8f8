"""Test the report of convert: rows, fractions and bytes, run statistics, early warnings."""

import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from tests.close import assert_bitwise
from tests.torch.conversion.families import tiny, tokens


class Model(nn.Module):
    """An embedding, a layer that is never called, a layer whose weight another function reads, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.unused = nn.Linear(32, 32)
        self.fused = nn.Linear(32, 32)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 50, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(self.norm(self.dropout(elsewhere(self, x))))  # type: ignore[no-any-return]


def elsewhere(model: Any, x: Tensor) -> Tensor:
    """Read a layer's weight outside of any forward, which source analysis cannot detect."""
    # Reading only a dtype or a device does not count.
    x = x.to(model.fused.weight.dtype).to(model.fused.weight)
    return torch.nn.functional.linear(x, model.fused.weight.t().t(), model.fused.bias)


def test_rows_count_parameters_flops_and_bytes() -> None:
    model = Model()
    report = qt.convert(model, "mxfp8", skip=["layers.1"])
    rows = {row.name: row for row in report.rows}
    assert list(rows) == ["layers.0", "layers.1", "layers.2", "unused", "fused", "head"]
    assert rows["layers.0"].recipe is recipes.mxfp8() and rows["layers.0"].implementation
    assert (rows["layers.0"].parameters, rows["layers.0"].flops) == (1024, 2048.0)
    # Of 4 bytes per element, one is saved as code, plus one byte of scale per 32 elements along the tokens.
    assert rows["layers.0"].saved == 4 * 32 - 32 - 1
    assert rows["layers.1"].why == "skip pattern 'layers.1'" and rows["layers.1"].recipe is None
    assert "output head stays in high precision" in rows["head"].why and rows["head"].saved == 0
    assert report.share == 4 / 5 and report.head_parameters == 1600
    assert report.flops_share == 4 * 1024 / (5 * 1024 + 1600)
    assert report.saved == 4 * 95
    lines = report.table().splitlines()
    assert lines[0].split()[:3] == ["layer", "recipe", "implementation"]
    assert any(line.startswith("layers.* x 2") and "mxfp8" in line and "30.5%" in line for line in lines), (
        report.table()
    )
    assert "61% of the FLOPs of GEMMs; 380 fewer bytes per token saved for backward" in str(report)
    assert "layers.* x 2" in report._repr_html_()


def test_flops_of_experts_are_those_that_a_token_visits() -> None:
    report = qt.convert(tiny("mixtral"), "mxfp8")
    row = next(row for row in report.rows if row.name.endswith("experts"))
    assert row.parameters == 4 * 3 * 64 * 96 and row.flops == 2 * row.parameters * 2 / 4
    # Two experts process a token: 64 input and 96 hidden features.
    assert row.saved == 2 * (3 * (64 + 96) - (64 + 96) / 32)


def test_the_bytes_saved_are_those_that_a_layer_keeps_less() -> None:
    bytes_per_token = {}
    for recipe in (None, "mxfp8", "tensorwise", "rowwise"):
        layer = nn.Linear(256, 32, bias=False)
        report = None if recipe is None else qt.convert(layer, recipe)
        sizes = 0

        def pack(t: Tensor) -> Tensor:
            nonlocal sizes
            sizes += 0 if t.data_ptr() == layer.weight.data_ptr() else t.numel() * t.element_size()  # noqa: B023
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = layer(torch.randn(4096, 256, requires_grad=True))
        bytes_per_token[recipe] = sizes / 4096
        assert y.requires_grad
        if report is not None:
            assert abs(bytes_per_token[None] - bytes_per_token[recipe] - report.saved) < 0.3, recipe


@pytest.mark.parametrize("training", [True, False])
def test_a_check_names_uncalled_layers_and_bypassed_weights(training: bool) -> None:
    model = Model().train(training)
    report = qt.convert(model, "nvfp4", head=True)
    ids = torch.randint(50, (2, 4))
    before, noise = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    check = report.check(model, ids)
    assert not check and not check.gone
    assert check.never_called == ["unused", "fused"]
    assert list(check.read_behind) == ["fused"] and "linear" in check.read_behind["fused"]
    assert "converted and not called in this run: unused" in str(check)
    assert "read in high precision by" in str(check) and "outside of the layer: the weight of fused" in str(check)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), noise) and model.training is training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_passing_model_check_is_reported() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    report = qt.convert(model, "delayed")
    check = report.check(model, torch.randn(4, 16))
    assert check and str(check) == "every converted layer was called, and no other code read its weight"
    assert not model[0].history.any(), "it records nothing"
    assert report.check(torch.compile(model, backend="eager"), torch.randn(4, 16))
    assert report.check(nn.Sequential(model), torch.randn(4, 16)), "one that wraps it"


def test_a_check_runs_a_model_that_fails_and_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    report = qt.convert(model, "mxfp8")
    with pytest.raises(ValueError, match="its last axis must be 16"):
        report.check(model, torch.randn(4, 17))
    assert not model._forward_hooks and not model[0]._forward_pre_hooks


# Warnings before work is lost.


def test_torchao_that_converts_afterwards_is_named() -> None:
    float8 = pytest.importorskip("torchao.float8")
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    report = qt.convert(model, "mxfp8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        float8.convert_to_float8_training(
            model, config=float8.Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: name == "2"
        )
        check = report.check(model, torch.randn(16, 32))
    assert check.gone == {"2": "Float8Linear of torchao"} and not check
    assert "no longer converted: 2 is now a Float8Linear of torchao: another library has replaced it" in str(check)
    report = qt.convert(model, "mxfp8")
    assert report.skipped == {"2": "Float8Linear overrides forward"}


def test_a_pattern_without_a_match_warns_and_a_shadowed_one_does_not() -> None:
    model = Model()
    with pytest.warns(UserWarning, match=r"no layer has a name that matches '\*\.haed', 'lm_head'"):
        qt.convert(model, {"*.haed": None, "layers.*": "rowwise", "*": "mxfp8"}, skip=["lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = qt.convert(model, {"*": "mxfp8", "layers.*": "rowwise"})
    assert report.unused == ["layers.*"]


def test_a_forward_that_casts_to_the_dtype_of_the_weight_computes_the_same() -> None:
    """T5 casts the input of 'wo' like this."""
    model, x = tiny("t5").eval(), tokens()
    saved = qt.quantize_weights(model, "mxfp8")
    assert any(name.endswith("wo") for name in saved.layers) and saved.skipped["lm_head"].startswith("the output head")
    with torch.no_grad():
        loss = model(input_ids=x, labels=x).loss
        qt.dequantize_weights(model)
        assert_bitwise(model(input_ids=x, labels=x).loss, loss)


@pytest.mark.parametrize("kind", ["experts", "linear", "conv1d"])
def test_a_weight_that_is_sharded_in_forward_gives_a_clear_error(kind: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        model = tiny("gpt2" if kind == "conv1d" else "mixtral")
        qt.convert(model, "mxfp8")
        layer: Any = {
            "experts": lambda: model.model.layers[0].mlp.experts,
            "linear": lambda: model.model.layers[0].self_attn.q_proj,
            "conv1d": lambda: model.transformer.h[0].mlp.c_fc,
        }[kind]()
        weight = "down_proj" if kind == "experts" else "weight"
        setattr(layer, weight, nn.Parameter(distribute_tensor(getattr(layer, weight).data, mesh, [Shard(0)])))
        routing = (torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2)) if kind == "experts" else ()
        with pytest.raises(ValueError, match=r"has a weight that is sharded over .*fully_shard"):
            layer(torch.randn(3, 64), *routing)
    finally:
        dist.destroy_process_group()


# Heads.


@pytest.mark.parametrize("name", ["head", "lm_head", "output"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_output_head_is_converted_only_on_request(name: str, tied: bool) -> None:
    def model() -> nn.ModuleDict:
        parts = nn.ModuleDict(
            {"embed": nn.Embedding(50, 32), "up": nn.Linear(32, 32), name: nn.Linear(32, 50, bias=False)}
        )
        if tied:
            parts[name].weight = parts["embed"].weight
        return parts

    report = qt.convert(model(), "mxfp8")
    assert list(report.converted) == ["up"] and "output head" in report.skipped[name]
    assert report.share == 1 and report.head_parameters == 1600 and not report.reaches_little
    for converted in (qt.convert(model(), "mxfp8", head=True), qt.convert(model(), {name: "mxfp8", "*": "mxfp8"})):
        assert list(converted.converted) == ["up", name] and converted.share == 1 and converted.head_parameters == 0
    report = qt.convert(model(), "mxfp8", skip=[name])
    assert report.skipped[name] == f"skip pattern {name!r}"


def test_a_skipped_layer_keeps_its_recipe_and_is_reported() -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(32, 2), "up": nn.Linear(32, 32)})
    qt.convert(model, "mxfp8")
    report = qt.convert(model, "mxfp8", skip=["a"])
    assert report.skipped == {"a": "skip pattern 'a'; it keeps mxfp8"}
    assert list(report.converted) == ["a.out_proj", "up"]
    with pytest.warns(UserWarning, match="changed nothing"):
        report = qt.convert(model, "mxfp8", skip=["*"])
    assert set(report.skipped.values()) == {"skip pattern '*'; it keeps mxfp8"}
    assert all(m.recipe is recipes.mxfp8() for m in (model["a"], model["a"].out_proj, model["up"]))


# Size.


@pytest.mark.parametrize("blocks", [False, qt.Blocks(loss=True)], ids=["layers", "blocks"])
def test_a_billion_parameters_on_meta_are_converted_in_a_second(blocks: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=16, vocab_size=32000
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) > 1e9
    start = time.process_time()
    report = qt.convert(model, "delayed", blocks=blocks)
    assert time.process_time() - start <= 1.0
    assert len(report.converted) == 24 * 7 and report.rows[0].implementation == "not on a device yet"
    # Two norms, an MLP and attention per layer, the last norm, and the loss.
    assert sum(bool(row.block) for row in report.blocks) == (24 * 4 + 2 if blocks else 0)


def test_explain_covers_layers_other_than_linear() -> None:
    model = tiny("gpt_oss")
    qt.convert(model, "mxfp8")
    explained = qt.explain(model.model.layers[0], torch.randn(6, 64))
    assert {"mlp.experts, first product", "mlp.experts, second product", "self_attn.q_proj"} <= set(explained)
    assert all(e.recipe is recipes.mxfp8() for e in explained.values())
    model = tiny("gpt2")
    qt.convert(model, "rowwise")
    rows = qt.explain(model.transformer.h[0], torch.randn(6, 64))["attn.c_attn"].rows
    assert [row.what for row in rows if row.what.endswith("GEMM")] == ["fprop GEMM", "dgrad GEMM", "wgrad GEMM"]
    attention = nn.MultiheadAttention(32, 2)
    qt.convert(attention, "mxfp8")
    assert set(qt.explain(attention, torch.randn(3, 32))) == {"", "out_proj"}


def test_a_model_whose_output_head_lookup_fails_is_converted() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.up, self.head = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 50)

        def get_output_embeddings(self) -> nn.Module:
            raise KeyError("decoder")

        def get_input_embeddings(self) -> nn.Module:
            raise KeyError("encoder")

    report = qt.convert(Failing(), "mxfp8")
    assert list(report.converted) == ["up"] and "output head" in report.skipped["head"]
