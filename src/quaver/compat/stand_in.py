"""`install` and `uninstall`: let `import torchao` or `import transformer_engine` use Quaver's modules in this process.

An entry in `sys.meta_path` handles `import` and `importlib.metadata`; no other library is modified. Modules are the
same objects under both names.
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

# ---- installation ----

HERE = "quaver.compat"


@dataclass(frozen=True)
class Library:
    """A library that Quaver can stand in for."""

    #: Version that is reported to callers.
    version: str
    #: Libraries that check for this one when they are imported, or once and cache the result.
    readers: tuple[str, ...]
    #: Older names of modules, and Quaver's modules for them.
    renamed: Mapping[str, str] = field(default_factory=dict)


_LIGHTNING = "lightning", "lightning_fabric", "pytorch_lightning"
LIBRARIES = {
    "transformer_engine": Library(
        "2.15.0",
        ("accelerate", "peft", *_LIGHTNING),
        {"transformer_engine.pytorch.fp8": f"{HERE}.transformer_engine.pytorch.quantization"},
    ),
    # For torchao before 0.15, transformers does not try to use its inference functions, which Quaver lacks.
    "torchao": Library("0.14.1", ("accelerate", "peft", "torchtitan", "transformers", *_LIGHTNING)),
}


class _Same(Loader):
    """Loader that returns an existing Quaver module under another name."""

    def __init__(self, own: ModuleSpec) -> None:
        self.own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self.own.name)

    def exec_module(self, module: ModuleType) -> None:
        # Restore the spec, because the import has set that of the other name.
        module.__spec__ = self.own


class _Installed(importlib.metadata.Distribution):
    """Metadata of the replaced library for `importlib.metadata`."""

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
        package = getattr(context, "name", None)
        if package is None or re.sub(r"[-_.]+", "_", package).lower() == self.name:
            yield _Installed(self.name, self.library.version)


def install(name: str) -> None:
    """Let Quaver replace a library in this process until `uninstall`.

    Importing the library or its modules returns Quaver's, and `importlib.metadata` reports a version, so that libraries
    which check for it use Quaver. An installed copy of the library is hidden completely.

    Args:
        name: "transformer_engine" or "torchao".
    Raises:
        ValueError: another name.
        RuntimeError: the library, or one that checks for it at import, was already imported.
    """
    check_name("library", name, LIBRARIES)
    if any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        return
    for other in (name, *LIBRARIES[name].readers):
        if other in sys.modules:
            why = "" if other == name else f", and has checked for {name}"
            raise RuntimeError(
                f"{other} is already imported{why}: call {HERE}.install({name!r}) before anything imports {other}"
            )
    sys.meta_path.insert(0, _Finder(name))


def uninstall() -> None:
    """Undo all calls of `install`: later imports get the library itself, if it is installed.

    Existing references to modules imported before still point to Quaver's.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in LIBRARIES and getattr(module, "__name__", "").startswith(HERE):
            del sys.modules[name]


# ---- missing names ----
# Public names of other libraries that Quaver does not provide, each with the alternative for the error message.

_CODES = "`quaver.torch.quantize` returns codes with their scales, and `quaver.torch.QuantizedTensor` stores a weight"
_RECIPES = "a `quaver.Recipe` defines how each operand is quantized, and `quaver.Rules` of which layer"
_COMMUNICATION = "communication uses torch's collectives, by the styles of `quaver.torch.parallel`"

#: Names of `transformer_engine.pytorch`; "not planned" means that there is no alternative.
PYTORCH = {
    "make_graphed_callables": "use `quaver.torch.CapturedStep`, which captures a step with the optimizer",
    "onnx_export": "use `quaver.torch.onnx_export`, which writes a file",
    "ops": "use modules and functions of `quaver.torch`; `torch.compile` fuses what is between them",
    "newton_schulz": "`quaver.torch.optim.Muon` has it",
    "CudaRNGStatesTracker": "noise and dropout have separate counters on each rank",
    "apply_recipe": "use `quaver.torch.convert` to give layers their own recipes",
    "get_cudnn_version": "`torch.backends.cudnn.version()`",
    "get_device_compute_capability": "`torch.cuda.get_device_capability()`",
    "constants": "recipes name their formats",
    "DType": "recipes name their formats, and codes have torch's dtypes",
    **dict.fromkeys(("GatedDeltaNetAttention", "GatedDeltaNet2Attention", "GatedDeltaProductAttention"), "not planned"),
    "FusedMLAQUpProjFunction": "not planned",
    "FusedMLAQUpProjRopeQuant": "not planned",
    "ManualOffloadSynchronizer": "copies start and end with the layers of `quaver.torch.offload`",
    **dict.fromkeys(("initialize_ub", "destroy_ub", "UserBufferQuantizationMode"), _COMMUNICATION),
    **dict.fromkeys(("CPLoadBalancingStrategy", "newton_schulz_tp", "CusolverMpCtx"), _COMMUNICATION),
    **dict.fromkeys(("QuantizerRole", "QuantizerRequest", "DelayedScalingRequest", "quantizer_factory"), _RECIPES),
    **dict.fromkeys(
        ("interleave_glu_tensor", "deinterleave_glu_tensor"), "gate and value are stored one after the other"
    ),
    **dict.fromkeys(("QuantizedTensorStorage", "Quantizer", "prepare_for_saving"), _CODES),
    **dict.fromkeys(("restore_from_saved", "restore_from_func_ctx", "Float8Quantizer"), _CODES),
    **dict.fromkeys(("Float8CurrentScalingQuantizer", "MXFP8Quantizer", "Float8BlockQuantizer"), _CODES),
    **dict.fromkeys(("NVFP4Quantizer", "HybridQuantizer", "IdentityQuantizer", "Float8Tensor", "MXFP8Tensor"), _CODES),
    **dict.fromkeys(("Float8BlockwiseQTensor", "NVFP4Tensor", "HybridQuantizedTensor", "IdentityTensor"), _CODES),
    **dict.fromkeys(("Float8TensorStorage", "MXFP8TensorStorage", "Float8BlockwiseQTensorStorage"), _CODES),
    **dict.fromkeys(("NVFP4TensorStorage", "HybridQuantizedTensorStorage", "IdentityTensorStorage"), _CODES),
}

