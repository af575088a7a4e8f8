"""Turn the nn.Linear layers of any model into quantized ones, in place, and back.

A layer keeps its identity: only its class changes, so that hooks, attributes, training mode, tied weights, shared instances
and parametrizations are what they were.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quaver import recipes
from quaver.core.rules import Rule, Rules, matches
from quaver.core.spec import Recipe
from quaver.torch import amax
from quaver.torch.autocast import ambient
from quaver.torch.linear import STATE, TRANSIENT, Linear, prepare


@dataclass
class Report:
    """What `convert` did, and why it left the rest alone."""

    #: Name of each converted layer, and its recipe.
    converted: dict[str, Recipe] = field(default_factory=dict)
    #: Name of each linear layer left alone, and the reason.
    skipped: dict[str, str] = field(default_factory=dict)
    #: Patterns, of rules and of skip, that matched nothing.
    unused: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        by_recipe: dict[str, int] = {}
        for recipe in self.converted.values():
            by_recipe[str(recipe)] = by_recipe.get(str(recipe), 0) + 1
        counts = ", ".join(f"{n} to {name}" for name, n in by_recipe.items()) or "nothing"
        lines = [f"converted {counts}"]
        lines += [f"  left alone: {name or '(root)'} ({why})" for name, why in self.skipped.items()]
        lines += [f"  matched nothing: {pattern}" for pattern in self.unused]
        return "\n".join(lines)


def convert(
    model: nn.Module, recipe: str | Recipe | Rules, *, skip: Sequence[str] = (), seed: int = 0
) -> Report:
    """Convert every nn.Linear that the rules name, in place.

    With a delayed recipe the model rolls its histories at the start of its own forward, unless an autocast around it has
    done so. Convert the module that DistributedDataParallel wraps, before wrapping it.

    Args:
        model: any module; itself an nn.Linear too.
        recipe: a recipe or its name for all, or `Rules`.
        skip: patterns of names to leave alone, such as "lm_head".
        seed: of stochastic rounding.
    Returns:
        What was converted, what was not and why, and the patterns that matched nothing.
    Raises:
        ValueError: an unknown recipe, before anything is changed.
    """
    if isinstance(skip, str):
        raise ValueError(f"skip is the string {skip!r}; give a list of patterns: skip=[{skip!r}]")
    rules = recipe if isinstance(recipe, Rules) else Rules({"*": recipe})
    chosen = {id(r): None if r.recipe is None else recipes.get(r.recipe) for r in rules.rules}
    report = Report()
    used: set[str] = set()
    inside_attention = _unused_projections(model)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        rule, why = _decide(name, module, rules, skip, used, inside_attention)
        if rule is None:
            report.skipped[name] = why
            continue
        wanted = chosen[id(rule)]
        assert wanted is not None
        _convert_layer(module, wanted, name, seed)
        report.converted[name] = wanted
    report.unused = [p for p in (*skip, *(_label(r) for r in rules.rules)) if p not in used]
    if any(r.delayed is not None for r in report.converted.values()):
        _attach(model)
    if not report.converted:
        warnings.warn(f"convert changed nothing:\n{report}", stacklevel=2)
    return report


def revert(model: nn.Module) -> list[str]:
    """Give every converted layer its old class back; weights stay, state of recipes goes. Returns their names."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            _set_class(module, back=True)
            for buffer in STATE:
                module._buffers.pop(buffer, None)
                module._non_persistent_buffers_set.discard(buffer)
            for attribute in (*OWN, *TRANSIENT, "_delayed"):
                module.__dict__.pop(attribute, None)
            names.append(name)
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, RollHistories):
            del model._forward_pre_hooks[key]
    if hasattr(model, DDP_IGNORES):
        delattr(model, DDP_IGNORES)
    return names


#: Attributes that convert adds to a layer.
OWN = ("recipe", "seed", "qualified_name", "_serial")
#: What DistributedDataParallel reads to know which buffers it need not broadcast.
DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"


