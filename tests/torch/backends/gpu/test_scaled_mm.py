"""Test scaled GEMMs: run what torch supports on a CPU, and check arguments of GPU calls with a stand-in."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType

import quaver.torch as qt
from quaver import E4M3, E5M2, QuantSpec, recipes
from quaver.torch.backends.gpu import device, fused_quantize, scaled_mm
from quaver.torch.linear import plan_emulated
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized, swizzle, unswizzle
from quaver.torch.operations import ops
from tests.pairs import pairs
from tests.torch.backends.gpu.cublaslt import stand_in, torchs_own

NVFP4, MXFP8 = recipes.get("nvfp4"), recipes.get("mxfp8")
assert MXFP8.fprop.a is not None and NVFP4.fprop.a is not None and NVFP4.fprop.b is not None
WHOLE = {
    "tensor": QuantSpec(E4M3),
    "tensor e5m2": QuantSpec(E5M2),
    "tensor fp32": QuantSpec(E4M3, scale="fp32"),
    "row": QuantSpec(E4M3, (1, None)),
    "row fp32": QuantSpec(E4M3, (1, None), "fp32"),
}
BLOCKS = {
    "1x128": QuantSpec(E4M3, (1, 128)),
    "1x128 fp32": QuantSpec(E4M3, (1, 128), "fp32"),
    "128x128": QuantSpec(E4M3, (128, 128)),
    "1x128 e5m2": QuantSpec(E5M2, (1, 128)),
    "mxfp8": MXFP8.fprop.a,
    "mxfp8 e5m2": QuantSpec(E5M2, (1, 32), "e8m0"),
    "mxfp8 2d": QuantSpec(E4M3, (32, 32), "e8m0"),
    "nvfp4": NVFP4.fprop.a,
    "nvfp4 2d": NVFP4.fprop.b,
}
SPECS = WHOLE | BLOCKS
#: (m, k, n)
SHAPES = [(5, 48, 32), (33, 100, 16), (64, 272, 144)]
#: Of the output and of the bias.
OUTPUTS = [
    (torch.float32, None),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, None),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    scaled_mm._choices.clear()
    scaled_mm._transposes.clear()
    yield
    scaled_mm._choices.clear()
    scaled_mm._transposes.clear()


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A CPU that passes for a GPU of an architecture: `pytest.mark.parametrize("gpu", [90], indirect=True)`."""
    calls: list[list[str]] = []
    monkeypatch.setattr(device, "_architecture", lambda _: request.param)
    monkeypatch.setattr(scaled_mm, "scaled_mm", stand_in(request.param, calls))
    return calls


def pair(a: QuantSpec, b: QuantSpec, m: int, k: int, n: int, transposed: bool = False) -> tuple[Quantized, Quantized]:
    generator = torch.Generator().manual_seed(m + k)
    x = torch.randn(m, k, generator=generator) * torch.logspace(-2, 2, m)[:, None]
    w = torch.randn(n, k, generator=generator)
    one = reference.quantize(x.t().contiguous(), a).T if transposed and a.transposable else reference.quantize(x, a)
    return one, reference.quantize(w.t().contiguous(), b).T if transposed and b.transposable else reference.quantize(
        w, b
    )


def check(name: str, a: Quantized, b: Quantized, dtype: torch.dtype, bias: torch.dtype | None) -> str:
    """Compare an implementation with the reference and return what ran."""
    extra = None if bias is None else torch.linspace(-3, 3, b.shape[0], dtype=bias)
    expected = reference.matmul(a, b, torch.float32, extra).double()
    with qt.only(name):
        reasons = ops.MATMUL.explain(a, b, dtype, extra)
        y = ops.MATMUL(a, b, dtype, extra)
    assert y.dtype is dtype and y.shape == expected.shape
    off = (y.double() - expected).norm() / expected.norm()
    assert off <= {torch.float32: 1e-6, torch.bfloat16: 2.5e-3, torch.float16: 4e-4}[dtype], (name, off)
    return next(impl for impl, why in reasons if not why)


@torchs_own
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("a", "b"), list(itertools.product(WHOLE, WHOLE)))
def test_tensor_and_row_scales_use_the_torch_gemm(a: str, b: str, transposed: bool) -> None:
    for number, (dtype, bias) in enumerate(OUTPUTS):
        # Each output with one shape; the pairs of operands take turns.
        m, k, n = SHAPES[(number + list(WHOLE).index(a) + 2 * list(WHOLE).index(b)) % len(SHAPES)]
        ran = check("native", *pair(SPECS[a], SPECS[b], m, k, n, transposed), dtype, bias)
        assert ran == ("decoded" if a == b == "tensor e5m2" else "native")


