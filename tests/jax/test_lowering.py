"""Lowered programs, for CUDA without a GPU and for the CPU, have the expected operations."""

import re
import warnings
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import quaver.jax as qj
from quaver.jax.operations.native import on_cuda, warn_if_emulated
from quaver.recipes import get
from quaver.recipes.spec import GemmSpec, QuantSpec
from tests.operands import GEMMS

TYPES = {"e4m3": "f8E4M3FN", "e5m2": "f8E5M2", "e2m1": "f4E2M1FN", "e2m3": "", "e3m2": ""}
every_gemm = pytest.mark.parametrize("gemm", GEMMS.values(), ids=GEMMS)
#: How each recipe's GEMMs run on CUDA.
EXPECTED = {
    "delayed": "fp8",
    "tensorwise": "fp8",
    "rowwise": "fp8",
    "rowwise_bf16_wgrad": "fp8",
    "blockwise": "emulated",
    "mxfp8": "block-scaled",
    "mxfp6": "emulated",
    "mxfp4": "emulated",
    "nvfp4": "block-scaled",
}


@cache
def operand(spec: QuantSpec, rows: int) -> qj.Quantized:
    """The shapes and dtypes of an operand [rows, 96]; nothing is computed."""
    x = jax.ShapeDtypeStruct((rows, 96), jnp.float32)
    types: qj.Quantized = jax.eval_shape(lambda x: qj.quantize(x, spec), x)
    return types


def lowered(gemm: GemmSpec, platform: str, dtype: Any = jnp.bfloat16, **options: Any) -> str:
    """The program of a GEMM [64, 96] @ [48, 96].T of quantized operands."""
    assert gemm.a is not None and gemm.b is not None
    program = jax.jit(lambda a, b: qj.matmul(a, b, dtype, **options))
    traced = program.trace(operand(gemm.a, 64), operand(gemm.b, 48))
    return traced.lower(lowering_platforms=(platform,)).as_text()


def dots(text: str) -> list[tuple[str, str, str]]:
    """Element types of both operands and of the result of every plain dot."""
    return re.findall(r"dot_general .*: \(tensor<[\dx]+x(\w+)>, tensor<[\dx]+x(\w+)>\) -> tensor<[\dx]+x(\w+)>", text)


def block_scaled_dots(text: str) -> list[tuple[str, ...]]:
    """Element types of the operands, their scales and the result of every block-scaled dot."""
    kind = r"tensor<[\dx]+x(\w+)>"
    return re.findall(rf"@__op\$block_scaled_dot.*: \({kind}, {kind}, {kind}, {kind}\) -> {kind}", text)


@pytest.mark.parametrize(
    ("recipe", "capability", "why"),
    [
        ("tensorwise", "9.0", None),
        ("tensorwise", "8.0", "8.9 and newer do"),
        ("mxfp8", "10.0", None),
        ("mxfp8", "9.0", "10.0 and newer do"),
        ("blockwise", "10.0", "no GEMM for their blocks"),
        ("tensorwise", None, "CUDA only"),
    ],
)
def test_an_emulated_gemm_warns_once(recipe: str, capability: str | None, why: str | None) -> None:
    gemm = get(recipe).fprop
    assert gemm.a is not None and gemm.b is not None
    warn_if_emulated.cache_clear()
    for times in range(2):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            warn_if_emulated(on_cuda(gemm.a, gemm.b), gemm.a, gemm.b, capability)
        assert len(warned) == (why is not None and times == 0)
        assert not warned or (why is not None and why in str(warned[0].message))


