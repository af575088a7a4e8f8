"""Turn the nn.Linear layers of any model into quantized ones, in place, and back.

A layer keeps its identity: only its class changes, so that hooks, attributes, training mode, tied weights, shared
instances and parametrizations are what they were.
"""

import copy
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from quaver import recipes
from quaver.core.converting.conversion import Choice, Report
from quaver.core.converting.rules import Rule, Rules, Skip
from quaver.core.spec import Recipe
from quaver.torch.blocks.attention.dot_product import DotProductAttention
from quaver.torch.linear.layer import Linear, is_foreign
from quaver.torch.linear.stored import storing
from quaver.torch.model import attention_modules
from quaver.torch.model.matrices import gemm_parameters
from quaver.torch.state.buffers import STATE, prepare
from quaver.torch.state.context import ambient
from quaver.torch.state.history import amax, steps
from quaver.torch.state.layer import LayerState
from quaver.torch.state.noise import fresh_count, name_streams
from quaver.torch.state.recomputation import recomputing


def convert(
    model: nn.Module,
    recipe: str | Recipe | Rules | Mapping[str, Recipe | str | None],
    *,
    skip: Skip = (),
    seed: int = 0,
) -> Report:
    """Convert every nn.Linear that the rules name, in place, and give every `DotProductAttention` its recipe.

    With a delayed recipe the model rolls its histories at the start of its own forward, unless an autocast around it
    has done so. Convert the module that DistributedDataParallel wraps, before wrapping it.

    Args:
        model: any module; itself an nn.Linear too.
        recipe: a recipe or its name for all, or `Rules`, or the dict that `Rules` takes.
            A layer that has this recipe already keeps its state. Whether attention is quantized is the recipe's choice;
            a rule with sizes sees the features of all heads, of queries and of values.
        skip: patterns of names to leave alone, such as "lm_head", and filters of nn.Linear such as
            `quaver.rules.unprofitable("h100")`: a list of them, or one filter.
        seed: of stochastic rounding.
    Returns:
        What was converted, what was not and why, the share of the parameters that GEMMs read, and the patterns that
        matched nothing. A layer that the model holds under several names is matched by any of them and listed under the
        first. A share below half of what the caller did not leave out warns.
    Raises:
        ValueError: an unknown recipe, before anything is changed.
    """
    choice = Choice(recipe, skip)
    chosen = {rule: None if rule.recipe is None else recipes.get(rule.recipe) for rule in choice.rules.rules}
    report = Report(others=_others(model))
    in_attention = _unused_projections(model)
    left: set[nn.Module] = set()
    for module, names in attention_modules.instances(model, nn.Linear):
        rule, why = choice.decide(names, module.in_features, module.out_features)
        wanted = None if rule is None else chosen[rule]
        by_choice = why
        why = why or in_attention.get(id(module), "") or _unfit(module)
        if wanted is not None:
            by_choice = "" if why else choice.refused(names[0], module.in_features, module.out_features, wanted)
            why = why or by_choice
        if why or wanted is None:
            report.skipped[names[0]] = why
            if by_choice:
                left.add(module)
        else:
            _convert_layer(module, wanted, names[0], seed)
            report.converted[names[0]] = wanted
    _convert_attention(model, choice, chosen, report)
    _count_parameters(model, choice, left, report)
    report.unused = choice.unused
    _settle(model)
    if not report.converted and not report.attention:
        warnings.warn(f"convert changed nothing:\n{report}", stacklevel=2)
    elif report.other_attention and not report.attention:
        warnings.warn(f"the recipe's attention=True quantizes nothing here:\n{report}", stacklevel=2)
    elif report.reaches_little:
        warnings.warn(f"{LITTLE}:\n{report}", stacklevel=2)
    return report


