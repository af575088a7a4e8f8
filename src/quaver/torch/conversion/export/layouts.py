"""Tables of what servers read: layouts of operands in files, formats of checkpoints, names of experts, fused layers.

A layout is a reader's view of a spec's blocks: one scale per tensor, per row, per 128 × 128 square, or per block of 32
or 16 along k. A block of several rows is written as several rows that repeat its scale, which changes no number. Each
table names its source.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
        block = self.input.text.partition("[")[2].partition("]")[0]
        return f"inputs {self.input.format}[{block}], {where}"


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


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """A checkpoint format for export. Each format is one constant of this class."""

    #: Value of `format=`, and the `quant_method` that config.json has for it.
    name: str
    method: str
    #: Function of (layout, weight's spec, inputs) that returns a `Scheme` or raises `UnsupportedByFormat`.
    scheme: Callable[[Layout, QuantSpec, Inputs], Scheme]
    #: Function of (operand, scheme, inputs) that returns a layer's tensors by the suffix after the layer's name.
    tensors: Callable[[Quantized, Scheme, Inputs], dict[str, Tensor]]
    #: Function of (schemes by layer name, names of matrices in high precision) that returns the quantization entry of
    #: config.json, without its `quant_method`.
    configuration: Callable[[Mapping[str, Scheme], list[str]], dict[str, Any]]
    #: Function with the same arguments that returns the content of further JSON files, by file name.
    further_files: Callable[[Mapping[str, Scheme], list[str]], dict[str, Any]] = lambda schemes, left: {}
    #: True for a format that only stores stacks of experts as one tensor, False for one that stores matrices.
    stacked: bool = False


def layout_of(spec: QuantSpec) -> Layout:
    """Return the file layout of a weight's spec.

    Raises:
        UnsupportedByFormat: no server reads these blocks or scales.
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
        UnsupportedByFormat: the message gives K and the width.
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


def stored_scales(q: Quantized, layout: Layout) -> Tensor:
    """Return an operand's scales as files store them, float32 [row blocks, k blocks], or for "mx" and "nv"
    `row_scales`.
    """
    return row_scales(q) if WIDTHS[layout] > 1 else q.scales().contiguous()


#: Specs with which readers quantize inputs, by the weight's layout; "mx" inputs have the format of the weight.
INPUTS: dict[Layout, QuantSpec] = {
    "tensor": QuantSpec(E4M3, (None, None), "fp32"),
    "channel": QuantSpec(E4M3, (1, None), "fp32"),
    "block": QuantSpec(E4M3, (1, 128), "fp32"),
    "nv": QuantSpec(E2M1, (1, 16), "two_level_fp32"),
}


def reader_input(layout: Layout, weight: QuantSpec) -> QuantSpec:
    """Return the spec with which readers quantize the input of a weight."""
    return replace(weight, block=(1, 32)) if layout == "mx" else INPUTS[layout]


def tensor_factor(q: Quantized) -> Tensor:
    """Return the encode factor of the tensor, by which block scales are divided: float32 []."""
    assert q.tensor_factor is not None
    return q.tensor_factor.reshape(()).clone()