@pytest.mark.parametrize("name", GEMMS)
def test_on_cuda_a_gemm_is_native_where_the_hardware_has_its_scales(name: str) -> None:
    gemm = GEMMS[name]
    assert gemm.a is not None and gemm.b is not None
    expected = EXPECTED.get(re.split(r"[.(]", name)[0], on_cuda(gemm.a, gemm.b))
    assert on_cuda(gemm.a, gemm.b) == expected
    text = lowered(gemm, "cuda", jnp.float32)
    types = TYPES[gemm.a.format.name], TYPES[gemm.b.format.name]
    if expected == "fp8":
        assert dots(text) == [(*types, "f32")] and not block_scaled_dots(text)
    elif expected == "block-scaled":
        scale = "f8E8M0FNU" if gemm.a.scale == "e8m0" else "f8E4M3FN"
        assert block_scaled_dots(text) == [(*types, scale, scale, "f32")] and not dots(text)
    else:
        wide = "bf16" if gemm.a.power_of_two else "f32"
        assert dots(text) == [(wide, wide, "f32")] and not block_scaled_dots(text)


@every_gemm
def test_on_a_cpu_operands_are_bf16_and_sums_float32(gemm: GemmSpec) -> None:
    assert gemm.a is not None
    folds = gemm.a.power_of_two or gemm.a.two_level or gemm.a.block[1] is None
    wide = "bf16" if folds else "f32"
    assert dots(lowered(gemm, "cpu")) == [(wide, wide, "f32")]


def test_a_rounding_that_commutes_with_the_scales_is_the_gemms_own() -> None:
    """A GEMM that writes bf16 moves half of the bytes; with float32 scales or a bias it must not round yet."""
    types = ("f8E4M3FN", "f8E4M3FN")
    assert dots(lowered(GEMMS["delayed.fprop"], "cuda")) == [(*types, "bf16")]
    assert dots(lowered(GEMMS["delayed(power_of_two=False).fprop"], "cuda")) == [(*types, "f32")]
    assert dots(lowered(GEMMS["delayed.fprop"], "cuda", bias=jnp.zeros(48))) == [(*types, "f32")]
    assert block_scaled_dots(lowered(GEMMS["mxfp8.fprop"], "cuda"))[0][-1] == "bf16"
    assert block_scaled_dots(lowered(GEMMS["nvfp4(power_of_two=False).fprop"], "cuda"))[0][-1] == "f32"


def test_fast_accumulation_is_opt_in() -> None:
    gemm = GEMMS["delayed.fprop"]
    assert "precision = [HIGHEST, HIGHEST]" in lowered(gemm, "cuda")
    assert "precision = [HIGHEST" not in lowered(gemm, "cuda", fast_accum=True)


def test_decoding_is_behind_an_optimization_barrier() -> None:
    """XLA on a GPU deletes a cast to FP8 and back, and the rounding with it."""
    spec = QuantSpec(GEMMS["delayed.fprop"].a.format)  # type: ignore[union-attr]
    program = jax.jit(lambda x: qj.dequantize(qj.quantize(x, spec)))
    text = program.trace(jax.ShapeDtypeStruct((8, 8), jnp.float32)).lower(lowering_platforms=("cuda",)).as_text()
    assert re.search(r"optimization_barrier %.* : tensor<8x8xf8E4M3FN>", text)
    assert re.search(r"optimization_barrier %.* : tensor<64x96xf8E4M3FN>", lowered(GEMMS["blockwise.fprop"], "cuda"))


@pytest.mark.parametrize("name", EXPECTED)
def test_all_three_gemms_of_a_layer_match_its_recipe(name: str) -> None:
    recipe = get(name)

    def program(x: jax.Array, w: jax.Array, g: jax.Array, state: Any) -> Any:
        y, backward = jax.vjp(lambda x, w, state: qj.linear(x, w, recipe=recipe, state=state, name="a"), x, w, state)
        return y, backward(g)

    state = qj.state.init(recipe) or None
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 96), (96, 48), (64, 48))]
    text = jax.jit(program).trace(*shapes, state).lower(lowering_platforms=("cuda",)).as_text()
    counts = {
        "fp8": [d for d in dots(text) if d[0].startswith("f8")],
        "block-scaled": block_scaled_dots(text),
        "emulated": dots(text),
    }
    kept_high = sum(gemm.a is None for gemm in recipe.gemms.values())
    assert len(counts[EXPECTED[name]]) == 3 - kept_high
    assert len(dots(text)) + len(block_scaled_dots(text)) == 3
