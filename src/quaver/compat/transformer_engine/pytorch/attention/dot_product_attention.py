"""Transformer Engine's `DotProductAttention`: its masks, layouts and call options for Quaver's attention."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quaver.compat.transformer_engine.pytorch.attention.inference import InferenceParams
from quaver.compat.transformer_engine.pytorch.module.parameters import Stateless, place, refuse_codes
from quaver.options import checks
from quaver.recipes.text import check_name
from quaver.torch.nn.attention.dot_product import DotProductAttention as Ours
from quaver.torch.nn.attention.dot_product import alibi_slopes
from quaver.torch.state import observer
from quaver.torch.state.context import checkpoint

SINKS = {"vanilla": None, "off-by-one": "off_by_one", "learnable": "learnable"}
Window = tuple[int, int] | None
BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


class DotProductAttention(Stateless, Ours):
    """Attention with Transformer Engine's arguments; the output's last axis is [heads × features], flattened.

    Raises:
        ValueError: context parallelism, `return_max_logit`, padding between packed sequences, or a window with more
            keys than queries, which Transformer Engine aligns with the last key.
    """

    @checks
    def __init__(
        self, num_attention_heads: int, kv_channels: int | tuple[int, int], num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
        window_size: Window = None, *, softcap: float = 0.0, layer_number: int | None = None,
        softmax_scale: float | None = None, softmax_type: str = "vanilla", tp_size: int = 1, cp_group: Any = None,
        return_max_logit: bool = False,
        # Accepted without effect: options for several ranks and hints.
        sequence_parallel: bool = False, get_rng_state_tracker: Any = None, tp_group: Any = None,
        attention_type: str = "self", cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p",
        name: str | None = None,
    ) -> None:  # fmt: skip
        check_name("softmax_type", softmax_type, SINKS)
        if cp_group is not None or return_max_logit or tp_size > 1:
            raise ValueError(
                "cp_group, tp_size and return_max_logit are not supported: build the model unsharded and use "
                "context_parallel and HeadParallel() of quaver.torch.parallel"
            )
        own: Any = {"groups": num_gqa_groups, "mask_type": named(attn_mask_type), "dropout": attention_dropout}
        own |= {"scale": softmax_scale, "soft_cap": softcap or None, "layout": qkv_format}
        learnable = softmax_type == "learnable"
        super().__init__(num_attention_heads, kv_channels, sinks=None if learnable else SINKS[softmax_type], **own)
        self.window_size, self.layer_number = window_size, layer_number or 1
        self.softmax_offset: nn.Parameter | None = None
        if learnable:
            self.softmax_offset = nn.Parameter(torch.zeros(self.heads, device=place("cuda")))

    @checks
    def forward(  # type: ignore[override]
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Any = None, *,
        qkv_format: str | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_kv_padded: Tensor | None = None,
        attn_mask_type: str | None = None, window_size: Window = None, softcap: float | None = None,
        checkpoint_core_attention: bool = False, core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
        inference_params: InferenceParams | None = None, pad_between_seqs: bool | None = None,
        fp8_output: bool | None = None,
        # Accepted without effect.
        max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, fast_zero_fill: bool = True,
        num_splits: int | None = 1,
    ) -> Tensor:  # fmt: skip
        """Run attention on q, k and v in the layout `qkv_format`; returns the heads flattened into the last axis."""
        refuse_codes(fp8_output)
        q, k, v = query_layer, key_layer, value_layer
        layout, kind = qkv_format or self.layout, named(attn_mask_type or self.mask_type)
        transposed = inference_params is not None and layout == "sbhd"
        if transposed:
            q, k, v, layout = *(x.transpose(0, 1) for x in (q, k, v)), "bshd"
        tokens, ends = 0 if layout == "sbhd" else 1, None
        if inference_params is not None:
            k, v, mask, kind = inference_params.join(self.layer_number, k, v, kind)
        elif layout == "thd":
            mask, kind = None, kind.removeprefix("padding").removeprefix("_") or "none"
        else:
            mask = _mask(kind, attention_mask, (cu_seqlens_q, q.shape[tokens]), (cu_seqlens_kv, k.shape[tokens]))
        if layout == "thd":
            padded = (cu_seqlens_q_padded, cu_seqlens_q), (cu_seqlens_kv_padded, cu_seqlens_kv)
            if pad_between_seqs or any(p is not None and not torch.equal(p, e) for p, e in padded):  # type: ignore[arg-type]
                raise ValueError("padding between packed sequences is not supported: remove it from the tokens")
            ends = cu_seqlens_q if cu_seqlens_kv is None or cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_kv)
        window = window_size or self.window_size
        if window is not None and "causal" in kind:
            window = window[0], 0
        elif window is not None and layout != "thd" and q.shape[tokens] != k.shape[tokens]:
            raise ValueError(
                f"window_size {window} with mask type {kind!r} and {q.shape[tokens]} queries of "
                f"{k.shape[tokens]} keys is not supported: give an 'arbitrary' mask, or a causal one"
            )
        options = self.options(q, k, v, kind, window) | {"layout": layout, "mask": mask, "cu_seqlens": ends}
        options |= self._bias(core_attention_bias_type, core_attention_bias, alibi_slopes)
        if self.softmax_offset is not None:
            options["sinks"] = self.softmax_offset
        if softcap is not None:
            options["soft_cap"] = softcap or None
        attend = partial(self.observed if observer.active.observers else self.attend, **options)
        again = checkpoint_core_attention and torch.is_grad_enabled()
        y: Tensor = checkpoint(attend, q, k, v) if again else attend(q, k, v)
        return (y.transpose(0, 1) if transposed else y).flatten(-2)

    def _bias(self, kind: str, bias: Tensor | None, slopes: Tensor | None) -> dict[str, Any]:
        """Return the options for a bias: ALiBi slopes or a bias of scores."""
        check_name("core_attention_bias_type", kind, BIASES)
        if kind == "alibi":
            return {"alibi_slopes": alibi_slopes(self.heads, place("cuda")) if slopes is None else slopes}
        if bias is not None and kind == "pre_scale_bias":
            bias = bias * (self.head_dim[0] ** -0.5 if self.scale is None else self.scale)
        return {"bias": bias}


def named(mask_type: str) -> str:
    """Return Quaver's name of a mask type of Transformer Engine."""
    name = mask_type.replace(",", "_")
    return {"no_mask": "none", "causal_padding": "padding_causal"}.get(name, name)


def _mask(kind: str, mask: Any, *sides: tuple[Tensor | None, int]) -> Any:
    """Return the mask of a call in Quaver's form: [B, S] of padded tokens, or a pair of them for queries and keys.

    Args:
        kind: mask type.
        mask: mask argument of the call, or None.
        sides: for queries and for keys, the cumulative sequence lengths and the number of tokens.
    """
    if kind == "arbitrary":
        return mask
    if not kind.startswith("padding"):
        return None
    query_ends = sides[0][0]
    if mask is None and query_ends is not None:
        ends = [(query_ends if e is None else e, n) for e, n in sides]
        return tuple(torch.arange(n, device=e.device)[None] >= e.diff()[:, None] for e, n in ends)
    if isinstance(mask, tuple):
        return tuple(part.flatten(1) for part in mask)
    return None if mask is None else mask.flatten(1)
