"""Pass the boundaries of packed sequences to all layers of transformers' models with Mamba mixers.

transformers describes packed sequences in three ways: `seq_idx` [B, S], the sequence number of each token;
`cu_seq_lens_q`, cumulative lengths for a batch of one row; and `position_ids` that restart at 0. Its mixers read only
the first two, and some models (GraniteMoeHybrid) do not mask attention by `position_ids`. The forward pre-hook
`PackedInputs` derives the missing arguments from those that the caller passed.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from quaver.torch.numerics.rounding import is_tracing

#: Argument names for cumulative lengths, in order of precedence; they take precedence over `seq_idx`.
CU_SEQLENS = ("cu_seqlens", "cu_seq_lens_q")
#: Argument names for a cache.
CACHES = ("past_key_values", "cache_params")

#: (version of the tensor, its cu_seqlens) by `seq_idx` tensor, which all mixers of a model share.
_cu_seqlens: WeakIdKeyDictionary = WeakIdKeyDictionary()


def cu_seqlens_of(x: Tensor, arguments: Mapping[str, Any]) -> Tensor | None:
    """Return the boundaries of packed sequences among the B * S tokens of x, int [sequences + 1].

    Args:
        x: [B, S, ...]. A sequence does not span rows.
        arguments: arguments of a mixer's forward, by name.
    Returns:
        The boundaries, or None if no argument describes packed sequences.
    Raises:
        ValueError: cumulative lengths with several rows, or a `seq_idx` whose shape is not [B, S].
    """
    batch, length = x.shape[:2]
    for name in CU_SEQLENS:
        cu_seqlens = arguments.get(name)
        if cu_seqlens is not None:
            if batch != 1:
                raise ValueError(
                    f"{name} describes a batch of one row, and this batch has {batch}; give seq_idx [B, S] instead"
                )
            return cu_seqlens
    seq_idx: Tensor | None = arguments.get("seq_idx")
    if seq_idx is None:
        return None
    if seq_idx.shape != (batch, length):
        raise ValueError(
            f"seq_idx has shape {list(seq_idx.shape)}, and the tokens {[batch, length]}; give the number of each "
            "token's sequence"
        )
    if is_tracing() or seq_idx.is_inference():
        return _cu_seqlens_from(seq_idx)
    cached = _cu_seqlens.get(seq_idx)
    if cached is None or cached[0] != seq_idx._version:
        # A cached inference tensor could not be used by a later training forward.
        with torch.inference_mode(False):
            cached = _cu_seqlens[seq_idx] = seq_idx._version, _cu_seqlens_from(seq_idx)
    result: Tensor = cached[1]
    return result


def _cu_seqlens_from(seq_idx: Tensor) -> Tensor:
    starts = _is_first(seq_idx).flatten().nonzero().squeeze(1)
    return torch.cat([starts, starts.new_full((1,), seq_idx.numel())])


def _is_first(seq_idx: Tensor) -> Tensor:
    """Return a bool tensor [B, S] that is True at the first token of each sequence."""
    first = torch.ones_like(seq_idx, dtype=torch.bool)
    first[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return first


def last_starts(cu_seqlens: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the last sequence of each row.

    Returns:
        Its index in cu_seqlens, and the index of its first token among all B * S tokens; int64 [B] each.
    """
    ends = torch.arange(1, batch + 1, dtype=cu_seqlens.dtype, device=cu_seqlens.device) * length
    last = torch.searchsorted(cu_seqlens, ends) - 1
    return last, cu_seqlens[last].long()