@pytest.mark.parametrize(("a", "b", "transposed"), pairs(SPECS, SPECS, [False, True]))
def test_any_two_operands_are_multiplied_decoded(a: str, b: str, transposed: bool) -> None:
    if transposed and not (SPECS[a].transposable or SPECS[b].transposable):
        return
    for (m, k, n), (dtype, bias) in zip(SHAPES[1:], OUTPUTS, strict=False):
        assert check("decoded", *pair(SPECS[a], SPECS[b], m, k, n, transposed), dtype, bias) == "decoded"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_the_kernel_that_decodes_gives_the_same_products(name: str, transposed: bool) -> None:
    for m, k, n in SHAPES:
        a, b = pair(SPECS[name], SPECS[name], m, k, n, transposed)
        expected = scaled_mm.matmul(a, b, torch.float32)
        with qt.only("decoded"), qt.only("triton"):
            torch.testing.assert_close(ops.MATMUL(a, b, torch.float32, None), expected, rtol=0, atol=0)


NATIVE = {
    89: {("tensor", "tensor"), ("tensor", "row"), ("row", "row fp32"), ("tensor e5m2", "tensor")},
    90: {("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("128x128", "1x128 fp32"), ("1x128", "1x128")},
    100: {
        ("tensor", "tensor e5m2"),
        ("row", "row"),
        ("mxfp8", "mxfp8 2d"),
        ("nvfp4", "nvfp4 2d"),
        ("1x128", "128x128"),
    },
}
ROWS = [(arch, a, b) for arch, those in NATIVE.items() for a, b in sorted(those)]


@pytest.mark.parametrize(("gpu", "a", "b"), ROWS, indirect=["gpu"])
def test_operands_get_the_layouts_and_scales_the_gpu_requires(gpu: list[list[str]], a: str, b: str) -> None:
    for (m, k, n), (dtype, bias), transposed in pairs([*SHAPES, (130, 640, 256)], OUTPUTS, [False, True]):
        assert check("native", *pair(SPECS[a], SPECS[b], m, k, n, transposed), dtype, bias) == "native"
    assert gpu


@pytest.mark.parametrize(("gpu", "arch"), [(89, 89), (90, 90), (100, 100), (120, 120)], indirect=["gpu"])
def test_unsupported_operands_are_decoded_with_a_reason(gpu: list[list[str]], arch: int) -> None:
    for a, b in itertools.product(SPECS, SPECS):
        why = scaled_mm.unavailable(SPECS[a], SPECS[b], torch.device("cpu"))
        wide = {a, b} & {"1x128", "128x128", "1x128 fp32"}
        if wide and arch != 90 and not {a, b} <= {"1x128", "128x128"}:
            assert why
        if a == b == "128x128":
            assert bool(why) == (arch < 100)
        if {a, b} & {"1x128 e5m2", "mxfp8 e5m2"}:
            assert "no GEMM" in why
        if why:
            x, w = pair(SPECS[a], SPECS[b], 16, 64, 16)
            assert scaled_mm.reason(x, w, torch.float32, None) == why and not why.endswith(".")
            assert check("native", x, w, torch.float32, None) == "decoded"


@pytest.mark.parametrize("gpu", [89], indirect=True)
def test_rows_without_scales_in_the_gemm_are_scaled_in_one_pass(
    gpu: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0+cu128"))
    passes, finished = [], scaled_mm.finished
    monkeypatch.setattr(scaled_mm, "finished", lambda *args: passes.append(args[1]) or finished(*args))
    for a, b in (("row", "row"), ("tensor", "row")):
        x, w = pair(SPECS[a], SPECS[b], 64, 256, 32)
        expected = reference.matmul(x, w, torch.float32, torch.ones(32))
        with qt.only("native"):
            y = ops.MATMUL(x, w, torch.bfloat16, torch.ones(32, dtype=torch.bfloat16))
        assert (y - expected).norm() < 2.5e-3 * expected.norm()
        assert passes[-1] is torch.bfloat16, "the pass also adds the bias and writes the output's dtype"


@pytest.mark.parametrize("gpu", [90], indirect=True)
def test_a_gemm_that_its_probe_refuses_is_announced_and_emulated(
    gpu: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = scaled_mm.scaled_mm

    def without_rows(*args: object) -> Tensor:
        if args[3][0] is ScalingType.RowWise:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED")
        return right(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(scaled_mm, "scaled_mm", without_rows)
    monkeypatch.setattr(scaled_mm, "KINDS", {**scaled_mm.KINDS, ("row", "row"): scaled_mm.KINDS["row", "row"][:1]})
    monkeypatch.setattr(fused_quantize, "_announced", set())
    monkeypatch.setattr(device, "why_no_fp8", lambda *_: "")
    with pytest.warns(UserWarning, match=r"rowwise .*fprop, dgrad, wgrad run as bf16.*CUBLAS_STATUS_NOT_SUPPORTED"):
        fused_quantize.warn_once(recipes.get("rowwise"), torch.empty(0))
    fused_quantize.warn_once(recipes.get("tensorwise"), torch.empty(0))
    assert "the GPU has" in plan_emulated.reason_unsupported(recipes.get("tensorwise"), torch.device("cpu"))
    assert "the GPU has" not in plan_emulated.reason_unsupported(recipes.get("rowwise"), torch.device("cpu"))


def test_a_probe_that_loses_the_cuda_context_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: object) -> None:
        raise RuntimeError("CUDA error: an illegal instruction was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(RuntimeError, match=r"lost the CUDA context of cuda:0 \(unspecified launch failure\)"):
        device.refusal(RuntimeError("unspecified launch failure\nmore"), torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    assert device.refusal(ValueError("no\nmore"), torch.device("cuda:0")) == "no"


@pytest.mark.parametrize("gpu", [100], indirect=True)
def test_sizes_of_k_are_probed_by_divisibility(gpu: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    right = scaled_mm.scaled_mm

    def of_whole_blocks(a: Tensor, *rest: object) -> Tensor:
        if a.shape[1] % 32:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED")
        return right(a, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(scaled_mm, "scaled_mm", of_whole_blocks)
    for k in (656, 48, 96, 672, 64, 128):
        ran = check("native", *pair(SPECS["mxfp8"], SPECS["mxfp8"], 32, k, 32), torch.bfloat16, None)
        assert ran == ("decoded" if k % 32 else "native"), k


@pytest.mark.parametrize("gpu", [90], indirect=True)
def test_fast_accumulation_follows_the_recipe(gpu: list[list[str]]) -> None:
    x, w = pair(SPECS["tensor"], SPECS["tensor"], 16, 32, 16)
    for fast in (False, True):
        with qt.only("native"):
            qt.matmul(x, w, torch.float32, None, fast)
        assert gpu[-1][2] == ("fast" if fast else "")


def test_a_gemm_that_refuses_or_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = pair(SPECS["tensor"], SPECS["tensor"], 16, 32, 16)

    def refuses(*_: object) -> Tensor:
        raise RuntimeError("CUDA error: not today\nsecond line")

    monkeypatch.setattr(scaled_mm, "scaled_mm", refuses)
    assert scaled_mm.reason(x, w, torch.float32, None) == "CUDA error: not today"
    scaled_mm._choices.clear()
    monkeypatch.setattr(scaled_mm, "scaled_mm", lambda a, b, *_: 2.0 * (a.float() @ b.float()))
    assert "off by" in scaled_mm.reason(x, w, torch.float32, None)
    assert check("native", x, w, torch.float32, None) == "decoded"


@pytest.mark.parametrize("gpu", [90], indirect=True)
@pytest.mark.parametrize("name", ["tensor", "row", "1x128"])
def test_a_bias_that_a_gemm_refuses_is_added_after_it(
    gpu: list[list[str]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    right = scaled_mm.scaled_mm

    def without(*args: object) -> Tensor:
        if args[8] is not None:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED")
        return right(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(scaled_mm, "scaled_mm", without)
    x, w = pair(SPECS[name], SPECS[name], 64, 256, 32)
    assert check("native", x, w, torch.bfloat16, torch.bfloat16) == "native"
    choose_gemm = scaled_mm.choose_gemm(x, w, torch.bfloat16, torch.zeros(32, dtype=torch.bfloat16))
    assert choose_gemm.kind is not None and not choose_gemm.adds and not choose_gemm.why
    # The sum with the bias is rounded once.
    assert choose_gemm.out is torch.float32


SCRAMBLED = {
    "rows": lambda s: s.roll(1, 0),
    "blocks of k": lambda s: s.roll(1, 1),
    "both": lambda s: s.flip(0, 1),
}


@pytest.mark.parametrize("how", SCRAMBLED)
@pytest.mark.parametrize(
    ("gpu", "a", "b"),
    [
        (90, "row", "row"),
        (90, "1x128", "128x128"),
        (90, "1x128", "1x128"),
        (100, "mxfp8", "mxfp8 2d"),
        (100, "nvfp4", "nvfp4 2d"),
    ],
    indirect=["gpu"],
)
def test_a_gemm_that_takes_scales_for_others_is_not_used(
    gpu: list[list[str]], monkeypatch: pytest.MonkeyPatch, a: str, b: str, how: str
) -> None:
    one, other = pair(SPECS[a], SPECS[b], 160, 640, 144)
    right = scaled_mm.scaled_mm

    def wrong(x: Tensor, y: Tensor, scale: list[Tensor], *rest: object) -> Tensor:
        first, rows, k = scale[0], x.shape[0], x.shape[1] * (2 if x.dtype is torch.float4_e2m1fn_x2 else 1)
        if first.dim() == 2:
            mixed = SCRAMBLED[how](first.contiguous()).t().contiguous().t()
        else:
            plain = unswizzle(first.view(torch.uint8), rows, -(-k // (16 if len(scale) == 2 else 32)))
            mixed = swizzle(SCRAMBLED[how](plain).contiguous()).view(first.dtype)
        return right(x, y, [mixed, *scale[1:]], *rest)  # type: ignore[arg-type]

    chosen = scaled_mm.choose_gemm(one, other, torch.bfloat16, None).kind
    assert chosen is not None
    scaled_mm._choices.clear()
    if a != "row" or how != "blocks of k":
        monkeypatch.setattr(scaled_mm, "scaled_mm", wrong)
        assert scaled_mm.choose_gemm(one, other, torch.bfloat16, None).kind != chosen


@torchs_own
def test_no_memory_for_a_probe_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = pair(SPECS["tensor"], SPECS["tensor"], 16, 32, 16)

    def refuses(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(scaled_mm, "scaled_mm", refuses)
        with pytest.raises(torch.OutOfMemoryError):
            scaled_mm.reason(x, w, torch.float32, None)
    assert scaled_mm.reason(x, w, torch.float32, None) == ""


def test_features_that_are_no_multiple_of_16_are_decoded() -> None:
    x, w = pair(SPECS["tensor"], SPECS["tensor"], 16, 32, 24)
    assert "24 columns" in scaled_mm.reason(x, w, torch.float32, None)
    assert check("native", x, w, torch.float32, None) == "decoded"


@pytest.mark.parametrize("shape", [(0, 32, 16), (16, 0, 16), (16, 32, 0)])
def test_nothing_to_add_up_gives_zeros(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    for name in ("native", "decoded"):
        x = reference.quantize(torch.randn(m, k), SPECS["tensor"])
        w = reference.quantize(torch.randn(n, k), SPECS["tensor"])
        with qt.only(name):
            assert torch.equal(ops.MATMUL(x, w, torch.float32, None), torch.zeros(m, n))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_values_poison_their_rows(name: str, bad: float) -> None:
    x = torch.randn(32, 256)
    x[3, 200] = bad
    a, b = reference.quantize(x, SPECS[name]), reference.quantize(torch.randn(16, 256), SPECS[name])
    expected = reference.matmul(a, b, torch.float32).isnan()
    assert expected[3].all()
    assert torch.equal(scaled_mm.matmul(a, b, torch.float32).isnan(), expected)


@pytest.mark.parametrize("name", ["tensor", "tensor fp32", "row", "1x128", "1x128 fp32", "mxfp8"])
@pytest.mark.parametrize("scale", [1e-28, 1e-20, 1.0, 1e20, 1e28])
def test_scales_far_from_one_lose_no_precision(name: str, scale: float) -> None:
    x, w = torch.rand(16, 256).add_(0.5) * scale / 2, torch.rand(16, 256).add_(0.5) / scale
    a, b = reference.quantize(x, SPECS[name]), reference.quantize(w, SPECS[name])
    y, expected = scaled_mm.matmul(a, b, torch.float32).double(), reference.matmul(a, b, torch.float32).double()
    assert (y - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (128, 4), (129, 5), (300, 17)])
def test_swizzling_is_undone_and_puts_scales_where_cublaslt_reads_them(shape: tuple[int, int]) -> None:
    scale = torch.randint(1, 255, shape, dtype=torch.uint8)
    flat, across = swizzle(scale), -(-shape[1] // 4)
    assert flat.numel() == -(-shape[0] // 128) * 128 * across * 4
    for r, c in itertools.product((0, shape[0] // 2, shape[0] - 1), range(shape[1])):
        at = (r // 128 * across + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        assert flat[at] == scale[r, c]
    assert torch.equal(unswizzle(flat, *shape), scale)
    assert flat.long().sum() == scale.long().sum(), "the rest is zero"
