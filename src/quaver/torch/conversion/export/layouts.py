"""Layouts of quantized operands in files, and the formats compressed-tensors, DeepSeek and ModelOpt.

A layout is a reader's view of a spec's blocks: one scale per tensor, per row, per 128 × 128 square, or per block of 32
or 16 along k. A block of several rows is written as several rows that repeat its scale, which changes no number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

import quaver
from quaver.recipes.formats import E2M1, E4M3
from quaver.recipes.spec import QuantSpec
from quaver.torch.numerics.quantized import Quantized

# ---- layouts ----

#: "tensor": one scale; "channel": one per row; "block": one per 128 × 128; "mx": an E8M0 byte per 32 along k; "nv": an
#: E4M3 scale per 16 along k and a tensor factor.
Layout = Literal["tensor", "channel", "block", "mx", "nv"]
#: By layout, the number that K must be a multiple of: readers assume that every block along k is complete.
WIDTHS: dict[Layout, int] = {"tensor": 1, "channel": 1, "block": 1, "mx": 32, "nv": 16}


class UnsupportedByFormat(ValueError):
    """A format cannot represent this operand; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Storage scheme of a layer's weight in a file format, with the way its readers quantize the layer's input."""

    #: Name of the scheme in the format.
    name: str
    layout: Layout
    #: Spec of the weight as fprop consumes it.
    weight: QuantSpec
    #: Spec with which a reader quantizes the input, or None for 16-bit inputs.
    input: QuantSpec | None = None
    #: True if the input's scale is in the file; with two-level scales, the tensor factor is.
    static: bool = False

    @property
    def reads(self) -> str:
        """Text that says how a reader quantizes the input."""
        if self.input is None:
            return "16-bit inputs"
        where = "measured"
        if self.static:
            where = "the tensor's factor in the file" if self.input.two_level else "scale in the file"
        return f"inputs {self.input.format}[{_block(self.input)}], {where}"


def _block(spec: QuantSpec) -> str:
    return spec.text.partition("[")[2].partition("]")[0]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Statistics of a layer's input that are known at export."""

    #: Spec with which the recipe quantizes inputs, or None for high precision.
    spec: QuantSpec | None
    #: Decode scale from delayed scaling, or None if no history has set one.
    scale: float | None = None
    #: Input amax that `calibrate` measured, or None.
    amax: float | None = None

    @property
    def static_scale(self) -> float | None:
        """Decode scale per tensor for E4M3 inputs, or None if unknown."""
        if self.scale is not None or self.amax is None:
            return self.scale
        return self.amax / E4M3.max if self.amax else 1.0

    @property
    def static_factor(self) -> float | None:
        """Encode factor per tensor for two-level block scales, or None if unknown."""
        if self.amax is None:
            return None
        return E4M3.max * E2M1.max / self.amax if self.amax else 1.0


class FileFormat:
    """A checkpoint format for export. Each format is one constant of this class.

    Args:
        name: value of `format=`.
        readers: programs that read the format.
        scheme: function of (layout, weight's spec, inputs) that returns a `Scheme` or raises `UnsupportedByFormat`.
        tensors: function of (operand, scheme, inputs) that returns a layer's tensors by the suffix after the layer's
            name.
        configuration: function of (schemes by layer name, names of matrices in high precision) that returns the
            quantization entry of config.json.
        beside: function with the same arguments that returns the content of further JSON files, by file name.
        stacked: True for a format that only stores stacks of experts as one tensor, False for one that stores matrices.
    """

    def __init__(
        self,
        name: str,
        readers: str,
        scheme: Callable[[Layout, QuantSpec, Inputs], Scheme],
        tensors: Callable[[Quantized, Scheme, Inputs], dict[str, Tensor]],
        configuration: Callable[[Mapping[str, Scheme], list[str]], dict[str, Any]],
        beside: Callable[[Mapping[str, Scheme], list[str]], dict[str, Any]] = lambda schemes, left: {},
        stacked: bool = False,
    ) -> None:
        self.name, self.readers, self.scheme, self.tensors = name, readers, scheme, tensors
        self.configuration, self.beside, self.stacked = configuration, beside, stacked


def layout_of(spec: QuantSpec) -> Layout:
    """Return the file layout of a weight's spec.

    Raises:
        Unfit: no server reads these blocks or scales.
    """
    name, (rows, k) = spec.format.name, spec.block
    if name == "e4m3" and spec.scale in ("fp32", "power_of_two", "unit") and not spec.hadamard:
        if spec.per_tensor:
            return "tensor"
        if spec.block == (1, None):
            return "channel"
        if spec.block == (128, 128):
            return "block"
    if spec.scale == "e8m0" and k == 32 and rows is not None and name in ("e4m3", "e2m3", "e2m1"):
        return "mx"
    if spec.two_level and k == 16:
        return "nv"
    raise UnsupportedByFormat(f"no server reads weights in {spec}")


