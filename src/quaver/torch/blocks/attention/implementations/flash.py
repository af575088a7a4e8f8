"""The flash-attn package, where it is installed: causal, windows, ALiBi, soft cap, ragged batches, no masks as tensors.

It aligns everything bottom right.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from quaver.core.reference.masks import MASKS
from quaver.torch.blocks.attention.inputs.call import Call

#: True if flash-attn can be imported.
INSTALLED = find_spec("flash_attn") is not None


def reason(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str:
    """ "" to take the call, else why not."""
    if not INSTALLED:
        return "flash-attn is not installed"
    if not q.is_cuda:
        return f"flash-attn runs on GPUs, and this is {q.device.type!r}"
    return unfit(q, k, v, call)


def unfit(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str:
    """Why flash-attn does not serve this call on any machine; "" if it does."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn computes in float16 and bfloat16, not {q.dtype}"
    if v.shape[-1] != q.shape[-1] or q.shape[-1] > 256:
        return f"flash-attn wants q, k and v equally wide, at most 256; these are {q.shape[-1]} and {v.shape[-1]}"
    others = ("bias", call.bias), ("sinks", call.sinks), ("chunks", call.chunk)
    for name, given in (("mask of tokens or pairs", call.mask), *others):
        if given is not None:
            return f"flash-attn has no {name}"
    if call.soft_cap is not None and call.dropout:
        return "flash-attn has no soft cap with dropout"
    if call.alibi_slopes is not None and call.alibi_slopes.requires_grad:
        return "flash-attn has no gradient of ALiBi's slopes"
    if not q.shape[2] or not k.shape[2]:
        return "there is no query or no key"
    if _aligns(call) and not _equally_long(q, k, call):
        return f"flash-attn aligns bottom right, and {call.mask_type!r} of unequal lengths aligns top left"
    return ""


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """[B, H, Sq, D] of q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, D]."""
    import flash_attn  # type: ignore[import-not-found]

    options: dict[str, Any] = {
        "dropout_p": call.dropout,
        "softmax_scale": call.scale,
        "causal": MASKS[call.mask_type][1],
        "window_size": call.window or (-1, -1),
        "softcap": call.soft_cap or 0.0,
        "alibi_slopes": None if call.alibi_slopes is None else call.alibi_slopes.float(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    tokens_first = (x.transpose(1, 2) for x in (q, k, v))
    if call.ragged is None:
        y: Tensor = flash_attn.flash_attn_func(*tokens_first, **options)
        return y.transpose(1, 2)
    ends = [x.to(q.device, torch.int32) for x in (call.ragged.of_queries, call.ragged.of_keys)]
    # A compiler knows no lengths; all tokens bound them.
    lengths = call.ragged.lengths or ([q.shape[2]], [k.shape[2]])
    longest = [max(of, default=0) for of in lengths]
    y = flash_attn.flash_attn_varlen_func(*(x.squeeze(0) for x in tokens_first), *ends, *longest, **options)
    return y.unsqueeze(0).transpose(1, 2)


def _aligns(call: Call) -> bool:
    """True if the result depends on where query 0 stands, and flash-attn puts it elsewhere."""
    matters = MASKS[call.mask_type][1] or call.window is not None or call.alibi_slopes is not None
    return matters and not call.mask_type.endswith("bottom_right")


def _equally_long(q: Tensor, k: Tensor, call: Call) -> bool:
    if call.ragged is None:
        return q.shape[2] == k.shape[2]
    lengths = call.ragged.lengths
    return call.ragged.of_queries is call.ragged.of_keys or (lengths is not None and lengths[0] == lengths[1])
