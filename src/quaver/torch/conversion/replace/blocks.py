"""Decide which modules of a model Quaver's blocks replace: try each kind and report the result per module."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from quaver.torch.conversion.matchers.swap_class import (
    exchange,
    original_class,
    read_of_class,
    restore_class,
    unconverted_class,
)
from quaver.torch.conversion.replace import attention as attentions
from quaver.torch.conversion.replace import loss as losses
from quaver.torch.conversion.replace import mixer as formulas
from quaver.torch.conversion.replace import mlp as mlps
from quaver.torch.conversion.replace import norm as norms
from quaver.torch.conversion.replace.fused_module import FusedModule, attribute_key, fixed
from quaver.torch.conversion.replace.mamba_packing import PackedInputs
from quaver.torch.conversion.replace.mixer import CalledMixer, calls_its_layers
from quaver.torch.linear.linear import Quantizable


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Selects the parts of a model that `convert(..., blocks=...)` replaces by Quaver blocks that compute the same."""

    # RMSNorm and LayerNorm, whatever their class and parameter names.
    norm: bool = True
    # MLPs of two or three matrices with an activation.
    mlp: bool = True
    # Rope and attention between the projections; caches are not replaced.
    attention: bool = True
    # Convolution, scan and gated norm of Mamba-2 mixers, between their projections, in calls without a cache.
    mixer: bool = True
    # Save the input of a gated activation in eight bits; this changes gradients (docs/blocks/mlp.md).
    eight_bit_activations: bool = False
    # Output head fused with the loss. With labels in training, outputs then have a loss but no logits.
    loss: bool = False


class ReplaceableModule(NamedTuple):
    """Report entry for a module that a Quaver block may replace."""

    name: str
    #: Class name of the module.
    kind: str
    #: Description of the block that replaces it, or "".
    block: str
    #: Reason why the module's own forward runs, or "".
    why: str


class BlockMatcher(NamedTuple):
    """One kind of replaceable module; the callables take a module."""

    name: str
    #: Return True if a module may be of this kind.
    takes: Callable[[nn.Module], bool]
    #: Return the formula that the module computes, or None and the reason why it is not replaced.
    formula: Callable[[nn.Module, Blocks], tuple[Any, str]]
    over: type[FusedModule]
    #: Return why a replaced module still runs its own forward, such as a hook on a child, or "".
    blocking_child: Callable[[nn.Module, Any], str] = lambda module, formula: ""
    #: Attributes that may differ between modules that share a formula.
    ignored: frozenset[str] = frozenset()


#: Attributes with the index of a layer in its model, which caches need.
LAYER_INDEX_ATTRIBUTES = frozenset({"layer_idx", "layer_id", "layer_number"})
PARTS = (
    BlockMatcher("norm", norms.is_norm, lambda m, _: norms.formula_of(m), norms.FusedNorm),
    BlockMatcher(
        "mlp",
        mlps.is_mlp,
        lambda m, blocks: mlps.formula_of(m, blocks.eight_bit_activations),
        mlps.FusedMLP,
        mlps.hook_note,
    ),
    BlockMatcher(
        "attention",
        attentions.is_attention,
        lambda m, _: attentions.formula_of(m),
        attentions.FusedAttention,
        # The module's own forward runs, so the index may differ.
        ignored=LAYER_INDEX_ATTRIBUTES,
    ),
    BlockMatcher(
        "mixer",
        formulas.is_mamba2,
        lambda m, _: formulas.formula_of(m),
        formulas.FusedMixer,
        formulas.hook_note,
        ignored=LAYER_INDEX_ATTRIBUTES,
    ),
    BlockMatcher("loss", losses.is_causal, lambda m, _: losses.formula_of(m), losses.FusedLoss),
)


def place(modules: Sequence[tuple[nn.Module, str, str]], blocks: Blocks) -> list[ReplaceableModule]:
    """Replace the modules that Quaver blocks can compute, and report the result for each.

    Args:
        modules: modules of the model, each with its name and the reason why the user excludes it, or "".
        blocks: kinds to replace.
    Returns:
        One entry per module of a selected kind.
    """
    known: dict[Any, tuple[Any, str]] = {}
    rows = []
    for module, name, left in modules:
        part = _part(module, blocks)
        if part is None:
            continue
        formula, why = (None, left) if left else _formula(module, part, blocks, known)
        if isinstance(module, FusedModule):
            # Replaced by an earlier call; it is replaced again or stays restored.
            restore_class(module)
        if formula is not None:
            if hasattr(formula, "attributes"):
                formula = replace(formula, attributes=fixed(module.__dict__))
            exchange(module, part.over, formula)
            kind: Any = unconverted_class(module)
            kind._compared = read_of_class(kind._original, kind._formula)
            why = part.blocking_child(module, formula)
        rows.append(
            ReplaceableModule(name, unconverted_class(module).__name__, "" if formula is None else str(formula), why)
        )
    _complete_packed_inputs([module for module, _, _ in modules])
    return rows


def _complete_packed_inputs(modules: Sequence[nn.Module]) -> None:
    """Install hooks on models with fused mixers that pass the boundaries of packed sequences to all layers."""
    for module in modules:
        _forget_packed_inputs(module)
        kind = original_class(module)
        is_model = hasattr(module, "config") and "input_ids" in inspect.signature(kind.forward).parameters
        if is_model and any(isinstance(part, formulas.FusedMixer) for part in module.modules()):
            module.register_forward_pre_hook(PackedInputs(kind), with_kwargs=True)


def _forget_packed_inputs(module: nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, PackedInputs):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def have_mixers_call(modules: Sequence[nn.Module]) -> None:
    """Make mixers call their converted layers where their forward would pass the weights to one fused function."""
    for module in modules:
        parts = module._modules.values()
        holds = any(isinstance(part, Quantizable) for part in parts)
        if holds and not isinstance(module, FusedModule) and calls_its_layers(module):
            exchange(module, CalledMixer)


def remove_overrides(model: nn.Module) -> None:
    """Restore the class of every module that a block replaced, and remove its hooks."""
    for module in model.modules():
        _forget_packed_inputs(module)
        if isinstance(module, FusedModule):
            restore_class(module)


def _part(module: nn.Module, blocks: Blocks) -> BlockMatcher | None:
    if not isinstance(module, FusedModule) and type(module).__module__.partition(".")[0] == "quaver":
        return None
    return next((part for part in PARTS if getattr(blocks, part.name) and part.takes(module)), None)


def _formula(
    module: nn.Module, part: BlockMatcher, blocks: Blocks, known: dict[Any, tuple[Any, str]]
) -> tuple[Any, str]:
    """Return the formula or the reason; modules that differ in no relevant attribute share the result."""
    if "forward" in module.__dict__:
        return None, "its forward was replaced on the instance"
    children = tuple((name, attribute_key(child, part.ignored)) for name, child in module._modules.items())
    key = part.name, attribute_key(module, part.ignored), children
    if key not in known:
        known[key] = part.formula(module, blocks)
    return known[key]
