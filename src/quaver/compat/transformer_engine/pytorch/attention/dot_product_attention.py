"""Transformer Engine's `DotProductAttention`: its masks, layouts and options of a call over ours."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.compat.transformer_engine.pytorch.attention.inference import InferenceParams
from quaver.compat.transformer_engine.pytorch.module.linear import refuse_codes
from quaver.compat.transformer_engine.pytorch.module.parameters import Stateless, place
from quaver.core.options import suggests, takes
from quaver.core.text.spelling import check_name
from quaver.torch.blocks.attention.dot_product import DotProductAttention as Ours
from quaver.torch.blocks.attention.dot_product import alibi_slopes
from quaver.torch.state.checkpointing import checkpoint

SINKS = {"vanilla": None, "off-by-one": "off_by_one", "learnable": "learnable"}
BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


@dataclass
class CoreArguments:
    """The arguments of `DotProductAttention`; those of tensor and context parallelism are for one rank."""

    num_attention_heads: int
    kv_channels: int | tuple[int, int]
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    qkv_format: str = "sbhd"
    attn_mask_type: str = "causal"
    window_size: tuple[int, int] | None = None
    _: KW_ONLY
    softcap: float = 0.0
    sequence_parallel: bool = False
    tp_size: int = 1
    get_rng_state_tracker: Any = None
    tp_group: Any = None
    layer_number: int | None = None
    attention_type: str = "self"
    cp_group: Any = None
    cp_global_ranks: Any = None
    cp_stream: Any = None
    cp_comm_type: str = "p2p"
    softmax_scale: float | None = None
    softmax_type: str = "vanilla"
    return_max_logit: bool = False
    name: str | None = None


@suggests
@dataclass
class Call:
    """What one call may say; `max_seqlen_*`, `fast_zero_fill` and `num_splits` tell of what is not needed here."""

    attention_mask: Tensor | tuple[Tensor, Tensor] | None = None
    qkv_format: str | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    attn_mask_type: str | None = None
    window_size: tuple[int, int] | None = None
    softcap: float | None = None
    checkpoint_core_attention: bool = False
    core_attention_bias_type: str = "no_bias"
    core_attention_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    fast_zero_fill: bool = True
    inference_params: InferenceParams | None = None
    pad_between_seqs: bool | None = None
    fp8_output: bool | None = None
    num_splits: int | None = 1


class DotProductAttention(Stateless, Ours):
    """Attention of Transformer Engine's arguments; heads of the output lie side by side in its last axis.

    Raises:
        ValueError: context parallelism, `return_max_logit`, padding between sequences laid end to end, a window that
            Transformer Engine aligns with the last key of more keys than queries.
    """

    @takes(CoreArguments)
    def __init__(self, options: CoreArguments) -> None:
        check_name("softmax_type", options.softmax_type, SINKS)
        if options.cp_group is not None or options.return_max_logit or options.tp_size > 1:
            raise ValueError(
                "cp_group, tp_size and return_max_logit are not there: quaver.torch.parallel has context_parallel and "
                "Heads() for a model that is made whole"
            )
        super().__init__(
            options.num_attention_heads,
            options.kv_channels,
            groups=options.num_gqa_groups,
            mask_type=named(options.attn_mask_type),
            dropout=options.attention_dropout,
            sinks=None if options.softmax_type == "learnable" else SINKS[options.softmax_type],
            scale=options.softmax_scale,
            soft_cap=options.softcap or None,
            layout=options.qkv_format,
        )
        self.window_size, self.layer_number = options.window_size, options.layer_number or 1
        self.softmax_offset: nn.Parameter | None = None
        if options.softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(self.heads, device=place("cuda")))

    def forward(  # type: ignore[override]
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Any = None, **given: Any
    ) -> Tensor:
        """See `Call` for what else a call may say."""
        call = Call(attention_mask, **given)
        refuse_codes(bool(call.fp8_output))
        again = call.checkpoint_core_attention and torch.is_grad_enabled()
        layers = query_layer, key_layer, value_layer
        y: Tensor = checkpoint(self._attend, *layers, call) if again else self._attend(*layers, call)
        return y.flatten(-2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        layout, kind = call.qkv_format or self.layout, named(call.attn_mask_type or self.mask_type)
        turned = call.inference_params is not None and layout == "sbhd"
        if turned:
            q, k, v, layout = *(x.transpose(0, 1) for x in (q, k, v)), "bshd"
        tokens = 0 if layout == "sbhd" else 1
        if call.inference_params is not None:
            k, v, mask, kind = call.inference_params.join(self.layer_number, k, v, kind)
        elif layout == "thd":
            mask, kind = None, kind.removeprefix("padding").removeprefix("_") or "none"
        else:
            mask = _mask(call, kind, q.shape[tokens], k.shape[tokens])
        window = call.window_size or self.window_size
        if window is not None and "causal" in kind:
            window = window[0], 0
        elif window is not None and layout != "thd" and q.shape[tokens] != k.shape[tokens]:
            raise ValueError(
                f"window_size {window} with mask type {kind!r} and {q.shape[tokens]} queries of {k.shape[tokens]} keys "
                "is not there: give an 'arbitrary' mask, or a causal one"
            )
        options = self.options(q, k, v, kind, window) | self._bias(call) | {"layout": layout}
        if call.softcap is not None:
            options["soft_cap"] = call.softcap or None
        y = self.attend(q, k, v, mask=mask, cu_seqlens=_ends(call) if layout == "thd" else None, **options)
        return y.transpose(0, 1) if turned else y

    def _bias(self, call: Call) -> dict[str, Any]:
        """The options that a bias and learnable sinks are."""
        check_name("core_attention_bias_type", call.core_attention_bias_type, BIASES)
        bias, own = call.core_attention_bias, {}
        if self.softmax_offset is not None:
            own["sinks"] = self.softmax_offset
        if call.core_attention_bias_type == "alibi":
            slopes = call.alibi_slopes
            return own | {"alibi_slopes": alibi_slopes(self.heads, place("cuda")) if slopes is None else slopes}
        if bias is not None and call.core_attention_bias_type == "pre_scale_bias":
            bias = bias * (self.head_dim[0] ** -0.5 if self.scale is None else self.scale)
        return own | {"bias": bias}


def named(mask_type: str) -> str:
    """A mask type of Transformer Engine's by our name."""
    name = mask_type.replace(",", "_")
    return {"no_mask": "none", "causal_padding": "padding_causal"}.get(name, name)


def _mask(call: Call, kind: str, queries: int, keys: int) -> Any:
    """The mask of a call, as ours are: of tokens [B, S], a pair where queries' and keys' differ."""
    given = call.attention_mask
    if kind == "arbitrary":
        return given
    if not kind.startswith("padding"):
        return None
    if given is None and call.cu_seqlens_q is not None:
        pairs = ((call.cu_seqlens_q, queries), (call.cu_seqlens_kv, keys))
        ends = [(call.cu_seqlens_q if e is None else e, n) for e, n in pairs]
        return tuple(torch.arange(n, device=e.device)[None] >= e.diff()[:, None] for e, n in ends)
    if isinstance(given, tuple):
        return tuple(part.flatten(1) for part in given)
    return None if given is None else given.flatten(1)


def _ends(call: Call) -> Any:
    q, kv = call.cu_seqlens_q, call.cu_seqlens_kv
    pairs: Any = (call.cu_seqlens_q_padded, q), (call.cu_seqlens_kv_padded, kv)
    if call.pad_between_seqs or any(p is not None and not torch.equal(p, e) for p, e in pairs):
        raise ValueError("padding between sequences laid end to end is not there: leave it out of the tokens")
    return q if kv is None or q is None else (q, kv)
