"""Run Quaver's attention and rope inside the forward of transformers' attention classes.

A transformers forward calls two functions by name: one that rotates queries and keys, and one from a registry that
computes attention. Here the same forward runs as a copy of the function with other globals, in which both names refer
to Quaver's functions. The framework itself is not modified. Masks, caches and projections stay as they were.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.conversion.matchers.swap_class import original_class
from quaver.torch.conversion.probe import differs, first_of, random_tensor, stand_in
from quaver.torch.conversion.replace.fused import FusedModule, replaced, sizes, unsupported_input, with_functions
from quaver.torch.conversion.replace.rope import COMPLEX, HALVES, ONCE, PAIRS, Rope, rope_of, tables
from quaver.torch.nn.attention.op import attention
from quaver.torch.numerics.rounding import is_tracing

#: Name of the registry of attention functions in transformers' modeling files.
REGISTRY = "ALL_ATTENTION_FUNCTIONS"
#: Attention implementation that Quaver replaces, and one for which only rope is replaced: eager attention returns
#: weights, and gives a query that sees no key the average of all values.
SDPA, EAGER = "sdpa", "eager"
#: Keyword arguments of an attention function that Quaver's attention supports.
OURS = {"dropout", "scaling", "is_causal", "softcap", "s_aux", "position_bias"}
#: Keyword arguments that only the original function supports; if one is passed, the original runs.
THEIRS = ("output_attentions", "cache")


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
        functions[formula.rotary_name] = formula.rope
    copied: Callable[..., Any] = with_functions(forward, functions)
    return copied


def _patched_since(kind: Any) -> bool:
    """Return True if the globals of the original forward have changed since they were copied."""
    theirs = kind._original.forward.__globals__
    copied = kind._traced.__globals__
    return any(theirs.get(name) is not value for name, value in copied.items() if name != REGISTRY)


class _Registry:
    """Attention registry that returns Quaver's attention in place of the function that was compared."""

    def __init__(self, theirs: Any, attends: Any) -> None:
        self.theirs, self.attends = theirs, attends
        #: True once a forward has fetched the function.
        self.asked = False

    def get_interface(self, name: str, default: Any) -> Any:
        function = self.theirs.get_interface(name, default)
        if name != SDPA or function is not self.attends:
            return function
        if not is_tracing():
            self.asked = True
        return functools.partial(_attend, function)

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
    passed = {name: options.get(name) for name in OURS}
    queries, keys = query.shape[2], key.shape[2]
    causal = passed["is_causal"] if passed["is_causal"] is not None else getattr(module, "is_causal", True)
    mask_type, mask, bias = "none", None, passed["position_bias"]
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
        sinks=passed["s_aux"],
        scale=passed["scaling"],
        soft_cap=passed["softcap"],
        dropout=passed["dropout"] or 0.0,
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
    rotary_name = [n for n in forward.__code__.co_names if "rotary" in n and callable(module_globals.get(n))]
    rope = rope_of(module_globals[rotary_name[0]]) if len(rotary_name) == 1 else None
    formula = formula_with(module, rotary_name[0] if rope is not None else "", rope)
    if formula.attends is None and rope is None:
        return None, f"its configuration asks for {EAGER} attention, but only {SDPA} can be replaced"
    # The layout of cosines and sines is the one that the rope function was found to read.
    layouts = (rope.table_layout,) if rope is not None else (HALVES, PAIRS, ONCE, COMPLEX) if rotary_name else (HALVES,)
    reason = ""
    # Find the output projection by trial: usually the last matrix, Phi-3's first, in some modules none.
    matrices = [name for name, part in module._modules.items() if sizes(part) is not None]
    if not matrices:
        return None, "it holds no matrices"
    for out, layout, width in itertools.product([*reversed(matrices), None], layouts, _widths(module)):
        why = _differs(module, formula, out, layout, width)
        registry: _Registry = rebuilt(forward, formula).__globals__[REGISTRY]
        if not why and formula.attends is not None and not registry.asked:
            why = "it does not ask the registry how to attend"
        if "does not run" not in why:
            return (None, why) if why else (formula, "")
        # The first case is the usual one, so its reason is the most useful one.
        reason = reason or why
    return None, reason


