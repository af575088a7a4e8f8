"""Sequences that lie end to end in a batch, as transformers tells them: for mixers, and for the models around them.

A mixer is given `seq_idx` [B, S], the number of each token's sequence, or `cu_seq_lens_q` of a batch of one row. The
models of transformers know sequences by `position_ids` that start again as well, which their mixers never see, and
some (GraniteMoeHybrid) make no masks of them. `PackedInputs` runs before a model and completes what it was given.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from quaver.torch.numerics.tracing import is_tracing

#: Arguments of mixers and models, in the order in which they are believed: cumulative lengths, and a number a token.
ENDS, NUMBERS = ("cu_seqlens", "cu_seq_lens_q"), "seq_idx"
#: Arguments of models by which a cache comes.
CACHES = ("past_key_values", "cache_params")

#: (version, cumulative lengths) of tensors of `seq_idx`.
_ends: WeakIdKeyDictionary = WeakIdKeyDictionary()


def cu_seqlens_of(x: Tensor, given: Mapping[str, Any]) -> Tensor | None:
    """Where sequences begin and end among the tokens of x [B, S, ...], int [sequences + 1], rows one after the other.

    Args:
        given: the arguments of a mixer by name.
    Returns:
        None where nothing tells sequences apart.
    Raises:
        ValueError: cumulative lengths beside several rows, a `seq_idx` of another shape than tokens.
    """
    batch, length = x.shape[:2]
    for name in ENDS:
        ends = given.get(name)
        if ends is not None:
            if batch != 1:
                raise ValueError(f"{name} is of one row of sequences, and the batch has {batch}; give seq_idx [B, S]")
            return ends
    numbers: Tensor | None = given.get(NUMBERS)
    if numbers is None:
        return None
    if numbers.shape != (batch, length):
        raise ValueError(f"seq_idx is {list(numbers.shape)}; give one number a token, {[batch, length]}")
    if is_tracing() or numbers.is_inference():
        return _ends_of(numbers)
    known = _ends.get(numbers)
    if known is None or known[0] != numbers._version:
        # Training may read what inference mode has made first.
        with torch.inference_mode(False):
            known = _ends[numbers] = numbers._version, _ends_of(numbers)
    cached: Tensor = known[1]
    return cached


def _ends_of(numbers: Tensor) -> Tensor:
    first = torch.ones_like(numbers, dtype=torch.bool)
    first[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    starts = first.flatten().nonzero().squeeze(1)
    return torch.cat([starts, starts.new_full((1,), numbers.numel())])


def last_starts(cu_seqlens: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """The number of each row's last sequence, and where that begins among the tokens of all rows, int64 [B] each."""
    ends = torch.arange(1, batch + 1, dtype=cu_seqlens.dtype, device=cu_seqlens.device) * length
    last = torch.searchsorted(cu_seqlens, ends) - 1
    return last, cu_seqlens[last].long()


class PackedInputs:
    """Run before the forward of a model of transformers that holds mixers of ours.

    Of packed sequences each kind of argument is made of the others: `seq_idx` for mixers, `position_ids`, and for
    attention a mask of all pairs where one is added or given to torch. It makes no cache unless one is asked for.

    Args:
        kind: the model's class.
    """

    def __init__(self, kind: Any) -> None:
        self.name, self.passes_on = kind.__name__, passes_on(kind.forward)
        #: Of the arguments, without the module itself.
        self.names = tuple(inspect.signature(kind.forward).parameters)[1:]

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs = {**dict(zip(self.names, args, strict=False)), **kwargs}
        ids = kwargs.get("input_ids")
        ids = kwargs.get("inputs_embeds") if ids is None else ids
        if not isinstance(ids, Tensor) or ids.dim() < 2 or any(kwargs.get(name) is not None for name in CACHES):
            return None
        numbers = numbers_of(ids, kwargs)
        if numbers is None:
            return None
        if not self.passes_on:
            raise ValueError(
                f"{self.name} of transformers does not tell its layers where packed sequences begin: call its body "
                "and its head one after the other, or give one sequence a row"
            )
        given = {**kwargs, NUMBERS: numbers}
        if "position_ids" in self.names:
            given |= self._for_attention(model, kwargs, numbers)
        return (), given

    def _for_attention(self, model: Any, kwargs: dict[str, Any], numbers: Tensor) -> dict[str, Any]:
        """What keeps attention within sequences.

        Raises:
            ValueError: a mask that hides tokens, beside which transformers makes none of packed sequences.
        """
        mask = kwargs.get("attention_mask")
        given: dict[str, Any] = {}
        if isinstance(mask, Tensor) and mask.dim() == 2 and (is_tracing() or not bool((mask == 1).all())):
            raise ValueError(
                "transformers attends across packed sequences where an attention_mask hides tokens: leave the mask "
                "out, and padding too, or make it one of all pairs [B, 1, S, S]"
            )
        if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
            given["attention_mask"] = pairs_of(numbers, model)
        if kwargs.get("position_ids") is None:
            given["position_ids"] = positions_of(numbers)
        if kwargs.get("use_cache") is None:
            given["use_cache"] = False
        return given


def numbers_of(ids: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The number of each token's sequence [B, S], of whichever argument tells it; None where a row is one sequence."""
    ends = next((kwargs[name] for name in ENDS if kwargs.get(name) is not None), None)
    if ends is not None:
        places = torch.arange(ids.shape[1], dtype=ends.dtype, device=ids.device)
        return torch.searchsorted(ends[1:].to(ids.device), places, right=True)[None].int()
    numbers, positions = kwargs.get(NUMBERS), kwargs.get("position_ids")
    if numbers is not None:
        return numbers
    # As transformers tells packed positions from others.
    packed = isinstance(positions, Tensor) and positions.dim() == 2 and kwargs.get("attention_mask") is None
    if not packed or positions.shape[1] < 2:  # type: ignore[union-attr]
        return None
    steps = torch.diff(positions, prepend=positions[:, :1] - 1)  # type: ignore[index, arg-type]
    numbers = (steps != 1).cumsum(-1).int().expand(ids.shape[:2])
    return numbers if is_tracing() or bool(numbers[:, -1].any()) else None


def positions_of(numbers: Tensor) -> Tensor:
    """The place of each token in its sequence [B, S]."""
    places = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
    first = torch.ones_like(numbers, dtype=torch.bool)
    first[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return places - places.masked_fill(~first, 0).cummax(-1).values


def pairs_of(numbers: Tensor, model: Any) -> Tensor | None:
    """The mask of pairs [B, 1, S, S] that a model's way to attend takes: causal, within sequences.

    Returns:
        None where transformers makes it itself: beside windows, and for ways that take `cu_seq_lens_q` or position_ids.
    """
    way = getattr(model.config, "_attn_implementation", None)
    if way not in ("sdpa", "eager") or getattr(model.config, "sliding_window", None) is not None:
        return None
    seen = (numbers[:, None, :, None] == numbers[:, None, None, :]).tril()
    if way == "sdpa":
        return seen
    dtype = next(model.parameters()).dtype
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


def passes_on(forward: Callable[..., Any]) -> bool:
    """Whether a forward hands on arguments that it does not name, but to its loss, by its text; True without one."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return True
    others = next((n.args.kwarg.arg for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.args.kwarg), None)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "loss" not in ast.unparse(node.func)]
    named = [k.value.id for call in calls for k in call.keywords if k.arg is None and isinstance(k.value, ast.Name)]
    return others is not None and others in named