def revert(model: nn.Module) -> list[str]:
    """Give every converted layer its old class back; weights stay, state of recipes goes. Returns their names.

    Weights that exist only in eight bits are dequantized; attention has no recipe of its own any more.
    """
    names = []
    for attention, _ in attention_modules.instances(model, DotProductAttention):
        attention.recipe = None
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.weight_spec is not None:
            storing.restore(module)
        if isinstance(module, Linear) and _set_class(module, _original):
            for buffer in STATE:
                module._buffers.pop(buffer, None)
            for attribute in OWN:
                module.__dict__.pop(attribute, None)
            names.append(name)
    _settle(model)
    return names


#: Attributes that convert adds to a layer.
OWN = ("recipe", "seed", "qualified_name", "_state")


LITTLE = (
    "convert reached less than half of the parameters that GEMMs read; make the others nn.Linear, or leave them out by "
    "name with skip=[...] if that is meant"
)


# Which layers are converted.


def _count_parameters(model: nn.Module, choice: Choice, left: set[nn.Module], report: Report) -> None:
    """Count what was converted, what the caller chose to leave alone (of nn.Linear, the modules in `left`), and the
    rest."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        for p in gemm_parameters(module):
            if id(p) in seen:
                continue
            seen.add(id(p))
            if isinstance(module, Linear) and name in report.converted:
                report.converted_parameters += p.numel()
            elif module in left if isinstance(module, nn.Linear) else choice.leaves(name, p.shape[-1], p.shape[-2]):
                report.chosen_parameters += p.numel()
            else:
                report.unreached_parameters += p.numel()


def _others(model: nn.Module) -> dict[str, int]:
    """Modules that are no nn.Linear and yet own a matrix, counted by class."""
    return Counter(
        type(module).__name__
        for module in model.modules()
        if not isinstance(module, nn.Linear | nn.ParameterList | nn.ParameterDict)
        and any(p.dim() > 1 for p in module.parameters(recurse=False) if not nn.parameter.is_lazy(p))
    )


def _unfit(module: nn.Linear) -> str:
    """Why a layer cannot be converted, or ""."""
    if not isinstance(module, Linear) and type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} has a forward of its own"
    taken = [name for name in STATE if name in module._buffers]
    if taken and not isinstance(module, Linear):
        return f"it has a buffer {taken[0]!r} of its own"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    weight = module._parameters.get("weight")
    if weight is not None and nn.parameter.is_lazy(weight):
        return "its weight has no shape yet; run one forward first"
    if weight is not None and is_foreign(weight):
        return f"its weight is a {type(weight).__name__}, quantized by another library"
    return ""


def _unused_projections(model: nn.Module) -> dict[int, str]:
    """Linears whose weight their parent reads without calling them, and the reason to leave them."""
    why = "nn.MultiheadAttention reads its weight without calling it"
    return {id(m.out_proj): why for m in model.modules() if isinstance(m, nn.MultiheadAttention)}


# One layer: its class and its attributes.


def _convert_layer(module: nn.Linear, recipe: Recipe, name: str, seed: int) -> None:
    if not isinstance(module, Linear):
        _set_class(module, _counterpart)
        module.__dict__["_state"] = LayerState()
    if module.__dict__.get("recipe") is not recipe:
        for buffer in STATE:
            module._buffers.pop(buffer, None)
    module.__dict__.update(recipe=recipe, seed=seed, qualified_name=name)
    count = module._buffers.get("count")
    if count is not None:
        # The noise goes by the name from here on, and no longer by the order of construction.
        count[2] = fresh_count(module)[2]
    amax.register(module)
    name_streams(module)
    prepare(module, recipe)


def _convert_attention(model: nn.Module, choice: Choice, chosen: Mapping[Rule, Recipe | None], report: Report) -> None:
    """Give attention the recipe of the rule that its name fits, and report what is quantized by it and what is not."""
    for module, names in attention_modules.instances(model, DotProductAttention):
        features, of_values = (module.heads * size for size in module.head_dim)
        rule, _ = choice.decide(names, features, of_values)
        wanted = None if rule is None else chosen[rule]
        if wanted is not None:
            module.recipe = wanted
            if wanted.attention is not None:
                report.attention[names[0]] = wanted
    if any(recipe.attention is not None for recipe in report.converted.values()):
        report.other_attention = attention_modules.others(model)


def _set_class(module: nn.Linear, exchanged: Any) -> bool:
    """Exchange a layer's class by a function of classes; False where that knows none.

    A parametrized layer has a class of its own above the one to exchange, which copies of the layer share: it gets
    another rather than other bases.
    """
    kind = type(module)
    above = is_parametrized(module)
    base = exchanged(kind.__bases__[0] if above else kind)
    if base is None:
        return False
    if above:
        members = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
        base = type(kind.__name__, (base,), {**members, "__deepcopy__": _copied})
    module.__class__ = base
    return True


def _copied(self: nn.Linear, memo: dict[int, Any]) -> nn.Linear:
    """Deepcopy a parametrized layer, whose class refuses to be pickled."""
    copied: nn.Linear = type(self).__new__(type(self))
    memo[id(self)] = copied
    copied.__setstate__(copy.deepcopy(self.__dict__, memo))
    return copied


_counterparts: dict[type, type] = {nn.Linear: Linear}


def _counterpart(kind: type) -> type:
    """The quantized class for nn.Linear, or for a subclass of it that has no forward of its own."""
    if kind not in _counterparts:
        members = {"__reduce_ex__": _reduce, "__module__": kind.__module__, "_original": kind}
        # Another thread may have made one: a class is one object.
        _counterparts.setdefault(kind, type(kind.__name__, (kind, Linear), members))
    return _counterparts[kind]


def _original(kind: type) -> type | None:
    """What `_counterpart` was given; None for classes that it did not make."""
    return nn.Linear if kind is Linear else vars(kind).get("_original")


def _reduce(module: Any, protocol: int) -> Any:
    """Pickle a layer of a class that was made here: by the class it was made from."""
    return _rebuild, (type(module)._original,), module.__getstate__()


def _rebuild(kind: type) -> Any:
    counterpart: Any = _counterpart(kind)
    return counterpart.__new__(counterpart)


# What the model around the layers needs.

#: What DistributedDataParallel reads to know which buffers it need not broadcast.
DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"
#: In eval mode these read the weights of the layers in them without calling them, unless this attribute is false.
FAST_PATHS = {nn.TransformerEncoder: "use_nested_tensor", nn.TransformerEncoderLayer: "activation_relu_or_gelu"}

#: Models that roll their own histories.
_roots: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class RollHistories:
    """A root's forward pre-hook: ends a step of delayed scaling, as entering an outermost autocast would."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if ambient.now[2] == 0 and torch.is_grad_enabled() and not recomputing():
            steps.roll_root(_with_history(module))


