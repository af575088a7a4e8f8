"""torchtitan integration: a `QuantizationConverter` for a model's registry, like torchtitan's own converters.

    model_spec = model_registry("8B", converters=[QuaverConverter.Config(recipe_name="mxfp8", filter_fqns=["lm_head"])])

torchtitan describes a model by a tree of configs before it builds it. The converter replaces the configs of its
`Linear`, and wraps the root's config with one that converts the built model: it names noise streams, synchronizes
histories per step and sets up quantized all-gathers for fully_shard. torchtitan then builds the model on meta, shards
it, allocates memory and initializes it.
"""

from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

if find_spec("torchtitan") is None:
    raise ModuleNotFoundError(
        f"{__name__} needs torchtitan, which is not installed: pip install torchtitan==0.3.0", name="torchtitan"
    )

try:
    import spmd_types
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.models.common.decoder_sharding import dense_param_placement
    from torchtitan.models.common.linear import Linear
    from torchtitan.protocols.module import Module
except ImportError as error:
    raise ImportError(
        f"{__name__} needs the quantization converters of torchtitan 0.3, and this version lacks them or one of "
        f"their imports ({error}): pip install torchtitan==0.3.0, or call quaver.torch.convert where the model is "
        "made on meta"
    ) from error
from torchtitan.tools.logging import logger

import quaver.torch as qt
from quaver import recipes, rules
from quaver.recipes.conversion import ModuleRule, Rules, SkipFilter
from quaver.recipes.spec import Recipe
from quaver.recipes.text import suggest
from quaver.torch.backends.gpu import device
from quaver.torch.parallel.fsdp.gather import gather_quantized
from quaver.torch.state.buffers import STATE

__all__ = ["QuaverConverter", "QuaverLinear"]

#: Recipes of torchao that Quaver has under another name.
OTHER_NAMES = {"rowwise_with_gw_hp": "rowwise_bf16_wgrad"}
#: Special entry of `filter_fqns` that is not part of a name.
SMALL_KN = "auto_filter_small_kn"


class QuaverLinear(qt.Linear, Module):
    """`quaver.torch.Linear` in the form in which torchtitan builds and initializes layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Config of a linear layer and its recipe."""

        #: Name of a recipe in `quaver.recipes`.
        recipe_name: str
        #: Seed of stochastic rounding.
        seed: int = 0

        def build(self, **kwargs: Any) -> Any:
            """Build the layer."""
            passed: Any = self
            sharding = passed.sharding_config
            if sharding is not None:
                # The recipes' state is replicated on every rank, and torchtitan requires a placement for each buffer.
                model_options = dense_param_placement(tp=spmd_types.R)
                states = {**dict.fromkeys(STATE, model_options), **sharding.state_shardings}
                passed = replace(passed, sharding_config=replace(sharding, state_shardings=states))
            return Linear.Config.build(passed, **kwargs)

    def __init__(self, config: Any) -> None:
        super().__init__(
            config.in_features, config.out_features, config.bias, recipe=config.recipe_name, seed=config.seed
        )


