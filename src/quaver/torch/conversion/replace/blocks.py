"""Which modules of a model our blocks compute in place: each kind is tried, and what came of it is a row."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from quaver.torch.conversion.matchers.swap_class import exchange, read_of_class, restore_class, unconverted_class
from quaver.torch.conversion.replace import attention as attentions
from quaver.torch.conversion.replace import loss as losses
from quaver.torch.conversion.replace import mixer as formulas
from quaver.torch.conversion.replace import mlp as mlps
from quaver.torch.conversion.replace import norm as norms
from quaver.torch.conversion.replace.compare import OF_ALL, FusedModule, fixed
from quaver.torch.conversion.replace.mamba_packing import PackedInputs
from quaver.torch.conversion.replace.mixer import CalledMixer, calls_its_layers
from quaver.torch.linear.linear import Quantizable


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Which parts of a model `convert(..., blocks=...)` has computed by our blocks, where they compute the same."""

    # RMSNorm and LayerNorm, by whatever class and names.
    norm: bool = True
    # Two matrices, or three, and what is between them.
    mlp: bool = True
    # What is between the projections of attention: rotary positions and the attending, caches apart.
    attention: bool = True
    # The convolution, scan and gated norm of Mamba-2 mixers, between their projections, where no cache is given.
    mixer: bool = True
    # Keep what goes into a gated activation in eight bits; gradients change (docs/blocks/mlp.md).
    eight_bit_activations: bool = False
    # The head with its loss: where labels are given in training, outputs have a loss and no logits.
    loss: bool = False


class ReplaceableModule(NamedTuple):
    """A module that one of our blocks may compute."""

    name: str
    #: Its class.
    kind: str
    #: What computes it, or "".
    block: str
    #: Why its own forward runs, or "".
    why: str


class BlockMatcher(NamedTuple):
    """A kind of parts: functions of a module."""

    name: str
    #: Whether a module may be one.
    takes: Callable[[nn.Module], bool]
    #: What it computes, or None and why it is left alone.
    formula: Callable[[nn.Module, Blocks], tuple[Any, str]]
    over: type[FusedModule]
    #: Why a module that is placed runs its own forward all the same, such as a hook on a part inside, or "".
    in_the_way: Callable[[nn.Module, Any], str] = lambda module, formula: ""
    #: Attributes that do not tell two of them apart.
    alike: frozenset[str] = frozenset()


#: Where a layer stands in its model, as caches want it.
PLACES = frozenset({"layer_idx", "layer_id", "layer_number"})
PARTS = (
    BlockMatcher("norm", norms.is_norm, lambda m, _: norms.formula_of(m), norms.FusedNorm),
    BlockMatcher(
        "mlp",
        mlps.is_mlp,
        lambda m, blocks: mlps.formula_of(m, blocks.eight_bit_activations),
        mlps.FusedMLP,
        mlps.hooked,
    ),
    BlockMatcher(
        "attention",
        attentions.is_attention,
        lambda m, _: attentions.formula_of(m),
        attentions.FusedAttention,
        # Its own forward runs.
        alike=PLACES,
    ),
    BlockMatcher(
        "mixer",
        formulas.is_mamba2,
        lambda m, _: formulas.formula_of(m),
        formulas.FusedMixer,
        formulas.hooked,
        alike=PLACES,
    ),
    BlockMatcher("loss", losses.is_causal, lambda m, _: losses.formula_of(m), losses.FusedLoss),
)


def place(modules: Sequence[tuple[nn.Module, str, str]], blocks: Blocks) -> list[ReplaceableModule]:
    """Have our blocks compute the modules that they compute alike, and say of each what came of it.

    Args:
        modules: of the model, each with its name and why its owner leaves it alone, or "".
    """
    # What is asked is not what surrounds the call, and twins draw from the CPU's generator and seed it.
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        return _place(modules, blocks)


def _place(modules: Sequence[tuple[nn.Module, str, str]], blocks: Blocks) -> list[ReplaceableModule]:
    known: dict[Any, tuple[Any, str]] = {}
    rows = []
    for module, name, left in modules:
        part = _part(module, blocks)
        if part is None:
            continue
        formula, why = (None, left) if left else _formula(module, part, blocks, known)
        if isinstance(module, FusedModule):
            # Of an earlier call; one that is left alone computes by itself from now on.
            restore_class(module)
        if formula is not None:
            if hasattr(formula, "attributes"):
                formula = replace(formula, attributes=fixed(module.__dict__))
            exchange(module, part.over, formula)
            kind: Any = unconverted_class(module)
            kind._compared = read_of_class(kind._original, kind._formula)
            why = part.in_the_way(module, formula)
        rows.append(
            ReplaceableModule(name, unconverted_class(module).__name__, "" if formula is None else str(formula), why)
        )
    _complete_packed_inputs([module for module, _, _ in modules])
    return rows


def _complete_packed_inputs(modules: Sequence[nn.Module]) -> None:
    """Have models around mixers of ours complete what tells packed sequences apart."""
    for module in modules:
        _forget_packed_inputs(module)
        kind: Any = unconverted_class(module)
        kind = getattr(kind, "_original", kind)
        is_model = hasattr(module, "config") and "input_ids" in inspect.signature(kind.forward).parameters
        if is_model and any(isinstance(part, formulas.FusedMixer) for part in module.modules()):
            module.register_forward_pre_hook(PackedInputs(kind), with_kwargs=True)


def _forget_packed_inputs(module: nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, PackedInputs):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def have_mixers_call(modules: Sequence[nn.Module]) -> None:
    """Have mixers that hold converted layers call them, where their forward would hand the weights to one function."""
    for module in modules:
        parts = module._modules.values()
        holds = any(isinstance(part, Quantizable) for part in parts)
        if holds and not isinstance(module, FusedModule) and calls_its_layers(module):
            exchange(module, CalledMixer)


def remove_overrides(model: nn.Module) -> None:
    """Give every module that a block computes its own class back."""
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
    """Asked once of modules that differ in no attribute."""
    if "forward" in module.__dict__:
        return None, "its forward was replaced on the instance"
    children = tuple((name, _looks(child, part.alike)) for name, child in module._modules.items())
    key = part.name, _looks(module, part.alike), children
    if key not in known:
        known[key] = part.formula(module, blocks)
    return known[key]


def _looks(module: nn.Module | None, alike: frozenset[str]) -> Any:
    """What tells modules of one class apart: plain attributes by value, others by identity, and sizes; of a matrix the
    latter alone.

    Args:
        alike: attributes that tell none apart.
    """
    if module is None:
        return None
    size = mlps.sizes(module)
    if size is not None:
        return size, *(None if p is None else p.dtype for p in module._parameters.values())
    told = tuple((k, v) for k, v in fixed(module.__dict__) if k not in alike)
    names = {*OF_ALL, *alike, *(name for name, _ in told)}
    own = told, tuple((k, id(v)) for k, v in module.__dict__.items() if k not in names)
    shapes = tuple((k, None if p is None else (p.shape, p.dtype)) for k, p in module._parameters.items())
    kind = type(module)
    return kind, getattr(kind, "_original", kind).forward, own, shapes
