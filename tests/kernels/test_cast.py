"""One scale for the tensor: amax, cast, and cast with its transpose equal the reference bit for bit."""

import pytest
import torch
from torch import Tensor

from quaver import E4M3, E5M2, QuantSpec
from quaver.torch.backends.gpu import quantize as gpu
from quaver.torch.backends.gpu.cross_entropy import add_up
from quaver.torch.backends.gpu.launch import workspace
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized
from tests.close import assert_bitwise
from tests.kernels.compare import DEVICE, assert_padded, assert_same
from tests.operands import every_nth, nasty
from tests.pairs import alternating

SPECS = [QuantSpec(E4M3), QuantSpec(E5M2), QuantSpec(E4M3, scale="fp32"), QuantSpec(E5M2, scale="fp32")]
SHAPES = [(128, 64), (5, 7), (130, 65), (33, 200)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Sources of the factor.
MODES = ["current", "given", "delayed", "unset", "given and unset"]
OFTEN = ["current", "delayed", "unset"]
#: Shapes of several programs; each has a third of the operands in each mode.
WIDE = [shape for shape in SHAPES if shape[1] > 40]
#: Every shape with one spec; other specs and their modes with a small shape.
CALLS = [(mode, spec, (5, 7)) for mode in MODES for spec in SPECS[1:]]
CALLS += [(mode, SPECS[0], shape) for mode in OFTEN for shape in SHAPES]
CALLS += [(mode, SPECS[0], (33, 40)) for mode in ("given", "given and unset")]


def operands(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.from_numpy(x).to(DEVICE).to(dtype) for name, x in nasty(shape).items()}


@pytest.mark.parametrize(("shape", "dtype"), alternating([*SHAPES[1:], (40, 520)], DTYPES, [(33, 200)]), ids=str)
def test_amax_is_the_largest_magnitude_by_its_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    at = shape[0] + DTYPES.index(dtype)
    for name, x in every_nth(operands(shape, dtype), at, 3).items():
        expected = reference.quantize(x, QuantSpec(E4M3)).amax
        torch.testing.assert_close(gpu.measure(x), expected, rtol=0, atol=0, equal_nan=True, msg=name)
        assert not workspace(DEVICE).any(), "the programs' meeting place is left as it was found"


@pytest.mark.parametrize(("mode", "spec", "shape"), CALLS, ids=str)
def test_codes_scales_and_amax_equal_the_reference(mode: str, spec: QuantSpec, shape: tuple[int, int]) -> None:
    values = operands(shape, torch.bfloat16)
    if shape in WIDE:
        values = every_nth(values, WIDE.index(shape) + OFTEN.index(mode), 3)
    for name, x in values.items():
        amax = torch.full((1, 1), -3.0, device=DEVICE) if "given" in mode else None
        factor = {"delayed": torch.tensor([4.0]), "current": None, "given": None}.get(mode, torch.tensor([0.0]))
        factor = None if factor is None else factor.to(DEVICE)
        expected = reference.quantize(x, spec, amax, factor)
        q = gpu.per_tensor(x, spec, amax, factor, mode == "delayed", True)
        assert_same(q, expected)
        assert q.cached_transpose is not None
        assert torch.equal(q.cached_transpose.codes(), expected.codes().t())
        for part in (q, q.cached_transpose):
            assert_padded(part)
        if "given" not in mode:
            torch.testing.assert_close(q.amax, expected.amax, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize(
    ("kind", "dtype"), alternating(["rows", "transpose", "gaps", "every other"], DTYPES, ["gaps"]), ids=str
)
def test_any_strides_and_dtypes_give_the_references_bits(kind: str, dtype: torch.dtype) -> None:
    base = torch.randn(70, 150, device=DEVICE).to(dtype)
    x = {"rows": base, "transpose": base.t(), "gaps": base[:, 16:100], "every other": base[::2, ::3]}[kind]
    spec = SPECS[0]
    expected = reference.quantize(x, spec)
    assert_same(gpu.quantize(x, spec), expected)
    q, transposed = gpu.quantize_both(x, spec, spec)
    assert_same(q, expected)
    assert_same(transposed, reference.quantize(x.t(), spec))
    assert not (q.transposed or transposed.transposed), "before Blackwell a GEMM reads its operands row by row"


@pytest.mark.parametrize(("before", "outlier", "after"), [(0.0, 8.0, 8.0), (9.0, 8.0, 9.0), (1.0, float("inf"), 1.0)])
@pytest.mark.parametrize("is_set", [True, False])
def test_a_history_records_the_largest_finite_amax(is_set: bool, before: float, outlier: float, after: float) -> None:
    x = torch.ones(150, 70, device=DEVICE, dtype=torch.bfloat16)
    x[100, 3] = -outlier
    history = torch.tensor([0.5, before, 0.5], device=DEVICE)
    gpu.per_tensor(x, SPECS[0], None, torch.tensor([2.0], device=DEVICE), is_set, False, newest=history[1:2])
    assert history.tolist() == [0.5, after, 0.5]


@pytest.mark.parametrize(
    ("shape", "is_set"), [((128, 64), False), ((1, 1), True), ((5, 7), False), ((130, 65), True)], ids=str
)
def test_sums_come_from_the_same_read_and_change_no_code(shape: tuple[int, int], is_set: bool) -> None:
    factor = torch.tensor([2.0], device=DEVICE) if is_set else None
    values = operands(shape, torch.bfloat16)
    # The two larger shapes take half of the cases each.
    for name, x in (every_nth(values, is_set, 2) if shape[0] > 100 else values).items():
        plain = gpu.per_tensor(x, SPECS[0], None, factor, is_set, True)
        q = gpu.per_tensor(x, SPECS[0], None, factor, is_set, True, sums=True)
        assert_same(q, plain)
        assert q.cached_transpose is not None and plain.cached_transpose is not None
        assert torch.equal(q.cached_transpose.codes(), plain.cached_transpose.codes())
        assert plain.partial_sums is None
        assert q.partial_sums is not None
        # float64 shows which sums overflow float32, and which are infinities that cancel.
        wide = torch.stack([part.double().sum(0) for part in x.split(128)])
        size = torch.stack([part.double().abs().sum(0) for part in x.split(128)]).float()
        close = (q.partial_sums - wide).abs() <= 1e-6 * size
        beyond = (size.isinf() | size.isnan()) & ~(q.partial_sums.isfinite() ^ wide.float().isfinite())
        assert (close | beyond).all(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_of_the_values_before_scaling_in_any_layout(dtype: torch.dtype) -> None:
    base = torch.randint(-8, 9, (300, 110), device=DEVICE).to(dtype)
    for x, in_stored_layout in ((base, False), (base[:, 3:67], True), (base[::2, :64], False), (base[:, :1], True)):
        q = gpu.per_tensor(x, SPECS[0], None, None, False, False, in_stored_layout, sums=True)
        assert q.partial_sums is not None
        assert_bitwise(add_up(q.partial_sums, torch.float32), x.float().sum(0))
    q, transposed = gpu.quantize_both(base, SPECS[0], SPECS[0], sums=True)
    assert q.partial_sums is not None and transposed.partial_sums is None
    swapped = gpu.quantize_both(base.t(), SPECS[0], SPECS[0], sums=True)
    assert swapped[0].partial_sums is swapped[1].partial_sums is None, (
        "of a transpose the other sums would be asked for"
    )


@pytest.mark.parametrize("blocks", [1, 40, 1100])
def test_sums_of_blocks_are_added_up_in_one_order_and_rounded_once(blocks: int) -> None:
    partial = torch.randn(blocks, 70, device=DEVICE)
    wide = add_up(partial, torch.float32)
    torch.testing.assert_close(wide.double(), partial.double().sum(0), rtol=1e-5, atol=1e-4)
    assert_bitwise(add_up(partial, torch.float32), wide)
    assert_bitwise(add_up(partial, torch.bfloat16), wide.bfloat16())


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0)], ids=str)
def test_empty_operands_have_the_references_shapes(shape: tuple[int, int]) -> None:
    x = torch.empty(shape, device=DEVICE, dtype=torch.bfloat16)
    expected = reference.quantize(x, SPECS[0])
    pair: tuple[Quantized, ...] = (gpu.quantize(x, SPECS[0]), *gpu.quantize_both(x, SPECS[0], SPECS[0]))
    for q in pair:
        assert q.shape in (shape, shape[::-1])
        assert torch.equal(q.scales(), expected.scales())