def check_width(q: Quantized, layout: Layout) -> None:
    """Raise if K is not a multiple of the layout's block width.

    Raises:
        Unfit: the message gives K and the width.
    """
    width = WIDTHS[layout]
    if q.shape[1] % width:
        raise UnsupportedByFormat(
            f"its rows of {q.shape[1]} values end within a block of {width}, and readers assume complete blocks"
        )


def stored_codes(q: Quantized) -> Tensor:
    """Return the codes in row-major order, as files store them.

    Returns:
        8 bits: float8_e4m3fn [N, K]. 4 bits: uint8 [N, K / 2] with the even k in the lower half of a byte. 6 bits:
        uint8 [N, 3 K / 4] with four codes in three bytes, the first in the lowest bits.
    """
    data = q.upright().data.contiguous()
    if q.spec.format.bits != 6:
        return data
    codes = data.int().view(q.shape[0], -1, 4)
    word = codes[..., 0] | codes[..., 1] << 6 | codes[..., 2] << 12 | codes[..., 3] << 18
    return torch.stack([word >> shift & 0xFF for shift in (0, 8, 16)], -1).to(torch.uint8).flatten(1)


def row_scales(q: Quantized) -> Tensor:
    """Return the stored scales of blocks along k, repeated for each row of the operand: uint8 [N, K / width]."""
    q = q.upright()
    height = q.spec.block[0]
    assert isinstance(q.scale, Tensor) and height is not None
    return q.scale.repeat_interleave(height, 0)[: q.shape[0]].contiguous()


def one_scale(q: Quantized) -> Tensor:
    """Return the scale of a per-tensor operand, float32 []."""
    return q.scales().reshape(()).clone()


def tensor_factor(q: Quantized) -> Tensor:
    """Return the encode factor of the tensor, by which block scales are divided: float32 []."""
    assert q.tensor_factor is not None
    return q.tensor_factor.reshape(()).clone()


