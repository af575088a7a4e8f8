"""Run Quaver's attention and rope inside the forward of transformers' attention classes.

A transformers forward calls two functions by name: one that rotates queries and keys, and one from a registry that
computes attention. Here the same forward runs as a copy of the function with other globals, in which both names refer
to Quaver's functions. The framework itself is not modified. Masks, caches and projections stay as they were.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.conversion.matchers.swap_class import original_class
from quaver.torch.conversion.probe import differs, first_of, random_tensor
from quaver.torch.conversion.replace.fused_module import FusedModule, replaced, unsupported_input, with_functions
from quaver.torch.conversion.replace.rope import Rope, rope_of
from quaver.torch.nn.attention.op import attention
from quaver.torch.numerics.rounding import is_tracing

#: Name of the registry of attention functions in transformers' modeling files.
REGISTRY = "ALL_ATTENTION_FUNCTIONS"
#: Attention implementation that Quaver replaces, and one for which only rope is replaced: eager attention returns
#: weights, and gives a query that sees no key the average of all values.
SDPA, EAGER = "sdpa", "eager"
#: Keyword arguments that the block does not support. If one is passed, the original function runs, or raises its own
#: error.
THEIRS = ("output_attentions", "cache", "softcap", "s_aux")


@dataclass(frozen=True)
class AttentionFormula:
    """The functions in a forward that are replaced, and their replacements."""

    #: Name of the rope function or "", the function itself, and Quaver's replacement or None.
    rotary_name: str
    function: Any
    rope: Rope | None
    #: The configuration's attention implementation, and the registry's "sdpa" function that is replaced, or None.
    implementation: str
    attends: Any

    def __str__(self) -> str:
        parts = ["attention"] * (self.attends is not None) + ["rope"] * (self.rope is not None)
        return " and ".join(parts)


class FusedAttention(FusedModule):
    """Mixin above an attention class whose forward uses the registry."""

    _formula: AttentionFormula
    #: Copy of the forward for torch.compile, or None if only rope is replaced.
    _traced: Any = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        formula, forward = cls._formula, cls._original.forward
        if formula.attends is not None:
            # Rope stays the forward's own function, because the compiler fuses it.
            registry = _Registry(forward.__globals__[REGISTRY], formula.attends)
            cls._traced = with_functions(forward, {REGISTRY: registry}, snapshot=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("hidden_states")
        if replaced(self) or unsupported_input(x) or _needs_original(self, kwargs):
            return super().forward(*args, **kwargs)
        kind = type(self)
        if not is_tracing():
            return rebuilt(kind._original.forward, self._formula)(self, *args, **kwargs)
        if kind._traced is None or _patched_since(kind):
            return super().forward(*args, **kwargs)
        return kind._traced(self, *args, **kwargs)


def _needs_original(module: Any, kwargs: dict[str, Any]) -> bool:
    """Return True if the original forward must run: weights are requested, or the implementation or rope function
    changed.
    """
    formula, config = module._formula, module.config
    if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
        return True
    if getattr(config, "_attn_implementation", None) != formula.implementation:
        return True
    return (
        bool(formula.rotary_name)
        and type(module)._original.forward.__globals__.get(formula.rotary_name) is not formula.function
    )


@functools.lru_cache(maxsize=256)
def rebuilt(forward: Any, formula: AttentionFormula) -> Callable[..., Any]:
    """Return a copy of a forward whose globals contain Quaver's functions."""
    functions: dict[str, Any] = {REGISTRY: _Registry(forward.__globals__[REGISTRY], formula.attends)}
    if formula.rope is not None:
        functions[formula.rotary_name] = functools.partial(_rotate, formula)
    copied: Callable[..., Any] = with_functions(forward, functions)
    return copied


def _patched_since(kind: Any) -> bool:
    """Return True if the globals of the original forward have changed since they were copied."""
    theirs = kind._original.forward.__globals__
    copied = kind._traced.__globals__
    return any(theirs.get(name) is not value for name, value in copied.items() if name != REGISTRY)


def _rotate(
    formula: AttentionFormula, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any
) -> Any:
    """Apply rope with the signature of a model's function, which runs if it gets arguments that were not compared."""
    if more or options not in ({}, {"unsqueeze_dim": 1}, {"unsqueeze_dim": 2}):
        return formula.function(q, k, cos, sin, *more, **options)
    assert formula.rope is not None
    return formula.rope(q, k, cos, sin, **options)


