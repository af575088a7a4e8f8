"""Turn the layers of any model that multiply by a weight into quantized ones, in place, and back.

A layer keeps its identity: only its class changes, so that hooks, attributes, training mode, tied weights, shared
instances and parametrizations are what they were.
"""

import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from quaver import recipes
from quaver.recipes.conversion import ConversionRules, ModuleRule, Rules, Skip, names_a_module
from quaver.recipes.spec import Recipe
from quaver.recipes.text import instance
from quaver.torch.conversion.matchers import linears
from quaver.torch.conversion.matchers.linears import (
    ADAPTER,
    LEFT,
    LinearMatcher,
    adapter_layers,
    gemm_parameters,
    kind_of,
    output_heads,
)
from quaver.torch.conversion.matchers.swap_class import exchange, restore_class
from quaver.torch.conversion.replace.blocks import Blocks, have_mixers_call, place, remove_overrides
from quaver.torch.conversion.replace.mixer import bypassed
from quaver.torch.conversion.report import Implementations, Report, ReportRow, saved_a_token
from quaver.torch.linear import store_weight
from quaver.torch.linear.grouped.layer import GroupedLinear
from quaver.torch.linear.linear import Quantizable
from quaver.torch.nn.attention.dot_product import DotProductAttention
from quaver.torch.operations import operation
from quaver.torch.state.buffers import STATE, prepare
from quaver.torch.state.context import active_context
from quaver.torch.state.history import amax, scaling_step
from quaver.torch.state.layer_state import LayerState, recomputing
from quaver.torch.state.noise import fresh_count, name_streams

# ---- attention modules -----------------------------------------------------------------------------------
# The attention of a model that `convert` gives recipes, and the attention that it cannot reach.

Module = TypeVar("Module", bound=nn.Module)