def cut(q: Quantized, start: int, stop: int) -> Quantized:
    """Return rows start to stop of an operand as an operand with the same codes and scales.

    Raises:
        UnsupportedByFormat: the rows start within a block of several rows.
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
_MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_NV = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
#: The format's description of (weight, input) by layout.
STRATEGIES: dict[Layout, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor": ({"strategy": "tensor"}, {"strategy": "tensor"}),
    "channel": ({"strategy": "channel"}, {"strategy": "token"}),
    "block": ({"strategy": "block", "block_structure": [128, 128]}, {"strategy": "group", "group_size": 128}),
    "mx": (_MX, _MX),
    "nv": (_NV, _NV),
}


def _scheme(layout: Layout, spec: QuantSpec, inputs: Inputs) -> Scheme:
    quantizes, static = inputs.spec is not None, False
    if layout == "mx":
        name = MX_NAMES[spec.format.bits]
    elif layout == "nv":
        name = "nvfp4-pack-quantized"
        static = quantizes = quantizes and inputs.amax is not None
    else:
        name = "float-quantized" if quantizes else "naive-quantized"
        static = quantizes and layout == "tensor" and inputs.scale is not None
    reads = reader_input(layout, spec) if quantizes else None
    return Scheme(name=name, layout=layout, weight=spec, input=reads, static=static)


def _tensors(q: Quantized, scheme: Scheme, inputs: Inputs) -> dict[str, Tensor]:
    scales = stored_scales(q, scheme.layout)
    tensors = {"weight" if scheme.weight.format is E4M3 else "weight_packed": stored_codes(q), "weight_scale": scales}
    if scheme.layout == "nv":
        tensors["weight_scale"] = scales.view(torch.float8_e4m3fn)
        tensors["weight_global_scale"] = tensor_factor(q).view(1)
    elif scheme.layout == "tensor":
        tensors["weight_scale"] = scales.view(1)
    if scheme.static:
        name, value = ("input_scale", inputs.scale)
        if scheme.layout == "nv":
            name, value = ("input_global_scale", inputs.static_factor)
        tensors[name] = _scalar(value).view(1)
    return tensors


def _scalar(value: float | None) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def _group(scheme: Scheme) -> dict[str, Any]:
    """Return the format's description of a scheme; layers with equal descriptions form a group."""
    weight, reads = STRATEGIES[scheme.layout]
    dynamic = "local" if scheme.layout == "nv" else not scheme.static
    return {
        "format": scheme.name,
        "targets": [],
        "weights": _operand(scheme.weight, False) | weight,
        "input_activations": None if scheme.input is None else _operand(scheme.input, dynamic) | reads,
        "output_activations": None,
    }


def _operand(spec: QuantSpec, dynamic: bool | str) -> dict[str, Any]:
    return {"num_bits": spec.format.bits, "type": "float", "symmetric": True, "dynamic": dynamic}


def _configuration(schemes: Mapping[str, Scheme], left: list[str]) -> dict[str, Any]:
    """Return config.json's entry: one group for all linear layers if they share a scheme, else a group per scheme."""
    each = {name: _group(scheme) for name, scheme in schemes.items()}
    groups: list[dict[str, Any]] = []
    for group in each.values():
        if group not in groups:
            groups.append(group)
    targets = [[name for name in each if each[name] == group] for group in groups] if len(groups) > 1 else [["Linear"]]
    names = {group["format"] for group in groups}
    return {
        "format": names.pop() if len(names) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group | {"targets": targets[i]} for i, group in enumerate(groups)},
        "ignore": left,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


COMPRESSED_TENSORS = FileFormat(
    name="compressed-tensors",
    method="compressed-tensors",
    scheme=_scheme,
    tensors=_tensors,
    configuration=_configuration,
)


# ---- DeepSeek's block format ----
#
#     weight[n, k] = codes[n, k] × weight_scale_inv[n // 128, k // 128]
#
# Weights are float8_e4m3fn with a float32 `weight_scale_inv` per 128 × 128 block. A per-tensor scale is repeated for
# every block. Readers quantize inputs in 1 × 128 blocks at run time.
# Source: DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3, and the configuration of its checkpoints.

SIZE = 128


def _scheme_deepseek(layout: Layout, spec: QuantSpec, inputs: Inputs) -> Scheme:
    if layout not in ("block", "tensor"):
        raise UnsupportedByFormat(
            f"its blocks of {SIZE} by {SIZE} have one float32 scale each, but this weight is {spec}"
        )
    if inputs.spec is None:
        raise UnsupportedByFormat("its readers quantize inputs, and this recipe leaves them in high precision")
    return Scheme(name="fp8", layout=layout, weight=spec, input=INPUTS["block"])


