"""explain: which implementation runs, and why the others do not."""

import pytest
import torch
import transformers
from torch import nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.operations import ops
from tests.recipes.test_text import Text

GEMMS = ["fprop GEMM", "dgrad GEMM", "wgrad GEMM"]
OPERANDS = ["input", "weight", "grad_output", "weight.T", "grad_output.T", "input.T"]
NAMES = [impl.name for impl in ops.QUANTIZE.implementations]


@pytest.mark.parametrize("shape", [(5, 48), (2, 3, 48), (48,), (0, 48)])
@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_it_names_three_gemms_and_six_quantizations(
    recipe: str, shape: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    layer = qt.Linear(48, 32, recipe=recipe)
    explained = qt.explain(layer, torch.randn(shape))
    rows = {row.what: row for row in explained.rows}
    assert sorted(rows) == sorted(GEMMS + OPERANDS)
    r = recipes.get(recipe)
    for gemm, operands in zip(GEMMS, (OPERANDS[0:2], OPERANDS[2:4], OPERANDS[4:6]), strict=True):
        spec = r.gemms[gemm.split()[0]]
        for what, side in zip(operands, (spec.a, spec.b), strict=True):
            assert rows[what].how.split(",")[0] == ("high precision" if side is None else str(side))
            assert rows[what].runs == "torch" if side is None else rows[what].runs in NAMES
        assert rows[gemm].runs == ("torch" if spec.a is None else "cpu")
    assert repr(explained) == str(explained) and str(explained).startswith(f"recipe {recipe}\n")
    assert all(what in str(explained) for what in rows)
    words = Text(explained._repr_html_()).words
    assert words[0] == f"recipe {recipe}" and set(rows) | {row.runs for row in explained.rows} <= set(words)
    assert not capsys.readouterr().out, "an interpreter shows it a second time"


def test_explain_reports_missing_implementations_instead_of_failing() -> None:
    layer = qt.Linear(48, 32, recipe="nvfp4")
    x = torch.randn(5, 48)
    with qt.only("cpu"):
        rows = {row.what: row for row in qt.explain(layer, x).rows}
        try:
            layer(x)
        except ValueError:
            assert rows["input"].runs == "nothing" and dict(rows["input"].passed_over)["reference"]
        else:
            assert rows["input"].runs == "cpu"


def test_explain_reports_a_missing_recipe() -> None:
    layer = qt.Linear(48, 32)
    explanation = qt.explain(layer, torch.randn(5, 48))
    assert explanation.recipe is None
    assert repr(explanation) == "no recipe is in force: nn.Linear's own GEMMs, unquantized"
    assert Text(explanation._repr_html_()).words == [repr(explanation)]
    with qt.autocast("mxfp8"):
        assert str(qt.explain(layer, torch.randn(5, 48)).recipe) == "mxfp8"
    with qt.autocast(enabled=False):
        assert qt.explain(qt.Linear(48, 32, recipe="mxfp8"), torch.randn(5, 48)).rows == ()


def test_attention_is_explained_with_its_options_and_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    core = qt.DotProductAttention(4, 8, groups=2, mask_type="causal", soft_cap=2.0)
    explained = qt.explain(core, q, k, v)
    assert explained.runs == "reference" and "no soft cap" in dict(explained.passed_over)["sdpa"]
    assert not capsys.readouterr().out
    assert repr(explained) == str(explained) and "not sdpa: " in str(explained)
    words = Text(explained._repr_html_()).words
    assert "reference" in words and any("sdpa: " in word and "no soft cap" in word for word in words)
    assert "causal_bottom_right" in qt.explain(core, q, k, v, mask_type="causal_bottom_right").how
    with qt.autocast(recipes.mxfp8(attention=True)):
        assert qt.explain(core, q, k, v).runs == "fp8"
    with pytest.raises(ValueError, match="takes q, k and v, but got 1"):
        qt.explain(core, q)
    with pytest.raises(ValueError, match="with 2 heads of 8 features"):
        qt.explain(core, q, q, q)


@pytest.mark.parametrize("mask_type", ["causal", "padding_causal", "arbitrary"])
@pytest.mark.parametrize(
    "layout, shape", [("bshd", (2, 5, 32)), ("sbhd", (5, 2, 32)), ("bshd", (32,)), ("thd", (7, 32))]
)
def test_every_part_of_a_layer_is_explained(
    layout: str, shape: tuple[int, ...], mask_type: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if layout == "thd" and mask_type.startswith("padding"):
        mask_type = "causal"
    recipe = recipes.mxfp8(attention=True)
    layer = qt.TransformerLayer(32, 4, 64, groups=2, mask_type=mask_type, layout=layout, recipe=recipe)
    explained = qt.explain(layer, torch.randn(shape))
    parts = ["attention.core", "attention.qkv_proj", "attention.o_proj", "mlp.up_proj", "mlp.down_proj"]
    assert sorted(explained) == sorted(parts)
    assert explained["attention.core"].runs == "fp8" and len(explained["mlp.down_proj"].rows) == 9
    assert not capsys.readouterr().out
    assert repr(explained) == str(explained) and all(f"{name}\n{explained[name]}" in str(explained) for name in parts)
    assert set(parts) <= set(Text(explained._repr_html_()).words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_whole_model_is_explained_by_its_tokens(dtype: torch.dtype) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=128)).to(dtype)
    qt.convert(model, "mxfp8", head=True)
    explained, layers = qt.explain(model, torch.randint(128, (4, 32))), dict(model.named_modules())
    assert len(explained) == 8
    for name, one in explained.items():
        assert str(one) == str(qt.explain(layers[name], torch.empty(4, 32, layers[name].in_features, dtype=dtype)))


def test_modules_with_nothing_to_explain_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a module that contains some, not Linear; convert the model first"):
        qt.explain(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(ValueError, match="a Linear and its input x, no other arguments"):
        qt.explain(qt.Linear(4, 4), torch.randn(2, 4), torch.randn(2, 4))  # type: ignore[call-overload]