def instances(model: nn.Module, kind: type[Module]) -> list[tuple[Module, list[str]]]:
    """Each module of a class once, with all its names."""
    modules: dict[int, tuple[Module, list[str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kind):
            modules.setdefault(id(module), (module, []))[1].append(name)
    return list(modules.values())


def others(model: nn.Module) -> dict[str, int]:
    """Modules of other classes that are attention by their name, the innermost ones, counted by class."""
    return Counter(type(module).__name__ for module in model.modules() if _named(module) and not _holds_another(module))


def _named(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() and not isinstance(module, DotProductAttention)


def _holds_another(module: nn.Module) -> bool:
    """True if a module inside attends, one of ours or of another class."""
    return any(isinstance(part, DotProductAttention) or _named(part) for part in module.modules() if part is not module)


# ---- conversion ------------------------------------------------------------------------------------------


def convert(
    model: nn.Module,
    recipe: str | Recipe | Rules | Mapping[str, Recipe | str | None],
    *,
    skip: Skip = (),
    seed: int = 0,
    head: bool = False,
    blocks: bool | Blocks = False,
) -> Report:
    """Convert every layer that the rules name, in place, and give every `DotProductAttention` its recipe.

    Layers are nn.Linear and its subclasses that compute the same, transformers' Conv1D, the projections that
    nn.MultiheadAttention holds, and stacked experts of transformers; not PEFT's adapters. With a delayed recipe the
    model rolls its histories at the start of its own forward, unless an autocast around it has done so, or where its
    layers run after a backward if its forward is not called. Convert the module that DistributedDataParallel wraps,
    before wrapping it.

    Args:
        model: any module; itself an nn.Linear too.
        recipe: a recipe or its name for all, or `Rules`, or the dict that `Rules` takes.
            A layer that has this recipe already keeps its state. Whether attention is quantized is the recipe's choice;
            a rule with sizes sees the features of all heads, of queries and of values, and those of an expert.
        skip: patterns of names to leave alone, such as "*.mlp.gate", and filters of layers such as
            `quaver.rules.unprofitable("h100")`: a list of them, or one filter. Experts go by the names of the module
            and of its parameters. A layer that was converted before keeps its recipe.
        seed: of stochastic rounding.
        head: True converts output heads too, tied or not; a rule whose pattern names one does so for that one.
        blocks: True has our blocks compute the norms, MLPs, attention and mixers of the model that they compute alike,
            in place and under every recipe, and so does a `Blocks` that says which; `skip` leaves out by name. False
            changes nothing about what blocks compute.
    Returns:
        What was converted, what was not and why, the shares of parameters and FLOPs, and the patterns that matched
        nothing. A layer that the model holds under several names is matched by any of them and listed under the first.
        A share below half of what the caller did not leave out warns, as do patterns that fit no name and histories of
        another recipe that are dropped.
    Raises:
        ValueError: an unknown recipe, before anything is changed.
    """
    instance("convert", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    blocks = Blocks() if blocks is True else blocks
    if blocks and not isinstance(blocks, Blocks):
        raise ValueError(f"blocks is {blocks!r}; give True, False, or a quaver.torch.Blocks")
    choice = ConversionRules(recipe, skip)
    chosen = {rule: None if rule.recipe is None else recipes.get(rule.recipe) for rule in choice.rules.rules}
    report = Report(kind="nn.Linear")
    policy = dict.fromkeys(adapter_layers(model), ADAPTER) | dict.fromkeys(() if head else output_heads(model), LEFT)
    walk = _ModuleConverter(model, choice, chosen, policy, seed, report)
    modules = instances(model, nn.Module)
    for module, names in modules:
        walk.visit(module, names)
    if blocks:
        report.blocks = place([(m, names[0], choice.skips(names)) for m, names in modules], blocks)
    have_mixers_call([module for module, _ in modules])
    _convert_attention(model, choice, chosen, report)
    report.others = _others(model, walk.reached)
    report.unused = choice.unused
    _settle(model)
    scaling_step.together(with_history(model))
    _warn(model, choice, walk, report)
    operation.register()
    return report


def revert(model: nn.Module) -> list[str]:
    """Give all that was converted its old class back; weights stay, state of recipes goes. Returns the layers' names.

    Weights that exist only in eight bits are dequantized; attention has no recipe of its own any more.
    """
    instance("revert", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    names = []
    for attention, _ in instances(model, DotProductAttention):
        attention.recipe = None
    for name, module in model.named_modules():
        if isinstance(module, Quantizable) and module.weight_spec is not None:
            store_weight.restore(module)
        if isinstance(module, GroupedLinear) and module.recipe is not None:
            module.forget()
            names.append(name)
        if isinstance(module, Quantizable) and restore_class(module):
            for buffer in STATE:
                module._buffers.pop(buffer, None)
            for attribute in OWN:
                module.__dict__.pop(attribute, None)
            names.append(name)
    remove_overrides(model)
    _settle(model)
    return names


#: Attributes that convert adds to a layer, and one that torchao's call of it does.
OWN = ("recipe", "seed", "qualified_name", "_state", "linear_mm_config")


LITTLE = (
    "convert reached less than half of the parameters that GEMMs read; make the others nn.Linear, or leave them out by "
    "name with skip=[...] if that is meant"
)


# Which layers are converted.


class _ModuleConverter:
    """Decides about each module of a model once, converts it, and reports it."""

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
        #: Layers that only a rule that names them converts, and why.
        self.policy = policy
        #: Parameters that some layer's row counts.
        self.seen: set[int] = set()
        #: Modules that were converted, and those in them whose parameters they multiply by.
        self.reached: set[nn.Module] = set()
        #: Why a layer whose weight its parent reads is left alone.
        self.inside: dict[nn.Module, str] = {}
        #: Layers whose state of another recipe was dropped.
        self.lost: list[str] = []
        self.runs = Implementations()
        self.config = getattr(model, "config", None)

    def visit(self, module: nn.Module, names: list[str]) -> None:
        kind = kind_of(module)
        if kind is None:
            self.inside.update(bypassed(module, lambda part: kind_of(part) is not None))
            self._count_others(module, names[0])
            return
        recipe, why, by_choice = self._decide(module, kind, names)
        kept = module.recipe if isinstance(module, Quantizable) and recipe is None else None
        runs = recipe or kept
        if isinstance(module, nn.MultiheadAttention) and (runs is None or not runs.quantizes):
            self.inside[module.out_proj] = "nn.MultiheadAttention reads its weight without calling it"
        # Before the class changes: a parametrization's weights are asked of the old one.
        weights = [p for p in kind.weights(module) if id(p) not in self.seen]
        if recipe is None:
            why += f"; it keeps {kept}" if kept is not None else ""
            self.report.skipped[names[0]] = why
        else:
            if _convert_layer(module, kind, recipe, names[0], self.seed):
                self.lost.append(names[0])
            self.report.converted[names[0]] = recipe
        if recipe is not None:
            self.reached.add(module)
            self.reached.update(module.modules() if kind.experts(module) else ())
        self._row(module, kind, names[0], weights, recipe, why, by_choice)

    def _decide(self, module: nn.Module, kind: LinearMatcher, names: list[str]) -> tuple[Recipe | None, str, bool]:
        """The recipe of a module, or None, why, and whether its owner's choice or a policy is the reason."""
        asked = [*names, *(f"{n}.{p}".lstrip(".") for n in names for p in _parameter_names(module, kind))]
        sizes = kind.sizes(module)
        rule, why = self.choice.decide(asked, *sizes)
        if why or rule is None:
            return None, why, True
        recipe = self.chosen[rule]
        assert recipe is not None
        if module in self.policy and not names_a_module(rule.pattern):
            return None, self.policy[module], True
        why = self.inside.get(module, "") if recipe.quantizes else ""
        why = why or linears.reason_unsupported_kinds(module, kind)
        if why:
            return None, why, False
        why = self.choice.refused(names[0], *sizes, recipe)
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
        elif why.startswith(LEFT):
            self.report.head_parameters += size
        elif by_choice:
            self.report.chosen_parameters += size
        else:
            self.report.unreached_parameters += size
        active = linears.active(module, kind, self.config)
        implementation, saved = "", 0.0
        if recipe is not None and weights:
            implementation = self.runs(recipe, weights[0], kind.sizes(module))
            each = active * max(1, kind.experts(module))
            saved = each * sum(saved_a_token(recipe, k, weights[0].element_size()) for k in kind.inputs(module))
        kind_name = type(module).__name__
        self.report.rows.append(
            ReportRow(name, kind_name, recipe, implementation, size, 2.0 * size * active, saved, why)
        )

    def _count_others(self, module: nn.Module, name: str) -> None:
        """Count what GEMMs read in a module that is not reached."""
        weights = [p for p in gemm_parameters(module) if id(p) not in self.seen and module not in self.reached]
        if not weights:
            return
        self.seen.update(map(id, weights))
        sizes = [(p.numel(), self.choice.leaves(name, p.shape[-1], p.shape[-2])) for p in weights]
        left = sum(size for size, is_left in sizes if is_left)
        total = sum(size for size, _ in sizes)
        self.report.chosen_parameters += left
        self.report.unreached_parameters += total - left
        why = "left out by name" if left == total else f"{type(module).__name__} reads it in a forward of its own"
        self.report.rows.append(ReportRow(name, type(module).__name__, None, "", total, 2.0 * total, 0.0, why))


def _parameter_names(module: nn.Module, kind: LinearMatcher) -> list[str]:
    """Of experts, which go by them too."""
    return [name for name, _ in module.named_parameters()] if kind.experts(module) else []


def _others(model: nn.Module, reached: set[nn.Module]) -> dict[str, int]:
    """Modules that hold a matrix and were not converted, nn.Linear apart, counted by class."""
    return Counter(
        type(module).__name__
        for module in model.modules()
        if module not in reached
        and not isinstance(module, nn.Linear | nn.ParameterList | nn.ParameterDict)
        and any(p.dim() > 1 for p in module.parameters(recurse=False) if not nn.parameter.is_lazy(p))
    )


def _warn(model: nn.Module, choice: ConversionRules, walk: _ModuleConverter, report: Report) -> None:
    """Say what is likely not meant, before a run is spent on it."""
    if walk.lost:
        others = f", and that of {len(walk.lost) - 1} other layers" if len(walk.lost) > 1 else ""
        warnings.warn(
            f"convert gives {walk.lost[0] or '(root)'} another recipe, and what the one before has recorded is dropped"
            f"{others}: histories and counts start fresh",
            stacklevel=3,
        )
    names = [*(name for name, _ in model.named_modules(remove_duplicate=False)), *dict(model.named_parameters())]
    unknown = choice.unknown(names)
    if unknown:
        warnings.warn(f"no layer has a name that fits {', '.join(map(repr, unknown))}", stacklevel=3)
    if not report.converted and not report.attention and not any(row.block for row in report.blocks):
        warnings.warn(f"convert changed nothing:\n{report}", stacklevel=3)
    elif report.other_attention and not report.attention:
        warnings.warn(f"the recipe's attention=True quantizes nothing here:\n{report}", stacklevel=3)
    elif report.reaches_little:
        warnings.warn(f"{LITTLE}:\n{report}", stacklevel=3)


# One layer: its class and its attributes.


def _convert_layer(module: nn.Module, kind: LinearMatcher, recipe: Recipe, name: str, seed: int) -> bool:
    """Convert a layer; True if state that another recipe has recorded was dropped."""
    if not isinstance(module, Quantizable):
        exchange(module, kind.over(module))
        state = module.__dict__["_state"] = LayerState()
        state.members = linears.members(module, kind)
    assert isinstance(module, Quantizable)
    lost = False
    if module.__dict__.get("recipe") is not recipe:
        lost = _recorded(module)
        for buffer in STATE:
            module._buffers.pop(buffer, None)
    module.__dict__.update(recipe=recipe, seed=seed, qualified_name=name)
    count = module._buffers.get("count")
    if count is not None:
        # The noise goes by the name from here on, and no longer by a number.
        count[..., 2] = fresh_count(module)[..., 2]
    amax.register(module)
    name_streams(module)
    prepare(module, recipe)
    return lost


def _recorded(module: Quantizable) -> bool:
    """Whether a layer's history holds anything."""
    history = module._buffers.get("history")
    return history is not None and not history.is_meta and bool(history.any())


def _convert_attention(
    model: nn.Module, choice: ConversionRules, chosen: Mapping[ModuleRule, Recipe | None], report: Report
) -> None:
    """Give attention the recipe of the rule that its name fits, and report what is quantized by it and what is not."""
    for module, names in instances(model, DotProductAttention):
        features, of_values = (module.heads * size for size in module.head_dim)
        rule, _ = choice.decide(names, features, of_values)
        wanted = None if rule is None else chosen[rule]
        if wanted is not None:
            module.recipe = wanted
            if wanted.attention is not None:
                report.attention[names[0]] = wanted
    if any(recipe.attention is not None for recipe in report.converted.values()):
        report.other_attention = others(model)


# What the model around the layers needs.

#: What DistributedDataParallel reads to know which buffers it need not broadcast.
DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"
#: What transformers' `save_pretrained` reads to know which names of the state dict it leaves out of the folder. Where a
#: version lacks it, the folder has what recipes add; with `state_dict=plain_state_dict(model)` it has not.
FOLDER_IGNORES = "_keys_to_ignore_on_save"
#: In eval mode these read the weights of the layers in them without calling them, unless this attribute is false.
FAST_PATHS = {nn.TransformerEncoder: "use_nested_tensor", nn.TransformerEncoderLayer: "activation_relu_or_gelu"}

#: Models that roll their own histories.
_roots: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class RollHistories:
    """A root's forward pre-hook: ends a step of delayed scaling, as entering an outermost autocast would."""

    #: True within `one_step`.
    quiet = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not self.quiet:
            end_step(module)


def end_step(model: nn.Module) -> None:
    """What a converted root's own forward does first, for a wrapper that knows where a step begins and calls parts."""
    if active_context.now[2] == 0 and torch.is_grad_enabled() and not recomputing():
        scaling_step.roll_root(with_history(model))


@contextmanager
def one_step(model: nn.Module) -> Iterator[None]:
    """End a step of delayed scaling, and have the root's forward end none within: a backward does."""
    end_step(model)
    hooks = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, RollHistories)]
    for hook in hooks:
        hook.quiet = True
    try:
        yield
    finally:
        for hook in hooks:
            hook.quiet = False


def with_history(model: nn.Module) -> list[nn.Module]:
    """The layers that keep a history of amaxes."""
    return [m for m in model.modules() if isinstance(m, Quantizable) and "history" in m._buffers]


def _settle(model: nn.Module) -> None:
    """Make the hooks and switches around the layers fit what the layers now are."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            # The outermost converted model rolls: a part of it that is called twice in a step must not roll between.
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
        # A model that transformers calls quantized is written by its quantizer.
        if isinstance(module.__dict__.get(FOLDER_IGNORES), set) and not module.__dict__.get("is_quantized"):
            _keep_out_of_folders(module)


def _switch_off(module: nn.Module, switch: str, off: bool) -> None:
    """Set an attribute to False and remember what it was, or give it back."""
    attributes = module.__dict__
    if off and "_before_convert" not in attributes:
        attributes["_before_convert"] = attributes.get(switch, False)
        attributes[switch] = False
    elif not off and "_before_convert" in attributes:
        attributes[switch] = attributes.pop("_before_convert")


def _ignore_histories(model: nn.Module) -> None:
    """Keep DDP from overwriting what each rank has recorded with rank 0's; what the user ignores stays ignored.

    Members that have tokens on one rank alone have drawn there alone: a count that goes back would draw again.
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


def _keep_out_of_folders(model: nn.Module) -> None:
    """Make the folder that a model of transformers saves itself to that of the unconverted one, in names."""
    layers = [(name, m) for name, m in model.named_modules(remove_duplicate=False) if kind_of(m) is not None]
    # Its class has made this set for the model alone, and copies have their own.
    ignored: set[str] = getattr(model, FOLDER_IGNORES)
    for name, module in layers:
        names = {f"{name}.{buffer}".lstrip(".") for buffer in STATE}
        if isinstance(module, Quantizable):
            ignored |= names
        else:
            ignored -= names