def _with_history(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, Linear) and "history" in m._buffers]


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
                _switch_off(module, switch, any(isinstance(m, Linear) for m in module.modules()))
    rolls = bool(_with_history(model))
    if rolls and not any(model is part for root in _roots for part in root.modules()):
        model.register_forward_pre_hook(RollHistories(), prepend=True)
        _roots.add(model)
    _ignore_histories(model)


def _switch_off(module: nn.Module, switch: str, off: bool) -> None:
    """Set an attribute to False and remember what it was, or give it back."""
    attributes = module.__dict__
    if off and "_before_convert" not in attributes:
        attributes["_before_convert"] = attributes.get(switch, False)
        attributes[switch] = False
    elif not off and "_before_convert" in attributes:
        attributes[switch] = attributes.pop("_before_convert")


def _ignore_histories(model: nn.Module) -> None:
    """Keep DDP from overwriting what each rank has recorded with rank 0's; what the user ignores stays ignored."""
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    ours = {f"{name}.{b}".lstrip("."): b in m._buffers for name, m in linears for b in ("history", "factor")}
    before = list(getattr(model, DDP_IGNORES, ()))
    names = [name for name in before if name not in ours] + [name for name, is_there in ours.items() if is_there]
    if names:
        setattr(model, DDP_IGNORES, names)
    elif before:
        delattr(model, DDP_IGNORES)
