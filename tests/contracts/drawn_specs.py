"""Formats, specs, GEMMs, recipes and operands drawn at random: every way to compute them agrees with the reference.

`python -m tests.contracts.drawn_specs --seconds 600 --seed 0` draws until the time is over; what fails is printed with
its seed, and `--only SEED` draws that one again.
"""

import argparse
import contextlib
import functools
import itertools
import time
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

import quaver.jax as qj
import quaver.torch as qt
from quaver import reference
from quaver.recipes.formats import FORMATS, Format
from quaver.recipes.spec import Delayed, GemmSpec, QuantSpec, Recipe
from quaver.torch.state.noise import tensor_id
from tests.close import assert_bitwise

SIGNED = [fmt for fmt in FORMATS.values() if fmt.signed]
BLOCKS: list[Any] = [
    *((None, None), (1, None), (None, 1), (1, 32), (1, 16), (32, 32), (16, 16), (1, 128), (128, 128)),
    *((1, 1), (2, 3), (5, None), (None, 7), (7, 16), (1, 1000), (10**12, 32)),
]
SCALES = ["fp32", "power_of_two", "e8m0", "two_level", "two_level_fp32", "unit"]
SIDES = [1, 2, 3, 15, 16, 17, 32, 33, 48, 64, 65, 100, 128, 129]
#: torch's dtype, half a unit in its last place, and the largest error of sums in it without quantization.
DTYPES = {"float32": (torch.float32, 2.0**-24, 4e-6), "bfloat16": (torch.bfloat16, 2.0**-8, 4e-3)}
DTYPES["float16"] = torch.float16, 2.0**-11, 2e-3
#: Largest error of an element, relative to the sum of its products' magnitudes.
BOUND = 4e-6


def own_format(rng: np.random.Generator) -> Format:
    """Random format: its bits, bias, NaN and largest number."""
    exponent_bits = int(rng.integers(1, 6))
    mantissa_bits = int(rng.integers(1, 8 - exponent_bits))
    has_nan, bits = bool(rng.integers(2)), 1 + exponent_bits + mantissa_bits
    # Some codes may be left for infinities and NaN.
    code = 2 ** (bits - 1) - 1 - has_nan - int(rng.integers(2))
    exponent, fraction = code >> mantissa_bits, code % 2**mantissa_bits
    lowest = 1 if exponent_bits == 1 else 0
    bias = int(rng.integers(lowest, 2 ** (exponent_bits - 1) + 1))
    largest = (1 + fraction / 2**mantissa_bits) * 2.0 ** (exponent - bias)
    return Format(
        name=f"e{exponent_bits}m{mantissa_bits}b{bias}" + "n" * has_nan,
        bits=bits,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        bias=bias,
        max=largest,
        has_nan=has_nan,
    )


def sensible(build: Any, attempts: int = 1000) -> Any:
    """Draw until an object can be built; every refusal must be a ValueError with a message."""
    for _ in range(attempts):
        try:
            return build()
        except ValueError as refusal:
            assert len(str(refusal).split()) > 5, f"no sentence: {refusal}"
    raise AssertionError(f"refused {attempts} times")


def draw_spec(rng: np.random.Generator, hadamard: bool = False) -> QuantSpec:
    def build() -> QuantSpec:
        fmt = own_format(rng) if rng.random() < 0.3 else SIGNED[rng.integers(len(SIGNED))]
        block, scale = BLOCKS[rng.integers(len(BLOCKS))], SCALES[rng.integers(len(SCALES))]
        rounding = "stochastic" if rng.random() < 0.2 else "nearest"
        return QuantSpec(fmt, block, scale, rounding, hadamard)  # type: ignore[arg-type]

    spec: QuantSpec = sensible(build)
    return spec


def draw_recipe(rng: np.random.Generator) -> Recipe:
    def build() -> Recipe:
        rotated = [bool(rng.random() < 0.2) for _ in range(3)]
        delayed = Delayed(length=int(rng.integers(1, 5))) if rng.random() < 0.1 else None
        if rng.random() < 0.5 or delayed is not None:
            # One spec for each tensor, as in most recipes.
            x, w, g = (draw_spec(rng) for _ in range(3))
            if delayed is not None:
                kind = ["fp32", "power_of_two"][rng.integers(2)]
                x, w, g = (QuantSpec(s.format, (None, None), kind, s.rounding) for s in (x, w, g))  # type: ignore[arg-type]
            six = [(x, w), (g, w), (g, x)]
        else:
            six = [(draw_spec(rng, r), draw_spec(rng, r)) for r in rotated]
        gemms = [
            GemmSpec(None, None) if rng.random() < 0.05 else GemmSpec(*pair, bool(rng.integers(2))) for pair in six
        ]
        plain = gemms[0].a is not None and any(gemm.a is None for gemm in gemms)
        return Recipe("drawn", *gemms, delayed=delayed, dequantized_backward=bool(plain and rng.integers(2)))

    recipe: Recipe = sensible(build)
    return recipe


