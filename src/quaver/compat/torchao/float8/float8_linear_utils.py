"""torchao's `convert_to_float8_training`, implemented by `quaver.torch.convert`."""

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
    """Replace each nn.Linear by a function's result; returns the module, or the replacement of a root nn.Linear."""
    if isinstance(module, nn.Linear) and (module_filter_fn is None or module_filter_fn(module, "")):
        return from_float_func(module)
    for name, layer in [*module.named_modules()]:
        if name and isinstance(layer, nn.Linear) and (module_filter_fn is None or module_filter_fn(layer, name)):
            module.set_submodule(name, from_float_func(layer))
    return module


def convert_to_float8_training(
    module: nn.Module, *, module_filter_fn: Filter | None = None, config: Float8LinearConfig | None = None
) -> nn.Module:
    """Convert a model's linear layers in place, and return the model.

    Unlike in torchao, layers change their class and are not replaced. So hooks, training mode and tied weights are
    kept, and `quaver.torch.revert(model)` undoes it. Subclasses of nn.Linear with their own forward are not converted.

    Args:
        module: any module, possibly an nn.Linear itself. With `enable_fsdp_float8_all_gather` all ranks must call this
            before fully_shard; without a process group that option has no effect.
        module_filter_fn: function of a module and its name that returns True to convert it. None converts all,
            including output heads.
        config: None means tensorwise.
    Returns:
        The same module. Its layers have torchao's attribute `linear_mm_config`.
    Raises:
        ValueError: as in `quaver.torch.convert` and `quaver.torch.parallel.gather_quantized`.
    Exact: codes and scales are torchao's wherever torchao's logarithm rounds a power of two correctly. Bounded:
    outputs, by the order of sums.
    """
    config = config or Float8LinearConfig()
    if config.emulate and torch.cuda.is_available():
        warnings.warn(
            "emulate=True emulates only the GEMMs that this GPU lacks; use quaver.torch.only('reference') "
            "around a step to emulate all",
            stacklevel=2,
        )
    modules = dict(module.named_modules(remove_duplicate=False))

    def left(name: str, in_features: int, out_features: int, recipe: Recipe) -> str:
        module = modules.get(name)
        if not isinstance(module, nn.Linear):
            return "torchao converts only nn.Linear; use quaver.torch.convert for this layer"
        if module_filter_fn is not None and not module_filter_fn(module, name):
            return "excluded by module_filter_fn"
        return ""

    for name in convert(module, recipe_of(config), skip=left, head=True).converted:
        modules[name].__dict__["linear_mm_config"] = linear_mm_config(config)
    # fully_shard needs a process group, so without one there is nothing to gather.
    if config.enable_fsdp_float8_all_gather and dist.is_initialized():
        gather_quantized(module)
    return module


def _auto_filter_for_recipe(recipe: str | Float8LinearRecipeName, filter_fqns: Sequence[str]) -> Filter:
    """Return torchao's size filter: True for a layer that is large enough and has none of `filter_fqns` in its name.

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
    """Apply `_auto_filter_for_recipe("tensorwise", filter_fqns)` to a module and its name."""
    return _is_large(mod, fqn, filter_fqns, "tensorwise")


def _auto_filter_for_rowwise(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> bool:
    """Apply `_auto_filter_for_recipe("rowwise", filter_fqns)` to a module and its name."""
    return _is_large(mod, fqn, filter_fqns, "rowwise")


__all__ = ["Float8Linear", "convert_to_float8_training", "swap_linear_layers"]
