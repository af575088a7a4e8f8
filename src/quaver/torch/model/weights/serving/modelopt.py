"""NVIDIA ModelOpt's files, which TensorRT-LLM, vLLM and SGLang read: one algorithm for a model, or one a layer.

Source: github.com/NVIDIA/Model-Optimizer, version 0.47: names of its algorithms and tensors, hf_quant_config.json.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import quaver
from quaver.core.numbers.formats import E2M1, E4M3
from quaver.core.spec import QuantSpec
from quaver.torch.model.weights.serving.layouts import (
    FileFormat,
    Inputs,
    Layout,
    Scheme,
    Unfit,
    check_width,
    one_scale,
    row_scales,
    stored_codes,
    tensor_factor,
)
from quaver.torch.numerics.quantized import Quantized


def _scheme(layout: Layout, spec: QuantSpec, inputs: Inputs) -> Scheme:
    if layout == "nv":
        if spec.scale == "two_level_fp32":
            raise Unfit(
                "it stores the reciprocal of the tensor's factor, which is exact for powers of two alone; "
                "train with nvfp4(power_of_two=True)"
            )
        static = inputs.spec is not None and inputs.amax is not None
        reads = QuantSpec(E2M1, (1, 16), "two_level_fp32") if static else None
        name = "NVFP4" if static else "W4A16_NVFP4"
        return Scheme(name=name, layout=layout, weight=spec, input=reads, static=static)
    if inputs.spec is None:
        raise Unfit("its readers quantize inputs, and this recipe leaves them in high precision")
    if layout == "tensor":
        if inputs.static_scale is None:
            raise Unfit(
                "it holds the scale of a layer's inputs, and none is known: give calibrate=inputs, which tells those "
                "of linear layers, not of stacked experts"
            )
        return Scheme(name="FP8", layout=layout, weight=spec, input=QuantSpec(E4M3, (None, None), "fp32"), static=True)
    if layout == "channel":
        reads = QuantSpec(E4M3, (1, None), "fp32")
        return Scheme(name="FP8_PER_CHANNEL_PER_TOKEN", layout=layout, weight=spec, input=reads)
    if layout == "mx" and spec.format is E4M3:
        return Scheme(name="MXFP8", layout=layout, weight=spec, input=QuantSpec(E4M3, (1, 32), "e8m0"))
    raise Unfit(f"none of its algorithms has weights in {spec}")


def _tensors(q: Quantized, scheme: Scheme, inputs: Inputs) -> dict[str, Tensor]:
    check_width(q, scheme.layout)
    codes = stored_codes(q)
    if scheme.layout == "nv":
        scales = row_scales(q).view(torch.float8_e4m3fn)
        tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": 1.0 / tensor_factor(q)}
        if inputs.static_factor is not None and scheme.static:
            tensors["input_scale"] = _scalar(1.0 / inputs.static_factor)
        return tensors
    if scheme.layout == "mx":
        return {"weight": codes, "weight_scale": row_scales(q)}
    if scheme.layout == "channel":
        return {"weight": codes, "weight_scale": q.scales().flatten().contiguous()}
    return {"weight": codes, "weight_scale": one_scale(q), "input_scale": _scalar(inputs.static_scale)}


def _scalar(value: float | None) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


#: Bits and elements of a block, by algorithm.
SIZES = {"FP8": (8, None), "FP8_PER_CHANNEL_PER_TOKEN": (8, None), "MXFP8": (8, 32), "NVFP4": (4, 16)}
SIZES["W4A16_NVFP4"] = SIZES["NVFP4"]


def _group(name: str, targets: list[str]) -> dict[str, Any]:
    bits, size = SIZES[name]
    words: dict[str, Any] = {"dynamic": False, "num_bits": bits, "type": "float"}
    words |= {} if size is None else {"group_size": size}
    weights = words | ({"strategy": "channel"} if name == "FP8_PER_CHANNEL_PER_TOKEN" else {})
    group: dict[str, Any] = {"weights": weights, "targets": targets}
    if name == "FP8_PER_CHANNEL_PER_TOKEN":
        group["input_activations"] = words | {"dynamic": True, "strategy": "token"}
    elif name != "W4A16_NVFP4":
        group["input_activations"] = words
    return group


def _details(schemes: Mapping[str, Scheme], left: list[str]) -> dict[str, Any]:
    """What both files say: the algorithm, or that there are several and which layer has which."""
    names = list(dict.fromkeys(scheme.name for scheme in schemes.values()))
    each = {name: {"quant_algo": name} | _size(name) for name in names}
    if len(names) == 1:
        return each[names[0]] | {"kv_cache_quant_algo": None, "exclude_modules": left}
    layers = {layer: each[scheme.name] for layer, scheme in schemes.items()}
    return {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}


def _size(name: str) -> dict[str, int]:
    size = SIZES[name][1]
    return {} if size is None else {"group_size": size}


PRODUCER = {"name": "quaver", "version": quaver.__version__}


def _configuration(schemes: Mapping[str, Scheme], left: list[str]) -> dict[str, Any]:
    details = _details(schemes, left)
    names = list(dict.fromkeys(scheme.name for scheme in schemes.values()))
    of_name = {name: [layer for layer, scheme in schemes.items() if scheme.name == name] for name in names}
    groups = {
        f"group_{number}": _group(name, ["Linear"] if len(names) == 1 else of_name[name])
        for number, name in enumerate(names)
    }
    layers = {"quantized_layers": details["quantized_layers"]} if "quantized_layers" in details else {}
    return {
        "quant_method": "modelopt",
        "quant_algo": details["quant_algo"],
        "config_groups": groups,
        "ignore": left,
        "producer": PRODUCER,
        **layers,
    }


def _beside(schemes: Mapping[str, Scheme], left: list[str]) -> dict[str, Any]:
    return {"hf_quant_config.json": {"producer": PRODUCER, "quantization": _details(schemes, left)}}


MODELOPT = FileFormat("modelopt", "TensorRT-LLM, vLLM, SGLang", _scheme, _tensors, _configuration, _beside)
