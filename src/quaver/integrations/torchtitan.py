"""torchtitan's seam: a `QuantizationConverter` that a model's registry is given, as torchtitan's own are.

    model_spec = model_registry("8B", converters=[QuaverConverter.Config(recipe_name="mxfp8", filter_fqns=["lm_head"])])

torchtitan describes a model by a tree of configurations before it makes one. The converter puts configurations of our
layer in the place of those of its `Linear`, and above the root's own one that converts what it builds: names for noise,
one step for all histories, weights that fully_shard gathers as codes. torchtitan makes the model on meta, shards it,
gives it memory and initializes it then.
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
        f"{__name__} needs the quantization converters of torchtitan 0.3, and this version lacks them or what they "
        f"import ({error}): pip install torchtitan==0.3.0, or call quaver.torch.convert where the model is made on meta"
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

#: torchao's recipes that are ours under another name.
OTHER_NAMES = {"rowwise_with_gw_hp": "rowwise_bf16_wgrad"}
#: Among `filter_fqns`, what is no part of a name.
SMALL_KN = "auto_filter_small_kn"


class QuaverLinear(qt.Linear, Module):
    """`quaver.torch.Linear` as torchtitan builds and initializes layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """A layer and its recipe."""

        #: One of `quaver.recipes`.
        recipe_name: str
        #: Of stochastic rounding.
        seed: int = 0

        def build(self, **kwargs: Any) -> Any:
            """The layer."""
            given: Any = self
            sharding = given.sharding_config
            if sharding is not None:
                # What recipes remember lies whole on every rank, and torchtitan wants to be told of each buffer.
                whole = dense_param_placement(tp=spmd_types.R)
                states = {**dict.fromkeys(STATE, whole), **sharding.state_shardings}
                given = replace(given, sharding_config=replace(sharding, state_shardings=states))
            return Linear.Config.build(given, **kwargs)

    def __init__(self, config: Any) -> None:
        super().__init__(
            config.in_features, config.out_features, config.bias, recipe=config.recipe_name, seed=config.seed
        )


class QuaverConverter(QuantizationConverter):
    """Converts a model's linear layers where torchtitan describes it.

    Args:
        config: a `QuaverConverter.Config`.
    Raises:
        ValueError: an unknown recipe; an option that the recipe or this machine does not have; in `convert`, names of
            `filter_fqns` that no layer has, or nothing to convert; where torchtitan joins the model with the job,
            tensor or pipeline parallelism, the backend full_dtensor, CUDA graphs, or compiled layers whose weights
            travel as codes.
    Exact: what `quaver.torch.convert` gives on the same model, bit for bit; with weights gathered as codes, too.
    Source: options and their names are those of torchtitan's Float8LinearConverter and of its earlier float8 section.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """What is converted, and how."""

        #: One of `quaver.recipes`, or torchao's "rowwise_with_gw_hp".
        recipe_name: str = "tensorwise"
        #: Parts of names of layers to leave alone; "auto_filter_small_kn" among them leaves alone what torchao's filter
        #: of this name does. Features that are no multiple of 16 are left alone anyway.
        filter_fqns: list[str] = field(default_factory=list)
        #: Whether fully_shard gathers weights as codes (`quaver.torch.parallel.gather_quantized`).
        enable_fsdp_float8_all_gather: bool = False
        #: Whether ranks agree on the weights' amaxes in one all-reduce a step, which they do anyway: it is asked for
        #: with weights that are gathered as codes and have one scale each, measured in every step.
        precompute_float8_dynamic_scale_for_fsdp: bool = False
        #: Whether GEMMs may be emulated that this machine does not have.
        emulate: bool = False
        #: Of stochastic rounding.
        seed: int = 0

    def __init__(self, config: Any) -> None:
        self.config = config
        self.recipe_name = OTHER_NAMES.get(config.recipe_name, config.recipe_name)
        self.recipe = recipes.get(self.recipe_name)
        self.small_kn = rules.auto_filter_small_kn(self.recipe_name) if SMALL_KN in config.filter_fqns else None
        _check(config, self.recipe)

    def convert(self, model_config: Any) -> Any:
        """Put our configurations in the place of torchtitan's; returns the root's."""
        given = self.config
        patterns = [pattern for pattern in given.filter_fqns if pattern != SMALL_KN]
        layers = list(model_config.traverse(Linear.Config))
        _refuse_unknown(patterns, [name for name, *_ in layers])
        left: dict[str, str] = {}
        for name, layer, parent, attribute in layers:
            left[name] = _why_not(name, layer, patterns, self.small_kn, self.recipe)
            if left[name]:
                continue
            ours = QuaverLinear.Config(**_values(layer), recipe_name=self.recipe_name, seed=given.seed)
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
        return _rooted(model_config, _Whole(given.seed, given.enable_fsdp_float8_all_gather))


@dataclass(frozen=True)
class _Whole:
    """What is done to the whole model."""

    seed: int
    gathers: bool


def _check(config: Any, recipe: Recipe) -> None:
    """Raise the ValueError of options that contradict one another, the recipe or the machine."""
    weight, precompute = recipe.fprop.b, "precompute_float8_dynamic_scale_for_fsdp"
    if getattr(config, precompute):
        if not config.enable_fsdp_float8_all_gather:
            raise ValueError(
                f"{precompute} is of weights that are gathered as codes: set enable_fsdp_float8_all_gather"
            )
        if weight is None or not weight.per_tensor or recipe.delayed is not None:
            raise ValueError(
                f"{precompute} is of weights with one scale each, measured in every step, which {recipe} has not: "
                "leave it out; what ranks must agree on travels in one all-reduce a step anyway"
            )
    if config.enable_fsdp_float8_all_gather and config.model_compile_enabled:
        raise ValueError(_COMPILED)
    why = "" if config.emulate else _why_emulated(recipe)
    if why:
        raise ValueError(f"this machine would emulate GEMMs of {recipe} ({why}): set emulate=True if that is meant")


_COMPILED = (
    "torchtitan compiles blocks as one graph each (fullgraph=True), and no graph holds a layer whose weight travels as "
    "codes: leave out enable_fsdp_float8_all_gather, or compile without the model"
)


def _why_emulated(recipe: Recipe) -> str:
    """Why one of a recipe's GEMMs has no native form here, or ""; without trying any."""
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