def _tensors_deepseek(q: Quantized, scheme: Scheme, inputs: Inputs) -> dict[str, Tensor]:
    rows, columns = (-(-size // SIZE) for size in q.shape)
    scales = q.scales().expand(rows, columns).contiguous()
    return {"weight": stored_codes(q), "weight_scale_inv": scales}


def _configuration_deepseek(schemes: Mapping[str, Scheme], left: list[str]) -> dict[str, Any]:
    return {
        "fmt": "e4m3",
        "weight_block_size": [SIZE, SIZE],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": left,
    }


DEEPSEEK = FileFormat(
    name="deepseek",
    method="fp8",
    scheme=_scheme_deepseek,
    tensors=_tensors_deepseek,
    configuration=_configuration_deepseek,
)


# ---- NVIDIA ModelOpt, read by TensorRT-LLM, vLLM and SGLang ----
#
# One algorithm for the whole model, or one per layer.
# Source: github.com/NVIDIA/Model-Optimizer, version 0.47: names of its algorithms and tensors, hf_quant_config.json.

#: Names of algorithms that quantize inputs, by layout.
ALGORITHMS: dict[Layout, str] = {
    "tensor": "FP8",
    "channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "mx": "MXFP8",
    "nv": "NVFP4",
}


def _scheme_modelopt(layout: Layout, spec: QuantSpec, inputs: Inputs) -> Scheme:
    if layout == "nv":
        if spec.scale == "two_level_fp32":
            raise UnsupportedByFormat(
                "it stores the reciprocal of the tensor's factor, which is only exact for powers of two; train "
                "with nvfp4(power_of_two=True)"
            )
        if inputs.spec is None or inputs.amax is None:
            return Scheme(name="W4A16_NVFP4", layout=layout, weight=spec)
    elif inputs.spec is None:
        raise UnsupportedByFormat("its readers quantize inputs, and this recipe leaves them in high precision")
    elif layout == "tensor" and inputs.static_scale is None:
        raise UnsupportedByFormat(
            "it stores the scale of a layer's inputs, which is unknown: give calibrate=inputs, which measures "
            "it for linear layers, but not for stacked experts"
        )
    elif layout == "block" or (layout == "mx" and spec.format is not E4M3):
        raise UnsupportedByFormat(f"none of its algorithms supports weights in {spec}")
    reads, static = reader_input(layout, spec), layout in ("tensor", "nv")
    return Scheme(name=ALGORITHMS[layout], layout=layout, weight=spec, input=reads, static=static)


def _tensors_modelopt(q: Quantized, scheme: Scheme, inputs: Inputs) -> dict[str, Tensor]:
    scales = stored_scales(q, scheme.layout)
    tensors = {"weight": stored_codes(q), "weight_scale": scales}
    if scheme.layout == "nv":
        tensors["weight_scale"] = scales.view(torch.float8_e4m3fn)
        tensors["weight_scale_2"] = 1.0 / tensor_factor(q)
        if scheme.static and inputs.static_factor is not None:
            tensors["input_scale"] = _scalar(1.0 / inputs.static_factor)
    elif scheme.layout == "tensor":
        tensors |= {"weight_scale": scales.view(()), "input_scale": _scalar(inputs.static_scale)}
    elif scheme.layout == "channel":
        tensors["weight_scale"] = scales.flatten()
    return tensors


def _group_size(scheme: Scheme) -> dict[str, int]:
    width = WIDTHS[scheme.layout]
    return {"group_size": width} if width > 1 else {}


def _group_modelopt(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    words = {"dynamic": False, "num_bits": scheme.weight.format.bits, "type": "float", **_group_size(scheme)}
    if scheme.layout == "channel":
        weights, reads = words | {"strategy": "channel"}, words | {"dynamic": True, "strategy": "token"}
    else:
        weights, reads = words, words
    group = {"weights": weights, "targets": targets}
    return group if scheme.input is None else group | {"input_activations": reads}


def _details(schemes: Mapping[str, Scheme], left: list[str]) -> dict[str, Any]:
    """Return the entry for both JSON files: the one algorithm, or "MIXED_PRECISION" and the algorithm of each layer."""
    each = {layer: {"quant_algo": scheme.name} | _group_size(scheme) for layer, scheme in schemes.items()}
    if len({scheme.name for scheme in schemes.values()}) == 1:
        return next(iter(each.values())) | {"kv_cache_quant_algo": None, "exclude_modules": left}
    return {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": each}


PRODUCER = {"name": "quaver", "version": quaver.__version__}


def _configuration_modelopt(schemes: Mapping[str, Scheme], left: list[str]) -> dict[str, Any]:
    details, groups = _details(schemes, left), {}
    each = {scheme.name: scheme for scheme in schemes.values()}
    for number, (name, scheme) in enumerate(each.items()):
        named = [layer for layer, other in schemes.items() if other.name == name]
        groups[f"group_{number}"] = _group_modelopt(scheme, ["Linear"] if len(each) == 1 else named)
    layers = {"quantized_layers": details["quantized_layers"]} if len(each) > 1 else {}
    return {
        "quant_algo": details["quant_algo"],
        "config_groups": groups,
        "ignore": left,
        "producer": PRODUCER,
        **layers,
    }


def _further_files(schemes: Mapping[str, Scheme], left: list[str]) -> dict[str, Any]:
    return {"hf_quant_config.json": {"producer": PRODUCER, "quantization": _details(schemes, left)}}


MODELOPT = FileFormat(
    name="modelopt",
    method="modelopt",
    scheme=_scheme_modelopt,
    tensors=_tensors_modelopt,
    configuration=_configuration_modelopt,
    further_files=_further_files,
)


# ---- mxfp4, that of GPT-OSS: the experts of a layer in MXFP4, everything else in high precision ----
#
#     tensor               dtype  shape                 content
#     gate_up_proj_blocks  uint8  [E, 2 I, H / 32, 16]  E2M1 codes, two a byte, the even k in the lower half
#     gate_up_proj_scales  uint8  [E, 2 I, H / 32]      E8M0 scales
#     down_proj_blocks     uint8  [E, H, I / 32, 16]
#     down_proj_scales     uint8  [E, H, I / 32]
#
# E experts, H hidden features, I features between the two projections. Rows of gate and up alternate: gate is in the
# even rows of gate_up_proj. Servers leave inputs in 16 bits.
# Source: the checkpoints openai/gpt-oss-20b and 120b, and transformers 5.23, integrations/mxfp4.py.

#: Modules in high precision, as config.json of the published checkpoints lists them.
HIGH_PRECISION = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")


def _scheme_mxfp4(layout: Layout, spec: QuantSpec, inputs: Inputs) -> Scheme:
    if layout != "mx" or spec.format is not E2M1:
        raise UnsupportedByFormat(
            f"it stores E2M1 codes with one E8M0 scale per 32 values along k, but this weight is {spec}"
        )
    return Scheme(name="mxfp4", layout=layout, weight=spec)


def _tensors_mxfp4(q: Quantized, scheme: Scheme, inputs: Inputs) -> dict[str, Tensor]:
    return {"_blocks": stored_codes(q).unflatten(1, (-1, 16)), "_scales": row_scales(q)}


def _configuration_mxfp4(schemes: Mapping[str, Scheme], left: list[str]) -> dict[str, Any]:
    # Layers whose experts are in high precision are not in the published list.
    experts = [name for name in left if name.endswith(".experts")]
    return {"modules_to_not_convert": [*HIGH_PRECISION, *experts]}


MXFP4 = FileFormat(
    name="mxfp4",
    method="mxfp4",
    scheme=_scheme_mxfp4,
    tensors=_tensors_mxfp4,
    configuration=_configuration_mxfp4,
    stacked=True,
)
FORMATS: dict[str, FileFormat] = {f.name: f for f in (COMPRESSED_TENSORS, DEEPSEEK, MODELOPT, MXFP4)}


# ---- names of exported experts for model families whose checkpoints store all experts of a layer as one tensor ----
#
# Checkpoints of most families have a tensor for each expert, and transformers splits its stacks when it saves them. For
# the other families `STACKS` says under which names servers read quantized experts, as found in the servers' source
# code. Export refuses quantized experts of a family that is in neither group.

#: {suffix of a stack's name in the checkpoint: suffixes of the layers that an expert's rows are split into equally}.
#: "{}" is replaced by the number of the expert.
SplitNames = Mapping[str, tuple[str, ...]]

_GATE_UP: SplitNames = {
    ".experts.gate_up_proj": (".experts.{}.gate_proj", ".experts.{}.up_proj"),
    ".experts.down_proj": (".experts.{}.down_proj",),
}
_GRANITE: SplitNames = {
    ".input_linear.weight": (".experts.{}.gate_proj", ".experts.{}.up_proj"),
    ".output_linear.weight": (".experts.{}.down_proj",),
}

#: Names of each expert's layers by `config.model_type` of transformers; None if servers read one tensor for all
#: experts, in format "mxfp4". The comments name the servers, and the file or pull request in which this was found.
STACKS: dict[str, SplitNames | None] = {
    "gpt_oss": None,  # vLLM and SGLang, models/gpt_oss.py; transformers, integrations/mxfp4.py
    "granitemoe": _GRANITE,  # SGLang, pull request 37679
    "granitemoehybrid": _GRANITE,  # vLLM, models/granitemoehybrid.py: get_expert_mapping
    "llama4": _GATE_UP,  # vLLM, models/llama4.py: make_expert_params_mapping
    "llama4_text": _GATE_UP,
    "qwen3_5_moe": _GATE_UP,  # vLLM, models/qwen3_5.py: get_expert_mapping
    "qwen3_5_moe_text": _GATE_UP,
}


def expert_layers(family: str, key: str) -> tuple[str, ...]:
    """Return the names of the layers that servers read for one expert of a stack.

    Args:
        family: `config.model_type`.
        key: the name of the stack in the checkpoint.
    Returns:
        Names with "{}" for the number of the expert, in the order of the expert's rows; () if servers do not read this
        stack split by expert.
    """
    for suffix, names in (STACKS.get(family) or {}).items():
        if key.endswith(suffix):
            return tuple(key.removesuffix(suffix) + name for name in names)
    return ()


# ---- layers that servers fuse ----

#: Last names of projections that servers fuse into one weight, which then has one scheme and one tensor factor. From
#: `packed_modules_mapping` and `stacked_params_mapping` of vLLM's and SGLang's models (November 2026).
FUSED = (
    ("q_proj", "k_proj", "v_proj"),  # most decoders
    ("query", "key", "value"),  # BERT
    ("gate_proj", "up_proj"),  # most decoders
    ("w1", "w3"),  # Mixtral's and DeepSeek's experts
    ("q_a_proj", "kv_a_proj_with_mqa"),  # deepseek_v2.py: fused_qkv_a_proj
    ("wq_a", "wkv"),  # deepseek_v4.py: fused_wqa_wkv
    ("wkv", "wgate"),  # deepseek_v4.py: fused_wkv_wgate
    ("in_proj_qkv", "in_proj_z"),  # qwen3_5.py: in_proj_qkvz
    ("in_proj_b", "in_proj_a"),  # qwen3_5.py: in_proj_ba
)


def fused_groups(names: Iterable[str]) -> list[list[str]]:
    """Group layer names of a checkpoint so that those that a server fuses are in one list."""
    groups: dict[str, list[str]] = {name: [name] for name in names}
    for name in list(groups):
        parent, dot, last = name.rpartition(".")
        for tied in FUSED:
            for other in tied if last in tied else ():
                one, two = groups[name], groups.get(f"{parent}{dot}{other}")
                if two is not None and two is not one:
                    one += two
                    groups.update(dict.fromkeys(two, one))
    return list({id(group): group for group in groups.values()}.values())
