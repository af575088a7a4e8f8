"""Experts that checkpoints hold as one tensor go out under names that servers read, or are refused by a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import quaver
import quaver.torch as qt
from quaver import reference
from quaver.torch.conversion.export.layouts import STACKS
from tests.close import assert_bitwise
from tests.torch.conversion.export.served import dense
from tests.torch.conversion.families import tiny, tokens

MXFP4 = quaver.recipes.get("mxfp4")


def of_reference(weight: Tensor, recipe: quaver.Recipe = MXFP4) -> Tensor:
    """A matrix [N, K] as the specification quantizes it, float32."""
    spec = recipe.fprop.b
    assert spec is not None
    return torch.from_numpy(reference.dequantize(reference.quantize(weight.detach().float().numpy(), spec)))


def gpt_oss() -> Any:
    model = tiny("gpt_oss", intermediate_size=32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj_bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    for parameter in model.parameters():
        # Not the frequencies of rope, which are a buffer.
        parameter.data = parameter.data.bfloat16()
    return model.eval()


def test_gpt_oss_exports_in_its_published_format_and_transformers_reads_the_same_bits(tmp_path: Path) -> None:
    trained, expected = gpt_oss(), gpt_oss()
    qt.convert(trained, quaver.Rules({"*.experts": "mxfp4", "*": None}))
    result = qt.export(trained, tmp_path / "out", format="mxfp4", check=tokens())
    assert result.check is not None and result.check.weights.largest == 0.0

    tensors = load_file(tmp_path / "out" / "model.safetensors")
    prefix = "model.layers.0.mlp.experts."
    layout = {name.removeprefix(prefix): (t.dtype, tuple(t.shape)) for name, t in tensors.items() if prefix in name}
    assert layout == {
        "gate_up_proj_blocks": (torch.uint8, (4, 64, 2, 16)),
        "gate_up_proj_scales": (torch.uint8, (4, 64, 2)),
        "gate_up_proj_bias": (torch.bfloat16, (4, 64)),
        "down_proj_blocks": (torch.uint8, (4, 64, 1, 16)),
        "down_proj_scales": (torch.uint8, (4, 64, 1)),
        "down_proj_bias": (torch.bfloat16, (4, 64)),
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }

    with torch.no_grad():
        for layer in expected.model.layers:
            for stack in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                each = [of_reference(matrix.t()).t() for matrix in stack]
                stack.copy_(torch.stack(each))
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    assert read.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert_bitwise(read.state_dict()[name], value)
    with torch.no_grad():
        assert_bitwise(read(input_ids=tokens()).logits, expected(input_ids=tokens()).logits)


def test_mxfp4_holds_experts_alone(tmp_path: Path) -> None:
    trained = gpt_oss()
    qt.convert(trained, "mxfp4")
    with pytest.raises(
        ValueError, match=r"'mxfp4' cannot store .*q_proj: it stores only stacks of experts as one tensor"
    ):
        qt.export(trained, tmp_path / "out", format="mxfp4")
    result = qt.export(trained, tmp_path / "out", format="mxfp4", high_precision=["*.self_attn.*"])
    assert all(name.endswith("experts.down_proj") or "gate_up" in name for name in next(iter(result.layers.values())))
    with pytest.raises(ValueError, match="it stores no stack of experts as one tensor; use format='mxfp4', or"):
        qt.export(trained, tmp_path / "other")
    trained = gpt_oss()
    qt.convert(trained, quaver.Rules({"*.experts": "mxfp8", "*": None}))
    with pytest.raises(
        ValueError, match=r"experts: it stores E2M1 codes .*high_precision=\['model.layers.0.mlp.experts'"
    ):
        qt.export(trained, tmp_path / "other", format="mxfp4")


#: What stands before "experts" in the names of layer 0, by family.
SPLIT = {
    "granitemoe": "model.layers.0.block_sparse_moe",
    "granitemoehybrid": "model.layers.0.block_sparse_moe",
    "llama4_text": "model.layers.0.feed_forward",
    "qwen3_5_moe_text": "model.layers.0.mlp",
}


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "rowwise"])
@pytest.mark.parametrize("family", SPLIT)
def test_stacks_are_cut_into_the_experts_that_servers_read(family: str, recipe: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained = tiny(family)
    experts = trained.get_submodule(f"{SPLIT[family]}.experts")
    qt.convert(trained, quaver.Rules({"*.experts": recipe, "*": None}))
    result = qt.export(trained, tmp_path / "out", check=tokens())
    assert result.check is not None and result.check.weights.largest == 0.0
    read = dense(tmp_path / "out")
    for number in range(4):
        up, down = experts.gate_up_proj[number], experts.down_proj[number]
        up, down = (up.t(), down.t()) if family == "llama4_text" else (up, down)
        names = [f"{SPLIT[family]}.experts.{number}.{name}_proj" for name in ("gate", "up", "down")]
        assert_bitwise(torch.cat([read[name] for name in names[:2]]), of_reference(up, quaver.recipes.get(recipe)))
        assert_bitwise(read[names[2]], of_reference(down, quaver.recipes.get(recipe)))
    assert len([name for name in read if name.startswith(SPLIT[family])]) == 12
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if "block_sparse_moe.input" in name]


def test_every_family_of_the_table_is_tested() -> None:
    # The whole models hold the text ones.
    assert set(STACKS) == {*SPLIT, "gpt_oss", "llama4", "qwen3_5_moe"}


@pytest.mark.parametrize("family", ["jetmoe", "aria_text", "dbrx"])
def test_experts_that_no_server_reads_are_refused_by_name_or_exported_in_high_precision(
    family: str, tmp_path: Path
) -> None:
    trained = tiny(family)
    qt.convert(trained, "rowwise")
    sentence = "codes for a layer of this kind" if family == "dbrx" else f"{family}, and no known server reads"
    with pytest.raises(ValueError, match=rf"{sentence}.*high_precision=\["):
        qt.export(trained, tmp_path / "out")
    patterns = ["*.input_linear", "*.output_linear"] if family == "jetmoe" else ["*.experts"]
    result = qt.export(trained, tmp_path / "out", high_precision=patterns)
    left = {name.rpartition(".")[2] for name in result.left}
    assert left == {pattern.removeprefix("*.") for pattern in patterns}


@pytest.mark.parametrize("family", ["mixtral", "llama4_text", "granitemoe"])
def test_scales_of_delayed_scaling_are_per_expert(family: str, tmp_path: Path) -> None:
    trained = tiny(family)
    qt.convert(trained, "delayed")
    for seed in range(3):
        trained(input_ids=tokens(seed)).logits.square().mean().backward()
    result = qt.export(trained, tmp_path / "out", check=tokens())
    assert result.check is not None and result.check.weights.largest == 0.0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    experts = next(m for name, m in trained.named_modules() if name.endswith(".experts"))
    name = next(n for n in tensors if n.endswith("experts.1.down_proj.input_scale") or n.endswith("1.w2.input_scale"))
    # Members are the experts of the first stack, then those of the second.
    assert float(tensors[name]) == 1.0 / float(experts.factor[4 + 1, 0])


@pytest.mark.parametrize("family", ["mixtral", "llama4_text"])
def test_calibration_distinguishes_the_inputs_of_each_expert_gemm(family: str, tmp_path: Path) -> None:
    trained = tiny(family)
    qt.convert(trained, quaver.Rules({"*.experts": "nvfp4", "*": None}))
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                parameter.mul_(16)
    qt.export(trained, tmp_path / "out", calibrate=tokens())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    first, second = ("w1", "w2") if family == "mixtral" else ("gate_proj", "down_proj")
    one, two = (
        next(v for n, v in tensors.items() if n.endswith(f"experts.0.{name}.input_global_scale"))
        for name in (first, second)
    )
    assert float(one) != float(two)


@pytest.mark.parametrize("by", ["rule", "name"])
@pytest.mark.parametrize(
    ("family", "name"),
    [("mixtral", "mlp.experts.0.w1"), ("granitemoe", "block_sparse_moe.experts.0.gate_proj")],
)
def test_experts_in_high_precision_are_named_to_readers(family: str, name: str, by: str, tmp_path: Path) -> None:
    trained = tiny(family)
    qt.convert(trained, quaver.Rules({"*.experts": None if by == "rule" else "rowwise", "*": "rowwise"}))
    qt.export(trained, tmp_path / "out", high_precision=["*.experts"] if by == "name" else [])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    ending = name if family == "granitemoe" else "experts.0.w1"
    assert any(ignored.endswith(ending) for ignored in config["ignore"]), config["ignore"]
