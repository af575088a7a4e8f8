"""`DotProductAttention`, the attention function with its options as a module; and `explain_attention`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver import recipes
from quaver.options import takes
from quaver.recipes.spec import Recipe
from quaver.recipes.text import check_name, html_table
from quaver.reference.attention import (
    MASKS,
    OFF_BY_ONE,
    alibi_numbers,
    check_chunk,
    check_heads,
    check_numbers,
    check_sinks,
    check_window,
)
from quaver.torch.nn.attention.fp8 import explain as explain_fp8
from quaver.torch.nn.attention.inputs import (
    LAYOUTS,
    AttentionCall,
    CuSeqlens,
    Mask,
    Window,
    check_fits,
    check_mask,
    ragged_of,
)
from quaver.torch.nn.attention.op import ATTENTION, AttentionOpOptions, attention, prepare
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.state import observer
from quaver.torch.state.context import in_force, recipe_in_force

# ---- module ----


@dataclass(frozen=True, kw_only=True)
class CoreOptions:
    """Options of `DotProductAttention`."""

    # Number of key/value heads, each serving heads / groups query heads; None for one per query head.
    groups: int | None = None
    mask_type: str = "none"
    window: Window | None = None
    chunk: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    # Dropout of the attention probabilities.
    dropout: float = 0.0
    # None, "off_by_one" or "learnable".
    sinks: str | None = None
    alibi: bool = False
    # "bshd", "sbhd" or "thd".
    layout: str = "bshd"
    recipe: str | Recipe | None = None
    # Device and dtype of learnable sinks.
    device: Any = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class CoreArguments(CoreOptions):
    """Constructor arguments of `DotProductAttention`; see there."""

    heads: int
    head_dim: int | tuple[int, int]


class DotProductAttention(nn.Module):
    """Scaled dot-product attention: softmax(q kᵀ scale) v, without projections.

    Args:
        heads: number of query heads.
        head_dim: features of a head, or (of queries and keys, of values).
        groups: number of key/value heads, each serving heads / groups query heads; None for one per query head.
        mask_type, window, chunk, scale, soft_cap, layout: as for `quaver.torch.nn.attention.attention`.
        dropout: of the probabilities, in training mode only.
        sinks: None, "off_by_one", or "learnable" for a parameter `sinks` [heads].
        alibi: True lowers scores with distance, by slopes 2^(-8 h / heads).
        recipe: recipe whose `attention` quantizes; None uses the innermost autocast's.
        device, dtype: of the sinks.
    Raises:
        ValueError: invalid heads, names, window or probability.
    """

    sinks: nn.Parameter | None
    #: Function that computes attention; context parallelism replaces it.
    attend: Callable[..., Tensor] = staticmethod(attention)

    @takes(CoreArguments)
    def __init__(self, options: CoreArguments) -> None:
        super().__init__()
        heads, head_dim = options.heads, options.head_dim
        self.heads, self.groups = heads, heads if options.groups is None else options.groups
        self.head_dim = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
        self.mask_type, self.window, self.layout = options.mask_type, options.window, options.layout
        self.chunk, self.scale, self.soft_cap = options.chunk, options.scale, options.soft_cap
        self.dropout, self.alibi = options.dropout, options.alibi
        self.recipe = None if options.recipe is None else recipes.get(options.recipe)
        self._check(options.sinks)
        self.off_by_one = options.sinks == OFF_BY_ONE
        learnable = None
        if options.sinks == "learnable":
            learnable = nn.Parameter(torch.empty(heads, device=options.device, dtype=options.dtype))
        self.register_parameter("sinks", learnable)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set sinks to 0, which equals "off_by_one"."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(heads, features per head) of queries, keys and values."""
        wide, narrow = self.head_dim
        return (self.heads, wide), (self.groups, wide), (self.groups, narrow)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        cu_seqlens: CuSeqlens | None = None,
        mask_type: str | None = None,
        window: Window | None = None,
    ) -> Tensor:
        """Compute attention of q on k and v, in the module's layout; see `quaver.torch.nn.attention.attention`.

        Args:
            q, k, v, mask, bias, cu_seqlens: as for `attention`.
            mask_type: overrides the module's for this call, for example if keys are cached and the queries are the last
                ones.
            window: overrides the module's for this call; (-1, -1) is no window.
        """
        options = self.options(q, k, v, mask_type, window)
        options |= {"mask": mask, "bias": bias, "cu_seqlens": cu_seqlens}
        if observer.active.observers:
            return self.observed(q, k, v, **options)
        return self.attend(q, k, v, **options)

    def observed(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Call `attend`, and report the call to active observers if it is quantized."""
        recipe = options["recipe"]
        if is_tracing() or recipe is None or recipe.attention is None:
            return self.attend(q, k, v, **options)
        for each in observer.active.observers:
            recipe = each.attention_recipe(self, recipe)
        options["recipe"] = recipe
        if recipe is None or recipe.attention is None:
            return self.attend(q, k, v, **options)
        # Views, which have no other readers.
        qkv = q.view_as(q), k.view_as(k), v.view_as(v)
        y = self.attend(*qkv, **options)
        for each in observer.active.observers:
            each.observe_attention(self, qkv, options, y)
        return y

    def options(
        self, q: Tensor, k: Tensor, v: Tensor, mask_type: str | None = None, window: Window | None = None
    ) -> dict[str, Any]:
        """Return the keyword arguments that the module adds to a call of `attention`.

        Raises:
            ValueError: the numbers of heads differ from the module's.
        """
        self._check_heads(q, k, v)
        recipe = in_force(self.recipe)
        if recipe is not None and recipe.attention is not None:
            recipe = recipe_in_force(self.recipe)
        return {
            "mask_type": self.mask_type if mask_type is None else mask_type,
            "window": self.window if window is None else window,
            "chunk": self.chunk,
            "alibi_slopes": alibi_slopes(self.heads, q.device) if self.alibi else None,
            "sinks": OFF_BY_ONE if self.off_by_one else self._parameters["sinks"],
            "scale": self.scale,
            "soft_cap": self.soft_cap,
            "dropout": self.dropout if self.training else 0.0,
            "layout": self.layout,
            "recipe": recipe,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.recipe is not None:  # Equal recipes are one object.
            self.recipe = recipes.get(self.recipe)

    def check(
        self,
        batch: int,
        queries: int,
        keys: int,
        mask: Mask | None,
        bias: Tensor | None,
        cu_seqlens: CuSeqlens | None,
        mask_type: str | None = None,
        window: Window | None = None,
    ) -> None:
        """Raise the ValueError that `forward` would raise, for callers that do other work first."""
        shape = (batch, self.heads, queries, keys)
        ragged = ragged_of(self.layout, cu_seqlens, queries, keys)
        mask_type, window = mask_type or self.mask_type, self.window if window is None else window
        check_mask(mask_type, mask, window, shape, ragged is not None)
        if bias is not None:
            check_fits("bias", bias, shape)

    def extra_repr(self) -> str:
        options = {name: getattr(self, name) for name in ("window", "chunk", "scale", "soft_cap")}
        options |= {name: getattr(self, name) for name in ("dropout", "alibi", "recipe")}
        parts = "".join(f", {name}={value}" for name, value in options.items() if value)
        return f"{self.heads}, {self.head_dim}, groups={self.groups}, mask_type={self.mask_type!r}{parts}"

    def _check(self, sinks: str | None) -> None:
        check_heads(self.heads, self.groups)
        check_name("mask type", self.mask_type, MASKS)
        check_window(self.mask_type, self.window)
        check_chunk(self.chunk)
        check_name("layout", self.layout, LAYOUTS)
        check_sinks(sinks)
        if len(self.head_dim) != 2 or min(self.head_dim) < 1:
            raise ValueError(f"head_dim is {self.head_dim}; give a number above 0, or (of q and k, of v)")
        check_numbers(self.soft_cap, self.dropout)

    def _check_heads(self, *qkv: Tensor) -> None:
        for name, x, size in zip("qkv", qkv, self.sizes, strict=True):
            if x.shape[-2:] != size:
                raise ValueError(
                    f"{name} has shape {list(x.shape)}; this attention in layout {self.layout!r} takes "
                    f"{LAYOUTS[self.layout]} with {size[0]} heads of {size[1]} features"
                )


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Return ALiBi's slopes, `quaver.reference.attention.alibi_numbers`, float32 [heads]."""
    return torch.tensor(alibi_numbers(heads), dtype=torch.float32, device=device)


# ---- explanation of a call ----


@dataclass(frozen=True, repr=False)
class AttentionExplanation:
    """Result of `explain_attention`; its repr is a table in an interpreter, in a notebook and in print."""

    #: Shapes, dtype and options of the call.
    how: str
    #: Name of the implementation that runs.
    runs: str
    #: (implementation, reason why it does not run) for all others, in order of preference.
    passed_over: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        lines = [f"  {'attention':<20}{self.how:<58}  {self.runs}"]
        lines += [f"{'':<22}not {name}: {why}" for name, why in self.passed_over]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        row = "attention", self.how, self.runs, reason_unsupported(self.passed_over)
        return html_table(("what", "how", "runs", "why not another"), [row])


def reason_unsupported(passed_over: Sequence[tuple[str, str]]) -> str:
    """Return why other implementations do not run, in one line."""
    return "; ".join(f"{name}: {why}" for name, why in passed_over)


def explain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, recipe: str | Recipe | None = None, **options: Any
) -> AttentionExplanation:
    """Show which implementation `attention` would run with these arguments, without computing anything.

    `quaver.torch.explain(module, q, k, v)` does the same for a `DotProductAttention`, with its options and recipe.

    Args:
        q, k, v, recipe, options: as for `attention`.
    Returns:
        An `AttentionExplanation`, which an interpreter shows as a table and a script can print.
    Raises:
        ValueError: as `attention`.
    """
    recipe = None if recipe is None else recipes.get(recipe)
    wide, keys, values, call = prepare(q, k, v, AttentionOpOptions(**options))
    spec = None if recipe is None else recipe.attention
    if spec is None:
        rows = ATTENTION.explain(wide, keys, values, call)
    else:
        bias = call.alibi_slopes if call.bias is None else call.bias
        rows = explain_fp8(wide, keys, values, spec, bias, call.soft_cap, call.dropout)
    runs = next((name for name, why in rows if not why), "nothing")
    others = tuple((name, why or f"{runs} comes first") for name, why in rows if name != runs)
    if spec is not None:
        others += tuple((impl.name, f"recipe {recipe} quantizes attention") for impl in ATTENTION.implementations)
    return AttentionExplanation(_how(wide, keys, values, call), runs, others)


def _how(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    batch, heads, queries, dim = q.shape
    groups, keys, width = k.shape[1], k.shape[2], v.shape[-1]
    wide = str(dim) if dim == width else f"{dim}/{width}"
    parts = [f"{batch}x{heads}/{groups} heads of {wide}, {queries} on {keys}, {str(q.dtype)[6:]}", call.mask_type]
    if call.ragged is not None:
        parts.append("ragged")
    if call.window is not None:
        parts.append(f"window {call.window}")
    if call.chunk is not None:
        parts.append(f"chunks of {call.chunk}")
    names = ("bias", "alibi_slopes", "sinks", "soft_cap", "dropout")
    parts += [name for name in names if isinstance(getattr(call, name), Tensor) or getattr(call, name)]
    return ", ".join(parts)
