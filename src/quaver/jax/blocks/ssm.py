"""Mamba-2 as functions of arrays: causal convolution, scan in chunks, gated norm, and the block of them.

With c_l the cumulative sum of A dt up to token l of a chunk, P the state that enters it, and xd = dt x:

    y_l = Σ_(s ≤ l) (C_l · B_s) exp(c_l - c_s) xd_s + exp(c_l) P C_l + D x_l
    state that leaves = exp(c_last) P + Σ_s exp(c_last - c_s) xd_s ⊗ B_s

Differences of c are summed token by token, so nearby tokens are precise however large the sums are. Source: Dao and Gu
2024, arXiv:2405.21060 §6.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from quaver.jax.blocks.layers import activate, get_activation
from quaver.jax.blocks.options import PartOptions
from quaver.jax.linears.dot_general import KernelMatrix
from quaver.jax.numerics.quantized import array

#: Limits of the step that do not clamp.
UNLIMITED = (0.0, math.inf)
#: Default number of tokens per chunk, and the largest.
CHUNK, LARGEST_CHUNK = 64, 256
#: Order of gate and norm: gate before the norm, after it, or no norm.
GATES = ("gate_first", "norm_first", "no_norm")

# ---- convolution and gated norm ----


def causal_conv1d(
    x: Array, kernel: Array, bias: Array | None = None, *, activation: str = "silu", initial: Array | None = None
) -> Array:
    """Causal depthwise convolution followed by an activation, in float32, rounded once.

    Args:
        x: [B, T, channels].
        kernel: [K, 1, channels], as flax.linen.Conv's; the last tap is for the token itself.
        bias: [channels].
        activation: a name in `ACTIVATIONS` that takes one array; "linear" is none.
        initial: [B, K - 1, channels], the tokens before the first one; None is zeros.
    Returns:
        x's shape and dtype.
    Raises:
        ValueError: shapes that do not fit, or an activation that is gated or unknown.
    Bounded: in float32, relative RMS 1e-6 of float64.
    """
    x = array("causal_conv1d", "x", x)
    if get_activation(activation).gated:
        raise ValueError(f"activation {activation!r} takes two arrays; give one that takes one, such as 'silu'")
    if x.ndim != 3 or kernel.ndim != 3 or kernel.shape[1:] != (1, x.shape[-1]):
        raise ValueError(f"x is {x.shape} and kernel {kernel.shape}; give [B, T, channels] and [K, 1, channels]")
    taps, tokens = kernel.shape[0], x.shape[1]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    padded = jnp.concatenate([_tokens_before(x, taps, initial), x], 1).astype(wide)
    z = jnp.zeros(x.shape, wide)
    for k in range(taps):
        z = z + padded[:, k : k + tokens] * kernel[k, 0].astype(wide)
    z = z if bias is None else z + bias.astype(wide)
    return activate(activation, z).astype(x.dtype)


def last_tokens(x: Array, taps: int, initial: Array | None = None) -> Array:
    """Return the tokens that a convolution of this many taps needs to continue x: [B, taps - 1, channels]."""
    return jnp.concatenate([_tokens_before(x, taps, initial), x], 1)[:, x.shape[1] :]


def _tokens_before(x: Array, taps: int, initial: Array | None) -> Array:
    shape = (x.shape[0], taps - 1, x.shape[2])
    if initial is not None and initial.shape != shape:
        raise ValueError(f"initial is {initial.shape}; give [B, K - 1, channels] = {shape}")
    return jnp.zeros(shape, x.dtype) if initial is None else initial.astype(x.dtype)


def gated_rms_norm(
    x: Array, gate: Array, scale: Array, *, groups: int = 1, eps: float = 1e-5, norm_before_gate: bool = False
) -> Array:
    """Return rms(x silu(gate)) scale, or rms(x) scale silu(gate), with each group of features normalized on its own.

    Args:
        x, gate: [..., d].
        scale: [d].
        groups: number of groups of neighbouring features.
        eps: added to the mean of the squares.
        norm_before_gate: normalize before gating.
    Returns:
        x's shape and dtype. Bounded: in float32, relative RMS 1e-6 of float64.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    passed = jax.nn.silu(gate.astype(wide))
    v = x.astype(wide) if norm_before_gate else x.astype(wide) * passed
    parts = v.reshape(*v.shape[:-1], groups, -1)
    factor = lax.rsqrt(jnp.square(parts).mean(-1, keepdims=True) + eps)
    y = (parts * factor).reshape(v.shape) * scale.astype(wide)
    return (y * passed if norm_before_gate else y).astype(x.dtype)


