"""Streams have the tensors of exported files, within few bytes and little memory, and send what has changed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import quaver.torch as qt
from quaver.torch.serving import ServingStream
from quaver.torch.serving.engines import ENGINES, VLLM
from tests.torch.conversion.export.served import HELD, model, tokens
from tests.torch.parallel.fsdp.live import Live
from tests.torch.serving.small import assert_same, llama, tensors
from tests.torch.serving.small import tokens as tokens_of_llama

#: Recipes that a checkpoint format holds.
PAIRS = [(recipe, format) for format in HELD for recipe in HELD[format]]


@pytest.mark.parametrize(("recipe", "checkpoint_format"), PAIRS)
def test_stream_has_the_tensors_of_exported_files(recipe: str, checkpoint_format: str, tmp_path: Path) -> None:
    trained = model(recipe)
    qt.export(trained, tmp_path / "out", format=checkpoint_format, calibrate=tokens())
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    stream = qt.serving_stream(
        trained, "transformers", checkpoint_format=checkpoint_format, calibrate=tokens(), bucket_bytes=4000
    )
    buckets = list(stream)
    assert_same(tensors(buckets), load_file(tmp_path / "out" / "model.safetensors"))
    assert all(len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= 4000 for bucket in buckets)
    assert len(buckets) > 3
    assert_same(dict(trained.state_dict()), before)


def test_stored_codes_are_streamed_without_a_copy() -> None:
    stored = model("mxfp8")
    qt.quantize_weights(stored, "mxfp8", skip=["5"])
    sent = dict(pair for bucket in qt.serving_stream(stored, "transformers") for pair in bucket)
    codes: Any = stored[1].weight.detach()
    assert sent["1.weight"].data_ptr() == codes.codes.data_ptr()
    assert_same(tensors([list(sent.items())]), tensors(qt.serving_stream(model("mxfp8"), "transformers")))


#: Largest share of bf16's bytes of converted weights with K >= 1024.
LARGEST = {
    "tensorwise": 0.503,
    "rowwise": 0.503,
    "blockwise": 0.503,
    "mxfp8": 0.516,
    "nvfp4": 0.282,
}


PAGE = Path(__file__).parents[3] / "docs" / "guides" / "rollout.md"


@pytest.mark.parametrize("recipe", LARGEST)
def test_bytes_of_converted_weights(recipe: str) -> None:
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{recipe}`") and "%" in line)
    for k, documented in zip((1024, 4096), row.split("|")[2:], strict=False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(k, 256), nn.GELU(), nn.Linear(256, 8)).bfloat16()
        qt.convert(net, recipe, skip=["2"])
        stream = qt.serving_stream(net, "transformers")
        sizes = {name: tensor.nbytes for name, tensor in tensors(stream).items()}
        quantized = sum(size for name, size in sizes.items() if name.startswith("0.weight"))
        assert quantized == stream.bytes.codes + stream.bytes.scales
        assert stream.bytes.bf16 == 2 * k * 256
        assert quantized / (2 * k * 256) == stream.bytes.share <= LARGEST[recipe]
        assert documented.strip() == f"{100 * stream.bytes.share:.1f} %"
        assert stream.bytes.other == sum(sizes.values()) - quantized == 2 * (256 + 256 * 8 + 8)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("changed", [False, True])
def test_no_pass_holds_a_copy_of_the_model(recipe: str, changed: bool) -> None:
    """The peak is that of quantizing one layer, whatever their number, and less than a copy in bf16."""
    peaks = []
    for count in (2, 32):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(count)])
        qt.convert(net, recipe)
        stream = qt.serving_stream(net, "transformers", bucket_bytes=1)
        with Live([*net.parameters(), *net.buffers()]) as live:
            for _ in stream.changed() if changed else stream:
                pass
        peaks.append(live.peak)
    assert peaks[1] < 1.1 * peaks[0] < 32 * 256 * 256 * 2


def test_changed_layers_only_with_those_that_an_engine_fuses() -> None:
    trained = llama("nvfp4", bias=True)
    stream = qt.serving_stream(trained, "vllm")
    everything = tensors(stream.changed())
    assert_same(everything, tensors(stream))
    assert tensors(stream.changed()).keys() == everything.keys(), "a pass over everything forgets digests"
    assert not tensors(stream.changed())
    attention = trained.model.layers[1].self_attn
    with torch.no_grad():
        # A write that changes no version counter.
        attention.k_proj.weight.data[3, 5] += 1.0
        trained.model.norm.weight.data[0] += 1.0
    sent = tensors(stream.changed())
    prefix = "model.layers.1.self_attn."
    parts = ("weight_packed", "weight_scale", "weight_global_scale", "bias")
    assert set(sent) == {"model.norm.weight"} | {
        f"{prefix}{name}.{part}" for name in ("q_proj", "k_proj", "v_proj") for part in parts
    }
    attention.o_proj.bias.data += 1.0
    assert set(tensors(stream.changed())) == {
        f"{prefix}o_proj.{part}" for part in ("weight_packed", "weight_scale", "weight_global_scale", "bias")
    }
    # An abandoned pass, or a receiver that has restarted.
    stream.bucket_bytes = 1
    attention.o_proj.bias.data += 1.0
    abandoned = stream.changed()
    next(abandoned)
    del abandoned
    assert tensors(stream.changed()).keys() == everything.keys()
    stream.reset()
    assert tensors(stream.changed()).keys() == everything.keys()


def test_a_pass_within_another_one_counts_and_forgets_its_own() -> None:
    trained = llama("mxfp8")
    stream = qt.serving_stream(trained, "transformers", bucket_bytes=9000)
    expected = tensors(stream)
    sizes = vars(stream.bytes)
    assert_same(tensors(bucket for pair in zip(stream, stream, strict=True) for bucket in pair[:1]), expected)
    assert vars(stream.bytes) == sizes
    outer = stream.changed()
    next(outer)
    assert tensors(stream.changed()).keys() == expected.keys()
    tensors(outer)
    assert not tensors(stream.changed()), "the inner pass was complete"
    outer = stream.changed()
    reset = False
    trained.model.norm.weight.data += 1.0
    for _ in outer:
        stream.reset()
        reset = True
    assert reset and tensors(stream.changed()).keys() == expected.keys()


def test_passes_between_forward_and_backward_change_nothing() -> None:
    """Losses, states and the random generator are those of training without passes, in any context."""
    for recipe in ("delayed", "nvfp4"):
        ends = []
        for contexts in ((), (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16))):
            trained = llama(recipe, bias=True)
            optimizer = torch.optim.SGD(trained.parameters(), 0.1)
            for _ in range(3):
                for _ in range(2):
                    loss = trained(tokens_of_llama(), labels=tokens_of_llama()).loss
                    for context in contexts:
                        with context:
                            sent = tensors(qt.serving_stream(trained, "transformers"))
                        assert_same(sent, tensors(qt.serving_stream(trained, "transformers").changed()))
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append(dict(trained.state_dict()) | {"loss": loss.detach(), "generator": torch.get_rng_state()})
        assert_same(*ends)


class Mixture(nn.Module):
    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        each = [nn.ModuleDict({"w1": nn.Linear(width, width), "w2": nn.Linear(width, width)}) for _ in range(experts)]
        self.experts, self.gate = nn.ModuleList(each), nn.Linear(width, width)


@pytest.mark.parametrize("changed", [False, True])
def test_no_pass_holds_all_experts_of_a_layer(changed: bool) -> None:
    peaks = []
    for count in (2, 24):
        torch.manual_seed(0)
        net = nn.ModuleDict({"mlp": Mixture(count, 128)})
        qt.convert(net, "nvfp4")
        stream = qt.serving_stream(net, "transformers", bucket_bytes=1)
        with Live([*net.parameters(), *net.buffers()]) as live:
            for _ in stream.changed() if changed else stream:
                pass
        peaks.append(live.peak)
    assert peaks[1] < 1.1 * peaks[0]


def test_experts_of_a_layer_are_sent_together() -> None:
    torch.manual_seed(0)
    net = nn.ModuleDict({"mlp": Mixture(3, 32)})
    qt.convert(net, "mxfp8")
    stream = qt.serving_stream(net, "transformers")
    everything = tensors(stream.changed())
    codes = stream.bytes.codes
    assert codes == 7 * 32 * 32
    net["mlp"].experts[1]["w2"].weight.data[0, 0] += 1.0
    sent = tensors(stream.changed())
    assert set(sent) == {name for name in everything if ".experts." in name}
    assert stream.bytes.codes == 6 * 32 * 32


def test_delta_finds_every_change_of_one_code() -> None:
    net = nn.Sequential(nn.Linear(32, 32, bias=False))
    qt.quantize_weights(net, "mxfp8")
    stream = qt.serving_stream(net, "transformers")
    tensors(stream.changed())
    codes: Any = net[0].weight.detach()
    for place in range(0, 1024, 37):
        codes.codes.view(torch.uint8).view(-1)[place] ^= 1
        assert set(tensors(stream.changed())) == {"0.weight", "0.weight_scale"}
    codes.scale.view(-1)[3] += 1
    assert set(tensors(stream.changed())) == {"0.weight", "0.weight_scale"}


def test_configuration_is_that_of_exported_files(tmp_path: Path) -> None:
    import json

    trained = llama("mxfp8")
    qt.export(trained, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert qt.serving_stream(trained, "vllm").quantization_config == config["quantization_config"]


def test_every_recipe_is_streamed_or_rejected_by_an_engine() -> None:
    rejected = {
        (engine, recipe)
        for engine in ENGINES
        for recipe in HELD["compressed-tensors"]
        if not accepts(qt.serving_stream(model(recipe), engine))
    }
    assert rejected == {("sglang", "mxfp8"), ("sglang", "mxfp6"), ("sglang", "mxfp4"), ("vllm", "mxfp6")}


def accepts(stream: ServingStream) -> bool:
    try:
        next(iter(stream))
    except ValueError as error:
        assert "does not read these schemes of 'compressed-tensors'" in str(error)
        return False
    return True


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "engine": ({"format": "tensorrt"}, "format of a serving stream 'tensorrt'"),
    "old version": ({"format": "vllm", "version": "0.24.1"}, f"vllm 0.24.1 is not supported.*{VLLM.versions}"),
    "new version": ({"format": "vllm", "version": "1.0"}, r"0\.25 to 0\.33"),
    "no version": ({"format": "sglang", "version": "main"}, r"sglang main is not supported.*0\.5\.21 to 0\.5\.23"),
    "format": ({"checkpoint_format": "gguf"}, "checkpoint format 'gguf'"),
    "bucket": ({"bucket_bytes": 0}, "bucket_bytes is 0"),
    "bucket of text": ({"bucket_bytes": "256"}, "bucket_bytes is '256'"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_arguments(bad: str) -> None:
    arguments, message = BAD[bad]
    with pytest.raises(ValueError, match=message):
        qt.serving_stream(model("mxfp8"), **arguments)


@pytest.mark.parametrize("version", ["0.25.0", "0.33.1rc1.dev3+gabc", "v0.29.0"])
def test_known_versions(version: str) -> None:
    assert qt.serving_stream(model("mxfp8"), "vllm", version=version).engine is VLLM


def test_mixed_schemes_are_one_error_before_anything_is_sent() -> None:
    trained = llama(None)
    qt.convert(trained, {"*.k_proj": "rowwise", "*": "mxfp8"})
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    with pytest.raises(ValueError, match=re.escape("fuse these layers into one weight with one scheme")):
        next(iter(qt.serving_stream(trained, "vllm")))
    trained = llama(None)
    qt.convert(trained, {"*.mlp.*": "mxfp8", "*": "rowwise"})
    with pytest.raises(
        ValueError, match=r"sglang does not read .* mxfp8-quantized \(model.layers.0.mlp.gate_proj"
    ) as error:
        next(iter(qt.serving_stream(trained, "sglang")))
    assert "high_precision=['model.layers.0.mlp.down_proj'" in str(error.value)
    sent = tensors(qt.serving_stream(trained, "sglang", high_precision=["*.mlp.*"]))
    assert sent["model.layers.0.mlp.up_proj.weight"].dtype is torch.float32
    assert_same(dict(trained.state_dict()), before)


def test_weights_that_are_not_finite_are_rejected() -> None:
    trained = llama("mxfp8")
    trained.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.down_proj.weight contains infinities or NaN"):
        list(qt.serving_stream(trained, "vllm"))


def test_extra_state_of_modules_is_not_sent() -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 1}

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32, bias=False), Counting(32, 32, bias=False))
    qt.convert(net, "mxfp8", skip=["1"])
    stream = qt.serving_stream(net, "vllm")
    assert set(tensors(stream.changed())) == {"0.weight", "0.weight_scale", "1.weight"}
