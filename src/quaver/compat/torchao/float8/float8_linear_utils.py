"""`convert_to_float8_training`: torchao's call, which converts by `quaver.torch.convert`."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from quaver import rules
from quaver.compat.torchao.float8.config import Float8LinearConfig, Float8LinearRecipeName, recipe_of
from quaver.compat.torchao.float8.float8_linear import Float8Linear
from quaver.compat.torchao.float8.float8_training_tensor import linear_mm_config
from quaver.recipes.spec import Recipe
from quaver.torch.conversion.convert import convert
from quaver.torch.parallel.fsdp.gather import gather_quantized

Filter = Callable[[nn.Module, str], bool]


def swap_linear_layers(
    module: nn.Module, from_float_func: Callable[[nn.Linear], nn.Linear], *, module_filter_fn: Filter | None = None
) -> nn.Module:
    """Put what a function makes of each nn.Linear in its place; returns the module, or what a root nn.Linear became."""
    if isinstance(module, nn.Linear) and (module_filter_fn is None or module_filter_fn(module, "")):
        return from_float_func(module)
    for name, layer in [*module.named_modules()]:
        if name and isinstance(layer, nn.Linear) and (module_filter_fn is None or module_filter_fn(layer, name)):
            module.set_submodule(name, from_float_func(layer))
    return module


def convert_to_float8_training(
    module: nn.Module, *, module_filter_fn: Filter | None = None, config: Float8LinearConfig | None = None
) -> nn.Module:
    """Convert a model's linear layers in place, and return it.

    Unlike torchao's the class of each layer changes, not the layer: hooks, training mode and tied weights stay, and
    `quaver.torch.revert(model)` undoes it. Subclasses of nn.Linear that compute otherwise are left alone.

    Args:
        module: any, itself an nn.Linear too. Under `enable_fsdp_float8_all_gather` all ranks call this alike, before
            fully_shard; without a group of processes that option does nothing.
        module_filter_fn: of a module and its name: whether to convert it. None converts all, output heads too.
        config: None is tensorwise.
    Returns:
        The same module. Its layers have torchao's `linear_mm_config`.
    Raises:
        ValueError: what `quaver.torch.convert` and `quaver.torch.parallel.gather_quantized` refuse.
    Exact: codes and scales are torchao's wherever torchao's logarithm rounds a power of two right. Bounded: outputs,
    by the order of sums.
    """
    config = config or Float8LinearConfig()
    if config.emulate and torch.cuda.is_available():
        warnings.warn(
            "emulate=True emulates the GEMMs that this GPU lacks, and native ones run where it has them; "
            "with quaver.torch.only('reference') around a step all are emulated",
            stacklevel=2,
        )
    modules = dict(module.named_modules(remove_duplicate=False))

    def left(name: str, in_features: int, out_features: int, recipe: Recipe) -> str:
        given = modules.get(name)
        if not isinstance(given, nn.Linear):
            return "torchao converts nn.Linear alone; quaver.torch.convert reaches this, too"
        if module_filter_fn is not None and not module_filter_fn(given, name):
            return "left out by module_filter_fn"
        return ""

    for name in convert(module, recipe_of(config), skip=left, head=True).converted:
        modules[name].__dict__["linear_mm_config"] = linear_mm_config(config)
    # Without a group of processes there is no fully_shard to gather weights.
    if config.enable_fsdp_float8_all_gather and dist.is_initialized():
        gather_quantized(module)
    return module


def _auto_filter_for_recipe(recipe: str | Float8LinearRecipeName, filter_fqns: Sequence[str]) -> Filter:
    """torchao's filter by size: True of a layer that is large enough and has none of `filter_fqns` in its name.

    Raises:
        ValueError: a recipe for which torchao has no thresholds.
    """
    name = recipe if isinstance(recipe, str) else recipe.value
    rules.auto_filter_small_kn(name)
    return partial(_is_large, recipe=name, filter_fqns=filter_fqns)


def _is_large(mod: nn.Module, fqn: str, filter_fqns: Sequence[str], recipe: str) -> bool:
    if not isinstance(mod, nn.Linear) or any(part in fqn for part in filter_fqns):
        return False
    n, k = mod.weight.shape
    return not rules.auto_filter_small_kn(recipe)(fqn, k, n, recipe_of(Float8LinearConfig.from_recipe_name(recipe)))


def _auto_filter_for_tensorwise(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> bool:
    """`_auto_filter_for_recipe("tensorwise", filter_fqns)` of a module and its name."""
    return _is_large(mod, fqn, filter_fqns, "tensorwise")


def _auto_filter_for_rowwise(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> bool:
    """`_auto_filter_for_recipe("rowwise", filter_fqns)` of a module and its name."""
    return _is_large(mod, fqn, filter_fqns, "rowwise")


__all__ = ["Float8Linear", "convert_to_float8_training", "swap_linear_layers"]