# Which layers.


def _refuse_unknown(patterns: list[str], names: list[str]) -> None:
    for pattern in patterns:
        if not any(pattern in name for name in names):
            parts = dict.fromkeys(part for name in names for part in name.split(".") if not part.isdigit())
            raise ValueError(f"no linear layer has {pattern!r} of filter_fqns in its name; {suggest(pattern, parts)}")


def _why_not(name: str, layer: Any, patterns: list[str], small_kn: SkipFilter | None, recipe: Recipe) -> str:
    """Why a layer is left alone, or ""."""
    k, n = layer.in_features, layer.out_features
    if isinstance(layer, QuaverLinear.Config):
        return f"an earlier converter gave it {layer.recipe_name}"
    if type(layer) is not Linear.Config:
        return f"{type(layer).__qualname__} is a layer of its own"
    pattern = next((pattern for pattern in patterns if pattern in name), None)
    if pattern is not None:
        return f"filter_fqns has {pattern!r}"
    if k % 16 or n % 16:
        return f"its features, {k} and {n}, are not both multiples of 16"
    return "" if small_kn is None else small_kn(name, k, n, recipe)


# The whole model.


def _rooted(config: Any, whole: _Whole) -> Any:
    """A root's configuration that converts what it builds."""
    before: _Whole | None = getattr(config, "quaver", None)
    if before is not None:
        if before != whole:
            raise ValueError(
                f"two QuaverConverters of one model differ in what is the whole model's: {before} and {whole}; give "
                "both the same seed and enable_fsdp_float8_all_gather"
            )
        return config
    of: Any = type(config)
    root = _root_class(of)(**_values(config), quaver=whole)
    for each in fields(config):
        if not each.init:
            setattr(root, each.name, getattr(config, each.name))
    return root


def _values(config: Any) -> dict[str, Any]:
    return {each.name: getattr(config, each.name) for each in fields(config) if each.init}


@cache
def _root_class(base: Any) -> Any:
    """A class of configurations that build what those of another class do, converted."""

    @dataclass(kw_only=True, slots=True)
    class Config(base):
        quaver: _Whole

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            _refuse_job(config, self.quaver)
            base.update_from_config(self, config=config, **kwargs)

        def build(self, **kwargs: Any) -> Any:
            model = base.build(self, **kwargs)
            _finish(model, self.quaver)
            return model

    Config.__qualname__ = f"Quaver{base.__qualname__}"
    return Config


def _refuse_job(job: Any, whole: _Whole) -> None:
    """Raise the ValueError of a job whose parts do not go together with ours, before the model is made."""
    degrees = job.parallelism
    for kind, option in (("tensor", "tensor_parallel_degree"), ("pipeline", "pipeline_parallel_degree")):
        degree = getattr(degrees, option)
        if degree > 1:
            raise ValueError(
                f"parallelism.{option} is {degree}, and QuaverConverter's layers go with data parallelism alone: set "
                f"it to 1, or lay {kind} parallelism out by quaver.torch.parallel in a loop of your own"
            )
    if degrees.spmd_backend == "full_dtensor":
        raise ValueError(
            "parallelism.spmd_backend is full_dtensor, which hands layers DTensors, and QuaverConverter's take plain "
            "ones: set partial_dtensor"
        )
    training, compiling = getattr(job, "training", None), getattr(job, "compile", None)
    if training is not None and not training.disable_cuda_graphs:
        raise ValueError(
            "torchtitan records forward and backward as a CUDA graph, and quantized layers want a rehearsal of their "
            "own before that: set training.disable_cuda_graphs"
        )
    if whole.gathers and compiling is not None and compiling.enable and "model" in compiling.components:
        raise ValueError(_COMPILED)


def _finish(model: nn.Module, whole: _Whole) -> None:
    """What the layers of a model need that know nothing of one another."""
    chosen = [
        ModuleRule(pattern=name, recipe=module.recipe)
        for name, module in model.named_modules()
        if isinstance(module, QuaverLinear)
    ]
    qt.convert(model, Rules([*chosen, ModuleRule(recipe=None)]), seed=whole.seed)
    if whole.gathers:
        logger.info(f"quaver: weights are gathered as\n{gather_quantized(model)}")