_SHARDINGS = "shard arrays by jax.jit's shardings, or by Flax's logical rules"

#: Names of `transformer_engine.common.recipe`.
RECIPE = {
    "CustomRecipe": "`quaver.Recipe` says how each operand is quantized, and `quaver.Rules` of which layer",
    "quantizer_factory": _RECIPES,
}
#: Names of `transformer_engine.jax`, including those of 1.x.
JAX = {
    "get_delayed_scaling": "use the recipe passed to `autocast`",
    "dense": "`quaver.jax.linear`",
    "praxis": "not planned",
    **dict.fromkeys(("ShardingResource", "MajorShardingType", "ShardingType"), _SHARDINGS),
}
#: Names of `transformer_engine.jax.flax`.
FLAX = {
    "wrap_function_in_te_state_module": "use `quaver.jax.linen.einsum_cls` and `dot_general_cls`, which keep state",
    "make_grouped_dense_cls": "`quaver.jax.grouped_dot` multiplies groups",
}
_OPERATIONS = (
    "tensor subclasses with their own operations do not exist: use the functions `quaver.torch.matmul` and `quantize`"
)
_STYLES = (
    "`quaver.torch.parallel` has `ColwiseParallel`, `RowwiseParallel` and `SequenceParallel`, which do not "
    "convert layers: convert first"
)

#: Names of `torchao.float8` and its files.
TORCHAO = {
    "FP8Granularity": "inference is not supported; `ScalingGranularity` is the granularity of training",
    **dict.fromkeys(
        ("Float8TypeConfig", "type_config"), "`e4m3_dtype` and `e5m2_dtype` are torch's; AMD's are not supported"
    ),
    "tensor_already_casted_to_fp8": _CODES,
    "matmul_with_hp_or_float8_args": "use `quaver.torch.linear`, which multiplies under a recipe",
    **dict.fromkeys(("Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"), _STYLES),
    **dict.fromkeys(("Float8TrainingTensor", "WeightWithDynamicFloat8CastTensor", "GemmInputRole"), _CODES),
    "choose_scaled_mm_config": _CODES,
    **dict.fromkeys(("hp_tensor_and_scale_to_float8", "hp_tensor_to_float8_dynamic"), _CODES),
    **dict.fromkeys(("get_maybe_axiswise_dim", "NoopFwToFloat8BwDynamic"), _CODES),
    **dict.fromkeys(("amax_to_scale", "tensor_to_amax", "tensor_to_scale", "to_fp8_saturated"), _CODES),
    **dict.fromkeys(
        ("is_row_major", "pad_tensor_for_matmul"), "sizes and layouts are adapted automatically if a GEMM needs it"
    ),
    **dict.fromkeys(("Float8MMConfig", "preprocess_data", "preprocess_scale"), "not planned"),
    "addmm_float8_unwrapped_inference": "not planned",
}
#: Modules and functions of torchao besides `float8`.
TORCHAO_TOP = {
    "optim": "use `quaver.torch.optim`, which stores states in 8 bits",
    "dtypes": _CODES,
    **dict.fromkeys(("quantize_", "quantization", "swizzle", "ops", "testing"), "not planned"),
}


def unknown(module: str, names: Sequence[str], reasons: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that raises an error with the alternative for a missing name.

    It raises an AttributeError, so that `hasattr` is False. Within `from ... import` it raises an ImportError, because
    Python would discard the message of an AttributeError there.

    Args:
        module: name of the module.
        names: names that it provides.
        reasons: alternatives for names that it lacks.
    """

    def look_up(name: str) -> Any:
        why = reasons.get(name) or (suggest(name, names) if names else "this module provides no names")
        sentence = f"{module} has no {name!r}: {why}"
        if not name.startswith("__") and _imports_from(sys._getframe(1)):
            raise ImportError(sentence, name=module)
        raise AttributeError(sentence)

    return look_up


def _imports_from(frame: FrameType) -> bool:
    """Return True if a frame is executing the name lookup of a `from ... import`."""
    return opcode.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"
