"""Streams load into vLLM's own quantized layers by their own weight loaders, on a CPU: no kernel is run.

Kernels are replaced, because vLLM chooses one when it makes a layer and has none for most schemes on a CPU. It passes
with the Python files of vLLM 0.33.0's wheel and the pure Python packages that they import; CUDA is not needed.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import quaver.torch as qt
from tests.torch.serving.small import assert_same, llama, tensors

pytest.importorskip("vllm", reason="vllm is not installed: its wheel of PyPI loads weights on a CPU too")

SCHEMES = "vllm.model_executor.layers.quantization.compressed_tensors.schemes."
#: Functions that choose a kernel, by the module that calls them.
KERNELS = {
    "compressed_tensors_w8a8_fp8": "init_fp8_linear_kernel",
    "compressed_tensors_w8a8_mxfp8": "init_mxfp8_linear_kernel",
    "compressed_tensors_w4a4_mxfp4": "init_mxfp4_linear_kernel",
    "compressed_tensors_w4a4_nvfp4": "init_nvfp4_linear_kernel",
}


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM on one rank, with a configuration for a model in bfloat16."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    config: Any = VllmConfig(device_config=DeviceConfig("cpu"))
    file: Path = tmp_path_factory.mktemp("vllm") / "store"
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{file}", 0, backend="gloo")
        parallel_state.initialize_model_parallel(1, 1)
        config.model_config = SimpleNamespace(dtype=torch.bfloat16, is_moe=False, quantization_config=None)
        yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "mxfp4", "nvfp4"])
def test_fused_layers_of_vllm_hold_the_codes_of_a_stream(recipe: str, configuration: None) -> None:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    stream = qt.serving_stream(llama(recipe, hidden=256), "vllm")
    sent = tensors(stream)
    quantization = CompressedTensorsConfig.from_config(stream.quantization_config)
    with mock.patch.multiple(importlib.import_module(module_of(recipe)), **{kernel_of(recipe): mock.MagicMock()}):
        options = {"bias": False, "quant_config": quantization, "params_dtype": torch.bfloat16}
        prefix = "model.layers.0."
        qkv = QKVParallelLinear(256, 64, 4, 4, prefix=f"{prefix}self_attn.qkv_proj", **options)
        gate_up = MergedColumnParallelLinear(256, [768, 768], prefix=f"{prefix}mlp.gate_up_proj", **options)
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
    assert_loaded(qkv, {shard: f"{prefix}{name}." for shard, name in names.items()}, sent)
    assert_loaded(gate_up, {0: f"{prefix}mlp.gate_proj.", 1: f"{prefix}mlp.up_proj."}, sent)


def module_of(recipe: str) -> str:
    kind = {"mxfp8": "w8a8_mxfp8", "mxfp4": "w4a4_mxfp4", "nvfp4": "w4a4_nvfp4"}.get(recipe, "w8a8_fp8")
    return f"{SCHEMES}compressed_tensors_{kind}"


def kernel_of(recipe: str) -> str:
    return KERNELS[module_of(recipe).rpartition(".")[2]]


def assert_loaded(layer: Any, prefixes: dict[Any, str], sent: dict[str, torch.Tensor]) -> None:
    """Load a stream's tensors as the models of vLLM do, and check that the layer has all of their bytes in order."""
    loaded = dict.fromkeys(name for name, _ in layer.named_parameters())
    for shard, prefix in prefixes.items():
        own = {name.removeprefix(prefix): tensor for name, tensor in sent.items() if name.startswith(prefix)}
        assert own.keys() <= loaded.keys()
        for name, tensor in own.items():
            parameter = getattr(layer, name)
            assert parameter.dtype is tensor.dtype
            parameter.weight_loader(parameter, tensor, shard)
    for name, parameter in layer.named_parameters():
        each = [sent[prefix + name] for prefix in prefixes.values() if prefix + name in sent]
        assert each, f"vLLM expects {name}, which is not in the stream"
        expected = torch.cat([tensor.contiguous().view(torch.uint8).flatten() for tensor in each])
        assert torch.equal(parameter.data.contiguous().view(torch.uint8).flatten(), expected), name


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8", "nvfp4"])
def test_layers_that_did_not_change_keep_their_weights_in_vllm(recipe: str, configuration: None) -> None:
    """vLLM's reload of a part of the layers, as between start_weight_update and finish_weight_update."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.linear import QKVParallelLinear
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.model_loader import reload

    trained = llama(recipe, hidden=256)
    stream = qt.serving_stream(trained, "vllm")
    full = tensors(stream.changed())
    trained.model.layers[1].self_attn.v_proj.weight.data[0, 0] += 8.0
    sent = tensors(stream.changed())
    names = [f"model.layers.{i}.self_attn." for i in range(2)]
    prefixes = [{shard: f"{name}{shard}_proj." for shard in "qkv"} for name in names]
    assert sent and all(name.startswith(names[1]) for name in sent)
    quantization = CompressedTensorsConfig.from_config(stream.quantization_config)
    options = {"bias": False, "quant_config": quantization, "params_dtype": torch.bfloat16}
    with mock.patch.multiple(importlib.import_module(module_of(recipe)), **{kernel_of(recipe): mock.MagicMock()}):
        # The last one is loaded from all new tensors at once.
        *layers, fresh = [
            QKVParallelLinear(256, 64, 4, 4, prefix=f"{name}qkv_proj", **options) for name in (*names, names[1])
        ]
    model = torch.nn.ModuleList(layers)
    reload.record_metadata_for_reloading(model)
    loads = [(layers[0], prefixes[0], full), (layers[1], prefixes[1], full), (fresh, prefixes[1], full | sent)]
    for layer, own, source in loads:
        assert_loaded(layer, own, source)
        layer.quant_method.process_weights_after_loading(layer)
    before = {name: p.data.clone() for name, p in layers[0].named_parameters()}
    reload.initialize_layerwise_reload(model)
    for shard, prefix in prefixes[1].items():
        for name in [name for name in sent if name.startswith(prefix)]:
            parameter = getattr(layers[1], name.removeprefix(prefix))
            parameter.weight_loader(parameter, sent[name], shard)
    reload.finalize_layerwise_reload(model, get_current_vllm_config().model_config)
    assert_same({name: p.data for name, p in layers[0].named_parameters()}, before)
    expected = {name: p.data for name, p in fresh.named_parameters()}
    assert_same({name: p.data for name, p in layers[1].named_parameters()}, expected)
