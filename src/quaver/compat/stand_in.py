"""One of these packages in the place of the library that has its names, in a process that asks for it.

An entry of `sys.meta_path` answers `import` and `importlib.metadata`; no other library is changed. Modules are the same
objects by both names.
"""

import importlib
import importlib.metadata
import importlib.util
import opcode
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from quaver.recipes.text import check_name, suggest

# ---- stand in --------------------------------------------------------------------------------------------

HERE = "quaver.compat"


@dataclass(frozen=True)
class Library:
    """A library that there are names of."""

    #: Whose names they are: what asks for a version is told this one.
    version: str
    #: What looks for the library when it is imported, or once and for all.
    readers: tuple[str, ...]
    #: Older names of modules.
    renamed: Mapping[str, str] = field(default_factory=dict)


_LIGHTNING = "lightning", "lightning_fabric", "pytorch_lightning"
LIBRARIES = {
    "transformer_engine": Library(
        "2.15.0",
        ("accelerate", "peft", *_LIGHTNING),
        {"transformer_engine.pytorch.fp8": f"{HERE}.transformer_engine.pytorch.quantization"},
    ),
    # Of torchao before 0.15 transformers takes nothing for inference, which there is nothing for here.
    "torchao": Library("0.14.1", ("accelerate", "peft", "torchtitan", "transformers", *_LIGHTNING)),
}


class _Same(Loader):
    """Loads a module of ours by another name: the module itself."""

    def __init__(self, own: ModuleSpec) -> None:
        self.own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self.own.name)

    def exec_module(self, module: ModuleType) -> None:
        # Being imported by another name gave it that name's.
        module.__spec__ = self.own


class _Installed(importlib.metadata.Distribution):
    """What `importlib.metadata` reads of a library that this stands in for."""

    def __init__(self, name: str, version: str) -> None:
        self.texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            f"Summary: Names that {HERE} has, in the place of this library.\n",
            "top_level.txt": f"{name}\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self.texts.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


class _Finder(importlib.metadata.DistributionFinder):
    def __init__(self, name: str) -> None:
        self.name, self.library = name, LIBRARIES[name]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self.name:
            return None
        own = importlib.util.find_spec(self.library.renamed.get(fullname, f"{HERE}.{fullname}"))
        return None if own is None else ModuleSpec(fullname, _Same(own))

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        asked = getattr(context, "name", None)
        if asked is None or re.sub(r"[-_.]+", "_", asked).lower() == self.name:
            yield _Installed(self.name, self.library.version)


def install(name: str) -> None:
    """Put one of these packages in the place of the library that has its names, until `uninstall`, in this process.

    `import` of it and of its modules gives ours, and `importlib.metadata` has a version of it, so that libraries which
    look for it use ours. One that is installed too is hidden, all of it.

    Args:
        name: "transformer_engine" or "torchao".
    Raises:
        ValueError: another name.
        RuntimeError: the library was imported before, or one that looks for it when it is imported.
    """
    check_name("library", name, LIBRARIES)
    if any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        return
    for other in (name, *LIBRARIES[name].readers):
        if other in sys.modules:
            why = "" if other == name else f", and has looked for {name}"
            raise RuntimeError(
                f"{other} is imported already{why}: call {HERE}.install({name!r}) before anything imports {other}"
            )
    sys.meta_path.insert(0, _Finder(name))


