"""Collect the tensors to export: the GEMM operands of quantized layers, and all other tensors, under checkpoint names.

Operands come from the same function that fprop calls. Names are those of the unconverted model's checkpoint. For a
transformers model, transformers' own conversion provides the names and splits stacked experts.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quaver.recipes.conversion import matches
from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.conversion.export.layouts import STACKS, Inputs, expert_layers, row_scales
from quaver.torch.conversion.matchers.experts import QuantizedLlama4Experts
from quaver.torch.conversion.matchers.linears import kind_of, wrappers
from quaver.torch.conversion.quantized_weights import ADDED
from quaver.torch.linear import stored_weight
from quaver.torch.linear.general import begin, is_prequantized, quantized_weight
from quaver.torch.linear.linear import Linear, Quantizable
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.state.context import in_force
from quaver.torch.state.history import amax

# ---- operands ----


@dataclass(frozen=True)
class Piece:
    """A range of an operand's rows that a checkpoint stores under one name."""

    #: Checkpoint name up to "weight": the layer's name and a dot.
    prefix: str
    start: int
    stop: int


@dataclass
class StoredOperand:
    """A weight that a GEMM consumes as codes, and where its rows go in the checkpoint."""

    #: Name of the parameter in the model.
    name: str
    layer: Quantizable
    #: Recipe of the layer, or None if its weight is stored quantized and no recipe is in force.
    recipe: Recipe | None
    #: For stacked experts: index of the expert, and of the member in the layer's state.
    expert: int | None = None
    member: int = 0
    #: Number of experts if the format stores their matrices as one tensor, concatenated along rows; else 0.
    stack: int = 0
    #: Row ranges of the operand and their checkpoint names.
    pieces: list[Piece] = field(default_factory=list)

    @property
    def last(self) -> str:
        """Name of the parameter in its layer."""
        return self.name.rpartition(".")[2]

    @property
    def spec(self) -> QuantSpec:
        """Spec of the operand."""
        spec = None if self.recipe is None else self.recipe.fprop.b
        spec = spec or self.layer.weight_spec
        assert spec is not None
        return spec

    @property
    def of_experts(self) -> bool:
        """True if the parameter is a stack of experts' matrices."""
        return self.expert is not None or self.stack > 0

    @property
    def module_name(self) -> str:
        """Name of the layer in the model."""
        return self.name.rpartition(".")[0]

    @property
    def rows(self) -> int:
        """Number of output features of the layer or of one expert."""
        if not self.of_experts:
            return int(self.layer.out_features)
        return int(upright(self.layer, self.last).shape[1])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weight in high precision."""
        dtype: torch.dtype = self.layer.weight_dtype or self.layer.get_parameter(self.last).dtype
        return dtype

    @torch.no_grad()
    def operand(self) -> Quantized:
        """Return the codes and scales [N, K] that fprop's GEMM consumes; for a stack [E * N, K]."""
        weight: Tensor = self.layer.get_parameter(self.last)
        if self.of_experts:
            assert self.recipe is not None and self.recipe.fprop.b is not None
            matrices, spec = upright(self.layer, self.last).detach(), self.recipe.fprop.b
            if self.expert is not None:
                return ops.QUANTIZE(matrices[self.expert].contiguous(), spec, None, self.factor(amax.WEIGHT))
            return _concatenated([ops.QUANTIZE(matrix.contiguous(), spec) for matrix in matrices])
        if self.recipe is None or self.recipe.fprop.b is None:
            assert isinstance(weight, QuantizedTensor)
            return weight.unwrap()
        dtype = self.layer.weight_dtype or weight.dtype
        call = begin(self.layer, self.recipe, torch.empty((0, 0), dtype=dtype, device=weight.device), dtype, False)
        return quantized_weight(call, weight, "fprop", self.recipe.fprop.b)

    def zeros(self) -> Quantized:
        """Return codes and scales of zeros with the shapes and dtypes of `operand`."""
        weight: Any = upright(self.layer, self.last) if self.of_experts else self.layer.get_parameter(self.last)
        q = ops.QUANTIZE(
            torch.zeros((self.rows, weight.shape[-1]), dtype=torch.float32, device=weight.device), self.spec
        )
        return _concatenated([q] * self.stack) if self.stack else q

    def inputs(self, seen: Mapping[tuple[nn.Module, str], float]) -> Inputs:
        """Return the known statistics of the layer's input: spec, delayed scale, and amax from `calibrate`."""
        spec = None if self.recipe is None else self.recipe.fprop.a
        factor = None if spec is None else self.factor(amax.INPUT)
        return Inputs(spec=spec, scale=None if factor is None else 1.0 / factor, amax=seen.get((self.layer, self.last)))

    def factor(self, operand: int) -> float | None:
        """Return the encode factor of delayed scaling for an operand, or None if no history has set one."""
        factors = self.layer._buffers.get("factor")
        if factors is None or self.recipe is None or self.recipe.delayed is None:
            return None
        return float((factors if factors.dim() == 1 else factors[self.member])[operand]) or None