# ---- scan ----


def ssd(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    *,
    dt_bias: Array | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = UNLIMITED,
    initial_states: Array | None = None,
    chunk_size: int | None = None,
) -> tuple[Array, Array]:
    """Scan of a state space with one decay per head (state-space duality, Mamba-2), computed chunk by chunk.

        h_t = exp(A dt_t) h_(t-1) + dt_t x_t ⊗ B_t,    y_t = h_t C_t + D x_t,    dt clamped to dt_limit

    Args:
        x: [B, T, H, P].
        dt: [B, T, H]; the step is softplus(dt + dt_bias).
        A: [H], negative in all models.
        B, C: [B, T, G, N]; each group serves H / G heads.
        D: [H] or [H, P], or None for no skip connection.
        dt_bias: [H].
        dt_softplus: False uses dt + dt_bias without softplus.
        dt_limit: (least, most) of the step.
        initial_states: [B, H, P, N]; None is zeros.
        chunk_size: tokens per chunk, up to 256; None is 64. It affects results only by rounding.
    Returns:
        y in x's shape and dtype, and the states after the last token, [B, H, P, N], float32 (float64 if x is).
    Raises:
        ValueError: shapes or a chunk size that do not fit.
    Bounded: in float32, relative RMS 1e-6 of the float64 recurrence. Backward saves the states between chunks.
    """
    size = check_chunk(chunk_size)
    batch, tokens, heads, dim, groups, state = _checked_shapes(x, dt, A, B, C, initial_states)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    steps = dt.astype(wide) if dt_bias is None else dt.astype(wide) + dt_bias.astype(wide)
    steps = jax.nn.softplus(steps) if dt_softplus else steps
    steps = steps if dt_softplus and tuple(dt_limit) == UNLIMITED else jnp.clip(steps, *dt_limit)
    # exp of larger exponents is 0 or infinite anyway; finite sums have no differences of infinities.
    bound = 128.0 if wide == jnp.float32 else 1024.0
    decays = jnp.clip(steps * A.astype(wide), -bound, bound)
    added = steps[..., None] * x.astype(wide)
    count, short = -(-tokens // size), -tokens % size

    def chunks(a: Array, *shape: int) -> Array:
        """Return [chunks, B, *shape, L, ...] of [B, T, ...] whose next axes are `shape`; missing tokens are zeros."""
        padded = jnp.pad(a, [(0, 0), (0, short), *[(0, 0)] * (a.ndim - 2)])
        split = padded.reshape(batch, count, size, *shape, *a.shape[3:])
        return jnp.moveaxis(jnp.moveaxis(split, 2, 2 + len(shape)), 1, 0)

    shared = (groups, heads // groups)
    parts = (
        chunks(added, *shared),
        chunks(decays, *shared),
        chunks(B.astype(wide), groups),
        chunks(C.astype(wide), groups),
    )
    first = jnp.zeros((batch, heads, dim, state), wide) if initial_states is None else initial_states.astype(wide)
    first = first.reshape(batch, *shared, dim, state)
    last, y = lax.scan(jax.checkpoint(_chunk), first, parts)
    # [chunks, B, G, r, L, P]
    y = jnp.moveaxis(y, (0, 4), (1, 2)).reshape(batch, count * size, heads, dim)[:, :tokens]
    if D is not None:
        y = y + (D[:, None] if D.ndim == 1 else D).astype(wide) * x.astype(wide)
    return y.astype(x.dtype), last.reshape(batch, heads, dim, state)


def _chunk(state: Array, parts: tuple[Array, ...]) -> tuple[Array, Array]:
    """Compute a chunk: the state that leaves it, and its output [B, G, r, L, P].

    Args:
        state: [B, G, r, P, N].
        parts: dt x [B, G, r, L, P], A dt [B, G, r, L], B and C [B, G, L, N].
    """
    added, decays, B, C = parts
    at = jnp.arange(decays.shape[-1])
    # Sums of the decays of tokens s + 1 to l, at [l, s].
    between = jnp.where(at[:, None] > at, decays[..., None], 0).cumsum(-2)
    factors = jnp.exp(jnp.where(at[:, None] >= at, between, -jnp.inf))
    since_begin = jnp.exp(decays.cumsum(-1))
    products = _einsum("bgln,bgsn->bgls", C, B)[:, :, None] * factors
    y = _einsum("bgrls,bgrsp->bgrlp", products, added)
    y = y + since_begin[..., None] * _einsum("bgln,bgrpn->bgrlp", C, state)
    until_end = factors[..., -1, :, None] * added
    state = since_begin[..., -1, None, None] * state + _einsum("bgrsp,bgsn->bgrpn", until_end, B)
    return state, y


def _einsum(equation: str, *arrays: Array) -> Array:
    return jnp.einsum(equation, *arrays, precision=lax.Precision.HIGHEST)


def check_chunk(size: int | None) -> int:
    """Return the chunk size. Raises: ValueError."""
    if size is not None and (isinstance(size, bool | float) or not 1 <= size <= LARGEST_CHUNK):
        raise ValueError(f"chunk_size is {size}; give 1 to {LARGEST_CHUNK} tokens, or None")
    return size or CHUNK


def _checked_shapes(x: Array, dt: Array, A: Array, B: Array, C: Array, initial: Array | None) -> tuple[int, ...]:
    """Return (batch, tokens, heads, P, groups, N). Raises: ValueError."""
    if x.ndim != 4 or dt.shape != x.shape[:3] or A.shape != x.shape[2:3]:
        raise ValueError(f"x is {x.shape}, dt {dt.shape} and A {A.shape}; give [B, T, H, P], [B, T, H] and [H]")
    if B.shape != C.shape or B.ndim != 4 or B.shape[:2] != x.shape[:2] or not B.shape[2] or x.shape[2] % B.shape[2]:
        raise ValueError(f"B is {B.shape} and C {C.shape}; give [B, T, G, N] beside x {x.shape}, with G that divides H")
    state = (x.shape[0], *x.shape[2:], B.shape[3])
    if initial is not None and initial.shape != state:
        raise ValueError(f"initial_states is {initial.shape}; give [B, H, P, N] = {state}")
    return (*x.shape, *B.shape[2:])


# ---- block ----


class ScanSizes(NamedTuple):
    """Sizes of a scan."""

    heads: int
    head_dim: int
    groups: int
    state: int

    @property
    def inner(self) -> int:
        """Features of the scan's input."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state


@dataclass(kw_only=True)
class Mamba2Options(PartOptions):
    """Options of the block."""

    # Bias of in_proj and out_proj; None for out_bias uses `use_bias`.
    use_bias: bool = False
    out_bias: bool | None = None
    # Features of the scan's input; None is twice the input's.
    inner: int | None = None
    head_dim: int = 64
    # Features of a state, and number of groups of heads that share B and C.
    state: int = 128
    groups: int = 1
    # Options of the convolution.
    taps: int = 4
    conv_bias: bool = True
    conv_activation: str = "silu"
    # A name in `GATES`; number of feature groups of the norm (None uses `groups`); its eps.
    gate: str = "gate_first"
    gate_groups: int | None = None
    gate_eps: float = 1e-5
    # Minimum and maximum of a step.
    dt_limit: tuple[float, float] = UNLIMITED
    # Initial values: range of the steps, drawn log-uniformly, and of the decays.
    dt_range: tuple[float, float] = (1e-3, 1e-1)
    A_range: tuple[float, float] = (1.0, 16.0)
    chunk_size: int | None = None


class Mamba2State(NamedTuple):
    """State from which a block continues: last tokens of the convolution [B, taps - 1, channels], and [B, H, P, N]."""

    tokens: Array
    states: Array


def sizes_of(options: Any, dim: int) -> ScanSizes:
    """Return the sizes of a block of `dim` features. Raises: ValueError for options that do not fit."""
    inner = 2 * dim if options.inner is None else options.inner
    if options.head_dim < 1 or inner < 1 or inner % options.head_dim:
        raise ValueError(
            f"{inner} inner features do not divide into heads of {options.head_dim}; give an inner that does"
        )
    heads = inner // options.head_dim
    if options.groups < 1 or heads % options.groups or options.state < 1:
        raise ValueError(
            f"{heads} heads cannot share {options.groups} groups of {options.state} state features; give groups that "
            "divide the heads, and a state above 0"
        )
    if options.gate not in GATES:
        raise ValueError(f"gate is {options.gate!r}; give one of {', '.join(map(repr, GATES))}")
    check_chunk(options.chunk_size)
    return ScanSizes(heads, options.head_dim, options.groups, options.state)


def first_state(options: Any, dim: int, batch: int, dtype: Any = jnp.float32) -> Mamba2State:
    """Return the state before the first token.

    Args:
        options: a linen module, or `Mamba2Options`.
        dim: features of the block's input.
        batch: number of sequences.
        dtype: dtype of the tokens.
    """
    sizes = sizes_of(options, dim)
    tokens = jnp.zeros((batch, options.taps - 1, sizes.channels), dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    return Mamba2State(tokens, jnp.zeros((batch, sizes.heads, sizes.head_dim, sizes.state), wide))


def projections(sizes: ScanSizes, dim: int) -> dict[str, KernelMatrix]:
    """Return the matrices in_proj and out_proj by name."""
    features = sizes.inner + sizes.channels + sizes.heads
    return {
        "in_proj": KernelMatrix((features,), ("embed", "mlp")),
        "out_proj": KernelMatrix((dim,), ("mlp", "embed")),
    }


def parameter_names(options: Any) -> tuple[str, ...]:
    """Return the names of `first_parameters`."""
    return ("dt_bias", "A_log", "D", *(("scale",) if options.gate != "no_norm" else ()))


def first_parameters(key: Array, options: Any, sizes: ScanSizes) -> dict[str, Array]:
    """Return initial `dt_bias`, `A_log` and `D` [heads], and `scale` [inner] unless there is no gated norm."""
    for_steps, for_decays = jax.random.split(key)
    low, high = map(math.log, options.dt_range)
    shape = (sizes.heads,)
    steps = jnp.maximum(jnp.exp(jax.random.uniform(for_steps, shape, minval=low, maxval=high)), 1e-4)
    decays = jax.random.uniform(for_decays, shape, minval=options.A_range[0], maxval=options.A_range[1])
    # Inverse of softplus, so that softplus(dt_bias) is the step.
    first = {"dt_bias": steps + jnp.log(-jnp.expm1(-steps)), "A_log": jnp.log(decays), "D": jnp.ones(shape)}
    if options.gate != "no_norm":
        first["scale"] = jnp.ones(sizes.inner)
    return {name: value.astype(options.param_dtype) for name, value in first.items()}


def mixed(
    projected: Array,
    parameters: Mapping[str, Any],
    options: Any,
    sizes: ScanSizes,
    mask: Array | None = None,
    state: Mamba2State | None = None,
) -> tuple[Array, Mamba2State]:
    """Return the input of out_proj from the output of in_proj, and the state after the last token.

    Args:
        projected: z, x, B, C and dt along the last axis, [B, T, ...].
        parameters: those of `first_parameters`, `kernel` of the convolution, and `bias` or None.
        options: a module with `Mamba2Options`.
        sizes: sizes of the scan.
        mask: bool [B, T], True for padding, which must precede a sequence and has no effect on it.
        state: state of earlier tokens; None is zeros.
    """
    if mask is not None and (mask.shape != projected.shape[:2] or mask.dtype != jnp.bool_):
        raise ValueError(
            f"mask is {mask.dtype} {mask.shape}; give bool {projected.shape[:2]}, True where a token is padding"
        )
    inner, channels = sizes.inner, sizes.channels
    z, tokens, dt = jnp.split(projected, (inner, inner + channels), -1)

    def real(a: Array) -> Array:
        return a if mask is None else jnp.where(mask[..., None], 0, a).astype(a.dtype)

    # A NaN step in padding would make its chunk NaN although it contributes nothing.
    tokens, dt = real(tokens), real(dt)
    before = None if state is None else state.tokens
    convolved = causal_conv1d(
        tokens, parameters["kernel"], parameters["bias"], activation=options.conv_activation, initial=before
    )
    x, B, C = jnp.split(real(convolved), (inner, inner + sizes.groups * sizes.state), -1)
    lead = projected.shape[:2]
    B, C = (a.reshape(*lead, sizes.groups, sizes.state) for a in (B, C))
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y, states = ssd(
        x.reshape(*lead, sizes.heads, sizes.head_dim),
        dt,
        -jnp.exp(parameters["A_log"].astype(wide)),
        B,
        C,
        parameters["D"],
        dt_bias=parameters["dt_bias"],
        dt_limit=options.dt_limit,
        initial_states=None if state is None else state.states,
        chunk_size=options.chunk_size,
    )
    y = y.reshape(*lead, inner)
    after = Mamba2State(last_tokens(tokens, parameters["kernel"].shape[0], before), states)
    if options.gate == "no_norm":
        return activate("swiglu", z, y), after
    groups = options.groups if options.gate_groups is None else options.gate_groups
    first = options.gate == "norm_first"
    how: dict[str, Any] = {"groups": groups, "eps": options.gate_eps, "norm_before_gate": first}
    return gated_rms_norm(y, z, parameters["scale"], **how), after