def cut(q: Quantized, start: int, stop: int) -> Quantized:
    """Return rows start to stop of an operand as an operand with the same codes and scales.

    Raises:
        Unfit: the rows start within a block of several rows.
    """
    if (start, stop) == (0, q.shape[0]):
        return q
    q, height = q.upright(), q.spec.block[0]
    scale = q.scale
    if isinstance(scale, Tensor) and height is not None:
        if start % height:
            raise UnsupportedByFormat(f"the checkpoint splits it at row {start}, within a block of {height} rows")
        scale = scale[start // height : -(-stop // height)]
    return Quantized(q.data[start:stop], scale, q.spec, (stop - start, q.shape[1]), False, q.tensor_factor)


def with_one_factor(operands: Sequence[Quantized]) -> list[Quantized] | None:
    """Rescale two-level operands to share one tensor factor, the smallest one; return None if a block scale is not
    exact.

    A server that fuses these weights into one GEMM stores one tensor factor for all of them.
    """
    factors = [tensor_factor(q) for q in operands]
    # An all-zero operand has factor 1 and fits any other factor.
    smallest = min((f for q, f in zip(operands, factors, strict=True) if q.scales().any()), default=factors[0])
    results = []
    for q, factor in zip(operands, factors, strict=True):
        up = q.upright()
        assert isinstance(up.scale, Tensor)
        scale = up.scale.view(torch.float8_e4m3fn).float() * (smallest / factor)
        stored = scale.to(torch.float8_e4m3fn)
        if not torch.equal(stored.float(), scale):
            return None
        shared = smallest.reshape(1, 1).clone()
        results.append(Quantized(up.data, stored.view(torch.uint8), up.spec, up.shape, False, shared))
    return results


# ---- compressed-tensors, written by llm-compressor and read by vLLM and SGLang ----
#
# config.json lists groups of layers with the scheme of each group.
# Source: github.com/vllm-project/compressed-tensors, version 0.20: names of formats and tensors.

#: Format names of MX weights (blocks of 32) by the bits of an element.
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
    """Return the format's description of one operand."""
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
    """Return config.json's entry: one group for all linear layers if they share a scheme, else a group per scheme."""
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
    """Normalize a scheme: drop differences that the format does not record, namely how scales were chosen and how many
        rows
    share one.
    """
    weight = (
        replace(scheme.weight, block=(1, scheme.weight.block[1])) if scheme.layout in ("mx", "nv") else scheme.weight
    )
    kind = {"two_level_fp32": "two_level", "fp32": "power_of_two", "unit": "power_of_two"}.get(
        weight.scale, weight.scale
    )
    return replace(scheme, weight=replace(weight, scale=kind))  # type: ignore[arg-type]


COMPRESSED_TENSORS = FileFormat("compressed-tensors", "vLLM, SGLang, transformers", _scheme, _tensors, _configuration)


# ---- DeepSeek's block format ----
#
#     weight[n, k] = codes[n, k] × weight_scale_inv[n // 128, k // 128]
#
# Weights are float8_e4m3fn with a float32 `weight_scale_inv` per 128 × 128 block. A per-tensor scale is repeated for
# every block. Readers quantize inputs in 1 × 128 blocks at run time.
# Source: DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3, and the configuration of its checkpoints.

SIZE = 128
READS = QuantSpec(E4M3, (1, SIZE), "fp32")


def _scheme_deepseek(layout: Layout, spec: QuantSpec, inputs: Inputs) -> Scheme:
    if layout not in ("block", "tensor"):
        raise UnsupportedByFormat(
            f"its blocks of {SIZE} by {SIZE} have one float32 scale each, but this weight is {spec}"
        )
    if inputs.spec is None:
        raise UnsupportedByFormat("its readers quantize inputs, and this recipe leaves them in high precision")
    return Scheme(name="fp8", layout=layout, weight=spec, input=READS)


def _tensors_deepseek(q: Quantized, scheme: Scheme, inputs: Inputs) -> dict[str, Tensor]:
    rows, columns = (-(-size // SIZE) for size in q.shape)
    scales = q.scales().expand(rows, columns).contiguous()
    return {"weight": stored_codes(q), "weight_scale_inv": scales}


def _configuration_deepseek(schemes: Mapping[str, Scheme], left: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [SIZE, SIZE],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": left,
    }


DEEPSEEK = FileFormat(
    "deepseek", "vLLM, SGLang, transformers", _scheme_deepseek, _tensors_deepseek, _configuration_deepseek
)


# ---- NVIDIA ModelOpt, read by TensorRT-LLM, vLLM and SGLang ----
#
# One algorithm for the whole model, or one per layer.
# Source: github.com/NVIDIA/Model-Optimizer, version 0.47: names of its algorithms and tensors, hf_quant_config.json.


def _scheme_modelopt(layout: Layout, spec: QuantSpec, inputs: Inputs) -> Scheme:
    if layout == "nv":
        if spec.scale == "two_level_fp32":
            raise UnsupportedByFormat(
                "it stores the reciprocal of the tensor's factor, which is only exact for powers of two; train "
                "with nvfp4(power_of_two=True)"
            )
        static = inputs.spec is not None and inputs.amax is not None
        reads = QuantSpec(E2M1, (1, 16), "two_level_fp32") if static else None
        name = "NVFP4" if static else "W4A16_NVFP4"
        return Scheme(name=name, layout=layout, weight=spec, input=reads, static=static)
    if inputs.spec is None:
        raise UnsupportedByFormat("its readers quantize inputs, and this recipe leaves them in high precision")
    if layout == "tensor":
        if inputs.static_scale is None:
            raise UnsupportedByFormat(
                "it stores the scale of a layer's inputs, which is unknown: give calibrate=inputs, which measures "
                "it for linear layers, but not for stacked experts"
            )
        return Scheme(name="FP8", layout=layout, weight=spec, input=QuantSpec(E4M3, (None, None), "fp32"), static=True)
    if layout == "channel":
        reads = QuantSpec(E4M3, (1, None), "fp32")
        return Scheme(name="FP8_PER_CHANNEL_PER_TOKEN", layout=layout, weight=spec, input=reads)
    if layout == "mx" and spec.format is E4M3:
        return Scheme(name="MXFP8", layout=layout, weight=spec, input=QuantSpec(E4M3, (1, 32), "e8m0"))
    raise UnsupportedByFormat(f"none of its algorithms supports weights in {spec}")


def _tensors_modelopt(q: Quantized, scheme: Scheme, inputs: Inputs) -> dict[str, Tensor]:
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


#: (bits, block size along k) by algorithm.
SIZES = {"FP8": (8, None), "FP8_PER_CHANNEL_PER_TOKEN": (8, None), "MXFP8": (8, 32), "NVFP4": (4, 16)}
SIZES["W4A16_NVFP4"] = SIZES["NVFP4"]


def _group_modelopt(name: str, targets: list[str]) -> dict[str, Any]:
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
    """Return the entry for both JSON files: the one algorithm, or "MIXED_PRECISION" and the algorithm of each layer."""
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


def _configuration_modelopt(schemes: Mapping[str, Scheme], left: list[str]) -> dict[str, Any]:
    details = _details(schemes, left)
    names = list(dict.fromkeys(scheme.name for scheme in schemes.values()))
    of_name = {name: [layer for layer, scheme in schemes.items() if scheme.name == name] for name in names}
    groups = {
        f"group_{number}": _group_modelopt(name, ["Linear"] if len(names) == 1 else of_name[name])
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


MODELOPT = FileFormat(
    "modelopt", "TensorRT-LLM, vLLM, SGLang", _scheme_modelopt, _tensors_modelopt, _configuration_modelopt, _beside
)
