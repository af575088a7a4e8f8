"""What a recipe runs on each architecture: kernels that compile there, GEMMs that are there, and words that say so."""

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import recipes
from quaver.torch.backends.gpu import device, fused_quantize, scaled_mm
from tests.kernels.gate.record import ARCHITECTURES
from tests.kernels.test_gate import compiling
from tests.operands import SPECS
from tests.torch.backends.gpu.pretend import as_on_a_gpu, become

RECIPES = [name for name, build in recipes.RECIPES.items() if build().quantizes]
EVERY = list(itertools.product(RECIPES, ARCHITECTURES))
#: Each recipe on an architecture without FP8 GEMMs, and on one that has some; `make slow` takes them all.
BY_TURNS = {(recipe, ARCHITECTURES[i % 2]) for i, recipe in enumerate(RECIPES)}
BY_TURNS |= {(recipe, ARCHITECTURES[2 + i % 4]) for i, recipe in enumerate(RECIPES)}
PAIRS = [pytest.param(*pair, marks=() if pair in BY_TURNS else pytest.mark.slow) for pair in EVERY]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[list[str]]]]:
    """Makes a CPU pass for a GPU of an architecture; gives the calls of its scaled GEMMs."""
    with as_on_a_gpu(monkeypatch):
        yield lambda arch: become(arch, monkeypatch)


def native(recipe: str) -> dict[str, bool]:
    """Whether the GEMMs of two quantized operands are there, by name."""
    cpu = torch.device("cpu")
    gemms = {name: (gemm.a, gemm.b) for name, gemm in recipes.get(recipe).gemms.items() if gemm.a and gemm.b}
    fp8 = not device.why_no_fp8(cpu, "native")
    return {name: fp8 and not scaled_mm.unavailable(a, b, cpu) for name, (a, b) in gemms.items()}