def _concatenated(each: Sequence[Quantized]) -> Quantized:
    """Return the matrices [N, K] of experts as one [E * N, K], with one row of scales per row."""
    each = [q.upright() for q in each]
    (rows, columns), spec = each[0].shape, each[0].spec
    scales, shape = torch.cat([row_scales(q) for q in each]), (len(each) * rows, columns)
    return Quantized(torch.cat([q.data for q in each]), scales, replace(spec, block=(1, spec.block[1])), shape)


def upright(module: Any, name: str) -> Tensor:
    """Return a stack of experts' matrices as a view [E, N, K], whichever layout the module has."""
    weight: Tensor = module.get_parameter(name)
    return weight.transpose(1, 2) if is_stored_transposed(module) else weight


def is_stored_transposed(module: Any) -> bool:
    """Return True if a module's stacks of experts are stored as [E, K, N]."""
    return bool(getattr(module, "is_transposed", isinstance(module, QuantizedLlama4Experts)))


@dataclass
class DisassembledModel:
    """The exportable parts of a model."""

    collected: list[StoredOperand]
    #: All tensors that are not exported as codes, by checkpoint name.
    plain: dict[str, Tensor]
    #: Layers and experts that train quantized but are written in high precision by request, by name.
    left: dict[str, Quantizable]
    #: Checkpoint names of linear layers in high precision; experts appear under the names that servers look up.
    matrices: list[str]


def disassemble(model: nn.Module, high_precision: Sequence[str], *, sharded: bool = False) -> DisassembledModel:
    """Split a model into quantized operands and high-precision tensors.

    Args:
        model: the model, without wrappers that compile or replicate it.
        high_precision: name patterns of layers to write in high precision.
        sharded: True accepts DTensors, which the caller gathers.
    Raises:
        ValueError: a weight is on meta, sharded across ranks, computed by a parametrization, or of a layer kind that no
            format supports; a pattern matches no layer; the model has PEFT adapters or no quantized layer.
    """
    collected: list[StoredOperand] = []
    left: dict[str, Quantizable] = {}
    used: set[str] = set()
    if any(wrappers(model)):
        raise ValueError(
            "this model has PEFT adapters, which no format can store beside codes: merge them first, "
            "model.merge_and_unload(), and export the result"
        )
    for name, module in _named(model):
        if not isinstance(module, Quantizable):
            continue
        recipe = in_force(module.recipe)
        if (recipe is None or recipe.fprop.b is None) and module.weight_spec is None:
            continue
        patterns = [pattern for pattern in high_precision if matches(pattern, name)]
        if patterns:
            used.update(patterns)
            left[name] = module
        else:
            collected += _operands_of_layer(module, name, recipe, sharded)
    unused = [pattern for pattern in high_precision if pattern not in used]
    if unused:
        raise ValueError(f"no quantized layer has a name that matches {', '.join(map(repr, unused))} (high_precision)")
    if not collected:
        raise ValueError(
            "no layer of this model is quantized: call quaver.torch.convert(model, recipe), or export inside the "
            "quaver.torch.autocast(recipe) that it trains under"
        )
    plain = _others(model, {one.name for one in collected}, sharded)
    dropped = _drop_tied(model, plain)
    matrices = [
        name
        for name, module in _named(model)
        if isinstance(module, nn.Linear) and (f"{name}.weight" in plain or f"{name}.weight" in dropped)
    ]
    collected_names = {one.name for one in collected}
    stacks = {f"{name}.{matrix}": module for name, module in _named(model) for matrix in _stacks(module)}
    parts = DisassembledModel(collected, plain, left, matrices)
    return _renamed(model, parts, {name: module for name, module in stacks.items() if name not in collected_names})