class _Registry:
    """Attention registry that returns Quaver's attention in place of the function that was compared."""

    def __init__(self, theirs: Any, attends: Any) -> None:
        self.theirs, self.attends = theirs, attends

    def get_interface(self, name: str, default: Any) -> Any:
        function = self.theirs.get_interface(name, default)
        return function if name != SDPA or function is not self.attends else functools.partial(_attend, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)

    def __getitem__(self, name: str) -> Any:
        return self.theirs[name]


def _attend(
    theirs: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with the signature of a transformers attention function.

    Args:
        theirs: the original function, called if an unsupported argument is passed.
        module: the attention module.
        query, key, value: [B, heads, S, D].
        attention_mask: boolean (True means visible) or additive mask, or None.
        options: further keyword arguments.
    Returns:
        The output [B, S, heads, D], and None in place of weights.
    """
    if any(options.get(name) not in (None, False) for name in THEIRS):
        return theirs(module, query, key, value, attention_mask, **options)
    queries, keys, causal = query.shape[2], key.shape[2], options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    mask_type, mask, bias = "none", None, options.get("position_bias")
    if attention_mask is None:
        if causal and queries > 1:
            mask_type, key, value = "causal", key[:, :, :queries], value[:, :, :queries]
            bias = None if bias is None else bias[..., :queries]
    elif attention_mask.dtype is torch.bool:
        mask_type, mask = "arbitrary", ~attention_mask[..., :keys]
    else:
        added = attention_mask[..., :keys]
        bias = added if bias is None else bias + added
    y = attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        mask_type=mask_type,
        mask=mask,
        bias=bias,
        scale=options.get("scaling"),
        dropout=options.get("dropout") or 0.0,
    )
    return y, None


def is_attention(module: nn.Module) -> bool:
    """Return True for a module whose forward fetches its attention function from the registry."""
    forward = original_class(module).forward
    return REGISTRY in getattr(forward, "__code__", is_attention.__code__).co_names and hasattr(module, "config")


def formula_of(module: Any) -> tuple[AttentionFormula | None, str]:
    """Return which functions of the forward to replace, or None and the reason."""
    implementation = getattr(module.config, "_attn_implementation", None)
    if implementation is None:
        return None, "its configuration does not say how to attend"
    if implementation not in (SDPA, EAGER):
        return None, f"its configuration asks for {implementation}, but only {SDPA} can be replaced"
    forward = original_class(module).forward
    module_globals = forward.__globals__
    rotary_names = [n for n in forward.__code__.co_names if "rotary" in n and callable(module_globals.get(n))]
    rope = rope_of(module_globals[rotary_names[0]]) if len(rotary_names) == 1 else None
    name = rotary_names[0] if rope is not None else ""
    attends, why = None, f"its configuration asks for {EAGER} attention, but only {SDPA} can be replaced"
    if implementation == SDPA:
        attends = module_globals[REGISTRY].get_interface(SDPA, None)
        why = "" if _is_transformers(attends) else _attention_differs(attends)
    if why and rope is None:
        return None, why
    return AttentionFormula(name, module_globals.get(name), rope, implementation, None if why else attends), ""


def _is_transformers(attends: Any) -> bool:
    """Return True for transformers' own function of sdpa attention."""
    module = sys.modules.get("transformers.integrations.sdpa_attention")
    return attends is getattr(module, "sdpa_attention_forward", None)


def _attention_differs(attends: Any) -> str:
    """Return how another library's function and `_attend` differ, or ""."""

    def of(attend: Callable[..., Any]) -> Callable[..., Tensor]:
        def run(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            return first_of(attend(module, q, k, v, mask, dropout=0.0, scaling=0.3))

        return run

    def build_copy(dtype: torch.dtype) -> nn.Module:
        module: Any = nn.Identity()
        module.num_key_value_groups, module.is_causal = 2, True
        return module

    def inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
        seen = torch.ones(2, 1, 5, 5, dtype=torch.bool, device="cpu").tril()
        padded = seen.clone()
        padded[1, :, 1:, :1] = False
        for mask in (None, seen, padded):
            yield *(random_tensor((2, heads, 5, 16), dtype, i) for i, heads in enumerate((4, 2, 2))), mask

    return differs(build_copy, of(functools.partial(_attend, attends)), inputs, of(attends))
