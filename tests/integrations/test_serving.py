"""Exported files as the formats' own packages read them: transformers, compressed-tensors and NVIDIA ModelOpt."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.torch.conversion.export.check import divergence
from quaver.torch.conversion.export.operands import Reader
from tests.close import assert_bitwise
from tests.torch.conversion.export.served import HELD

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}


def llama(recipe: str) -> Any:
    """In bf16, some steps old where there are histories."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=128)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    qt.convert(model, recipe)
    if recipe == "delayed":
        for _ in range(3):
            model(input_ids=tokens(), labels=tokens()).loss.backward()
    return model


def tokens() -> Tensor:
    return torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(1))


def read(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def assert_same_weights(folder: Path, model: Any) -> None:
    """A loaded model has the weights that our reader finds, bit for bit."""
    reader = Reader(folder)
    prefixes = reader.quantized()
    assert prefixes
    for prefix in prefixes:
        assert_bitwise(model.get_parameter(prefix + "weight").detach().float(), reader.decoded(prefix).dense(), prefix)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(tokens()).logits.flatten(0, 1).double(), -1)


@pytest.mark.parametrize("recipe", HELD["compressed-tensors"])
def test_compressed_tensors_reads_the_same_weights_and_runs_them(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    trained = llama(recipe)
    result = qt.export(trained, tmp_path / "out", check=tokens(), calibrate=tokens())
    assert result.check is not None and result.check.weights.largest == 0.0
    dense = read(
        tmp_path / "out", dtype=torch.float32, quantization_config=transformers.CompressedTensorsConfig(dequantize=True)
    )
    assert_same_weights(tmp_path / "out", dense)
    # Its own inputs, quantized by its own observers: the remaining difference is only what the check calls inputs.
    run = divergence(logits(trained), logits(read(tmp_path / "out", dtype=torch.bfloat16)))
    assert run.mean < 3 * max(result.check.inputs.mean, result.check.high_inputs.mean)


@pytest.mark.parametrize("recipe", HELD["deepseek"])
def test_transformers_reads_deepseeks_blocks(recipe: str, tmp_path: Path) -> None:
    trained = llama(recipe)
    qt.export(trained, tmp_path / "out", format="deepseek")
    assert_same_weights(tmp_path / "out", read(tmp_path / "out", dtype=torch.float32))


def modelopt() -> Any:
    """ModelOpt's containers by algorithm."""
    pytest.importorskip("modelopt")
    from modelopt.torch.quantization import qtensor

    return qtensor


@pytest.mark.parametrize("recipe", HELD["modelopt"])
def test_modelopt_reads_the_same_weights(recipe: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qtensor = modelopt()
    qt.export(llama(recipe), tmp_path / "out", format="modelopt", calibrate=tokens())
    reader = Reader(tmp_path / "out")
    for prefix in reader.quantized():
        wanted = reader.decoded(prefix).dense()
        weight, scale = reader.tensor(prefix + "weight"), reader.tensor(prefix + "weight_scale")
        if weight.dtype is torch.uint8:
            packed = qtensor.NVFP4QTensor(wanted.shape, torch.float32, weight)
            second = reader.tensor(prefix + "weight_scale_2")
            got = packed.dequantize(torch.float32, scale=scale, double_scale=second, block_sizes={-1: 16})
        elif scale.dtype is torch.uint8:
            got = qtensor.MXFP8QTensor(wanted.shape, torch.float32, weight).dequantize(torch.float32, scale=scale)
        else:
            scale = scale if scale.dim() == 0 else scale[:, None]
            got = qtensor.FP8QTensor(wanted.shape, torch.float32, weight).dequantize(torch.float32, scale=scale)
        # Its table of four bits has no zero with a sign.
        assert_bitwise(got + 0.0, wanted + 0.0, prefix)
        if f"{prefix}input_scale" in reader.where:
            assert float(reader.tensor(f"{prefix}input_scale")) > 0


def test_compressed_tensors_converts_modelopts_files_to_our_own(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter

    trained = llama("nvfp4")
    for format in ("modelopt", "compressed-tensors"):
        qt.export(trained, tmp_path / format, format=format, calibrate=tokens())
    nvidia, ours = Reader(tmp_path / "modelopt"), Reader(tmp_path / "compressed-tensors")
    names = {name: nvidia.tensor(name) for name in nvidia.where}
    converter = ModelOptNvfp4Converter(ignore=["lm_head"], targets=["re:.*_proj$"])
    converted = converter.process(names)
    assert converted.keys() == set(ours.where)
    for name in ours.where:
        if name.endswith(("weight_packed", "weight_scale", "weight_global_scale")):
            given = ours.tensor(name)
            assert_bitwise(converted[name].reshape(given.shape).view(torch.uint8), given.view(torch.uint8), name)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
@pytest.mark.parametrize(("recipe", "format"), [("rowwise", "compressed-tensors"), ("blockwise", "deepseek")])
def test_experts_are_exported_under_their_checkpoint_names(
    family: str, recipe: str, format: str, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    torch.manual_seed(0)
    more: dict[str, Any] = {"num_key_value_heads": 2, "vocab_size": 64}
    if family == "DeepseekV3":
        more |= {"moe_intermediate_size": 128, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        more |= {"num_experts_per_tok": 2, "first_k_dense_replace": 0, "q_lora_rank": 64, "kv_lora_rank": 64}
        more |= {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4}
    elif family == "Qwen3Moe":
        more |= {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
    else:
        more |= {"num_local_experts": 4}
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES, **more))
    model = model.to(torch.bfloat16)
    qt.convert(model, recipe)
    ids = tokens() % 64
    result = qt.export(model, tmp_path / "out", format=format, check=ids)
    assert result.check is not None and result.check.weights.largest == 0.0
    options = (
        {} if format == "deepseek" else {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    )
    loaded = read(tmp_path / "out", dtype=torch.float32, **options)
    experts = loaded.model.layers[0].mlp.experts
    original = model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        theirs, ours = getattr(experts, name), getattr(original, name)
        for e in range(4):
            wanted = qt.quantize(ours[e].detach(), original.recipe.fprop.b).dequantize()
            assert_bitwise(theirs[e].detach().float(), wanted, f"{name} of expert {e}")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [f"{family}ForCausalLM"]


@pytest.mark.parametrize("head", [False, True])
def test_tied_heads_are_tied_again_unless_they_are_quantized(head: bool, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=128, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config)
    qt.convert(model, "rowwise", head=head)
    result = qt.export(model, tmp_path / "out", check=tokens())
    assert result.check is not None and result.check.weights.largest == 0.0
    assert ("lm_head.weight" in Reader(tmp_path / "out").where) == head
    options = transformers.CompressedTensorsConfig(dequantize=True)
    loaded = read(tmp_path / "out", dtype=torch.float32, quantization_config=options)
    assert_same_weights(tmp_path / "out", loaded)
    assert_bitwise(loaded.get_input_embeddings().weight.detach(), model.get_input_embeddings().weight.detach())
    shared = loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert shared == (not head)


def test_adapters_are_merged_first(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(llama("mxfp8"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge_and_unload"):
        qt.export(adapted, tmp_path / "out")
    qt.export(adapted.merge_and_unload(), tmp_path / "out")
    assert "model.layers.0.self_attn.q_proj.weight" in Reader(tmp_path / "out").where
