"""Linear layers that join several matrices in one weight: which ones look so, and how many rows each matrix has.

Blocks of this library say so themselves. Of another library's layer nothing does but its name: `qkv_proj` of Phi-3,
whose forward slices queries, keys and values from its output. A rank that has a run of its rows has other matrices'
features than that forward takes them for, and nothing fails.
"""

import gc
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from quaver.torch.linear.layer import Quantizable
from quaver.torch.state.layer import state_of

#: Names of layers that join matrices in the models of transformers, timm, xformers and others.
NAMES = re.compile(r"\w*[qQ][kK][vV]\w*|query_key_value|c_attn|W_pack|\w*gate_up\w*|Wi|w12|in_proj")


def matrices_of(layer: nn.Module, parts: Sequence[int]) -> Mapping[str, int]:
    """The rows of each matrix by its name: as a block says, or as a style does, whose matrices have numbers."""
    own: Mapping[str, int] = state_of(layer).pieces if isinstance(layer, Quantizable) else {}
    return own or {str(number): rows for number, rows in enumerate(parts)}


def check(layer: Any, name: str, style: str, parts: Sequence[int]) -> None:
    """Refuse parts that the weight does not have, and a weight that looks as if it had some and of which none are said.

    Raises:
        ValueError: with what to do.
    """
    rows = layer.weight.shape[0]
    own = matrices_of(layer, ())
    if own and parts:
        raise ValueError(f"{name} says itself that it joins {', '.join(own)}: leave out the parts of {style}")
    if parts and (sum(parts) != rows or min(parts) < 1):
        raise ValueError(f"{style} has {sum(parts)} rows, and {name} {rows}: give the rows of each of its matrices")
    if own or parts:
        return
    known = joined_name(layer)
    if known is not None:
        raise ValueError(
            f"{name} is called {known!r}, as layers are that join several matrices in one weight, and each rank needs "
            f"rows of each: say how many rows each has, in their order, Column(parts=(q, k, v)) or Column(parts=(gate, "
            f"up)), in all {rows}; or Column(parts=({rows},)) where a head's q, k and v lie together, as GPT-NeoX's "
            "do, or where it is one matrix"
        )


def joined_name(layer: nn.Module) -> str | None:
    """The layer's name, where it is one of `NAMES`."""
    qualified = layer.__dict__.get("qualified_name")
    if qualified:
        names = {qualified.rpartition(".")[2]}
    else:
        # Its parent's dict of modules has it under its name, and nothing but the interpreter knows the parent.
        holders = (each for each in gc.get_referrers(layer) if type(each) is dict)
        names = {key for holder in holders for key, held in holder.items() if held is layer and isinstance(key, str)}
    return next((name for name in sorted(names) if NAMES.fullmatch(name)), None)