class QuaverConverter(QuantizationConverter):
    """Converts the linear layers in a torchtitan model config.

    Args:
        config: a `QuaverConverter.Config`.
    Raises:
        ValueError: an unknown recipe, or an option that the recipe or this machine does not support. In `convert`:
            names in `filter_fqns` that match no layer, or nothing to convert. When torchtitan combines the model with
            the job: tensor or pipeline parallelism, the backend full_dtensor, CUDA graphs, or compiled layers with
            quantized all-gathers.
    Exact: the result of `quaver.torch.convert` on the same model, bit for bit, also with quantized all-gathers.
    Source: options and their names are those of torchtitan's Float8LinearConverter and of its earlier float8 section.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """Options of the conversion."""

        #: Name of a recipe in `quaver.recipes`, or torchao's "rowwise_with_gw_hp".
        recipe_name: str = "tensorwise"
        #: Parts of names of layers to leave alone; "auto_filter_small_kn" leaves alone the same layers as torchao's
        #: filter of this name. Layers whose features are not multiples of 16 are always left alone.
        filter_fqns: list[str] = field(default_factory=list)
        #: True if fully_shard all-gathers quantized weights (`quaver.torch.parallel.gather_quantized`).
        enable_fsdp_float8_all_gather: bool = False
        #: True requires that ranks reduce the weights' amaxes in one all-reduce per step. They always do; the option is
        #: accepted only with quantized all-gathers and weights with one scale each that is measured in every step.
        precompute_float8_dynamic_scale_for_fsdp: bool = False
        #: True allows GEMMs that this machine must emulate.
        emulate: bool = False
        #: Seed of stochastic rounding.
        seed: int = 0

    def __init__(self, config: Any) -> None:
        self.config = config
        self.recipe_name = OTHER_NAMES.get(config.recipe_name, config.recipe_name)
        self.recipe = recipes.get(self.recipe_name)
        self.small_kn = rules.auto_filter_small_kn(self.recipe_name) if SMALL_KN in config.filter_fqns else None
        _check(config, self.recipe)

    def convert(self, model_config: Any) -> Any:
        """Replace torchtitan's configs of linear layers and return the root's config."""
        passed = self.config
        patterns = [pattern for pattern in passed.filter_fqns if pattern != SMALL_KN]
        layers = list(model_config.traverse(Linear.Config))
        _check_names(patterns, [name for name, *_ in layers])
        left: dict[str, str] = {}
        for name, layer, parent, attribute in layers:
            left[name] = _why_not(name, layer, patterns, self.small_kn, self.recipe)
            if left[name]:
                continue
            ours = QuaverLinear.Config(**_values(layer), recipe_name=self.recipe_name, seed=passed.seed)
            if parent is None:
                model_config = ours
            elif isinstance(parent, list):
                parent[attribute] = ours
            else:
                setattr(parent, attribute, ours)
        lines = [f"  left alone: {name} ({why})" for name, why in left.items() if why]
        count = f"{len(left) - len(lines)} of {len(left)} linear layers to {self.recipe}"
        if len(lines) == len(left):
            raise ValueError("\n".join([f"QuaverConverter converts {count}", *lines]))
        logger.info("\n".join([f"quaver: {count}", *lines]))
        return _wrap_root(model_config, _ModelOptions(passed.seed, passed.enable_fsdp_float8_all_gather))


@dataclass(frozen=True)
class _ModelOptions:
    """Options that apply to the whole model."""

    seed: int
    gathers: bool


def _check(config: Any, recipe: Recipe) -> None:
    """Raise ValueError for options that contradict each other, the recipe or the machine."""
    weight, precompute = recipe.fprop.b, "precompute_float8_dynamic_scale_for_fsdp"
    if getattr(config, precompute):
        if not config.enable_fsdp_float8_all_gather:
            raise ValueError(
                f"{precompute} requires weights that are all-gathered as codes: set enable_fsdp_float8_all_gather"
            )
        if weight is None or not weight.per_tensor or recipe.delayed is not None:
            raise ValueError(
                f"{precompute} requires weights with one scale each that is measured in every step, and {recipe} "
                "does not have that: leave it out; amaxes are reduced in one all-reduce per step anyway"
            )
    if config.enable_fsdp_float8_all_gather and config.model_compile_enabled:
        raise ValueError(_COMPILED)
    why = "" if config.emulate else _why_emulated(recipe)
    if why:
        raise ValueError(f"this machine would emulate GEMMs of {recipe} ({why}): set emulate=True if that is meant")


_COMPILED = (
    "torchtitan compiles each block as one graph (fullgraph=True), and a graph cannot contain a layer whose "
    "weight is all-gathered as codes: leave out enable_fsdp_float8_all_gather, or leave the model out of compile"
)


def _why_emulated(recipe: Recipe) -> str:
    """Return why this machine has to emulate one of a recipe's GEMMs, or "", without running any."""
    gemms = [(gemm.a, gemm.b) for gemm in recipe.gemms.values() if gemm.a is not None and gemm.b is not None]
    if not gemms:
        return ""
    if not torch.cuda.is_available():
        return "it has no CUDA device"
    here = torch.device("cuda")
    why = device.why_no_fp8(here, "native")
    if why:
        return why
    from quaver.torch.backends.gpu import scaled_mm

    return next(filter(None, (scaled_mm.why_not_native(a, b, here) for a, b in gemms)), "")


# ---- which layers are converted ----


