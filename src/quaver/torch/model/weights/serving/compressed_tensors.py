"""compressed-tensors, what llm-compressor writes and vLLM and SGLang read: a scheme a layer, in groups of layers.

Source: github.com/vllm-project/compressed-tensors, version 0.20: the names of its formats and of the tensors of each.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quaver.core.numbers.formats import E2M1, E4M3
from quaver.core.spec import QuantSpec
from quaver.torch.model.weights.serving.layouts import (
    FileFormat,
    Inputs,
    Layout,
    Scheme,
    check_width,
    one_scale,
    row_scales,
    stored_codes,
    tensor_factor,
)
from quaver.torch.numerics.quantized import Quantized

#: By the bits of an element, of blocks of 32.
MX_NAMES = {8: "mxfp8-quantized", 6: "mxfp6-pack-quantized", 4: "mxfp4-pack-quantized"}


def _scheme(layout: Layout, spec: QuantSpec, inputs: Inputs) -> Scheme:
    quantizes = inputs.spec is not None
    if layout == "mx":
        reads = replace(spec, block=(1, 32)) if quantizes else None
        return Scheme(name=MX_NAMES[spec.format.bits], layout=layout, weight=spec, input=reads)
    if layout == "nv":
        static = quantizes and inputs.amax is not None
        reads = QuantSpec(E2M1, (1, 16), "two_level_fp32") if static else None
        return Scheme(name="nvfp4-pack-quantized", layout=layout, weight=spec, input=reads, static=static)
    if not quantizes:
        return Scheme(name="naive-quantized", layout=layout, weight=spec)
    block = {"tensor": (None, None), "channel": (1, None), "block": (1, 128)}[layout]
    static = layout == "tensor" and inputs.scale is not None
    reads = QuantSpec(E4M3, block, "fp32")
    return Scheme(name="float-quantized", layout=layout, weight=spec, input=reads, static=static)


def _tensors(q: Quantized, scheme: Scheme, inputs: Inputs) -> dict[str, Tensor]:
    check_width(q, scheme.layout)
    codes = stored_codes(q)
    if scheme.layout == "nv":
        scales = row_scales(q).view(torch.float8_e4m3fn)
        tensors = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": tensor_factor(q).view(1)}
        if scheme.static:
            tensors["input_global_scale"] = torch.tensor([inputs.static_factor], dtype=torch.float32, device="cpu")
        return tensors
    name = "weight" if scheme.weight.format is E4M3 else "weight_packed"
    if scheme.layout == "mx":
        return {name: codes, "weight_scale": row_scales(q)}
    tensors = {
        name: codes,
        "weight_scale": one_scale(q).view(1) if scheme.layout == "tensor" else q.scales().contiguous(),
    }
    if scheme.static:
        tensors["input_scale"] = torch.tensor([inputs.scale], dtype=torch.float32, device="cpu")
    return tensors


def _arguments(spec: QuantSpec, layout: Layout, of_weight: bool, static: bool) -> dict[str, Any]:
    """What the format says of one operand."""
    words: dict[str, Any] = {"num_bits": spec.format.bits, "type": "float", "symmetric": True}
    words["dynamic"] = not (of_weight or static)
    if layout == "nv":
        return words | {
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
            "dynamic": False if of_weight else "local",
        }
    if layout == "mx":
        return words | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    if layout == "block":
        if of_weight:
            return words | {"strategy": "block", "block_structure": [128, 128]}
        return words | {"strategy": "group", "group_size": 128}
    strategy = layout if layout == "tensor" or of_weight else "token"
    return words | {"strategy": strategy}


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    reads = scheme.input
    return {
        "format": scheme.name,
        "targets": targets,
        "weights": _arguments(scheme.weight, scheme.layout, True, False),
        "input_activations": None if reads is None else _arguments(reads, scheme.layout, False, scheme.static),
        "output_activations": None,
    }


def _configuration(schemes: Mapping[str, Scheme], left: list[str]) -> dict[str, Any]:
    """One group of all linear layers but those that are left, or a group of names for each scheme."""
    groups: dict[str, Any] = {}
    each = list(dict.fromkeys(_same(scheme) for scheme in schemes.values()))
    for number, scheme in enumerate(each):
        targets = ["Linear"] if len(each) == 1 else [name for name in schemes if _same(schemes[name]) == scheme]
        groups[f"group_{number}"] = _group(scheme, targets)
    names = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": names.pop() if len(names) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": left,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _same(scheme: Scheme) -> Scheme:
    """A scheme but for what the format does not tell apart: how scales came about, and how many rows share one."""
    weight = (
        replace(scheme.weight, block=(1, scheme.weight.block[1])) if scheme.layout in ("mx", "nv") else scheme.weight
    )
    kind = {"two_level_fp32": "two_level", "fp32": "power_of_two", "unit": "power_of_two"}.get(
        weight.scale, weight.scale
    )
    return replace(scheme, weight=replace(weight, scale=kind))  # type: ignore[arg-type]


COMPRESSED_TENSORS = FileFormat("compressed-tensors", "vLLM, SGLang, transformers", _scheme, _tensors, _configuration)