class RollHistories:
    """A root's forward pre-hook: ends a step of delayed scaling, as entering an outermost autocast would."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if ambient.depth > 0 or not torch.is_grad_enabled():
            return
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return
        amax.roll(m for m in module.modules() if isinstance(m, Linear) and "history" in m._buffers)


def _attach(model: nn.Module) -> None:
    """Let the model roll its histories, and keep DDP from overwriting what each rank has recorded with rank 0's."""
    if not any(isinstance(hook, RollHistories) for hook in model._forward_pre_hooks.values()):
        model.register_forward_pre_hook(RollHistories(), prepend=True)
    names = set(getattr(model, DDP_IGNORES, ()))
    names |= {name for name, _ in model.named_buffers() if name.rpartition(".")[2] in ("history", "factor")}
    setattr(model, DDP_IGNORES, sorted(names))


def _decide(
    name: str, module: nn.Linear, rules: Rules, skip: Sequence[str], used: set[str], in_attention: dict[int, str]
) -> tuple[Rule | None, str]:
    """The rule that converts this layer, or None and why not."""
    for pattern in skip:
        if matches(pattern, name):
            used.add(pattern)
            return None, f"skip pattern {pattern!r}"
    rule = rules.match(name, module.in_features, module.out_features)
    if rule is None:
        return None, "no rule matches it"
    used.add(_label(rule))
    if rule.recipe is None:
        return None, f"rule {_label(rule)!r} leaves it untouched"
    if id(module) in in_attention:
        return None, in_attention[id(module)]
    if not isinstance(module, Linear) and type(module).forward is not nn.Linear.forward:
        return None, f"{type(module).__name__} has a forward of its own"
    if nn.parameter.is_lazy(getattr(module, "weight", None)):
        return None, "its weight has no shape yet; run one forward first"
    return rule, ""


def _label(rule: Rule) -> str:
    sizes = [
        f"{name}={value}"
        for name, value, default in (
            ("min_in_features", rule.min_in_features, 0),
            ("min_out_features", rule.min_out_features, 0),
            ("multiple_of", rule.multiple_of, 1),
        )
        if value != default
    ]
    return rule.pattern + (f" ({', '.join(sizes)})" if sizes else "")


def _unused_projections(model: nn.Module) -> dict[int, str]:
    """Linears whose weight their parent reads without calling them."""
    why = "nn.MultiheadAttention reads its weight without calling it"
    return {id(m.out_proj): why for m in model.modules() if isinstance(m, nn.MultiheadAttention)}


def _convert_layer(module: nn.Linear, recipe: Recipe, name: str, seed: int) -> None:
    if not isinstance(module, Linear):
        _set_class(module)
    for buffer in STATE:
        module._buffers.pop(buffer, None)
    module.recipe = recipe  # type: ignore[assignment]
    module.seed = seed  # type: ignore[assignment]
    module.qualified_name = name  # type: ignore[assignment]
    amax.register(module)
    prepare(module, recipe)


def _set_class(module: nn.Linear, back: bool = False) -> None:
    """Swap a layer's class for its quantized counterpart; a parametrized layer's class is its own, so its base is swapped."""
    kind = type(module)
    if torch.nn.utils.parametrize.is_parametrized(module):
        base = kind.__bases__[0]
        kind.__bases__ = (_original(base) if back else _counterpart(base),)
    else:
        module.__class__ = _original(kind) if back else _counterpart(kind)


_counterparts: dict[type, type] = {nn.Linear: Linear}


def _counterpart(kind: type) -> type:
    """The quantized class for nn.Linear, or for a subclass of it that has no forward of its own."""
    if kind not in _counterparts:
        members = {"__reduce_ex__": _reduce, "__module__": kind.__module__, "_original": kind}
        _counterparts[kind] = type(kind.__name__, (Linear, kind), members)
    return _counterparts[kind]


def _original(kind: type) -> type:
    return getattr(kind, "_original", nn.Linear)


def _reduce(module: Any, protocol: int) -> Any:
    """Pickle a layer of a class that was made here: by the class it was made from."""
    return _rebuild, (type(module)._original,), module.__getstate__()


def _rebuild(kind: type) -> Any:
    made = _counterpart(kind)
    return made.__new__(made)
