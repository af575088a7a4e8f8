"""Converted models as onnxruntime runs them."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quaver
import quaver.torch as qt
from quaver import reference

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore")
RECIPES = ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"]


def llama(recipe: str | quaver.Recipe) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=96))
    qt.convert(model, recipe)
    return model.eval()


def run(file: Path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_a_llama_runs_in_onnxruntime_with_any_number_of_tokens(recipe: str, tmp_path: Path) -> None:
    model, file = llama(recipe), tmp_path / "model.onnx"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    qt.onnx_export(model, {"input_ids": torch.randint(96, (2, 9))}, file)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    graph = onnx.load(file).graph
    kinds = Counter(node.op_type for node in graph.node)
    # Inputs that several layers share are quantized once; every weight is a constant of float8.
    assert kinds["QuantizeLinear"] in (4, 7) and kinds["DequantizeLinear"] == 14 and "Log" not in kinds
    weights = [x for x in graph.initializer if x.data_type == onnx.TensorProto.FLOAT8E4M3FN and len(x.dims) == 2]
    assert len(weights) == 7
    for shape in ((2, 9), (3, 17), (1, 1)):
        ids = torch.randint(96, shape)
        with torch.no_grad():
            assert distance(run(file, ids), model(ids).logits) < 1e-6


def layers(recipe: str | quaver.Recipe) -> nn.Sequential:
    """Two layers, some steps old where there are histories."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 160))
    qt.convert(model, recipe)
    for _ in range(2 if recipe == "delayed" else 0):
        model(torch.randn(8, 128)).sum().backward()
    return model.eval()


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_in_float8_runs_in_onnxruntime(recipe: str, tmp_path: Path) -> None:
    model, file = layers(recipe), tmp_path / "model.onnx"
    qt.onnx_export(model, torch.randn(5, 128), file)
    for rows in (5, 1, 12):
        x = torch.randn(rows, 128)
        with torch.no_grad():
            assert distance(run(file, x), model(x)) < 1e-6


def test_scales_that_are_no_powers_of_two(tmp_path: Path) -> None:
    """Codes of values at a tie may differ where a quotient is rounded in place of a product."""
    model, file, x = layers(quaver.recipes.rowwise(power_of_two=False)), tmp_path / "model.onnx", torch.randn(64, 128)
    qt.onnx_export(model, x, file)
    with torch.no_grad():
        assert distance(run(file, x), model(x)) < 1e-3


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_our_blocks(recipe: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"activation": "swiglu", "normalization": "RMSNorm", "bias": False, "mask_type": "causal"}
    layer = qt.TransformerLayer(64, 4, 128, groups=2, rope=qt.RotaryEmbedding(16), **options).eval()
    x, file = torch.randn(2, 9, 64), tmp_path / "layer.onnx"
    with qt.autocast(recipe):
        qt.onnx_export(layer, x, file)
    for shape in ((2, 9, 64), (1, 20, 64)):
        x = torch.randn(shape)
        with torch.no_grad(), qt.autocast(recipe):
            assert distance(run(file, x), layer(x)) < 1e-6


class Bare(nn.Module):
    """One product by the identity: what comes out are the input's values as they were quantized."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(32))
        qt.convert(self, recipe)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_scales_near_every_power_of_two_are_the_references(recipe: str, tmp_path: Path) -> None:
    """Amaxes of 448 × 2**p, an ulp below and above, zero, and the smallest and largest numbers."""
    p = np.arange(-130, 118, dtype=np.float64)
    top = (448 * 2.0**p).astype(np.float32)
    amax_values = np.concatenate(
        [top, np.nextafter(top, np.float32(0)), np.nextafter(top, np.float32(np.inf)), [0, 1e-45, 3e38]]
    )
    amax_values = amax_values[np.isfinite(amax_values)].astype(np.float32)
    x = np.random.default_rng(0).uniform(-1, 1, (len(amax_values), 32)).astype(np.float32) * amax_values[:, None]
    x[:, 3] = amax_values
    model, file = Bare(recipe).eval(), tmp_path / "bare.onnx"
    qt.onnx_export(model, torch.randn(4, 32), file)
    spec = quaver.recipes.get(recipe).fprop.a
    wanted = reference.dequantize(reference.quantize(x, spec))
    got = run(file, torch.from_numpy(x)).numpy()
    normal = np.abs(wanted) >= 2.0**-126
    wrong = (got != wanted) & normal
    assert not wrong.any(), (amax_values[wrong.any(1)][:5], got[wrong][:5], wanted[wrong][:5])


def test_nonfinite_values_poison_their_row(tmp_path: Path) -> None:
    model, file = Bare("rowwise").eval(), tmp_path / "bare.onnx"
    qt.onnx_export(model, torch.randn(4, 32), file)
    x = torch.randn(4, 32)
    x[1, 5], x[2, 7] = float("inf"), float("nan")
    got = run(file, x)
    assert got[1].isnan().all() and got[2].isnan().all() and got[[0, 3]].isfinite().all()


def test_operations_without_an_onnx_counterpart_give_a_clear_error(tmp_path: Path) -> None:
    x = torch.randn(4, 32)
    for recipe, sentence in (
        ("nvfp4", "cannot be expressed with ONNX's float8"),
        ("mxfp6", "cannot be expressed with ONNX's float8"),
    ):
        with pytest.raises(ValueError, match=sentence):
            qt.onnx_export(Bare(recipe), x, tmp_path / "a.onnx")
    plain = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match="no layer of this model is quantized"):
        qt.onnx_export(plain, x, tmp_path / "a.onnx")
    with pytest.raises(ValueError, match="float8 with block scales requires 21 or later"):
        qt.onnx_export(Bare("mxfp8"), x, tmp_path / "a.onnx", opset=18)
    with pytest.raises(ValueError, match="is not a folder"):
        qt.onnx_export(Bare("mxfp8"), x, tmp_path / "none" / "a.onnx")
    packed = nn.Sequential(nn.MultiheadAttention(32, 2))
    qt.convert(packed, "mxfp8")
    with pytest.raises(ValueError, match="MultiheadAttention"):
        qt.onnx_export(packed, (x, x, x), tmp_path / "a.onnx")
    odd = nn.Sequential(nn.Linear(40, 8))
    qt.convert(odd, "mxfp8")
    with pytest.raises(ValueError, match="end within a block of 32"):
        qt.onnx_export(odd, torch.randn(2, 40), tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())
