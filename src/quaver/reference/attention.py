"""Executable specification of attention with quantized GEMMs, in numpy; all fast versions are compared with it.

One head is five products, each with both operands quantized along the contraction axis, which is last:

    forward    S  [Sq, Sk] = q [Sq, D] kᵀ [Sk, D]                 O  [Sq, Dv] = P [Sq, Sk] (vᵀ)ᵀ [Dv, Sk]
    backward   dP [Sq, Sk] = dO [Sq, Dv] vᵀ [Sk, Dv]              dV [Sk, Dv] = Pᵀ [Sk, Sq] (dOᵀ)ᵀ [Dv, Sq]
               dQ [Sq, D]  = dS [Sq, Sk] (kᵀ)ᵀ [D, Sk]            dK [Sk, D]  = dSᵀ [Sk, Sq] (qᵀ)ᵀ [D, Sq]

q, k, v and their transposes follow `AttentionSpec.input`; dO, dS and theirs follow `AttentionSpec.grad_output`; P is
E4M3 times a fixed factor. Values between two quantizations are computed in float64 and rounded to float32 where they
are quantized, so a float32 implementation differs only by float32's rounding.

In backward dS = P∘(dP - Δ), Δ = rowsum(P∘dP). This P is the softmax's float32 result, not the eight-bit one that
multiplies v: the derivative of the softmax is about the former, small probabilities are not lost in it, and the errors
of dQ and dK are smaller with it on Gaussian data. Δ uses the same quantized dO and v as dP, instead of rowsum(dO∘O). So
each row of dS sums to 0, and the effect of rounding values and gradients with a mean on dP cancels
(docs/design/numerics.md has the figures).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from quaver.recipes.formats import E4M3
from quaver.recipes.spec import PROBABILITY_FACTOR, AttentionSpec, QuantSpec
from quaver.recipes.text import check_name
from quaver.reference.numerics import round_to
from quaver.reference.operations import Quantized, matmul, quantize

# ---- heads ----


@dataclass(frozen=True, eq=False)
class Head:
    """Results of one head's forward pass."""

    #: Operands of the two products, in order: q, k; p, v.T.
    q: Quantized
    k: Quantized
    p: Quantized
    vt: Quantized
    #: Softmax before quantization, float32 [Sq, Sk].
    probabilities: np.ndarray
    #: Derivative of the scores after soft_cap with respect to those before, float64 [Sq, Sk]; 1 without soft_cap.
    slope: np.ndarray
    #: Logsumexp over scores and sink, float64 [Sq]; -inf if a query attends to nothing.
    logsumexp: np.ndarray
    #: Output, float32 [Sq, Dv].
    out: np.ndarray


@dataclass(frozen=True, eq=False)
class HeadGradients:
    """Results of one head's backward pass."""

    #: Operands: dO, v; dO.T; dS, k.T; dS.T, q.T. The left operand of dV is p.
    do: Quantized
    v: Quantized
    dot: Quantized
    ds: Quantized
    kt: Quantized
    dst: Quantized
    qt: Quantized
    #: Gradients of q, k and v, float64, not rounded yet: heads that share k and v are summed first.
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    #: Gradient of the scores where the bias is added, float64 [Sq, Sk].
    dbias: np.ndarray
    #: Gradient of the sink's logit.
    dsink: float


def attention_head(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    spec: AttentionSpec,
    *,
    hidden: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink: float | None = None,
    keep: np.ndarray | None = None,
    dropout: float = 0.0,
) -> Head:
    """Compute O = P v of one head, P = softmax(cap(q kᵀ scale) + bias).

    Codes are exact, except for a probability within float64's rounding of a tie.

    Args:
        q: [Sq, D].
        k: [Sk, D].
        v: [Sk, Dv].
        spec: quantization of the operands.
        hidden: bool [Sq, Sk], True where a query must not attend to a key.
        bias: [Sq, Sk], added to the scores.
        scale: factor of the scores; None is 1 / sqrt(D).
        soft_cap: scores become cap tanh(scores / cap).
        sink: logit of an extra column of the softmax with value 0.
        keep: bool [Sq, Sk], False where dropout drops a probability.
        dropout: dropout probability; remaining values are multiplied by 1 / (1 - dropout).

    Returns:
        The head's results. A query that attends to nothing gets 0. A block with an infinity or NaN has scale NaN; a NaN
        score makes only its query's probabilities NaN. Hidden keys count in the amax of the blocks of k and v.
    """
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    qq, kq, vt = (quantize(x, spec.input) for x in (q, k, v.T))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scores = matmul(qq, kq) * scale
        slope = np.ones_like(scores)
        if soft_cap is not None:
            bent = np.tanh(scores / soft_cap)
            scores, slope = soft_cap * bent, 1 - bent * bent
        if bias is not None:
            scores = scores + bias
        if hidden is not None:
            scores = np.where(hidden, -np.inf, scores)
        total = _logsumexp(scores if sink is None else np.pad(scores, ((0, 0), (0, 1)), constant_values=sink))
        probabilities = np.exp(scores - np.where(total == -np.inf, 0, total)[:, None]).astype(np.float32)
        p = _probabilities(probabilities if keep is None else np.where(keep, probabilities, np.float32(0)))
        out = (matmul(p, vt) / (1 - dropout)).astype(np.float32)
    return Head(qq, kq, p, vt, probabilities, slope, total, out)