def step(recipe: str, layer: qt.Linear, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with qt.autocast(recipe):
        y = layer(x)
    y.backward(torch.full_like(y, 0.5))
    assert x.grad is not None and layer.weight.grad is not None
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize(("recipe", "arch"), PAIRS)
def test_a_step_runs_on_every_architecture_and_its_gemms_are_native_where_they_are_there(
    recipe: str, arch: int, gpu: Callable[[int], list[list[str]]]
) -> None:
    layer, x = qt.Linear(64, 48, bias=False, dtype=torch.bfloat16), torch.randn(32, 64).bfloat16()
    with qt.only("reference"):
        expected = step(recipe, layer, x)
    calls = gpu(arch)
    # The first step probes, too.
    step(recipe, layer, x)
    calls.clear()
    ours = step(recipe, layer, x)
    assert len(calls) == sum(native(recipe).values())
    if recipes.get(recipe).dgrad.a is None or recipes.get(recipe).dgrad.a.rounding == "nearest":  # type: ignore[union-attr]
        for one, other in zip(ours, expected, strict=True):
            assert (one - other).float().norm() <= 2.0**-7 * other.float().norm()


def test_cached_facts_about_a_gpu_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = qt.Linear(64, 48, bias=False, dtype=torch.bfloat16), torch.randn(32, 64).bfloat16()
    for arch in (90, 100):
        with monkeypatch.context() as patch, as_on_a_gpu(patch):
            assert not scaled_mm._choices, "known before anything was multiplied"
            become(arch, patch)
            step("blockwise", layer, x)
            assert scaled_mm._choices


@pytest.mark.parametrize(("recipe", "arch"), PAIRS)
def test_explain_says_which_gemms_are_native_and_why_the_others_are_not(
    recipe: str, arch: int, gpu: Callable[[int], list[list[str]]]
) -> None:
    gpu(arch)
    layer, x = qt.Linear(64, 48, dtype=torch.bfloat16, recipe=recipe), torch.randn(32, 64).bfloat16()
    with qt.only("native"), qt.only("triton"):
        rows = {row.what: row for row in qt.explain(layer, x).rows}
    for name, is_native in native(recipe).items():
        row = rows[f"{name} GEMM"]
        assert row.runs == ("native" if is_native else "decoded"), row
        why = dict(row.passed_over).get("native", "")
        reasons = (
            f"{arch // 10}.{arch % 10} has no FP8 GEMMs",
            f"this GPU is sm_{arch}",
            "cuBLASLt has no GEMM for",
        )
        assert bool(why) is not is_native and (is_native or any(reason in why for reason in reasons)), why


@pytest.mark.parametrize(("name", "arch"), [(name, (80, 89)[i % 2]) for i, name in enumerate(SPECS)])
def test_operands_on_an_older_gpu_have_the_bits_of_the_reference(
    name: str, arch: int, gpu: Callable[[int], list[list[str]]]
) -> None:
    """There codes are computed with integer operations, and kernels read them as bytes."""
    spec = SPECS[name]
    gpu(arch)
    x = torch.randn(130, 144) * 2.0 ** torch.randint(-20, 20, (130, 144))
    x[0], x[1, 1], x[2, 2], x[64, 3] = 0.0, torch.inf, torch.nan, 1e-40
    # Alternate between specs: special values in one dtype and plain values in the other.
    choice = list(SPECS).index(name) // 2
    for matrix in (x, x[3:64], x[3:64].bfloat16(), x.bfloat16())[choice % 2 :: 2]:
        q, expected = qt.quantize(matrix, spec), None
        with qt.only("reference"):
            expected = qt.quantize(matrix, spec)
        with qt.only("triton"):
            q = qt.quantize(matrix, spec)
        for one, other in ((q.codes(), expected.codes()), (q.scales(), expected.scales())):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(q.dequantize(), expected.dequantize(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_ampere_warns_once_which_gemms_are_emulated(
    recipe: str, monkeypatch: pytest.MonkeyPatch, gpu: Callable[[int], list[list[str]]]
) -> None:
    monkeypatch.setattr(fused_quantize, "_announced", set())
    gpu(86)
    with pytest.warns(UserWarning, match="compute capability 8.6 has no FP8 GEMMs") as warned:
        fused_quantize.warn_once(recipes.get(recipe), torch.empty(0))
    names = ", ".join(native(recipe))
    assert f"{names} run as bf16 GEMMs of decoded operands" in str(warned[0].message)


#: Launches that do not compile for the target, run in the same process as others, which saves an import of torch.
OF_HOPPER = "--arch", 90, "--target", 80, "--recipes", "tensorwise"


@functools.cache
def compiled_kernels(*arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reports of `compiled_layers` for these arguments and for `OF_HOPPER`."""
    done = compiling("-m", "tests.torch.backends.gpu.compiled_layers", *map(str, (*arguments, "+", *OF_HOPPER)))
    assert done.returncode == 0, done.stdout + done.stderr
    report, hopper = map(json.loads, done.stdout.splitlines())
    return report, hopper


#: A recipe with a history, one with scales of 128 and one of 32; the gate compiles what the others launch.
AMPERE = 80, "Linear", "bf16", ("delayed", "blockwise", "mxfp8")


def step_of(arch: int, layer: str, dtype: str, names: Sequence[str]) -> tuple[Any, ...]:
    """The arguments of `compiled_layers`."""
    return ("--arch", arch, "--layer", layer, "--dtype", dtype, "--recipes", *names)


@pytest.mark.parametrize(
    ("arch", "layer", "dtype", "names"),
    [
        AMPERE,
        *(
            pytest.param(arch, layer, dtype, RECIPES, marks=pytest.mark.slow)
            for arch, layer, dtype in (
                *((arch, "Linear", "bf16") for arch in ARCHITECTURES),
                *((arch, "TransformerLayer", dtype) for arch in (80, 86) for dtype in ("bf16", "fp16", "fp32")),
                *((arch, "TransformerLayer", "bf16") for arch in ARCHITECTURES[2:]),
            )
        ),
    ],
)
def test_all_launches_of_a_layer_compile_for_the_architecture(
    arch: int, layer: str, dtype: str, names: Sequence[str]
) -> None:
    report, _ = compiled_kernels(*step_of(arch, layer, dtype, names))
    assert set(report) == set(names)
    for recipe, compiled in report.items():
        assert compiled["kernels"] or recipe in ("mxfp6", "mxfp4"), recipe
        assert not compiled["refused"], compiled["refused"]


def test_launches_for_hopper_do_not_compile_for_ampere() -> None:
    """Shows that the test above can fail."""
    _, report = compiled_kernels(*step_of(*AMPERE))
    assert any("fp8e4nv not supported" in why for why in report["tensorwise"]["refused"].values())


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_attention_in_eight_bits_compiles_for_the_architecture(arch: int) -> None:
    names = "tensorwise", "rowwise", "mxfp8"
    report, _ = compiled_kernels("--arch", arch, "--layer", "TransformerLayer", "--attention", "--recipes", *names)
    assert all("attention" in compiled["kernels"] and not compiled["refused"] for compiled in report.values()), report