#: Parts that torch's wrappers add to module names but not to state-dict keys.
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")


def _unwrapped_name(name: str) -> str:
    """Return a module name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) for every module, under each of its names."""
    return [(_unwrapped_name(name), module) for name, module in model.named_modules(remove_duplicate=False)]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile, DataParallel or DistributedDataParallel."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _operands_of_layer(module: Quantizable, name: str, recipe: Recipe | None, sharded: bool) -> list[StoredOperand]:
    """Return the weights of a layer or of its experts."""
    names = _stacks(module)
    for matrix in names:
        # A stack of experts is quantized matrix by matrix, which needs it on one rank.
        _check(f"{name}.{matrix}", module.get_parameter(matrix))
    if names:
        count = module.get_parameter(names[0]).shape[0]
        each = itertools.product(names, range(count))
        return [StoredOperand(f"{name}.{matrix}", module, recipe, e, number) for number, (matrix, e) in enumerate(each)]
    if not isinstance(module, Linear):
        raise ValueError(
            f"{name or 'the model'} ({type(module).__name__}) trains quantized, but no format has codes for a layer of "
            f"this kind: write it in high precision with high_precision=[{name!r}]; the served model then differs "
            "from the trained one there"
        )
    if "weight" in module._modules:
        raise ValueError(
            f"tensor parallelism stores the matrices of {name or 'the model'} as separate parameters, which cannot be "
            "gathered into one weight: leave the layer out of the plan of parallelize_module"
        )
    if "weight" not in module._parameters:
        raise ValueError(
            f"the weight of {name or 'the model'} is computed by a parametrization: remove it first, "
            "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
        )
    key = f"{name}.weight".lstrip(".")
    _check(key, module.weight, sharded)
    return [StoredOperand(key, module, recipe)]


def _stacks(module: nn.Module) -> Sequence[str]:
    """Return the names of a module's parameters that are stacks of experts' matrices."""
    kind = kind_of(module)
    names = () if kind is None else kind.stacks(module)
    return names if all(module._parameters.get(name) is not None for name in names) else ()


def _check(name: str, weight: Tensor, sharded: bool = False) -> None:
    if (not sharded and getattr(weight, "device_mesh", None) is not None) or is_prequantized(weight):
        raise ValueError(
            f"{name} is sharded across the ranks of a mesh: gather the model on one rank first (a checkpoint of "
            "torch.distributed.checkpoint.state_dict with full_state_dict=True, loaded into a model that is "
            "converted the same way), and export that"
        )
    if weight.is_meta:
        raise ValueError(f"{name} is on meta and has no values: load a checkpoint before exporting")


def _others(model: nn.Module, collected: set[str], sharded: bool) -> dict[str, Tensor]:
    """Return the state dict of the unconverted model without the weights that are exported as codes."""
    state: dict[str, Tensor] = {_unwrapped_name(name): value for name, value in model.state_dict().items()}
    for name, module in _named(model):
        if isinstance(module, Quantizable):
            prefix = f"{name}." if name else ""
            for added in ADDED:
                state.pop(prefix + added, None)
            if module.weight_spec is not None and f"{prefix}weight" not in collected:
                _check(f"{prefix}weight", module.get_parameter("weight"))
                state[f"{prefix}weight"] = stored_weight.unsharded_weight(module).dequantize()
    # Extra state of a module may be any object, which no file of tensors can store.
    state = {name: value for name, value in state.items() if name not in collected and isinstance(value, Tensor)}
    for name, value in state.items():
        _check(name, value, sharded)
    return state