def attention_head_backward(
    grad: np.ndarray,
    head: Head,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    spec: AttentionSpec,
    *,
    scale: float | None = None,
    sink: float | None = None,
    keep: np.ndarray | None = None,
    dropout: float = 0.0,
) -> HeadGradients:
    """Compute the gradients of `attention_head` for grad = dO [Sq, Dv]; other arguments as in forward.

    Codes are exact, except for a value within float64's rounding of a tie.
    """
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    with np.errstate(invalid="ignore", over="ignore"):
        do, dot = quantize(grad, spec.grad_output), quantize(grad.T, spec.grad_output)
        vq, kt, qt = quantize(v, spec.input), quantize(k.T, spec.input), quantize(q.T, spec.input)
        dp = matmul(do, vq) / (1 - dropout)
        if keep is not None:
            dp = np.where(keep, dp, 0)
        wide = head.probabilities.astype(np.float64)
        delta = (wide * dp).sum(-1)
        dbias = wide * (dp - delta[:, None])
        ds = (dbias * head.slope).astype(np.float32)
        dsq, dst = quantize(ds, spec.grad_output), quantize(ds.T, spec.grad_output)
        sink_weight = 0.0 if sink is None else np.exp(sink - head.logsumexp)
        dv = matmul(_transposed(head.p), dot) / (1 - dropout)
        dq, dk = matmul(dsq, kt) * scale, matmul(dst, qt) * scale
        return HeadGradients(do, vq, dot, dsq, kt, dst, qt, dq, dk, dv, dbias, -float((sink_weight * delta).sum()))


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, spec: AttentionSpec, **options: Any) -> np.ndarray:
    """Run `attention_head` over q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, Dv], H / G heads per group.

    Args:
        options: hidden, bias and keep, broadcastable to [B, H, Sq, Sk]; sinks [H]; others as for a head.

    Returns:
        float32 [B, H, Sq, Dv].
    """
    out = np.zeros((*q.shape[:3], v.shape[3]), np.float32)
    for b, h, g, own in _heads(q, k, options):
        out[b, h] = attention_head(q[b, h], k[b, g], v[b, g], spec, **own).out
    return out