def formula_with(module: Any, rotary_name: str, rope: Rope | None) -> AttentionFormula:
    """Return the formula of a module whose forward applies `rope` by a function of this name."""
    module_globals, implementation = original_class(module).forward.__globals__, module.config._attn_implementation
    attends = module_globals[REGISTRY].get_interface(SDPA, None) if implementation == SDPA else None
    return AttentionFormula(rotary_name, module_globals.get(rotary_name), rope, implementation, attends)


#: Number of tokens, and of input features, in the comparison.
TOKENS, SMALL = 5, 16
MASKS = ("none", "causal", "padding and window")


def _differs(module: Any, formula: AttentionFormula, out: str | None, table_layout: str, width: int) -> str:
    """Return how the outputs differ, or "": tested without a mask, with a causal one, and with padding and a window.

    Args:
        module: the attention module.
        formula: the candidate.
        out: name of the output projection, or None.
        table_layout, width: layout of cosines and sines, and their number of features.
    """
    forward = original_class(module).forward

    def of(function: Callable[..., Any]) -> Callable[..., Tensor]:
        def run(copied: Any, x: Tensor, mask: str) -> Tensor:
            return first_of(function(copied, **_arguments(copied, x, mask, formula, table_layout, width)))

        return run

    def inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
        return ((random_tensor((2, TOKENS, SMALL), dtype, 5), mask) for mask in MASKS)

    return differs(lambda dtype: small(module, dtype, out), of(rebuilt(forward, formula)), inputs, of(forward))


def _arguments(
    copied: Any, x: Tensor, mask: str, formula: AttentionFormula, table_layout: str, width: int
) -> dict[str, Any]:
    """Return keyword arguments for a forward, as a transformers model passes them."""
    names = inspect.signature(type(copied).forward).parameters
    i = torch.arange(TOKENS, dtype=torch.int64, device="cpu")
    seen = i[:, None] >= i
    if mask == "padding and window":
        seen = (seen & (i[:, None] - i < 3)).expand(2, 1, TOKENS, TOKENS).clone()
        seen[1, :, :, :1] = torch.eye(TOKENS, dtype=torch.bool, device="cpu")[:, :1]
    seen = seen.expand(2, 1, TOKENS, TOKENS)
    added = torch.where(seen, 0.0, torch.finfo(x.dtype).min).to(x.dtype)
    passed = None if mask == "none" else seen if formula.implementation == SDPA else added
    named: dict[str, Any] = {"hidden_states": x, "mask" if "mask" in names else "attention_mask": passed}
    if "position_embeddings" in names:
        named["position_embeddings"] = tables(table_layout, width, TOKENS, x.dtype)
    for name, parameter in names.items():
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            named.setdefault(name, i[None] if name == "position_ids" else None)
    named.pop("self", None)
    return named


def _widths(module: Any) -> list[int]:
    """Return the candidate numbers of rotated features, from the module's attributes."""
    named = ("rotary_ndims", "rotary_dim", "qk_rope_head_dim", "head_dim", "head_size", "attention_head_size")
    widths = [getattr(module, name, None) for name in named]
    whole = [width for width in widths if isinstance(width, int) and width > 1]
    part = getattr(module.config, "partial_rotary_factor", None) or 1.0
    return list(dict.fromkeys([*(int(w * part) // 2 * 2 for w in whole[-1:]), *whole])) or [2]


def small(module: Any, dtype: torch.dtype, out: str | None) -> nn.Module:
    """Return a small copy with few input and output features and the module's own heads.

    Args:
        module: the attention module.
        dtype: dtype of the copy.
        out: name of the output projection, or None.
    """
    shapes = {name: size[:2] for name, part in module._modules.items() if (size := sizes(part)) is not None}
    wide = next((k for name, (k, _) in shapes.items() if name != out), 0)
    features = {name: (SMALL if k == wide else k, n) for name, (k, n) in shapes.items()}
    if out is not None:
        features[out] = shapes[out][0], SMALL
    return stand_in(module, dtype, features)
