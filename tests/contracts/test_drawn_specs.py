"""Every format, spec, GEMM and recipe that can be constructed agrees with the reference, or is refused.

What is drawn is `tests.contracts.drawn_specs`; seeds that failed once are named here.
"""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import quaver.jax as qj
import quaver.torch as qt
from quaver.recipes.formats import E2M1, E4M3, E5M2, Format
from quaver.recipes.spec import AttentionSpec, Delayed, GemmSpec, QuantSpec, Recipe
from quaver.reference.numerics import decode, encode, round_to
from tests.contracts import drawn_specs
from tests.contracts.drawn_specs import check_layer, check_operand, own_format
from tests.xla_options import QUICKEST

#: A format that torch and JAX have no dtype for.
E3M4 = Format(name="e3m4", bits=8, exponent_bits=3, mantissa_bits=4, bias=3, max=15.5)
MX4 = QuantSpec(E2M1, (1, 32), "e8m0")


def same(a: QuantSpec, b: QuantSpec | None = None) -> Recipe:
    gemm = GemmSpec(a, b or a)
    return Recipe("mine", gemm, gemm, gemm)


#: Cases that CPU layers once computed wrongly, or not at all.
MENDED = {
    "e2m1 per tensor": same(QuantSpec(E2M1)),
    "e2m1 per tensor, divided": same(QuantSpec(E2M1, scale="fp32")),
    "e2m1 per row": same(QuantSpec(E2M1, (1, None))),
    "e2m1 per row, divided": same(QuantSpec(E2M1, (1, None), "fp32")),
    "mxfp4": same(MX4),
    "mxfp4 of 16": same(QuantSpec(E2M1, (1, 16), "e8m0")),
    "mxfp4 in squares": same(QuantSpec(E2M1, (32, 32), "e8m0")),
    "a format of one's own": same(QuantSpec(E3M4, (1, 32), "e8m0")),
    "a format of one's own, per tensor": same(QuantSpec(E3M4)),
    "e8m0 per tensor": same(QuantSpec(E4M3, scale="e8m0")),
    "unit": same(QuantSpec(E4M3, scale="unit"), QuantSpec(E4M3, (None, 7), "unit")),
    "blocks beyond the axis": same(QuantSpec(E5M2, (10**12, 10**12), "fp32")),
}


@pytest.mark.parametrize("name", MENDED)
def test_specs_with_past_bugs_are_correct(name: str) -> None:
    for t, k, n in ((33, 64, 17), (64, 128, 128)):
        rng = np.random.default_rng(0)
        drawn = [rng.normal(size=s).astype(np.float32) for s in ((t, k), (n, k), (t, n))]
        if name == "unit":
            drawn[0][3, 5] = np.nan
        step = drawn_specs.Step(0, MENDED[name], "float32", *drawn, None)
        got, expected = drawn_specs.by_torch(step)
        drawn_specs.assert_step(got, expected, step.dtype, f"{name}, {t} x {k} by {n}")


QUICK = ("mxfp4", "e2m1 per row, divided", "a format of one's own", "e8m0 per tensor")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MENDED])
def test_the_same_in_jax(name: str) -> None:
    rng = np.random.default_rng(0)
    drawn = [rng.normal(size=s).astype(np.float32) for s in ((33, 64), (17, 64), (33, 17))]
    step = drawn_specs.Step(0, MENDED[name], "float32", *drawn, None)
    # test_frameworks_agree.py checks the bits of optimized programs; this test checks formulas over formats.
    results = drawn_specs.by_jax(step, QUICKEST)
    assert results is not None
    drawn_specs.assert_step(*results, step.dtype, name)


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_drawn_operands_and_layers_equal_the_reference(first: int) -> None:
    for seed in range(first, first + 20):
        check_operand(seed)
        check_layer(seed)


@pytest.mark.parametrize("seed", [1001, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1002, 1003))])
def test_drawn_layers_equal_the_reference_compiled_and_in_jax(seed: int) -> None:
    check_operand(seed, in_jax=True)
    check_layer(seed, compiled=True, in_jax=True)


@pytest.mark.parametrize("seed", [2000, 2001])
def test_random_operands_equal_the_reference_when_kernels_are_requested(seed: int) -> None:
    check_operand(seed, kernels=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3000, 3036))
def test_dozens_of_drawn_layers_compiled_and_in_jax(seed: int) -> None:
    torch.compiler.reset()
    check_operand(seed, in_jax=True, kernels=True)
    check_layer(seed, compiled=True, in_jax=True)