def attention_backward(
    grad: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, spec: AttentionSpec, **options: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Compute the gradients of `attention` for grad [B, H, Sq, Dv].

    Args:
        options: as in forward.

    Returns:
        Gradients of q, k, v, the scores' bias [B, H, Sq, Sk] and sinks [H], float32, each rounded once; heads of a
        group are summed first.
    """
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    dbias = np.zeros((*q.shape[:3], k.shape[2]))
    dsinks = np.zeros(q.shape[1])
    for b, h, g, own in _heads(q, k, options):
        head = attention_head(q[b, h], k[b, g], v[b, g], spec, **own)
        backward_options = {name: value for name, value in own.items() if name in ("scale", "sink", "keep", "dropout")}
        gradients = attention_head_backward(grad[b, h], head, q[b, h], k[b, g], v[b, g], spec, **backward_options)
        dq[b, h] = gradients.dq
        dk[b, g] += gradients.dk
        dv[b, g] += gradients.dv
        dbias[b, h] = gradients.dbias
        dsinks[h] += gradients.dsink
    with np.errstate(over="ignore"):
        narrow = [x.astype(np.float32) for x in (dq, dk, dv, dbias, dsinks)]
    return narrow[0], narrow[1], narrow[2], narrow[3], narrow[4]


def _heads(q: np.ndarray, k: np.ndarray, options: dict[str, Any]) -> Any:
    """Yield batch, head, group and options of each head."""
    batch, heads, queries, _ = q.shape
    whole = (batch, heads, queries, k.shape[2])
    set_options = {name: value for name, value in options.items() if value is not None}
    wide = {n: np.broadcast_to(set_options.pop(n), whole) for n in ("hidden", "bias", "keep") if n in set_options}
    sinks = set_options.pop("sinks", None)
    for b in range(batch):
        for h in range(heads):
            own = set_options | {name: value[b, h] for name, value in wide.items()}
            yield b, h, h * k.shape[1] // heads, own if sinks is None else own | {"sink": float(sinks[h])}


def _logsumexp(scores: np.ndarray) -> np.ndarray:
    """Return logsumexp over the last axis; -inf if all are -inf, or there are none."""
    top = scores.max(-1, initial=-np.inf)
    shift = np.where(np.isfinite(top), top, 0)
    return shift + np.log(np.exp(scores - shift[:, None]).sum(-1))


#: Spec of quantized probabilities, which have a fixed scale.
_FIXED = QuantSpec(E4M3)


def _probabilities(p: np.ndarray) -> Quantized:
    data = round_to(p * np.float32(PROBABILITY_FACTOR), E4M3)
    return Quantized(data, np.full((1, 1), 1 / PROBABILITY_FACTOR, np.float32), _FIXED)


def _transposed(q: Quantized) -> Quantized:
    return Quantized(q.data.T, q.scale, q.spec)


# ---- masks by name, their arguments, and grouped heads, for both front ends ----

#: Masks by name: (takes a `mask` argument, hides later keys).
MASKS = {
    "none": (False, False),
    "causal": (False, True),
    "causal_bottom_right": (False, True),
    "padding": (True, False),
    "padding_causal": (True, True),
    "padding_causal_bottom_right": (True, True),
    "arbitrary": (True, False),
}


def check_type(mask_type: str, set_options: bool) -> None:
    """Raise ValueError if the mask type is unknown, or its `mask` is missing or superfluous."""
    check_name("mask type", mask_type, MASKS)
    takes_mask, _ = MASKS[mask_type]
    if takes_mask and not set_options:
        raise ValueError(f"mask_type {mask_type!r} needs a mask, True where masked out")
    if not takes_mask and set_options:
        raise ValueError(f"mask_type {mask_type!r} takes no mask; give 'arbitrary', or 'padding' for one of tokens")


def check_heads(heads: int, groups: int) -> None:
    """Raise ValueError unless each of the `groups` heads of keys and values serves equally many query heads."""
    if heads < 1 or groups < 1 or heads % groups:
        raise ValueError(
            f"{heads} query heads cannot share {groups} heads of keys and values evenly; "
            "make the first number a multiple of the second"
        )


def check_window(mask_type: str, window: tuple[int, int] | None) -> None:
    """Raise ValueError unless the window is a pair of numbers of keys, none ahead of a causal query."""
    if window is None:
        return
    pair = isinstance(window, tuple | list) and len(window) == 2
    if not pair or any(not isinstance(w, int | np.integer) or w < -1 for w in window):
        raise ValueError(f"window is {window}; give (left, right), numbers of keys, -1 for no bound")
    if MASKS[mask_type][1] and window[1] > 0:
        raise ValueError(f"window {window} looks ahead, and {mask_type!r} hides what is ahead; give ({window[0]}, 0)")


def check_chunk(chunk: int | None) -> None:
    """Raise ValueError unless chunk is a positive number of positions or None."""
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise ValueError(f"chunk is {chunk!r}; give a number of positions above 0, or None for one chunk")


def check_numbers(soft_cap: float | None, dropout: float) -> None:
    """Raise ValueError unless soft_cap and dropout are valid."""
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}; give a positive number, or None for no cap")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}; give a probability in [0, 1)")


#: Value of `sinks` for a logit of 0 for every head, which adds one to the softmax's denominator.
OFF_BY_ONE = "off_by_one"


def check_sinks(sinks: str | None) -> None:
    """Raise ValueError unless a module's sinks are None or have a known name."""
    if sinks not in (None, OFF_BY_ONE, "learnable"):
        raise ValueError(f"sinks is {sinks!r}; give None, 'off_by_one' or 'learnable'")


def alibi_numbers(heads: int) -> list[float]:
    """Return ALiBi's slopes 2^(-8 h / heads).

    If heads is not a power of two, they are the slopes of the next lower power of two, then every other slope of twice
    that number. Source: Press et al. 2022, as Hugging Face builds them for Bloom, Falcon and MPT.
    """
    below = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * h / below) for h in range(1, below + 1)]
    return slopes + [2 ** (-8 * h / (2 * below)) for h in range(1, 2 * (heads - below), 2)]
