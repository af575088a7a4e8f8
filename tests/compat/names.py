"""Which public names of Transformer Engine and torchao there are here: the tables of docs/guides/names.md.

`python -m tests.compat.names` writes them: Transformer Engine's names from the lists below, since it cannot be
installed without a GPU's tools, torchao's from the package, which has to be installed.
"""

import importlib
import pkgutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from quaver.compat import stand_in

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "names.md"
BEGIN = "<!-- python -m tests.compat.names writes {} from here -->"
END = "<!-- to here -->"

#: transformer_engine/pytorch/__init__.py of 2.20.2, and what it had besides at 001597e (2026).
PYTORCH = """
CPLoadBalancingStrategy CudaRNGStatesTracker CusolverMpCtx DType DelayedScalingRequest DotProductAttention
Float8BlockQuantizer Float8BlockwiseQTensor Float8BlockwiseQTensorStorage Float8CurrentScalingQuantizer Float8Quantizer
Float8Tensor Float8TensorStorage Fp8Padding Fp8Unpadding FusedMLAQUpProjFunction FusedMLAQUpProjRopeQuant
GatedDeltaNetAttention GatedDeltaNet2Attention GatedDeltaProductAttention GroupedLinear HybridQuantizedTensor
HybridQuantizedTensorStorage HybridQuantizer
IdentityQuantizer IdentityTensor IdentityTensorStorage InferenceParams LayerNorm LayerNormLinear LayerNormMLP Linear
MXFP8Quantizer MXFP8Tensor MXFP8TensorStorage ManualOffloadSynchronizer MultiheadAttention NVFP4Quantizer NVFP4Tensor
NVFP4TensorStorage QuantizedTensor QuantizedTensorStorage Quantizer QuantizerRequest QuantizerRole RMSNorm
RotaryPositionEmbedding TransformerLayer UserBufferQuantizationMode apply_recipe autocast checkpoint constants
deinterleave_glu_tensor destroy_ub fp8_autocast fp8_model_init get_cpu_offload_context get_cudnn_version
get_default_recipe get_device_compute_capability initialize_ub interleave_glu_tensor is_bf16_available is_fp8_available
is_fp8_block_scaling_available is_mxfp8_available is_nvfp4_available make_graphed_callables mark_not_offload moe_permute
moe_permute_and_pad_with_probs moe_permute_with_probs moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs
moe_unpermute newton_schulz newton_schulz_tp onnx_export ops optimizers parallel_cross_entropy prepare_for_saving
quantized_model_init quantizer_factory restore_from_func_ctx restore_from_saved
"""
#: transformer_engine/common/recipe at d0067d0 (August 2026).
RECIPE = """
CustomRecipe DelayedScaling Float8BlockScaling Float8CurrentScaling Format MMParams MXFP8BlockScaling NVFP4BlockScaling
QParams Recipe quantizer_factory
"""
#: transformer_engine/jax at d0067d0, and what 1 and 2 had besides.
JAX = """
MajorShardingType MeshResource NVTE_FP8_COLLECTION_NAME ShardingResource ShardingType autocast flax fp8_autocast
get_delayed_scaling praxis quantize update_collections update_fp8_metas
"""
#: transformer_engine/jax/flax at 076b995, and make_grouped_dense_cls of later.
FLAX = """
DenseGeneral DotProductAttention LayerNorm LayerNormDenseGeneral LayerNormMLP MultiHeadAttention RelativePositionBiases
TransformerLayer TransformerLayerType extend_logical_axis_rules make_dot_general_cls make_grouped_dense_cls
wrap_function_in_te_state_module
"""
#: A module of ours, the names of the library's, and why some are not there.
TRANSFORMER_ENGINE: dict[str, tuple[str, dict[str, str]]] = {
    "pytorch": (PYTORCH, stand_in.PYTORCH),
    "common.recipe": (RECIPE, stand_in.RECIPE),
    "jax": (JAX, stand_in.JAX),
    "jax.flax": (FLAX, stand_in.FLAX),
}
#: Files of torchao.float8 whose functions are no one's to call: what operations of its tensors dispatch to.
INNER = ("float8_ops",)


def row(module: str, names: list[str], reasons: dict[str, str]) -> list[str]:
    """One line for the names that are there, and one for each reason why others are not.

    Raises:
        LookupError: a name that is neither there nor explained.
    """
    ours: ModuleType | None
    try:
        ours = importlib.import_module(f"quaver.compat.{module}")
    except ModuleNotFoundError:
        ours = None
    there, others = [], {}
    for name in names:
        if name in reasons:
            others.setdefault(reasons[name], []).append(name)
        elif ours is not None and has(ours, name):
            there.append(name)
        else:
            raise LookupError(f"{module}.{name} is neither there nor named in quaver.compat.stand_in with a reason")
    lines = [f"| {module} | {listed(there)} | there |"] if there else []
    for why, each in sorted(others.items(), key=lambda one: (one[0] == "not planned", one[1])):
        lines.append(f"| {module} | {listed(each)} | {why if why == 'not planned' else f'refused: {why}'} |")
    return lines


def has(module: ModuleType, name: str) -> bool:
    try:
        getattr(module, name)
    except AttributeError:
        return hasattr(module, "__path__") and find_spec(f"{module.__name__}.{name}") is not None
    return True


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def transformer_engine() -> list[str]:
    """Lines of its table."""
    rows = (
        row(f"transformer_engine.{m}", sorted(names.split()), why) for m, (names, why) in TRANSFORMER_ENGINE.items()
    )
    return [line for lines in rows for line in lines]


def torchao() -> list[str]:
    """Lines of its table, of the package that is installed."""
    theirs: Any = importlib.import_module("torchao")
    float8: Any = importlib.import_module("torchao.float8")
    lines = row("torchao", sorted({*theirs.__all__, "float8"}), stand_in.TORCHAO_TOP)
    lines += row("torchao.float8", sorted(set(float8.__all__)), stand_in.TORCHAO)
    for info in pkgutil.iter_modules(float8.__path__):
        if info.name.startswith("_") or info.name in INNER:
            continue
        module = importlib.import_module(f"torchao.float8.{info.name}")
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__ and n[0] != "_"]
        lines += row(f"torchao.float8.{info.name}", sorted(own), stand_in.TORCHAO)
    return lines


TABLES = {"Transformer Engine's": transformer_engine, "torchao's": torchao}


def written(page: str, name: str, lines: list[str]) -> str:
    """A page with a table of these lines in the place of that between its marks."""
    begin = BEGIN.format(name)
    before, mark, after = page.partition(begin)
    assert mark, f"{PAGE.name} has no {begin}"
    _, end, rest = after.partition(END)
    table = ["| module | names | |", "|---|---|---|", *lines]
    return f"{before}{begin}\n\n" + "\n".join(table) + f"\n\n{end}{rest}"


if __name__ == "__main__":
    text = PAGE.read_text()
    for title, table in TABLES.items():
        text = written(text, title, table())
    PAGE.write_text(text)
    print(f"{PAGE} is written", file=sys.stderr)
