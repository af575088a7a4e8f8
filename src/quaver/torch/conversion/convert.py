"""Convert the linear layers of any model to quantized ones in place, and revert them.

A layer keeps its identity: only its class changes. Hooks, attributes, training mode, tied weights, shared instances and
parametrizations stay as they were.
"""

import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from quaver import recipes
from quaver.recipes.conversion import HEAD_REASON, ConversionRules, ModuleRule, Rules, Skip, names_a_module
from quaver.recipes.spec import Recipe
from quaver.recipes.text import check_instance
from quaver.torch.conversion.matchers import linears
from quaver.torch.conversion.matchers.linears import (
    ADAPTER_REASON,
    LinearMatcher,
    adapter_layers,
    gemm_parameters,
    kind_of,
    output_heads,
)
from quaver.torch.conversion.matchers.swap_class import exchange, restore_class
from quaver.torch.conversion.replace.blocks import Blocks, have_mixers_call, place, remove_overrides
from quaver.torch.conversion.replace.mixer import bypassed
from quaver.torch.conversion.report import Report, ReportRow
from quaver.torch.linear import stored_weight
from quaver.torch.linear.grouped.layer import GroupedLinear
from quaver.torch.linear.linear import Quantizable
from quaver.torch.nn.attention.dot_product import DotProductAttention
from quaver.torch.operations import operation
from quaver.torch.state.buffers import STATE, create_state_buffers
from quaver.torch.state.context import active_context
from quaver.torch.state.history import amax, scaling_step
from quaver.torch.state.layer_state import LayerState, recomputing
from quaver.torch.state.noise import fresh_count, name_streams

# ---- attention modules ----

Module = TypeVar("Module", bound=nn.Module)