def _drop_tied(model: nn.Module, plain: dict[str, Tensor]) -> set[str]:
    """Remove weights that transformers ties again on loading; return their names."""
    tied: Any = getattr(model, "all_tied_weights_keys", None) or {}
    again = {
        name
        for name, other in tied.items()
        if name in plain and other in plain and _address(plain[name]) == _address(plain[other])
    }
    for name in again:
        del plain[name]
    return again


def _address(x: Any) -> int:
    """Return the address of a tensor, or of this rank's part of a sharded one."""
    address: int = (x.to_local() if hasattr(x, "device_mesh") else x).data_ptr()
    return address


#: Function that converts a state dict to the checkpoint's names and layout.
Writer = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def _writer(model: nn.Module) -> Writer:
    """Return the function that converts a state dict to checkpoint format; transformers renames and splits stacks.

    A model with a method `checkpoint_names` provides the checkpoint name of each state-dict key itself.
    """
    rename: Any = getattr(model, "checkpoint_names", None)
    if rename is not None:
        return lambda state: {rename(name): value for name, value in state.items()}
    loading = sys.modules.get("transformers.core_model_loading")
    revert: Any = getattr(loading, "revert_weight_conversion", None)
    if revert is None or not hasattr(model, "save_pretrained"):
        return dict
    return lambda state: dict(revert(model, state))