class PackedInputs:
    """Forward pre-hook of a transformers model with fused mixers that adds the arguments for packed sequences.

    If the batch is packed, layers get `seq_idx`, `position_ids` and, for eager and sdpa attention, a mask [B, 1, S, S].
    `use_cache` becomes False unless the caller sets it. A batch that is not packed, or a call with a cache, is
    unchanged.

    Args:
        kind: the model's class.
    """

    def __init__(self, kind: Any) -> None:
        self.name, self.forwards_kwargs = kind.__name__, forwards_kwargs(kind.forward)
        #: Names of the forward's parameters without `self`.
        self.names = tuple(inspect.signature(kind.forward).parameters)[1:]

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs = {**dict(zip(self.names, args, strict=False)), **kwargs}
        ids = kwargs.get("input_ids")
        ids = kwargs.get("inputs_embeds") if ids is None else ids
        if not isinstance(ids, Tensor) or ids.dim() < 2 or any(kwargs.get(name) is not None for name in CACHES):
            return None
        seq_idx = seq_idx_of(ids, kwargs)
        if seq_idx is None:
            return None
        if not self.forwards_kwargs:
            raise ValueError(
                f"{self.name}.forward of transformers does not pass seq_idx on to its layers, which would mix packed "
                "sequences: call the base model and then the head, or give one sequence a row"
            )
        arguments = {**kwargs, "seq_idx": seq_idx}
        if "position_ids" in self.names:
            arguments |= self._attention_arguments(model, kwargs, seq_idx)
        return (), arguments

    def _attention_arguments(self, model: Any, kwargs: dict[str, Any], seq_idx: Tensor) -> dict[str, Any]:
        """Return the missing arguments that restrict attention to each sequence.

        Raises:
            ValueError: a mask [B, S] with zeros, with which transformers ignores packing; any such mask while tracing,
                where its values are unknown.
        """
        mask = kwargs.get("attention_mask")
        arguments: dict[str, Any] = {}
        if isinstance(mask, Tensor) and mask.dim() == 2 and (is_tracing() or not bool((mask == 1).all())):
            raise ValueError(
                f"attention_mask {list(mask.shape)} hides tokens, and transformers then attends across packed "
                "sequences: leave the mask and the padding out, or give a mask of all pairs [B, 1, S, S]"
            )
        if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
            arguments["attention_mask"] = attention_mask_of(seq_idx, model)
        if kwargs.get("position_ids") is None:
            arguments["position_ids"] = position_ids_of(seq_idx)
        if kwargs.get("use_cache") is None:
            arguments["use_cache"] = False
        return arguments


def seq_idx_of(ids: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return `seq_idx` [B, S] from the argument that describes packed sequences, or None if each row is one
    sequence.
    """
    cu_seqlens = next((kwargs[name] for name in CU_SEQLENS if kwargs.get(name) is not None), None)
    if cu_seqlens is not None:
        tokens = torch.arange(ids.shape[1], dtype=cu_seqlens.dtype, device=ids.device)
        return torch.searchsorted(cu_seqlens[1:].to(ids.device), tokens, right=True)[None].int()
    seq_idx, positions = kwargs.get("seq_idx"), kwargs.get("position_ids")
    if seq_idx is not None:
        return seq_idx
    # Like transformers, read packing from position_ids only if there is no mask.
    packed = isinstance(positions, Tensor) and positions.dim() == 2 and kwargs.get("attention_mask") is None
    if not packed or positions.shape[1] < 2:  # type: ignore[union-attr]
        return None
    steps = torch.diff(positions, prepend=positions[:, :1] - 1)  # type: ignore[index, arg-type]
    seq_idx = (steps != 1).cumsum(-1).int().expand(ids.shape[:2])
    return seq_idx if is_tracing() or bool(seq_idx[:, -1].any()) else None


def position_ids_of(seq_idx: Tensor) -> Tensor:
    """Return the position of each token in its sequence, int64 [B, S]."""
    tokens = torch.arange(seq_idx.shape[1], dtype=torch.int64, device=seq_idx.device).expand_as(seq_idx)
    return tokens - tokens.masked_fill(~_is_first(seq_idx), 0).cummax(-1).values


def attention_mask_of(seq_idx: Tensor, model: Any) -> Tensor | None:
    """Return a causal mask within sequences [B, 1, S, S], bool for sdpa and additive for eager attention.

    Returns:
        The mask, or None where transformers builds it: for sliding windows and other attention implementations.
    """
    implementation = getattr(model.config, "_attn_implementation", None)
    if implementation not in ("sdpa", "eager") or getattr(model.config, "sliding_window", None) is not None:
        return None
    attends = (seq_idx[:, None, :, None] == seq_idx[:, None, None, :]).tril()
    if implementation == "sdpa":
        return attends
    dtype = next(model.parameters()).dtype
    return torch.zeros_like(attends, dtype=dtype).masked_fill_(~attends, torch.finfo(dtype).min)


def forwards_kwargs(forward: Callable[..., Any]) -> bool:
    """Return True if a forward passes its **kwargs to a call other than its loss function.

    Reads the source code; True if there is no source.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return True
    kwargs = next((n.args.kwarg.arg for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.args.kwarg), None)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "loss" not in ast.unparse(node.func)]
    unpacked = [k.value.id for call in calls for k in call.keywords if k.arg is None and isinstance(k.value, ast.Name)]
    return kwargs is not None and kwargs in unpacked