def instances(model: nn.Module, kind: type[Module]) -> list[tuple[Module, list[str]]]:
    """Return each module of a class once, with all names under which the model has it."""
    modules: dict[int, tuple[Module, list[str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kind):
            modules.setdefault(id(module), (module, []))[1].append(name)
    return list(modules.values())


def others(model: nn.Module) -> dict[str, int]:
    """Count, by class, the innermost modules that are attention by class name but not `DotProductAttention`."""
    return Counter(
        type(module).__name__
        for module in model.modules()
        if _is_named_attention(module) and not _contains_attention(module)
    )


def _is_named_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() and not isinstance(module, DotProductAttention)


def _contains_attention(module: nn.Module) -> bool:
    """Return True if a submodule computes attention, be it Quaver's or another class."""
    return any(
        isinstance(part, DotProductAttention) or _is_named_attention(part)
        for part in module.modules()
        if part is not module
    )


# ---- conversion ----


def convert(
    model: nn.Module,
    recipe: str | Recipe | Rules | Mapping[str, Recipe | str | None],
    *,
    skip: Skip = (),
    seed: int = 0,
    head: bool = False,
    blocks: bool | Blocks = False,
) -> Report:
    """Convert every layer that the rules select, in place, and set the recipe of every `DotProductAttention`.

    Layers are nn.Linear and its subclasses with the same forward, transformers' Conv1D, the projections of
    nn.MultiheadAttention, and stacked experts of transformers, but not PEFT's adapters. With a delayed recipe the model
    rolls its histories at the start of its own forward, unless an enclosing autocast has already done so. If its
    forward is not called, its layers roll them when they run after a backward. With DistributedDataParallel, convert
    the module before you wrap it.

    Args:
        model: any module; it may itself be an nn.Linear.
        recipe: a recipe or recipe name for all layers, or `Rules`, or the dict that `Rules` takes. A layer that already
            has this recipe keeps its state. The recipe says if attention is quantized. A rule with size limits is
            applied to an attention module's total features over all heads, of queries and of values, and to the
            features of one expert.
        skip: name patterns to leave alone, such as "*.mlp.gate", and filters of layers such as
            `quaver.rules.unprofitable("h100")`: a list of them, or one filter. Patterns match experts by the name of
            their module and of its parameters. A layer that was converted before keeps its recipe.
        seed: seed of stochastic rounding.
        head: True also converts output heads, tied or not. A rule whose pattern names a head converts that head anyway.
        blocks: True replaces the norms, MLPs, attention and mixers of the model by Quaver's blocks where they compute
            the same, in place and under every recipe. A `Blocks` selects which ones; `skip` excludes modules by name.
            False replaces no blocks.
    Returns:
        A report: converted layers, reasons for the others, shares of parameters and FLOPs, and patterns that matched
        nothing. A layer with several names is matched by any of them and listed under the first. It warns if less than
        half of the parameters not excluded by the caller are converted, if a pattern fits no name, and if histories of
        another recipe are dropped.
    Raises:
        ValueError: unknown recipe; raised before anything is changed.
    """
    check_instance("convert", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    blocks = Blocks() if blocks is True else blocks
    if blocks and not isinstance(blocks, Blocks):
        raise ValueError(f"blocks is {blocks!r}; give True, False, or a quaver.torch.Blocks")
    choice = ConversionRules(recipe, skip)
    chosen = {rule: None if rule.recipe is None else recipes.get(rule.recipe) for rule in choice.rules.rules}
    report = Report(kind="nn.Linear")
    policy = dict.fromkeys(adapter_layers(model), ADAPTER_REASON) | dict.fromkeys(
        () if head else output_heads(model), HEAD_REASON
    )
    converter = _ModuleConverter(model, choice, chosen, policy, seed, report)
    modules = instances(model, nn.Module)
    for module, names in modules:
        converter.visit(module, names)
    if blocks:
        report.blocks = place([(m, names[0], choice.skips(names)) for m, names in modules], blocks)
    have_mixers_call([module for module, _ in modules])
    _convert_attention(model, choice, chosen, report)
    report.others = _others(model, converter.reached)
    report.unused = choice.unused
    _update_hooks(model)
    if layers := with_history(model):
        scaling_step.together(layers)
    _warn(model, choice, converter, report)
    operation.register_flop_formulas()
    return report


def revert(model: nn.Module) -> list[str]:
    """Restore the original class of every converted module and return the names of the layers.

    Weights stay; the state of recipes is dropped. Weights that are stored quantized are dequantized. Each
    `DotProductAttention` loses its own recipe.
    """
    check_instance("revert", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    names = []
    for attention, _ in instances(model, DotProductAttention):
        attention.recipe = None
    for name, module in model.named_modules():
        if isinstance(module, Quantizable) and module.weight_spec is not None:
            stored_weight.restore(module)
        if isinstance(module, GroupedLinear) and module.recipe is not None:
            module.forget()
            names.append(name)
        if isinstance(module, Quantizable) and restore_class(module):
            for buffer in STATE:
                module._buffers.pop(buffer, None)
            for attribute in ADDED_ATTRIBUTES:
                module.__dict__.pop(attribute, None)
            names.append(name)
    remove_overrides(model)
    _update_hooks(model)
    return names


#: Attributes that `convert` adds to a layer, and "linear_mm_config", which torchao's conversion adds.
ADDED_ATTRIBUTES = ("recipe", "seed", "qualified_name", "cache_compiled_weight", "_state", "linear_mm_config")


REACHES_LITTLE = (
    "convert reached less than half of the parameters that GEMMs read; make the others nn.Linear, or leave them out by "
    "name with skip=[...] if that is meant"
)


# ---- which layers are converted ----


class _ModuleConverter:
    """Visits each module of a model once: selects its recipe, converts it, and adds it to the report."""

    def __init__(
        self,
        model: nn.Module,
        choice: ConversionRules,
        chosen: Mapping[ModuleRule, Recipe | None],
        policy: Mapping[nn.Module, str],
        seed: int,
        report: Report,
    ) -> None:
        self.choice, self.chosen, self.seed, self.report = choice, chosen, seed, report
        #: Layers that are converted only if a rule names them, such as output heads, and the reason.
        self.policy = policy
        #: Ids of the parameters that are already counted in some row.
        self.seen: set[int] = set()
        #: Converted modules, and their submodules whose weights they use.
        self.reached: set[nn.Module] = set()
        #: Layers that are left alone because their parent reads the weight without calling them, and the reason.
        self.inside: dict[nn.Module, str] = {}
        #: Names of layers whose state from another recipe was dropped.
        self.dropped: list[str] = []
        #: Subclasses of nn.Linear that were probed, and if they compute what it does.
        self.probed: dict[Any, bool] = {}
        self.config = getattr(model, "config", None)

    def visit(self, module: nn.Module, names: list[str]) -> None:
        kind = kind_of(module)
        if kind is None:
            self.inside.update(bypassed(module, lambda part: kind_of(part) is not None))
            self._count_others(module, names[0])
            return
        recipe, why, by_choice = self._decide(module, kind, names)
        current_recipe = module.recipe if isinstance(module, Quantizable) and recipe is None else None
        runs = recipe or current_recipe
        if isinstance(module, nn.MultiheadAttention) and (runs is None or not runs.quantizes):
            self.inside[module.out_proj] = "nn.MultiheadAttention reads its weight without calling it"
        # Read weights before the class changes: the original class evaluates a parametrized weight.
        weights = [p for p in kind.weights(module) if id(p) not in self.seen]
        if recipe is None:
            why += f"; it keeps {current_recipe}" if current_recipe is not None else ""
            self.report.skipped[names[0]] = why
        else:
            if _convert_layer(module, kind, recipe, names[0], self.seed):
                self.dropped.append(names[0])
            self.report.converted[names[0]] = recipe
        if recipe is not None:
            self.reached.add(module)
            self.reached.update(module.modules() if kind.experts(module) else ())
        self._row(module, kind, names[0], weights, recipe, why, by_choice)

    def _decide(self, module: nn.Module, kind: LinearMatcher, names: list[str]) -> tuple[Recipe | None, str, bool]:
        """Return the recipe of a module or None, the reason for None, and True if the user or a policy is the
        reason.
        """
        candidates = [*names, *(f"{n}.{p}".lstrip(".") for n in names for p in _parameter_names(module, kind))]
        sizes = kind.sizes(module)
        rule, why = self.choice.decide(candidates, *sizes)
        if why or rule is None:
            return None, why, True
        recipe = self.chosen[rule]
        assert recipe is not None
        if module in self.policy and not names_a_module(rule.pattern):
            return None, self.policy[module], True
        why = self.inside.get(module, "") if recipe.quantizes else ""
        why = why or linears.reason_unsupported(module, kind, self.probed)
        if why:
            return None, why, False
        why = self.choice.refused(names[0], *sizes, recipe, kind.experts(module))
        return (None, why, True) if why else (recipe, "", False)

    def _row(
        self,
        module: nn.Module,
        kind: LinearMatcher,
        name: str,
        weights: list[nn.Parameter],
        recipe: Recipe | None,
        why: str,
        by_choice: bool,
    ) -> None:
        self.seen.update(map(id, weights))
        size = sum(p.numel() for p in weights if not nn.parameter.is_lazy(p))
        if recipe is not None:
            self.report.converted_parameters += size
        elif why.startswith(HEAD_REASON):
            self.report.head_parameters += size
        elif by_choice:
            self.report.chosen_parameters += size
        else:
            self.report.unreached_parameters += size
        active = linears.active(module, kind, self.config)
        row = ReportRow(name, type(module).__name__, recipe, size, 2.0 * size * active, why)
        if recipe is not None and weights:
            row = replace(
                row,
                device=weights[0].device,
                dtype=weights[0].dtype,
                features=kind.sizes(module),
                inputs=tuple(k for k, _ in kind.features(module)),
                visits=active * max(1, kind.experts(module)),
            )
        self.report.rows.append(row)

    def _count_others(self, module: nn.Module, name: str) -> None:
        """Count the parameters that GEMMs read in a module that `convert` does not reach."""
        weights = [p for p in gemm_parameters(module) if id(p) not in self.seen and module not in self.reached]
        if not weights:
            return
        self.seen.update(map(id, weights))
        sizes = [(p.numel(), self.choice.leaves(name, p.shape[-1], p.shape[-2])) for p in weights]
        left = sum(size for size, is_left in sizes if is_left)
        total = sum(size for size, _ in sizes)
        self.report.chosen_parameters += left
        self.report.unreached_parameters += total - left
        why = "left out by name" if left == total else f"{type(module).__name__} overrides forward and reads it there"
        self.report.rows.append(ReportRow(name, type(module).__name__, None, total, 2.0 * total, why))


def _parameter_names(module: nn.Module, kind: LinearMatcher) -> list[str]:
    """Return the parameter names of an experts module, which rules may match too; an empty list for other modules."""
    return [name for name, _ in module.named_parameters()] if kind.experts(module) else []


def _others(model: nn.Module, reached: set[nn.Module]) -> dict[str, int]:
    """Count, by class, the unconverted modules other than nn.Linear that own a matrix."""
    return Counter(
        type(module).__name__
        for module in model.modules()
        if module not in reached
        and not isinstance(module, nn.Linear | nn.ParameterList | nn.ParameterDict)
        and any(p.dim() > 1 for p in module.parameters(recurse=False) if not nn.parameter.is_lazy(p))
    )


def _warn(model: nn.Module, choice: ConversionRules, converter: _ModuleConverter, report: Report) -> None:
    """Warn about likely mistakes: dropped state, patterns without a match, and a conversion that reaches little."""
    if converter.dropped:
        others = f", and that of {len(converter.dropped) - 1} other layers" if len(converter.dropped) > 1 else ""
        warnings.warn(
            f"convert changes the recipe of {converter.dropped[0] or '(root)'} and drops the state of the previous "
            f"one{others}: histories and counts start fresh",
            stacklevel=3,
        )
    names = [*(name for name, _ in model.named_modules(remove_duplicate=False)), *dict(model.named_parameters())]
    unknown = choice.unknown(names)
    if unknown:
        warnings.warn(f"no layer has a name that matches {', '.join(map(repr, unknown))}", stacklevel=3)
    if not report.converted and not report.attention and not any(row.block for row in report.blocks):
        warnings.warn(f"convert changed nothing:\n{report}", stacklevel=3)
    elif report.other_attention and not report.attention:
        warnings.warn(f"the recipe's attention=True quantizes nothing here:\n{report}", stacklevel=3)
    elif report.reaches_little:
        warnings.warn(f"{REACHES_LITTLE}:\n{report}", stacklevel=3)


# ---- conversion of one layer ----


def _convert_layer(module: nn.Module, kind: LinearMatcher, recipe: Recipe, name: str, seed: int) -> bool:
    """Convert one layer; return True if recorded state of another recipe was dropped."""
    if not isinstance(module, Quantizable):
        exchange(module, kind.over)
        state = module.__dict__["_state"] = LayerState()
        state.members = linears.members(module, kind)
    assert isinstance(module, Quantizable)
    dropped = False
    if module.__dict__.get("recipe") is not recipe:
        dropped = _recorded(module)
        for buffer in STATE:
            module._buffers.pop(buffer, None)
    module.__dict__.update(recipe=recipe, seed=seed, qualified_name=name)
    count = module._buffers.get("count")
    if count is not None:
        # From now on the noise stream is derived from the layer's name instead of a running number.
        count[..., 2] = fresh_count(module)[..., 2]
    amax.register(module)
    name_streams(module)
    create_state_buffers(module, recipe)
    return dropped


def set_recipe(model: nn.Module, name: str, recipe: Recipe) -> None:
    """Give a converted layer another recipe; its scaling history is dropped."""
    module = model.get_submodule(name)
    kind = kind_of(module)
    assert kind is not None
    assert isinstance(module, Quantizable)
    _convert_layer(module, kind, recipe, module.__dict__.get("qualified_name", name), module.seed)
    _update_hooks(model)
    if layers := with_history(model):
        scaling_step.together(layers)


def _recorded(module: Quantizable) -> bool:
    """Return True if the layer's amax history has a nonzero entry."""
    history = module._buffers.get("history")
    return history is not None and not history.is_meta and bool(history.any())


def _convert_attention(
    model: nn.Module, choice: ConversionRules, chosen: Mapping[ModuleRule, Recipe | None], report: Report
) -> None:
    """Set each attention module's recipe from the rule that matches its name, and report which ones are quantized."""
    for module, names in instances(model, DotProductAttention):
        features, value_features = (module.heads * size for size in module.head_dim)
        rule, _ = choice.decide(names, features, value_features)
        wanted = None if rule is None else chosen[rule]
        if wanted is not None:
            module.recipe = wanted
            if wanted.attention is not None:
                report.attention[names[0]] = wanted
    if any(recipe.attention is not None for recipe in report.converted.values()):
        report.other_attention = others(model)


# ---- hooks and switches of the model around the layers ----

#: Attribute that lists the buffers that DistributedDataParallel does not broadcast.
DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"
#: Attribute that lists the state-dict keys that transformers' `save_pretrained` does not write. In a version without
#: it, the saved folder contains the keys that recipes add, unless you pass `state_dict=plain_state_dict(model)`.
FOLDER_IGNORES = "_keys_to_ignore_on_save"
#: Modules that in eval mode read the weights of their layers without calling them if this attribute is true.
FAST_PATHS = {nn.TransformerEncoder: "use_nested_tensor", nn.TransformerEncoderLayer: "activation_relu_or_gelu"}

#: Models that roll their own histories.
_roots: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class RollHistories:
    """Forward pre-hook of a root model that rolls the histories, as entering the outermost autocast would."""

    #: True inside `one_step`, where the hook does nothing.
    disabled = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not self.disabled:
            end_step(module)


def end_step(model: nn.Module) -> None:
    """Roll the histories of a converted root model, for a wrapper that calls its parts instead of its forward."""
    if active_context.now[2] == 0 and torch.is_grad_enabled() and not recomputing():
        scaling_step.roll_root(with_history(model))


@contextmanager
def one_step(model: nn.Module) -> Iterator[None]:
    """Roll the histories once on entry, and disable the root's forward hook inside; backward marks the next step."""
    end_step(model)
    hooks = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, RollHistories)]
    for hook in hooks:
        hook.disabled = True
    try:
        yield
    finally:
        for hook in hooks:
            hook.disabled = False


def with_history(model: nn.Module) -> list[nn.Module]:
    """Return the layers that have an amax history."""
    return [m for m in model.modules() if isinstance(m, Quantizable) and "history" in m._buffers]


def _update_hooks(model: nn.Module) -> None:
    """Update hooks, DDP's and transformers' ignore lists and fast-path switches after layers were converted or
    reverted.
    """
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            # Only the outermost model rolls: a submodule that is called twice in a step must not roll in between.
            if isinstance(hook, RollHistories):
                del module._forward_pre_hooks[key]
        _roots.discard(module)
        for kind, switch in FAST_PATHS.items():
            if isinstance(module, kind):
                _switch_off(module, switch, any(isinstance(m, Quantizable) for m in module.modules()))
    rolls = bool(with_history(model))
    if rolls and not any(model is part for root in _roots for part in root.modules()):
        model.register_forward_pre_hook(RollHistories(), prepend=True)
        _roots.add(model)
    _ignore_histories(model)
    for module in model.modules():
        # transformers' quantizer, not this list, controls saving a model with `is_quantized`.
        if isinstance(module.__dict__.get(FOLDER_IGNORES), set) and not module.__dict__.get("is_quantized"):
            _exclude_from_folders(module)


def _switch_off(module: nn.Module, switch: str, off: bool) -> None:
    """Set an attribute to False and save its value, or restore the saved value."""
    attributes = module.__dict__
    if off and "_before_convert" not in attributes:
        attributes["_before_convert"] = attributes.get(switch, False)
        attributes[switch] = False
    elif not off and "_before_convert" in attributes:
        attributes[switch] = attributes.pop("_before_convert")


def _ignore_histories(model: nn.Module) -> None:
    """Add the state buffers to DDP's ignore list so that rank 0 does not overwrite each rank's own; keep the user's
    entries.

    Noise counts are added only for layers with several members, such as experts. Members may have tokens on one rank
    only, and a count that was reset would repeat the noise.
    """
    layers = [(name, m) for name, m in model.named_modules() if kind_of(m) is not None]
    members = {m for _, m in layers if getattr(m.__dict__.get("_state"), "members", ())}
    buffers = [(f"{name}.{b}".lstrip("."), b, m) for name, m in layers for b in STATE]
    ours = {key: b in m._buffers and (b != "count" or m in members) for key, b, m in buffers}
    before = list(getattr(model, DDP_IGNORES, ()))
    names = [name for name in before if name not in ours] + [name for name, is_there in ours.items() if is_there]
    if names:
        setattr(model, DDP_IGNORES, names)
    elif before:
        delattr(model, DDP_IGNORES)


def _exclude_from_folders(model: nn.Module) -> None:
    """Exclude the state buffers from `save_pretrained`, so that the folder has the keys of the unconverted model."""
    layers = [(name, m) for name, m in model.named_modules(remove_duplicate=False) if kind_of(m) is not None]
    # The class makes this set per instance, and copies of the model have their own.
    ignored: set[str] = getattr(model, FOLDER_IGNORES)
    for name, module in layers:
        names = {f"{name}.{buffer}".lstrip(".") for buffer in STATE}
        if isinstance(module, Quantizable):
            ignored |= names
        else:
            ignored -= names
