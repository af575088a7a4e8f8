"""One AdamW step of one parameter in JAX; bit-compatible with `quaver.torch.optim`.

    m ← β1 m + (1 - β1) g        v ← β2 v + (1 - β2) g²        u = (m / (1 - β1ᵗ)) / (√(v / (1 - β2ᵗ)) + ε)
    w ← (1 - lr wd) w - lr clamp(u, ±U_t)

Every rounded operation is the one of `quaver.torch.optim.rules.AdamRule`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.jax.numerics.optimizer_state import SCALE_DTYPES, decode, encode
from quaver.jax.numerics.rounding import INFINITY_BITS, magnitude_bits, mul_wide, noise_stream, widen
from quaver.jax.optim.subnormals import F, W, add, bits_of, float_of, is_small, lifted, multiply, rounded
from quaver.reference.numerics import MULTIPLIER, ROUNDS, WEYL
from quaver.reference.optim import NOISE_BITS
from quaver.reference.optimizer_state import INTEGERS, PRESETS, SMALL, Preset, StateSpec

#: Bits of a residual by the kind of a weight's format.
RESIDUALS = {"residual8": 8, "residual16": 16, "remainder": 16}
#: Rows shorter than this are merged with the preceding dimension, because each row has its own scales.
SHORT = 64
NAN_BITS = W(0x7FC00000)


@dataclass(frozen=True)
class Layout:
    """Formats and shapes of a parameter and its states."""

    shape: tuple[int, ...]
    dtype: Any
    preset: Preset

    @staticmethod
    def of(p: Any, preset: Preset) -> "Layout":
        """Return the layout of a parameter, which has float32 moments if it is a vector or small."""
        shape = tuple(jnp.shape(p))
        dtype = jnp.result_type(p)
        if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(
                f"a parameter of shape {shape} has dtype {dtype}, and quaver.jax.optim trains float32, bfloat16 and "
                "float16: leave it out by optax.masked or optax.multi_transform"
            )
        small = len(shape) < 2 or prod(shape) < SMALL
        return Layout(shape, dtype, PRESETS["float32"] if small else preset)

    @property
    def moments(self) -> tuple[StateSpec, StateSpec]:
        """Specs of the first and second moment."""
        return self.preset.first, self.preset.second

    @property
    def weight(self) -> str:
        """Format of the weight: "plain", "stochastic" (bfloat16 without a residual), "master" or a residual."""
        if self.dtype == jnp.bfloat16:
            return "stochastic" if self.preset.bfloat16 == "none" else self.preset.bfloat16
        return "master" if self.dtype == jnp.float16 and self.preset.bfloat16 != "none" else "plain"

    @property
    def rounds_weight_stochastically(self) -> bool:
        return self.weight == "stochastic" or (self.preset.stochastic and self.weight.startswith("residual"))

    @property
    def leading(self) -> int:
        """Number of leading dimensions that stay rows; the others are columns, which blocks divide.

        All but the last, unless the last ones are short, as a convolution's or those of a column [N, 1].
        """
        last = max(len(self.shape) - 1, 0)
        if not prod(self.shape):
            return last
        leading = last
        while leading > 1 and prod(self.shape[leading:]) < SHORT:
            leading -= 1
        return 0 if len(self.shape) > 1 and prod(self.shape[1:]) == 1 else leading

    @property
    def flat(self) -> tuple[int, ...]:
        """Shape [..., K] in which blocks divide the last dimension."""
        return (*self.shape[: self.leading], prod(self.shape[self.leading :])) if self.shape else ()

    def scale_shape(self, spec: StateSpec) -> tuple[int, ...]:
        """Return the shape of a moment's scales: that of the parameter, with blocks instead of columns."""
        if spec.block is None:
            return ()
        merged = len(self.shape) - len(self.flat)
        return (*self.flat[:-1], *(1,) * merged, -(-self.flat[-1] // spec.block) * spec.of.numbers)

    def first_moment(self, spec: StateSpec) -> tuple[Any, tuple[int, ...] | None, Any]:
        """Return the dtype of a moment, and the shape and dtype of its scales, None without."""
        code = spec.of
        if not code.scaled or code.kind == "float16":
            dtype: Any = jnp.dtype(code.kind)
        else:
            dtype = jnp.int8 if code.signed and code.kind in INTEGERS else jnp.uint8
        return dtype, self.scale_shape(spec) if code.scaled else None, SCALE_DTYPES[spec.scale]

    @property
    def weight_state(self) -> Any:
        """Dtype of the residual or master of the weight; None without."""
        if self.weight == "master":
            return jnp.float32
        return {8: jnp.int8, 16: jnp.int16}[RESIDUALS[self.weight]] if self.weight in RESIDUALS else None


class Scalars(NamedTuple):
    """Scalars of a step: float32 []."""

    eps: Any
    lr: Any
    #: lr × weight decay.
    decay: Any
    #: 1 / (1 - β1ᵗ) and 1 / √(1 - β2ᵗ).
    bias_correction1: Any
    bias_correction2: Any
    #: U_t, or infinity.
    bound: Any


class LeafState(NamedTuple):
    """State of a parameter: moments and their scales, and what its weight has besides; None where nothing is stored."""

    m: Array
    m_scale: Array | None
    v: Array
    v_scale: Array | None
    weight: Array | None


def lerp_weight(beta: float) -> np.float32:
    """Return 1 - β, or -β if β is below one half: the weight of the operand that is not the start of `_lerp`."""
    return F(1 - beta if beta >= 0.5 else -beta)


@partial(jax.jit, static_argnames=("layout", "betas", "maximize", "seed"))
def step(
    p: Array,
    g: Array,
    state: LeafState,
    scalars: Scalars,
    index: Array,
    count: Array,
    seed_words: Array | None,
    *,
    layout: Layout,
    betas: tuple[float, float],
    maximize: bool,
    seed: int | None,
) -> tuple[Array, LeafState]:
    """Step a parameter.

    Args:
        p, g: parameter and gradient.
        state: its state.
        scalars: scalars of the step.
        index: number of the parameter, which its noise depends on; uint32 [].
        count: number of the step, from 1; int32 [].
        seed_words: seed of the noise as an array, if `seed` is None.
        layout: formats.
        betas: β1 and β2.
        maximize: ascend.
        seed: seed of the noise.
    Returns:
        The update u, float32 of p's shape, for which p + u, rounded to p's dtype, is the new parameter; and the new
        state. Exact, except where u does not exist; see `_update_to`.
    """

    def run(p: Array, g: Array, state: LeafState) -> tuple[Array, LeafState]:
        noise_key = seed if seed_words is None else seed_words, index, count
        return _step(p, -g if maximize else g, state, scalars, noise_key, layout, betas)

    def skip(p: Array, g: Array, state: LeafState) -> tuple[Array, LeafState]:
        return jnp.zeros(p.shape, jnp.float32), state

    return _apart(count, run, skip, p, g, state)


def _step(
    p: Array,
    g: Array,
    state: LeafState,
    scalars: Scalars,
    noise_key: tuple[Any, Array, Array],
    layout: Layout,
    betas: tuple[float, float],
) -> tuple[Array, LeafState]:
    weight = _read(p, state.weight, layout).reshape(layout.flat)
    g = widen(g).reshape(layout.flat)
    m, v = (_decoded(*pair, layout) for pair in zip(state[0:4:2], state[1:4:2], layout.moments, strict=True))

    def moments(m: Array, v: Array, g: Array) -> tuple[Array, Array]:
        # An infinite square would give NaN (infinity minus infinity) at the next step.
        square = _at_most_largest(multiply(g, g))
        return _lerp(m, g, lerp_weight(betas[0])), _lerp(v, square, lerp_weight(betas[1]))

    m, v = _apart(noise_key[2], moments, lambda m, v, _: (m, v), m, v, g)
    update = _update(m, v, scalars)
    weight = weight - rounded(weight * scalars.decay) - rounded(update * scalars.lr)
    number = any(spec.stochastic for spec in layout.moments) + layout.rounds_weight_stochastically
    noise = _noise(layout.flat, *noise_key, number)
    first, second = (_encoded(x, spec, noise, layout) for x, spec in zip((m, v), layout.moments, strict=True))
    weight_noise = noise[-1].reshape(layout.shape) if layout.rounds_weight_stochastically else None
    update, rest = _written(p, weight.reshape(layout.shape), weight_noise, layout)
    return update, LeafState(*first, *second, rest)


def _apart(count: Array, function: Callable[..., Any], never: Callable[..., Any], *args: Any) -> Any:
    """Return function(*args), on a CPU as a computation of its own, by a condition that is always true.

    XLA there steps all parameters at the same time, with the temporaries of all in memory, and computes moments again
    for each of their readers. On a GPU a condition would wait for the device.
    """

    def cpu(*args: Any) -> Any:
        return lax.cond(count > W(0), function, never, *args)

    return lax.platform_dependent(*args, cpu=cpu, default=function)


def _lerp(old: Array, new: Array, weight: np.float32) -> Array:
    """Return β old + (1 - β) new; see `quaver.torch.optim.rules.lerp`."""
    y = jnp.asarray(weight)
    return add(multiply(add(new, -old), y), old if weight > 0 else new)


def _at_most_largest(x: Array) -> Array:
    # Compare bits, because a minimum flushes subnormals.
    return jnp.where(bits_of(x) == INFINITY_BITS, F(np.finfo(F).max), x)


def _update(m: Array, v: Array, scalars: Scalars) -> Array:
    """Return the clamped update; one below 2**-126 counts as 0 where XLA flushes subnormals."""
    small_v = is_small(v)
    root = jnp.sqrt(jnp.where(small_v, lifted(v), v)) * jnp.where(small_v, F(2.0**-32), F(1))
    denominator = rounded(root * scalars.bias_correction2) + scalars.eps
    m_hat = multiply(m, scalars.bias_correction1)
    small = is_small(m_hat)
    update = jnp.where(small, lifted(m_hat), m_hat) / denominator * jnp.where(small, F(2.0**-64), F(1))
    return jnp.minimum(jnp.maximum(update, -scalars.bound), scalars.bound)


# ---- states ----


def _decoded(codes: Array, scale: Array | None, spec: StateSpec, layout: Layout) -> Array:
    if scale is not None and spec.block is not None:
        scale = scale.reshape(*layout.flat[:-1], scale.shape[-1])
    return decode(codes.reshape(layout.flat), scale, spec)


def _encoded(x: Array, spec: StateSpec, noise: list[Array], layout: Layout) -> tuple[Array, Array | None]:
    codes, scale = encode(x, spec, noise[0] if spec.stochastic else None)
    return codes.reshape(layout.shape), None if scale is None else scale.reshape(layout.scale_shape(spec))


# ---- weights ----


def _read(p: Array, state: Array | None, layout: Layout) -> Array:
    """Return the weight in float32; see `quaver.torch.optim.master_weights.read`."""
    if state is None:
        return widen(p)
    if layout.weight == "master":
        same = lax.bitcast_convert_type(state.astype(p.dtype), jnp.int16) == lax.bitcast_convert_type(p, jnp.int16)
        return jnp.where(same, state, widen(p))
    bits = RESIDUALS[layout.weight]
    code = lax.bitcast_convert_type(p, jnp.int16).astype(jnp.int32)
    number = jnp.maximum(((code & W(0x7FFF)) << W(bits)) + state.astype(jnp.int32), W(0))
    return float_of(number << W(16 - bits) | (code << W(16)) & W(-0x80000000))


def _written(p: Array, weight: Array, noise: Array | None, layout: Layout) -> tuple[Array, Array | None]:
    """Return the update of a parameter to a new weight, and the weight's state."""
    if layout.weight in RESIDUALS:
        code, rest = _split(weight, RESIDUALS[layout.weight], noise)
        new = lax.bitcast_convert_type(code.astype(jnp.int16), jnp.bfloat16)
        assert layout.weight_state is not None
        return _update_to(p, new), rest.astype(layout.weight_state)
    if layout.weight == "stochastic":
        return _update_to(p, encode(weight, StateSpec(code="bfloat16", stochastic=True), noise)[0]), None
    return _update_to(p, weight.astype(p.dtype)), weight if layout.weight == "master" else None


def _split(weight: Array, bits: int, noise: Array | None) -> tuple[Array, Array]:
    """Return int32 bits of bfloat16 and the residual of `bits` bits below them."""
    dropped = 16 - bits
    added = W(1 << dropped >> 1) if noise is None else noise >> W(NOISE_BITS - dropped)
    magnitude = jnp.minimum(magnitude_bits(weight), NAN_BITS)
    number = (magnitude + added) >> W(dropped)
    code = (number + W(1 << bits - 1)) >> W(bits)
    return code | (bits_of(weight) >> W(16)) & W(0x8000), number - (code << W(bits))


def _update_to(p: Array, new: Array) -> Array:
    """Return the update u for which p + u, computed in float32 and rounded to p's dtype, is `new`.

    It exists if |new| is above |p| / 2**16 (bfloat16), |p| / 2**13 (float16) or |p| / 2 (float32) and, where XLA
    flushes subnormals, is not subnormal. Else p + u differs by at most half an ulp of a float32 p.
    """
    wide_p, wide_new = widen(p), widen(new)
    # Adding -0 leaves every number as it is.
    return jnp.where(bits_of(wide_p) == bits_of(wide_new), F(-0.0), wide_new - wide_p)


# ---- noise ----


def _noise(shape: tuple[int, ...], seed: Any, index: Array, count: Array, number: int) -> list[Array]:
    """Return `number` noises of a parameter's elements, int32 below 2**15; see `quaver.torch.optim.step.words`."""
    if not number:
        return []
    rows = jnp.zeros((*shape[:-1], 1), jnp.uint32)
    for dim in range(len(shape) - 1):
        stride = np.uint32(prod(shape[dim + 1 : -1]))
        rows = rows + lax.broadcasted_iota(jnp.uint32, rows.shape, dim) * stride
    k = shape[-1]
    together = 4 if k % 4 == 0 else 1
    columns = lax.broadcasted_iota(jnp.uint32, (*rows.shape[:-1], k // together), len(shape) - 1)
    high, low = mul_wide(rows, k // together)
    low, high = low + columns, high + (low + columns < columns).astype(jnp.uint32)
    key, upper = noise_stream(seed, index, count.astype(jnp.uint32))
    if together == 4:
        first, second = (jnp.expand_dims(word, -1) for word in _philox(low, high ^ upper, key))
        lane = lax.broadcasted_iota(jnp.uint32, (*(1,) * len(shape), 4), len(shape))
    else:
        lane = low & np.uint32(3)
        first, second = _philox(low >> np.uint32(2) | high << np.uint32(30), high >> np.uint32(2) ^ upper, key)
    word = jnp.where(lane < np.uint32(2), first, second)
    swapped = word << np.uint32(16) | word >> np.uint32(16)
    word = jnp.where((lane & np.uint32(1)) == np.uint32(0), word, swapped).reshape(shape)
    mask = np.uint32(2**NOISE_BITS - 1)
    return [(word >> np.uint32(17 - 16 // number * i) & mask).astype(jnp.int32) for i in range(number)]


def _philox(c0: Array, c1: Array, key: Array) -> tuple[Array, Array]:
    """Return `quaver.jax.numerics.rounding.philox2x32`, as a loop.

    XLA does not fuse a loop into the three encodings that read its words; each would draw them again.
    """

    def draw(_: Array, words: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        c0, c1, key = words
        high, low = mul_wide(c0, MULTIPLIER)
        return high ^ c1 ^ key, low, key + np.uint32(WEYL[0])

    return lax.fori_loop(0, ROUNDS, draw, (c0, c1, key), unroll=ROUNDS // 2)[:2]