def test_unsupported_inputs_use_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(9, 20, device=DEVICE)
    spec = SPECS[0]
    assert "float64" in gpu.reason(x.double(), spec)
    assert_same(gpu.quantize(x.double(), spec), reference.quantize(x, spec))
    assert "no kernel" in gpu.reason(x, QuantSpec(E4M3, (2, 3)))
    assert_same(gpu.quantize(x, QuantSpec(E4M3, (2, 3))), reference.quantize(x, QuantSpec(E4M3, (2, 3))))
    monkeypatch.setattr(gpu, "LONGEST_SIDE", 10)
    assert "20 elements" in gpu.reason(x, spec)
    for operand, wanted in zip(gpu.quantize_both(x, spec, spec), (x, x.t()), strict=True):
        assert_same(operand, reference.quantize(wanted, spec))


@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
def test_every_bf16_value_rounds_as_the_reference(spec: QuantSpec) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256).to(DEVICE)
    one = torch.ones(1, device=DEVICE)
    expected = reference.quantize(x, spec, None, one)
    assert torch.equal(gpu.per_tensor(x, spec, None, one, True, False).codes(), expected.codes())


def test_more_rows_than_a_grids_second_axis_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quaver.torch.backends.gpu.tensorwise.SECOND_AXIS", 1)
    x = torch.randn(300, 131, device=DEVICE)
    q, transposed = gpu.quantize_both(x, SPECS[0], SPECS[0])
    assert_same(q, reference.quantize(x, SPECS[0]))
    assert_same(transposed, reference.quantize(x.t(), SPECS[0]))


def test_rows_beyond_32_bit_offsets_are_read() -> None:
    """64-bit offsets: the second row begins beyond 2**31 elements; memory that nobody touches costs nothing."""
    stride = 2**31 + 64
    storage = torch.UntypedStorage((stride + 16) * 2, device=DEVICE)
    x = torch.empty(0, dtype=torch.bfloat16, device=DEVICE).set_(storage, 0, (2, 16), (stride, 1))
    x.copy_(torch.arange(32.0).view(2, 16))
    spec = QuantSpec(E4M3)
    assert_same(gpu.per_tensor(x, spec, None, None, False, True), reference.quantize(x, spec))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_factor_of_another_dtype_is_the_same_number(dtype: torch.dtype) -> None:
    x, spec = torch.randn(32, 64, device=DEVICE), QuantSpec(E4M3)
    factor = torch.tensor([0.5], device=DEVICE)
    expected = gpu.quantize(x, spec, None, factor, is_set=True)
    assert_same(gpu.quantize(x, spec, None, factor.to(dtype), is_set=True), expected)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert_same(gpu.quantize(x, spec, None, 0.5), expected)
    finally:
        torch.set_default_dtype(before)