def uninstall() -> None:
    """Take all that `install` put away again: what is imported afterwards is the library itself, if it is installed.

    Modules that were imported before stay ours where they are bound already.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in LIBRARIES and getattr(module, "__name__", "").startswith(HERE):
            del sys.modules[name]


# ---- missing ---------------------------------------------------------------------------------------------
# Public names of other libraries that are not here, each with why, and an error that says it.

_CODES = "there is no class of tensors: `quaver.torch.quantize` returns codes with their scales"
_RECIPES = "a `quaver.Recipe` says how each operand is quantized, and `quaver.Rules` of which layer"
_COMMUNICATION = "what goes between ranks is torch's, by the styles of `quaver.torch.parallel`"
_OFFLOAD = "`torch.autograd.graph.save_on_cpu` keeps what backward needs on the host"

#: Names of `transformer_engine.pytorch`; what is not planned has no other way here.
PYTORCH = {
    "make_graphed_callables": "`quaver.torch.CapturedStep` captures a whole step, optimizer too",
    "onnx_export": "`quaver.torch.onnx_export` writes a file",
    "ops": "modules and functions of `quaver.torch`; `torch.compile` joins what is between",
    "newton_schulz": "`quaver.torch.optim.Muon` has it",
    "CudaRNGStatesTracker": "noise and dropout have counts of their own on each rank",
    "apply_recipe": "`quaver.torch.convert` gives layers recipes of their own",
    "get_cudnn_version": "`torch.backends.cudnn.version()`",
    "get_device_compute_capability": "`torch.cuda.get_device_capability()`",
    "constants": "recipes name their formats",
    "DType": "recipes name their formats, and codes have torch's dtypes",
    **dict.fromkeys(("GatedDeltaNetAttention", "GatedDeltaNet2Attention", "GatedDeltaProductAttention"), "not planned"),
    "FusedMLAQUpProjFunction": "not planned",
    "FusedMLAQUpProjRopeQuant": "not planned",
    **dict.fromkeys(("get_cpu_offload_context", "mark_not_offload", "ManualOffloadSynchronizer"), _OFFLOAD),
    **dict.fromkeys(("initialize_ub", "destroy_ub", "UserBufferQuantizationMode"), _COMMUNICATION),
    **dict.fromkeys(("CPLoadBalancingStrategy", "newton_schulz_tp", "CusolverMpCtx"), _COMMUNICATION),
    **dict.fromkeys(("QuantizerRole", "QuantizerRequest", "DelayedScalingRequest", "quantizer_factory"), _RECIPES),
    **dict.fromkeys(("interleave_glu_tensor", "deinterleave_glu_tensor"), "gate and value lie one after the other"),
    **dict.fromkeys(("QuantizedTensorStorage", "Quantizer", "prepare_for_saving"), _CODES),
    **dict.fromkeys(("restore_from_saved", "restore_from_func_ctx", "Float8Quantizer"), _CODES),
    **dict.fromkeys(("Float8CurrentScalingQuantizer", "MXFP8Quantizer", "Float8BlockQuantizer"), _CODES),
    **dict.fromkeys(("NVFP4Quantizer", "HybridQuantizer", "IdentityQuantizer", "Float8Tensor", "MXFP8Tensor"), _CODES),
    **dict.fromkeys(("Float8BlockwiseQTensor", "NVFP4Tensor", "HybridQuantizedTensor", "IdentityTensor"), _CODES),
    **dict.fromkeys(("Float8TensorStorage", "MXFP8TensorStorage", "Float8BlockwiseQTensorStorage"), _CODES),
    **dict.fromkeys(("NVFP4TensorStorage", "HybridQuantizedTensorStorage", "IdentityTensorStorage"), _CODES),
}

_SHARDINGS = "arrays are sharded by jax.jit's shardings, or by Flax's logical rules"

#: Names of `transformer_engine.common.recipe`.
RECIPE = {
    "CustomRecipe": "`quaver.Recipe` says how each operand is quantized, and `quaver.Rules` of which layer",
    "quantizer_factory": _RECIPES,
}
#: Names of `transformer_engine.jax`, of 1 too.
JAX = {
    "get_delayed_scaling": "a recipe is what `autocast` was given",
    "dense": "`quaver.jax.linear`",
    "praxis": "not planned",
    **dict.fromkeys(("ShardingResource", "MajorShardingType", "ShardingType"), _SHARDINGS),
}
#: Names of `transformer_engine.jax.flax`.
FLAX = {
    "wrap_function_in_te_state_module": "`quaver.jax.linen.einsum_cls` and `dot_general_cls` give functions with state",
    "make_grouped_dense_cls": "`quaver.jax.grouped_dot` multiplies groups",
    "extend_logical_axis_rules": "layers name no axes unless they are told; " + _SHARDINGS,
}
_OPERATIONS = "no class of tensors has operations of its own: `quaver.torch.matmul` and `quantize` are functions"
_STYLES = (
    "`quaver.torch.parallel` has `ColwiseParallel`, `RowwiseParallel` and `SequenceParallel`, which convert no "
    "layer: convert before"
)

#: Names of `torchao.float8` and of its files.
TORCHAO = {
    "FP8Granularity": "granularities of inference are not there; `ScalingGranularity` is that of training",
    **dict.fromkeys(
        ("Float8TypeConfig", "type_config"), "`e4m3_dtype` and `e5m2_dtype` are torch's; AMD's are not there"
    ),
    "tensor_already_casted_to_fp8": _CODES,
    "matmul_with_hp_or_float8_args": "`quaver.torch.linear` multiplies under a recipe",
    **dict.fromkeys(("Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"), _STYLES),
    **dict.fromkeys(("Float8TrainingTensor", "WeightWithDynamicFloat8CastTensor", "GemmInputRole"), _CODES),
    "choose_scaled_mm_config": _CODES,
    **dict.fromkeys(("hp_tensor_and_scale_to_float8", "hp_tensor_to_float8_dynamic"), _CODES),
    **dict.fromkeys(("get_maybe_axiswise_dim", "NoopFwToFloat8BwDynamic"), _CODES),
    **dict.fromkeys(("amax_to_scale", "tensor_to_amax", "tensor_to_scale", "to_fp8_saturated"), _CODES),
    **dict.fromkeys(("is_row_major", "pad_tensor_for_matmul"), "sizes and layouts are made fit where a GEMM needs it"),
    **dict.fromkeys(("Float8MMConfig", "preprocess_data", "preprocess_scale"), "not planned"),
    "addmm_float8_unwrapped_inference": "not planned",
}
#: torchao's own modules and functions beside `float8`.
TORCHAO_TOP = {
    "optim": "`quaver.torch.optim` keeps states in eight bits",
    "dtypes": _CODES,
    **dict.fromkeys(("quantize_", "quantization", "swizzle", "ops", "testing"), "not planned"),
}


def unknown(module: str, names: Sequence[str], reasons: Mapping[str, str]) -> Callable[[str], Any]:
    """What a module looks names up by that it has not: an error with what is there in its place.

    It is an AttributeError, so that `hasattr` is False, but within `from ... import` an ImportError: an AttributeError
    has no sentence left there.

    Args:
        module: its name.
        names: that it has.
        reasons: of those that it has not.
    """

    def look_up(name: str) -> Any:
        why = reasons.get(name) or (suggest(name, names) if names else "nothing of that file is there")
        sentence = f"{module} has no {name!r}: {why}"
        if not name.startswith("__") and _imports_from(sys._getframe(1)):
            raise ImportError(sentence, name=module)
        raise AttributeError(sentence)

    return look_up


def _imports_from(frame: FrameType) -> bool:
    """Whether what a frame does now is to take a name from a module that it imports."""
    return opcode.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"
