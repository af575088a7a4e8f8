"""Test that quantized torchao weights in safetensors load without torchao, with the bits of its dequantize()."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quaver.compat.checkpoints import read
from tests.close import assert_bitwise
from tests.pairs import pairs

quantization: Any = pytest.importorskip("torchao.quantization")
support: Any = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
pytest.importorskip("safetensors")
pytestmark = pytest.mark.filterwarnings("ignore")

GRANULARITIES: dict[str, Any] = {
    "per row": lambda: quantization.PerRow(),
    "per tensor": lambda: quantization.PerTensor(),
    "per block": lambda: quantization.PerBlock([16, 16]),
}


def saved(state: dict[str, Any], file: Path) -> Path:
    from safetensors.torch import save_file

    tensors, metadata = support.flatten_tensor_state_dict(state)
    save_file(tensors, file, metadata)
    return file


@pytest.fixture
def no_torchao(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setitem(sys.modules, "torchao", None)
    return monkeypatch


@pytest.mark.parametrize(
    ("dtype", "codes", "name"),
    pairs([torch.bfloat16, torch.float32], [torch.float8_e4m3fn, torch.float8_e5m2], GRANULARITIES),
)
def test_float8_weights_are_torchaos_values(
    name: str, codes: torch.dtype, dtype: torch.dtype, tmp_path: Path, no_torchao: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    high = torch.randn(64, 48, dtype=dtype) * torch.logspace(-6, 3, 64)[:, None].to(dtype)
    weight = quantization.Float8Tensor.from_hp(high, codes, GRANULARITIES[name]())
    state = {"a.weight": weight, "a.bias": torch.ones(64, dtype=dtype), "b.norm_qdata": torch.ones(3)}
    content = read(saved(state, tmp_path / "model.safetensors"))
    assert set(content) == set(state)
    assert_bitwise(content["a.weight"], weight.dequantize())
    assert_bitwise(content["b.norm_qdata"], state["b.norm_qdata"])


def test_a_model_that_transformers_saved_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "high")
    torchao = transformers.TorchAoConfig(quantization.Float8WeightOnlyConfig())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "high", quantization_config=torchao, dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "low", max_shard_size="40KB")
    index = tmp_path / "low" / "model.safetensors.index.json"
    assert len(set(json.loads(index.read_text())["weight_map"].values())) > 2
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torchao", None)
        content = read(index)
    quantized = 0
    for name, value in model.state_dict().items():
        ours = type(value).__name__ == "Float8Tensor"
        quantized += ours
        if name in content:
            assert_bitwise(content[name], value.dequantize() if ours else value, name)
    assert quantized == 14
    fresh = transformers.LlamaForCausalLM(config).bfloat16()
    absent = fresh.load_state_dict(content, strict=False)
    assert not absent.unexpected_keys and set(absent.missing_keys) <= {"lm_head.weight"}


def test_other_tensors_and_parts_that_are_missing_are_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    layer = nn.Sequential(nn.Linear(32, 64)).bfloat16()
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig(version=2))
    file = saved(layer.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has 0\.weight as torchao's Int8Tensor, and only Float8Tensor is supported"):
        read(file)
    weight = quantization.Float8Tensor.from_hp(torch.randn(64, 32))
    tensors, metadata = support.flatten_tensor_state_dict({"a.weight": weight})
    scale = tensors.pop("a._weight_scale")
    save_file(tensors, file, metadata)
    with pytest.raises(ValueError, match=r"has a\.weight without a\._weight_scale: pass the whole checkpoint"):
        read(file)
    for broken in ({"_weight_scale": scale[:7]}, {"_weight_qdata": torch.zeros(64, 32)}):
        save_file(
            {**tensors, "a._weight_scale": scale} | {f"a.{name}": value for name, value in broken.items()},
            file,
            metadata,
        )
        with pytest.raises(ValueError, match=r"has a\.weight in a form that no known version of torchao writes"):
            read(file)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="it has no weight_map"):
        read(tmp_path / "model.safetensors.index.json")