def _check_names(patterns: list[str], names: list[str]) -> None:
    for pattern in patterns:
        if not any(pattern in name for name in names):
            parts = dict.fromkeys(part for name in names for part in name.split(".") if not part.isdigit())
            raise ValueError(f"no linear layer has {pattern!r} of filter_fqns in its name; {suggest(pattern, parts)}")


def _why_not(name: str, layer: Any, patterns: list[str], small_kn: SkipFilter | None, recipe: Recipe) -> str:
    """Return why a layer is left alone, or ""."""
    k, n = layer.in_features, layer.out_features
    if isinstance(layer, QuaverLinear.Config):
        return f"an earlier converter gave it {layer.recipe_name}"
    if type(layer) is not Linear.Config:
        return f"{type(layer).__qualname__} is not torchtitan's plain Linear"
    pattern = next((pattern for pattern in patterns if pattern in name), None)
    if pattern is not None:
        return f"filter_fqns has {pattern!r}"
    if k % 16 or n % 16:
        return f"its features, {k} and {n}, are not both multiples of 16"
    return "" if small_kn is None else small_kn(name, k, n, recipe)


# ---- the whole model ----


def _wrap_root(config: Any, model_options: _ModelOptions) -> Any:
    """Wrap the root's config in one that converts the model it builds."""
    before: _ModelOptions | None = getattr(config, "quaver", None)
    if before is not None:
        if before != model_options:
            raise ValueError(
                f"two QuaverConverters of one model differ in options of the whole model: {before}, {model_options}; "
                "give both the same seed and enable_fsdp_float8_all_gather"
            )
        return config
    of: Any = type(config)
    root = _root_class(of)(**_values(config), quaver=model_options)
    for each in fields(config):
        if not each.init:
            setattr(root, each.name, getattr(config, each.name))
    return root


def _values(config: Any) -> dict[str, Any]:
    return {each.name: getattr(config, each.name) for each in fields(config) if each.init}


@cache
def _root_class(base: Any) -> Any:
    """Return a config class that builds what `base` builds, converted."""

    @dataclass(kw_only=True, slots=True)
    class Config(base):
        quaver: _ModelOptions

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            _check_job(config, self.quaver)
            base.update_from_config(self, config=config, **kwargs)

        def build(self, **kwargs: Any) -> Any:
            model = base.build(self, **kwargs)
            _convert_built_model(model, self.quaver)
            return model

    Config.__qualname__ = f"Quaver{base.__qualname__}"
    return Config


def _check_job(job: Any, model_options: _ModelOptions) -> None:
    """Raise ValueError for job options that QuaverConverter does not support, before the model is built."""
    degrees = job.parallelism
    for kind, option in (("tensor", "tensor_parallel_degree"), ("pipeline", "pipeline_parallel_degree")):
        degree = getattr(degrees, option)
        if degree > 1:
            raise ValueError(
                f"parallelism.{option} is {degree}, and QuaverConverter supports data parallelism only: set it to "
                f"1, or apply {kind} parallelism with quaver.torch.parallel in your own training loop"
            )
    if degrees.spmd_backend == "full_dtensor":
        raise ValueError(
            "parallelism.spmd_backend is full_dtensor, which passes DTensors to layers, and QuaverConverter's "
            "layers need plain tensors: set partial_dtensor"
        )
    training, compiling = getattr(job, "training", None), getattr(job, "compile", None)
    if training is not None and not training.disable_cuda_graphs:
        raise ValueError(
            "torchtitan records forward and backward as a CUDA graph, and quantized layers need a warm-up before "
            "that: set training.disable_cuda_graphs"
        )
    if model_options.gathers and compiling is not None and compiling.enable and "model" in compiling.components:
        raise ValueError(_COMPILED)


def _convert_built_model(model: nn.Module, model_options: _ModelOptions) -> None:
    """Convert a built model as a whole: names, histories and quantized all-gathers."""
    chosen = [
        ModuleRule(pattern=name, recipe=module.recipe)
        for name, module in model.named_modules()
        if isinstance(module, QuaverLinear)
    ]
    qt.convert(model, Rules([*chosen, ModuleRule(recipe=None)]), seed=model_options.seed)
    if model_options.gathers:
        logger.info(f"quaver: weights are gathered as\n{gather_quantized(model)}")
