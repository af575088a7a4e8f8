"""Public names of other libraries that are not here, each with why, and an AttributeError that says it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quaver.core.text.spelling import suggest

_CODES = "there is no class of tensors: `quaver.torch.quantize` returns codes with their scales"
_RECIPES = "a `quaver.Recipe` says how each operand is quantized, and `quaver.Rules` of which layer"
_COMMUNICATION = "what goes between ranks is torch's, by the styles of `quaver.torch.parallel`"
_OFFLOAD = "`torch.autograd.graph.save_on_cpu` keeps what backward needs on the host"

#: Names of `transformer_engine.pytorch`; what is not planned has no other way here.
PYTORCH = {
    "make_graphed_callables": "`quaver.torch.model.programs.graph.CapturedStep` captures a whole step",
    "onnx_export": "`quaver.torch.onnx_export` writes a file",
    "ops": "modules and functions of `quaver.torch`; `torch.compile` joins what is between",
    "newton_schulz": "`quaver.torch.optim.Muon` has it",
    "CudaRNGStatesTracker": "noise and dropout have counts of their own on each rank",
    "apply_recipe": "`quaver.torch.convert` gives layers recipes of their own",
    "get_cudnn_version": "`torch.backends.cudnn.version()`",
    "get_device_compute_capability": "`torch.cuda.get_device_capability()`",
    "constants": "recipes name their formats",
    "DType": "formats are `quaver.formats`, and of codes torch's dtypes",
    "GatedDeltaNetAttention": "not planned",
    "FusedMLAQUpProjFunction": "not planned",
    "FusedMLAQUpProjRopeQuant": "not planned",
    **dict.fromkeys(("get_cpu_offload_context", "mark_not_offload", "ManualOffloadSynchronizer"), _OFFLOAD),
    **dict.fromkeys(("initialize_ub", "destroy_ub", "UserBufferQuantizationMode"), _COMMUNICATION),
    **dict.fromkeys(("CPLoadBalancingStrategy", "newton_schulz_tp", "CusolverMpCtx"), _COMMUNICATION),
    **dict.fromkeys(("QuantizerRole", "QuantizerRequest", "DelayedScalingRequest", "quantizer_factory"), _RECIPES),
    **dict.fromkeys(("interleave_glu_tensor", "deinterleave_glu_tensor"), "gate and value lie one after the other"),
    **dict.fromkeys(("QuantizedTensor", "QuantizedTensorStorage", "Quantizer", "prepare_for_saving"), _CODES),
    **dict.fromkeys(("restore_from_saved", "restore_from_func_ctx", "Float8Quantizer"), _CODES),
    **dict.fromkeys(("Float8CurrentScalingQuantizer", "MXFP8Quantizer", "Float8BlockQuantizer"), _CODES),
    **dict.fromkeys(("NVFP4Quantizer", "HybridQuantizer", "IdentityQuantizer", "Float8Tensor", "MXFP8Tensor"), _CODES),
    **dict.fromkeys(("Float8BlockwiseQTensor", "NVFP4Tensor", "HybridQuantizedTensor", "IdentityTensor"), _CODES),
    **dict.fromkeys(("Float8TensorStorage", "MXFP8TensorStorage", "Float8BlockwiseQTensorStorage"), _CODES),
    **dict.fromkeys(("NVFP4TensorStorage", "HybridQuantizedTensorStorage", "IdentityTensorStorage"), _CODES),
}


def unknown(module: str, names: Sequence[str], reasons: Mapping[str, str]) -> Callable[[str], Any]:
    """What a module looks names up by that it has not: an AttributeError with what is there in its place.

    Args:
        module: its name.
        names: that it has.
        reasons: of those that it has not.
    """

    def look_up(name: str) -> Any:
        why = reasons.get(name) or suggest(name, names)
        raise AttributeError(f"{module} has no {name!r}: {why}")

    return look_up