def _renamed(model: nn.Module, parts: DisassembledModel, stacks: Mapping[str, nn.Module]) -> DisassembledModel:
    """Return the parts under checkpoint names.

    To learn where the rows of a quantized weight go, the writer is run on a tensor of row numbers in its place.

    Args:
        model: the model, whose own writer renames.
        parts: the parts under the model's names.
        stacks: modules with stacks of experts in high precision, by the stack's name.
    """
    to_checkpoint, family = _writer(model), str(getattr(getattr(model, "config", None), "model_type", ""))
    by_name: dict[str, list[StoredOperand]] = {}
    for one in parts.collected:
        by_name.setdefault(one.name, []).append(one)
    collected: list[StoredOperand] = []
    for name, each in by_name.items():
        rows = each[0].rows
        count = len(each) if each[0].of_experts else 0
        for key, part in to_checkpoint({name: _row_numbers(rows, count, each[0].layer)}).items():
            if count and part.dim() == 3:
                each = _operands_of_stack(each, key, family)
                break
            flat = part.flatten()
            first, last = int(flat[0]), int(flat[-1])
            whole = part.dim() == 2 and bool((flat.diff() == 1).all()) and first // rows == last // rows
            if not whole or not key.endswith("weight"):
                raise ValueError(
                    f"{name} becomes {key} in the model's checkpoint, which is not a range of rows of one matrix: "
                    f"write it in high precision with high_precision=[{each[0].module_name!r}]"
                )
            piece = Piece(key.removesuffix("weight"), first % rows, last % rows + 1)
            each[first // rows].pieces.append(piece)
        collected += each
    row = torch.zeros((1, 1), dtype=torch.float32, device="cpu")
    matrices: Iterable[str] = to_checkpoint({f"{name}.weight": row for name in parts.matrices})
    names = [name.removesuffix(".weight") for name in matrices]
    for name, module in stacks.items():
        module_name, _, parameter = name.rpartition(".")
        experts, rows, _ = upright(module, parameter).shape
        names += _lookup_names(to_checkpoint({name: _row_numbers(rows, experts, module)}), family, module_name)
    return replace(parts, collected=collected, plain=to_checkpoint(parts.plain), matrices=list(dict.fromkeys(names)))


def _row_numbers(rows: int, experts: int, module: nn.Module) -> Tensor:
    """Return int64 row numbers of a matrix [N, 1], or of a stack [E, N, 1] or, if stored transposed, [E, 1, N]."""
    if not experts:
        return torch.arange(rows, dtype=torch.int64, device="cpu").view(rows, 1)
    numbers = torch.arange(experts * rows, dtype=torch.int64, device="cpu").view(experts, rows, 1)
    return numbers.transpose(1, 2) if is_stored_transposed(module) else numbers


def _operands_of_stack(each: list[StoredOperand], key: str, family: str) -> list[StoredOperand]:
    """Assign server names to the matrices of a stack that a checkpoint stores as one tensor named `key`.

    Raises:
        ValueError: no known server reads quantized experts of this family.
    """
    one = each[0]
    if family in STACKS and STACKS[family] is None:
        return [replace(one, expert=None, stack=len(each), pieces=[Piece(key, 0, len(each) * one.rows)])]
    layers = expert_layers(family, key)
    if not layers:
        raise ValueError(
            f"{one.module_name} ({type(one.layer).__name__}) trains quantized, but its experts are one tensor "
            f"{key} in checkpoints of {family or 'this model'}, and no known server reads quantized experts of it: "
            f"write it in high precision with high_precision=[{one.module_name!r}]; the served model then differs "
            "from the trained one there"
        )
    part = one.rows // len(layers)
    for expert, matrix in enumerate(each):
        matrix.pieces += [Piece(f"{n.format(expert)}.", i * part, (i + 1) * part) for i, n in enumerate(layers)]
    return each


def _lookup_names(parted: Mapping[str, Tensor], family: str, module_name: str) -> list[str]:
    """Return the names that servers look up to find that a stack of experts is in high precision.

    Args:
        parted: the stack as the checkpoint stores it, by name.
        family: `config.model_type`.
        module_name: name of the module that has the stack.
    """
    names: list[str] = []
    for key, part in parted.items():
        layers = expert_layers(family, key)
        if part.dim() == 3 and layers:
            names += [layer.format(expert) for expert in range(part.shape[0]) for layer in layers]
        else:
            names.append(module_name if part.dim() == 3 else key.removesuffix(".weight"))
    return names


def store_operand(layer: Quantizable, q: Quantized) -> None:
    """Replace a layer's weight by an operand's codes and scales, stored as by `quaver.torch.quantized_init`."""
    dtype = layer.weight_dtype or layer.get_parameter("weight").dtype
    layer.weight = nn.Parameter(QuantizedTensor.from_quantized(q, dtype), requires_grad=False)


# ---- decoding: an independent reader of exported files, written from the formats' published formulas ----
#
# It uses none of Quaver's decoding: element values are computed from the fields of the OCP formats, and scales as each
# format's documentation says. `tests/integrations` compares the formats' own readers with it bit by bit.
#
#     compressed-tensors  codes × weight_scale
#                         4 bits, two-level scales: codes × (weight_scale / weight_global_scale)
#     deepseek            codes × weight_scale_inv of their 128 × 128 block
#     modelopt            codes × weight_scale
#                         4 bits, two-level scales: codes × (weight_scale × weight_scale_2)
#     mxfp4               blocks × scales, with the rows of all experts concatenated
#
# Source: OCP Microscaling Formats 1.0, sections 5.3 and 5.4, and the sources named in `layouts`.


@dataclass(frozen=True)
class Decoded:
    """A weight decoded from a file."""

    #: Element values without scales, float32 [N, K].
    values: Tensor
    #: Scales, float32 [row blocks, k blocks]; of two-level scales the product of both levels.
    scales: Tensor
    #: Block scales as stored in the file, or None.
    stored: Tensor | None = None
    #: Tensor factor of two-level scales, by which the block scales are divided, or None.
    factor: Tensor | None = None

    def dense(self) -> Tensor:
        """Return the dequantized weight, float32 [N, K]."""
        return self.values * expand_scales(self.scales, tuple(self.values.shape))


#: Suffix of the name of a weight's scales, by `quant_method`.
SCALES = {
    "compressed-tensors": "weight_scale",
    "fp8": "weight_scale_inv",
    "modelopt": "weight_scale",
    "mxfp4": "_scales",
}


class Reader:
    """Reader of an exported folder in any of the formats.

    Raises:
        ValueError: its config.json names an unknown format.
    """

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.config: dict[str, Any] = config["quantization_config"]
        self.method = self.config["quant_method"]
        if self.method not in SCALES:
            raise ValueError(f"{folder} has quant_method {self.method!r}; known: {', '.join(SCALES)}")
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self.where: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            with self._open("model.safetensors") as file:
                self.where = dict.fromkeys(file.keys(), "model.safetensors")

    def _open(self, name: str) -> Any:
        from safetensors import safe_open

        return safe_open(self.folder / name, framework="pt")

    def tensor(self, name: str) -> Tensor:
        with self._open(self.where[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def quantized(self) -> list[str]:
        """Return the name prefixes of quantized weights: the part before "weight", or for stacks before "_blocks"."""
        suffix = SCALES[self.method]
        return [name.removesuffix(suffix) for name in self.where if name.endswith(suffix)]

    def decoded(self, prefix: str) -> Decoded:
        """Read and decode the weight of a layer."""
        names = {name.removeprefix(prefix): name for name in self.where if name.startswith(prefix)}
        get = {suffix: self.tensor(name) for suffix, name in names.items() if "." not in suffix}
        return decoded(get, self.method)


def decoded(tensors: Mapping[str, Tensor], method: str) -> Decoded:
    """Decode the codes and the scales of a layer's weight, without multiplying them.

    Args:
        tensors: the layer's tensors by their suffix in the format.
        method: `quant_method` of the format.
    """
    if method == "mxfp4":
        blocks, stored = tensors["_blocks"].flatten(0, -3), tensors["_scales"].flatten(0, -2)
        values = E2M1[torch.stack([blocks & 15, blocks >> 4], -1).flatten(1).long()]
        return Decoded(values, E8M0[stored.long()], stored)
    codes = tensors["weight_packed"] if "weight_packed" in tensors else tensors["weight"]
    if method == "fp8":
        return Decoded(E4M3[codes.view(torch.uint8).long()], tensors["weight_scale_inv"])
    stored = tensors["weight_scale"]
    if codes.dtype is torch.float8_e4m3fn:
        values = E4M3[codes.view(torch.uint8).long()]
    elif codes.shape[1] == 24 * stored.shape[1]:
        values = _decode_6_bits(codes)
    else:
        values = E2M1[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    if stored.dtype is torch.uint8:
        return Decoded(values, E8M0[stored.long()], stored)
    if stored.dtype is torch.float8_e4m3fn:
        scales = E4M3[stored.view(torch.uint8).long()]
        if method == "modelopt":
            tensor_scale = tensors["weight_scale_2"]
            return Decoded(values, scales * tensor_scale, stored, 1.0 / tensor_scale)
        tensor_scale = tensors["weight_global_scale"].reshape(())
        return Decoded(values, scales / tensor_scale, stored, tensor_scale)
    return Decoded(values, stored.reshape(-1, 1) if stored.dim() < 2 else stored)


def _decode_6_bits(packed: Tensor) -> Tensor:
    """Return the values of 6-bit codes: four codes in three bytes, the first in the lowest bits."""
    bits = torch.stack([packed.int() >> i & 1 for i in range(8)], -1).reshape(packed.shape[0], -1, 6)
    return E2M3[sum(bits[..., i].long() << i for i in range(6))]


def expand_scales(scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Expand block scales to one scale per element, [N, K]; blocks are 16, 32 or 128 long, or the whole axis."""
    for dim in (0, 1):
        count, size = scales.shape[dim], shape[dim]
        if count not in (1, size):
            block = next(block for block in (16, 32, 128) if -(-size // block) == count)
            scales = scales.repeat_interleave(block, dim).narrow(dim, 0, size)
    return scales.expand(*shape)


def _table(exponent_bits: int, mantissa_bits: int, has_nan: bool) -> Tensor:
    """Return the float32 value of every code of a format, computed from its exponent and mantissa bits."""
    bias, numbers = 2 ** (exponent_bits - 1) - 1, []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        numbers.append(2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction))
    if has_nan:
        numbers[-1] = float("nan")
    return torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.float32, device="cpu")


#: Value of each E8M0 byte: a power of two; 255 is NaN.
E8M0 = torch.tensor([*(2.0 ** (code - 127) for code in range(255)), float("nan")], dtype=torch.float32, device="cpu")
E4M3, E2M3, E2M1 = _table(4, 3, True), _table(2, 3, False), _table(2, 1, False)
