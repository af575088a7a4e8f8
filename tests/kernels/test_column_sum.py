"""Test column sums: within the error bound of float64, rounded once, the same bits at any memory position."""

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import E4M3, QuantSpec
from quaver.torch.backends.gpu import cross_entropy as gpu
from quaver.torch.backends.gpu.tensorwise import per_tensor
from quaver.torch.operations import ops
from tests.close import assert_bitwise
from tests.kernels.compare import DEVICE
from tests.pairs import alternating

#: Rows of at most one program; of many programs with a ragged last one; one column; wider than a block.
SHAPES = [(1, 1), (5, 7), (32, 128), (33, 130), (64, 128), (300, 3), (700, 200)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def relative(sums: Tensor, expected: Tensor) -> float:
    return ((sums.double() - expected).norm() / expected.norm().clamp(min=1e-300)).item()


@pytest.mark.parametrize(("shape", "dtype"), alternating(SHAPES, DTYPES, [(33, 130)]), ids=str)
def test_sums_keep_their_bound_of_float64_and_are_rounded_once(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape, device=DEVICE) + 0.5).to(dtype)
    wide = gpu.column_sum(x, torch.float32)
    assert relative(wide, x.double().sum(0)) < 1e-6
    assert_bitwise(gpu.column_sum(x, dtype), wide.to(dtype))


@pytest.mark.parametrize("rows", [31, 160])
def test_more_programs_than_one_sum_as_one(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randint(-8, 9, (rows, 140), device=DEVICE).float()
    expected = x.sum(0)
    for programs in (1, 132):
        monkeypatch.setattr(gpu, "multiprocessors", lambda _, n=programs: n)
        assert_bitwise(gpu.column_sum(x, torch.float32), expected)


def test_edge_case_values() -> None:
    x = torch.ones(70, 6, device=DEVICE)
    x[3, 0], x[64, 1], x[1, 2], x[2, 2] = float("nan"), float("inf"), float("inf"), -float("inf")
    x[:, 3], x[:, 4], x[69, 4] = 2.0**-130, 0.0, 3e38
    expected = x.double().sum(0).float()
    torch.testing.assert_close(gpu.column_sum(x, torch.float32), expected, rtol=1e-6, atol=0, equal_nan=True)


def test_bits_do_not_depend_on_where_a_matrix_lies() -> None:
    base = torch.randn(150, 140, device=DEVICE)
    for x in (base[:, :100], base[:, 3:103], base.t()[:100].t(), base[::2], base[1:2].expand(40, 140)):
        assert_bitwise(gpu.column_sum(x, torch.float32), gpu.column_sum(x.clone().contiguous(), torch.float32))


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.filterwarnings("ignore:.*decoded operands:UserWarning")
def test_a_layers_bias_gradient_is_summed_by_a_kernel(
    dtype: torch.dtype, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one tensor scale the cast also sums, as it reads the gradient anyway; otherwise a separate kernel does."""
    layer = qt.Linear(24, 16, dtype=dtype, device=DEVICE, recipe=recipe)
    g = torch.randn(200, 16, device=DEVICE).to(dtype)
    expected = gpu.column_sum(g, dtype)
    if recipe == "tensorwise":
        partial = per_tensor(g, QuantSpec(E4M3), None, None, False, True, sums=True).partial_sums
        assert partial is not None
        expected = gpu.add_up(partial, dtype)
        monkeypatch.setattr(gpu, "column_sum", lambda *_: pytest.fail("the gradient is read once more"))
    with qt.only("triton"):
        assert ops.BIAS_GRADIENT.explain(g, dtype)[0] == ("triton", "")
        layer(torch.randn(200, 24, device=DEVICE).to(dtype).requires_grad_()).backward(g)
    assert layer.bias.grad is not None
    assert_bitwise(layer.bias.grad, expected)


def test_unsupported_sums_use_torch() -> None:
    with qt.only("triton"):
        for given, wanted in ((torch.float64, torch.float32), (torch.float32, torch.float64)):
            x = torch.ones(2, 3, dtype=given)
            assert "float64" in ops.BIAS_GRADIENT.explain(x, wanted)[0][1]
            assert_bitwise(ops.bias_gradient(x, wanted), torch.full((3,), 2.0, dtype=wanted))
        assert_bitwise(ops.bias_gradient(torch.ones(0, 3), torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16))