@pytest.mark.slow
def test_a_minute_of_draws_finds_nothing() -> None:
    """Run `--seconds 600` after a change of formats, scales or GEMMs."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.contracts.drawn_specs", "--seconds", "60", "--seed", "100000"]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0 and " 0 failed" in run.stdout, run.stdout + run.stderr


def test_formats_that_are_drawn_round_and_decode_as_they_say() -> None:
    for seed in range(100):
        rng = np.random.default_rng(seed)
        try:
            fmt = own_format(rng)
        except ValueError:
            continue
        codes = np.arange(2 ** (fmt.bits - 1), dtype=np.uint8)
        values = decode(codes, fmt)
        finite = values[~np.isnan(values)]
        assert finite[-1] == fmt.max and len(finite) == fmt.max_code + 1, fmt
        assert np.array_equal(encode(finite, fmt), codes[: len(finite)])
        middle = (finite[:-1].astype(np.float64) + finite[1:]) / 2
        even = np.where(np.arange(len(middle)) % 2 == 0, finite[:-1], finite[1:])
        assert np.array_equal(round_to(middle.astype(np.float32), fmt), even), fmt
        assert Format.parse(fmt.text) == fmt


LINE = QuantSpec(E4M3, (1, 32), "e8m0")
ROTATED = dataclasses.replace(LINE, hadamard=True)
NOISY = dataclasses.replace(LINE, rounding="stochastic")
TENSOR = GemmSpec(QuantSpec(E4M3), QuantSpec(E4M3))
HIGH = GemmSpec(None, None)


def _own(**changes: object) -> Format:
    numbers = {"name": "e3m4", "bits": 8, "exponent_bits": 3, "mantissa_bits": 4, "bias": 3, "max": 15.5} | changes
    return Format(**numbers)  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "one operand rotated": (lambda: GemmSpec(ROTATED, LINE), "rotates both operands or neither"),
    "a weight at random": (
        lambda: Recipe("mine", GemmSpec(LINE, NOISY), HIGH, HIGH),
        "rounds the weight stochastically",
    ),
    "a gemm that is none": (lambda: Recipe("mine", LINE, HIGH, HIGH), "has fprop=.*give a GemmSpec"),  # type: ignore[arg-type]
    "a history of two formats": (
        lambda: Recipe("mine", TENSOR, TENSOR, GemmSpec(QuantSpec(E4M3), QuantSpec(E5M2)), delayed=Delayed()),
        "one factor for both fprop.a and wgrad.b",
    ),
    "a history of rotated operands": (
        lambda: Recipe(
            "mine", *[GemmSpec(*[dataclasses.replace(QuantSpec(E4M3), hadamard=True)] * 2)] * 3, delayed=Delayed()
        ),
        "no rotation",
    ),
    "quantized backward, dequantized": (
        lambda: Recipe("mine", TENSOR, TENSOR, TENSOR, dequantized_backward=True),
        r"make one of them GemmSpec\(None, None\)",
    ),
    "nothing to dequantize": (lambda: Recipe("mine", HIGH, HIGH, HIGH, dequantized_backward=True), "a quantized fprop"),
    "a backward of rotated values": (
        lambda: Recipe("mine", GemmSpec(ROTATED, ROTATED), HIGH, HIGH, dequantized_backward=True),
        "leave hadamard out of fprop",
    ),
    "a backward that is a word": (
        lambda: Recipe("mine", TENSOR, HIGH, HIGH, dequantized_backward="yes"),  # type: ignore[arg-type]
        "give True or False",
    ),
    "an endless history": (lambda: Delayed(length=10**12), "12,000,000 MB in every layer; give at most"),
    "an endless margin": (lambda: Delayed(margin=10**9), "from -512 to 512"),
    "the name of another": (lambda: QuantSpec(_own(name="e4m3")), "another format of that name"),
    "a name that text cannot hold": (lambda: _own(name="E3M4:x"), "lower-case letters"),
    "bits that do not add up": (lambda: _own(bits=7), r"the sum of both and of the sign \(8 here\)"),
    "nine bits": (lambda: _own(bits=9, mantissa_bits=5), "at most 8"),
    "no mantissa": (lambda: _own(bits=4, mantissa_bits=0), "at least one of each"),
    "a maximum off the grid": (lambda: _own(max=15.3), "not one of its normal numbers below code 127"),
    "a maximum in NaN's place": (lambda: _own(max=31.0), "which is NaN's"),
    "a range beyond E5M2's": (lambda: _own(bias=-12, max=15.5 * 2**15), "give another bias"),
    "a half bias": (lambda: _own(bias=2.5), "bias is 2.5; give a whole number"),
    "a bias beyond float32's": (lambda: _own(bias=-5000), "bias is -5000; give one from -127 to 127"),
    "a max that is no float": (lambda: _own(max=10**400), "give its largest finite number"),
    "a max that is a flag": (lambda: _own(max=True), "max is True; give its largest finite number"),
    "a flag that is a word": (lambda: _own(has_nan="no"), "has_nan is 'no'; give True or False"),
    "attention of one's own": (lambda: _attention(E3M4), "e4m3 and e5m2"),
}


def _attention(fmt: Format) -> object:
    return AttentionSpec(QuantSpec(fmt), QuantSpec(fmt))


@pytest.mark.parametrize("name", REFUSED)
def test_uncomputable_specs_are_refused_at_construction(name: str) -> None:
    build, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        build()


def test_noise_on_the_input_is_refused_by_jax_alone() -> None:
    recipe = Recipe("noisy", GemmSpec(NOISY, LINE), GemmSpec(LINE, LINE), GemmSpec(LINE, NOISY))
    x = np.ones((4, 32), np.float32)
    qt.Linear(32, 8, recipe=recipe)(torch.from_numpy(x)).sum().backward()
    with pytest.raises(ValueError, match="rounds the input stochastically"):
        qj.linear(jnp.asarray(x), jnp.ones((32, 8)), recipe=recipe)


def test_a_delayed_recipe_may_round_gradients_at_random_with_noise_that_goes_on() -> None:
    noisy = dataclasses.replace(QuantSpec(E4M3), rounding="stochastic")
    recipe = Recipe("noisy", TENSOR, *[GemmSpec(noisy, QuantSpec(E4M3))] * 2, delayed=Delayed(length=2))
    layer, x, g = qt.Linear(32, 64), torch.randn(8, 32, requires_grad=True), torch.randn(8, 64)
    gradients = []
    for _ in range(3):
        with qt.autocast(recipe):
            y = layer(x)
        gradients.append(torch.autograd.grad(y, x, g)[0])
    assert layer.get_buffer("count")[0] == 3
    assert not torch.equal(gradients[1], gradients[2]), "each step draws noise of its own"