def draw_matrix(rng: np.random.Generator, shape: tuple[int, int], odd: bool) -> np.ndarray:
    """float32: normal, of rows or columns that differ in size, with zeros, ties or, if odd, an infinity or NaN."""
    x = rng.normal(size=shape) * 10.0 ** rng.uniform(-2, 2)
    kind = rng.integers(6)
    if kind == 1:
        x *= 10.0 ** rng.uniform(-3, 3, (shape[0], 1))
    elif kind == 2:
        x *= 10.0 ** rng.uniform(-3, 3, (1, shape[1]))
    elif kind == 3:
        x[rng.random(shape) < 0.7] = 0
        x[: shape[0] // 2] = 0
    elif kind == 4:
        x = rng.integers(-64, 65, size=shape) / 4
    if odd and x.size:
        x.flat[rng.integers(x.size)] = [np.inf, -np.inf, np.nan][rng.integers(3)]
    return x.astype(np.float32)


@dataclass(frozen=True)
class Step:
    """The inputs of a linear layer's step."""

    seed: int
    recipe: Recipe
    dtype: str
    #: [T, K], [N, K], [T, N], [N] or None: float32 arrays of the dtype's values.
    x: np.ndarray
    w: np.ndarray
    g: np.ndarray
    bias: np.ndarray | None

    def __str__(self) -> str:
        six = ", ".join(f"{label} {spec}" for label, spec in self.recipe.operands().items())
        shapes = f"x {self.x.shape}, w {self.w.shape}, {self.dtype}, bias {self.bias is not None}"
        return f"seed {self.seed}: {shapes}; delayed {self.recipe.delayed}; {six}"


def draw_step(seed: int) -> Step:
    rng = np.random.default_rng(seed)
    recipe = draw_recipe(rng)
    t, k, n = (SIDES[rng.integers(len(SIDES))] for _ in range(3))
    dtype = list(DTYPES)[rng.choice(3, p=[0.5, 0.4, 0.1])]
    odd = [bool(rng.random() < 0.1) for _ in range(3)]
    if dtype == "bfloat16" and spreads() and any(gemm.a is None for gemm in recipe.gemms.values()):
        odd = [False] * 3
    operands = [draw_matrix(rng, s, o) for s, o in zip(((t, k), (n, k), (t, n)), odd, strict=True)]
    x, w, g = (_to_dtype(a, dtype) for a in operands)
    bias = _to_dtype(rng.normal(size=n).astype(np.float32), dtype) if rng.random() < 0.4 else None
    return Step(seed, recipe, dtype, x, w, g, bias)


@functools.cache
def spreads() -> bool:
    """True if torch's own bf16 GEMM makes NaN of the row before one that holds an infinity: see docs/limits.md."""
    x = torch.ones(32, 3, dtype=torch.bfloat16)
    x[8, 0] = torch.inf
    return bool((x @ torch.ones(3, 100, dtype=torch.bfloat16)).isnan().any())


def _to_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    limit = np.float32(6e4) if dtype == "float16" else np.float32(3e38)
    x = np.where(np.isfinite(x), np.clip(x, -limit, limit), x)
    return torch.from_numpy(x).to(DTYPES[dtype][0]).float().numpy()


@dataclass(frozen=True)
class Expected:
    """A product in float64, and the sum of its terms' magnitudes."""

    value: np.ndarray
    size: np.ndarray
    quantized: bool


def product(a: Any, b: Any, bias: np.ndarray | None = None) -> Expected:
    high = [q.dequantize() if isinstance(q, reference.Quantized) else q for q in (a, b)]
    quantized = isinstance(a, reference.Quantized)
    with np.errstate(all="ignore"):
        size = np.abs(high[0].astype(np.float64)) @ np.abs(high[1].astype(np.float64)).T
        return Expected(reference.matmul(a, b, bias), size + (0 if bias is None else np.abs(bias)), quantized)


def expected_step(step: Step, ids: Any) -> tuple[Expected, Expected, Expected]:
    """Output, grad_input and grad_weight by the reference.

    Args:
        ids: the stream of each operand that is rounded at random, by its name.
    """
    r, counts = step.recipe, itertools.count()
    turned_counts = itertools.count()

    def operand(x: np.ndarray, spec: QuantSpec | None, name: str) -> Any:
        if spec is None:
            return x
        noise = {}
        if spec.rounding == "stochastic":
            noise = {"tensor_id": ids(name), "count": next(turned_counts if name.endswith(".T") else counts)}
        return reference.quantize(x, spec, **noise)  # type: ignore[arg-type]

    def transposed(q: Any) -> Any:
        return reference.Quantized(q.data.T, q.scale.T, q.spec)

    def values(q: Any) -> np.ndarray:
        """Unquantized operands in the dtype of the GEMMs."""
        with np.errstate(all="ignore"):
            return torch.from_numpy(q.dequantize()).to(DTYPES[step.dtype][0]).float().numpy()

    x = operand(step.x, r.fprop.a, "input")
    w = operand(step.w, r.fprop.b, "weight")
    y = product(x, w, step.bias)
    xt = transposed(x) if r.reuse.input else operand(step.x.T, r.wgrad.b, "input.T")
    if r.dequantized_backward and r.wgrad.b is None:
        xt = values(x).T
    g = operand(step.g, r.dgrad.a, "grad_output")
    wt = transposed(w) if r.reuse.weight else operand(step.w.T, r.dgrad.b, "weight.T")
    if r.dequantized_backward and r.dgrad.b is None:
        wt = values(w).T
    dx = product(g, wt)
    gt = transposed(g) if r.reuse.grad_output else operand(step.g.T, r.wgrad.a, "grad_output.T")
    return y, dx, product(gt, xt)


def assert_step(got: tuple[Any, ...], expected: tuple[Expected, ...], dtype: str, what: str) -> None:
    for name, value, right in zip(("output", "grad_input", "grad_weight"), got, expected, strict=True):
        assert_product(np.asarray(value, np.float64), right, dtype, f"{what}, {name}")


def assert_product(got: np.ndarray, expected: Expected, dtype: str, case: str) -> None:
    _, half_ulp, loose = DTYPES[dtype]
    largest = float(torch.finfo(DTYPES[dtype][0]).max)
    assert got.shape == expected.value.shape, f"{case}: shape {got.shape}, expected {expected.value.shape}"
    with np.errstate(all="ignore"):
        bound = BOUND if expected.quantized else loose
        allowed = half_ulp * np.abs(expected.value) + bound * expected.size + 1e-37
        allowed += 1e-7 if dtype == "float16" else 0
        near = np.abs(got - expected.value) <= allowed
        beyond = (np.abs(expected.value) + allowed > largest) & (np.abs(got) >= largest * (1 - 2 * half_ulp))
        right = np.where(np.isnan(expected.value), np.isnan(got), near | beyond | (got == expected.value))
    if not right.all():
        at = tuple(int(i) for i in np.argwhere(~right)[0])
        raise AssertionError(
            f"{case}: element {at} is {got[at]!r}, expected {expected.value[at]!r} ± {allowed[at]:.2g}; "
            f"{(~right).sum()} of {right.size} such"
        )


def layer_and_input(step: Step) -> tuple[qt.Linear, Tensor, Tensor]:
    dtype = DTYPES[step.dtype][0]
    layer = qt.Linear(step.w.shape[1], step.w.shape[0], step.bias is not None, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(step.w))
        if step.bias is not None:
            layer.bias.copy_(torch.from_numpy(step.bias))
    x, g = (torch.from_numpy(a).to(dtype) for a in (step.x, step.g))
    return layer, x.requires_grad_(), g


def by_torch(step: Step, compiled: bool = False) -> tuple[tuple[Any, ...], tuple[Expected, ...]]:
    layer, x, g = layer_and_input(step)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    with qt.autocast(step.recipe):
        y = run(x)
    y.backward(g)
    got = (y.detach(), x.grad, layer.weight.grad)
    return tuple(t.double().numpy() for t in got), expected_step(step, lambda name: tensor_id(layer, name))  # type: ignore[union-attr]


def by_jax(step: Step, options: dict[str, Any] | None = None) -> tuple[tuple[Any, ...], tuple[Expected, ...]] | None:
    """None if JAX refuses the recipe with a message. `options` are the compiler's."""
    # numpy converts, since JAX would compile a conversion for each shape.
    dtype = jnp.dtype(step.dtype)
    x, w, g = (a.astype(dtype) for a in (step.x, step.w.T, step.g))
    bias = None if step.bias is None else step.bias.astype(dtype)
    state = qj.state.init(step.recipe)

    @partial(jax.jit, compiler_options=options)
    def run(x: Any, w: Any, state: Any) -> Any:
        y, back = jax.vjp(lambda x, w, s: qj.linear(x, w, bias, recipe=step.recipe, state=s), x, w, state)
        return y, *back(g)[:2]

    try:
        y, dx, dw = run(x, w, state)
    except ValueError as refusal:
        draws = [step.recipe.operands()[label] for label in ("fprop.a", "wgrad.b")]
        assert any(s is not None and s.rounding == "stochastic" for s in draws), refusal
        assert "rounds the input stochastically" in str(refusal)
        return None
    got = tuple(np.asarray(a, np.float64) for a in (y, dx, np.asarray(dw).T))
    return got, expected_step(step, lambda name: zlib.crc32(f"linear.{name}".encode()))


def check_layer(seed: int, compiled: bool = False, in_jax: bool = False) -> None:
    step = draw_step(seed)
    results = {"torch": by_torch(step)}
    if compiled:
        results["compiled"] = by_torch(step, compiled=True)
    if in_jax and (jax_result := by_jax(step)) is not None:
        results["jax"] = jax_result
    for name, (got, expected) in results.items():
        try:
            assert_step(got, expected, step.dtype, name)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{step}") from None


def check_operand(seed: int, in_jax: bool = False, kernels: bool = False) -> None:
    """One operand's codes, scales and values, and a product of two, in numpy's bits."""
    rng = np.random.default_rng(seed)
    gemm: GemmSpec = sensible(lambda: GemmSpec(*(draw_spec(rng, r) for r in [bool(rng.random() < 0.2)] * 2)))
    sides = [SIDES[rng.integers(len(SIDES))] for _ in range(3)]
    sides = [side if rng.random() < 0.95 else 0 for side in sides]
    dtype = ["float32", "bfloat16", "float16"][rng.integers(3)]
    pair = [_to_dtype(draw_matrix(rng, (r, sides[2]), bool(rng.random() < 0.15)), dtype) for r in sides[:2]]
    transposed = bool(rng.integers(2))
    stream = {"seed": 5, "tensor_id": 7, "count": 3}
    case = f"seed {seed}: {gemm.a} by {gemm.b}, sides {sides}, {dtype}, transposed {transposed}"
    specs = [gemm.a, gemm.b]
    expected = [reference.quantize(x, spec, **stream) for x, spec in zip(pair, specs, strict=True)]  # type: ignore[arg-type]
    right = product(*expected)
    for name in ("", "reference", "triton") if kernels else ("", "reference"):
        with qt.only(name) if name else contextlib.nullcontext():
            tensors = [torch.from_numpy(x).to(DTYPES[dtype][0]) for x in pair]
            tensors = [t.t().contiguous().t() if transposed else t for t in tensors]
            operands = [qt.quantize(t, s, **stream) for t, s in zip(tensors, specs, strict=True)]  # type: ignore[arg-type]
            y = qt.matmul(*operands)
        for q, r in zip(operands, expected, strict=True):
            assert_bitwise(q.codes().numpy(), r.codes(), f"torch {name}, codes; {case}")
            assert_bitwise(q.scales().numpy(), r.scales(), f"torch {name}, scales; {case}")
        assert_product(y.double().numpy(), right, "float32", f"torch {name}, {case}")
    if in_jax:
        _check_operand_in_jax(pair, specs, dtype, stream, expected, right, case)


def _check_operand_in_jax(
    pair: Any, specs: Any, dtype: str, stream: Any, expected: Any, right: Expected, case: str
) -> None:
    operands = [qj.quantize(jnp.asarray(x, dtype), s, **stream) for x, s in zip(pair, specs, strict=True)]
    exact = all(s.scale not in ("fp32", "two_level_fp32") for s in specs)
    for q, r in zip(operands, expected, strict=True):
        if q.spec.scale not in ("fp32", "two_level_fp32"):
            assert_bitwise(np.asarray(q.codes()), r.codes(), f"jax, codes; {case}")
            assert_bitwise(np.asarray(q.scales()), r.scales(), f"jax, scales; {case}")
        else:
            assert np.abs(np.asarray(q.codes(), int) - r.codes().astype(int)).max(initial=0) <= 1, f"jax; {case}"
    if exact:
        assert_product(np.asarray(qj.matmul(*operands), np.float64), right, "float32", f"jax, {case}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    end, failed, runs = time.monotonic() + options.seconds, 0, 0
    seeds = itertools.count(options.seed) if options.only is None else iter([options.only])
    for seed in seeds:
        if time.monotonic() > end:
            break
        in_jax, compiled = seed % 25 == 0, seed % 100 == 0
        for check in (partial(check_operand, in_jax=in_jax), partial(check_layer, compiled=compiled, in_jax=in_jax)):
            runs += 1
            try:
                check(seed)
            except Exception as error:  # any error; the other draws still run
                failed += 1
                print(f"{type(error).__name__}: {str(error)[:700]}\n", flush=True)
        if compiled:
            torch.compiler.reset()
    print(f"{runs} draws, {failed} failed")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
