"""Which implementation of attention runs for a call, and why the others do not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quaver import recipes
from quaver.core.spec import Recipe
from quaver.core.text.tables import html_table
from quaver.torch.blocks.attention.implementations.fp8 import explain as explain_fp8
from quaver.torch.blocks.attention.inputs.call import Call
from quaver.torch.blocks.attention.op import ATTENTION, Options, prepare


@dataclass(frozen=True, repr=False)
class AttentionExplanation:
    """The result of `explain_attention`; an interpreter, a notebook and print show a table."""

    #: Shapes, dtype and the options in force.
    how: str
    #: The implementation that runs.
    runs: str
    #: (implementation, why it does not run) of all the others, in order of preference.
    passed_over: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        lines = [f"  {'attention':<20}{self.how:<58}  {self.runs}"]
        lines += [f"{'':<22}not {name}: {why}" for name, why in self.passed_over]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        row = "attention", self.how, self.runs, why_not(self.passed_over)
        return html_table(("what", "how", "runs", "why not another"), [row])


def why_not(passed_over: Sequence[tuple[str, str]]) -> str:
    """Why other implementations do not run, in a line."""
    return "; ".join(f"{name}: {why}" for name, why in passed_over)


def explain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, recipe: str | Recipe | None = None, **options: Any
) -> AttentionExplanation:
    """Say what `attention` would run with these arguments; nothing is computed.

    `quaver.torch.explain(module, q, k, v)` is the same for a `DotProductAttention`, with its options and recipe.

    Args:
        q, k, v, recipe, options: as `attention`.
    Returns:
        An `AttentionExplanation`, which an interpreter shows as a table and a script prints.
    Raises:
        ValueError: as `attention`.
    """
    recipe = None if recipe is None else recipes.get(recipe)
    wide, keys, values, call = prepare(q, k, v, Options(**options))
    spec = None if recipe is None else recipe.attention
    if spec is None:
        rows = ATTENTION.explain(wide, keys, values, call)
    else:
        bias = call.alibi_slopes if call.bias is None else call.bias
        rows = explain_fp8(wide, keys, values, spec, bias, call.soft_cap, call.dropout)
    runs = next((name for name, why in rows if not why), "nothing")
    others = tuple((name, why or f"{runs} comes first") for name, why in rows if name != runs)
    if spec is not None:
        others += tuple((impl.name, f"recipe {recipe} quantizes attention") for impl in ATTENTION.impls)
    return AttentionExplanation(_how(wide, keys, values, call), runs, others)


def _how(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str:
    batch, heads, queries, dim = q.shape
    groups, keys, width = k.shape[1], k.shape[2], v.shape[-1]
    wide = str(dim) if dim == width else f"{dim}/{width}"
    said = [f"{batch}x{heads}/{groups} heads of {wide}, {queries} on {keys}, {str(q.dtype)[6:]}", call.mask_type]
    if call.ragged is not None:
        said.append("ragged")
    if call.window is not None:
        said.append(f"window {call.window}")
    if call.chunk is not None:
        said.append(f"chunks of {call.chunk}")
    names = ("bias", "alibi_slopes", "sinks", "soft_cap", "dropout")
    said += [name for name in names if isinstance(getattr(call, name), Tensor) or getattr(call, name)]
    return ", ".join(said)
