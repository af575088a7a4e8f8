"""Rows gathered, summed and multiplied by kernels have the bits of plain torch, on difficult values."""

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import recipes
from quaver.reference.moe import rows_of
from quaver.torch.backends.gpu import permutation as gpu
from quaver.torch.nn.moe import permutation
from quaver.torch.nn.moe.permutation import gather_quantized, order
from quaver.torch.operations import ops
from tests.close import assert_bitwise
from tests.kernels.compare import DEVICE

#: Tokens, experts, choices per token, padding, capacity: dropped choices, empty rows, and one token.
CASES = [(33, 4, 2, 1, None), (33, 4, 3, 16, 5), (1, 8, 1, 16, None), (40, 8, 4, 1, 1)]


def difficult(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return values of many magnitudes with NaN, infinities, subnormals, and zeros of both signs."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
    x[:, 3] = -0.0
    x[0, :5] = torch.tensor([0.0, torch.nan, torch.inf, -0.0, 1e-40])
    x[rows // 2, 1:3] = torch.tensor([3e38, -torch.inf])
    return x.to(dtype).to(DEVICE)


#: Choices, experts, padding, capacity: several blocks of choices and of experts, one of each, and all in one expert.
ORDERS = [(700, 40, 1, None), (700, 40, 16, 9), (129, 1, 128, 2**40), (1, 3, 16, 1), (300, 1100, 4, None)]


@pytest.mark.parametrize("case", ORDERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_choices_are_sorted_as_by_plain_torch(case: tuple[int, int, int, int | None], dtype: torch.dtype) -> None:
    choices, experts, pad, capacity = case
    generator = torch.Generator().manual_seed(choices + experts)
    # Some choices are of experts elsewhere.
    ragged = torch.randint(-3, experts + 3, (choices,), generator=generator)
    for indices in (ragged, torch.full((choices,), experts - 1), torch.full((choices,), experts), -ragged.abs()):
        total = rows_of(choices, experts, pad, capacity)
        ours = gpu.order(indices.to(DEVICE, dtype), experts, pad, capacity, total)
        plain = permutation._order(indices.to(DEVICE, dtype), experts, pad, capacity, total)
        for one, other in zip(ours, plain, strict=True):
            assert one.dtype is other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_moved_rows_have_the_bits_of_plain_torch(
    case: tuple[int, int, int, int, int | None], dtype: torch.dtype
) -> None:
    tokens, experts, k, pad, capacity = case
    generator = torch.Generator().manual_seed(k)
    indices = torch.rand(tokens, experts, generator=generator).topk(k, -1)[1]
    _, places, sources = (t.to(DEVICE) for t in order(indices, experts, pad, capacity))
    weights = torch.randn(tokens * k, generator=generator).to(dtype)
    weights[0], weights[-1] = torch.nan, -0.0
    weights = weights.to(DEVICE)
    # A wider matrix has rows that are not adjacent.
    x, rows = difficult(tokens, 700, dtype)[:, :650], difficult(sources.shape[0], 650, dtype)
    for w in (None, weights):
        assert_bitwise(gpu.gather(x, sources, k, w), permutation._gather(x, sources, k, w))
        assert_bitwise(gpu.combine(rows, places, k, w), permutation._combine(rows, places, k, w))
    ours, plain = gpu.dots(x, rows, places, k), permutation._dots(x, rows, places, k)
    assert not ours[places.view(-1, k) < 0].any()
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-3, equal_nan=True)


def test_weights_and_places_may_have_gaps() -> None:
    x, places = torch.randn(4, 32), torch.tensor([2, 9, 0, 9, 3, 9, 1, 9])[::2].to(DEVICE)
    weights = torch.randn(4, 2).to(DEVICE)[:, :1]
    assert weights.reshape(-1).stride() == (2,)
    ours = []
    for name in ("triton", "reference"):
        with ops.only(name):
            rows = x.to(DEVICE).requires_grad_()
            y = qt.unpermute(rows, places, 1, weights)
            ours.append((y, *torch.autograd.grad(y.square().sum(), rows)))
    for one, other in zip(*ours, strict=True):
        assert_bitwise(one, other)


def test_empty_rows_are_filled_in_any_dtype() -> None:
    sources = torch.tensor([3, -1, 0], device=DEVICE)
    for x, fill in ((torch.arange(40, dtype=torch.uint8).view(4, 10), 7), (torch.randn(4, 3), 1.0)):
        ours = gpu.gather(x.to(DEVICE), sources, 1, None, fill)
        assert_bitwise(ours, permutation._gather(x.to(DEVICE), sources, 1, None, fill))
        assert (ours[1] == fill).all()


@pytest.mark.parametrize("name", ["rowwise", "blockwise", "mxfp8"])
def test_operands_that_kernels_wrote_can_be_moved(name: str) -> None:
    """Their scales may be swizzled, and a block may end after the last column."""
    spec = recipes.get(name).fprop.a
    assert spec is not None
    x, sources = difficult(9, 160, torch.bfloat16), torch.tensor([4, -1, 8, 0, 0, -1], device=DEVICE)
    with ops.only("triton"):
        moved = gather_quantized(ops.QUANTIZE(x, spec), sources, 1)
    expected = qt.quantize(permutation._gather(x, sources, 1), spec)
    assert_bitwise(moved.codes(), expected.codes())
    assert_bitwise(moved.scales(), expected.scales())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_rows_that_kernels_do_not_read_are_moved_by_torch(dtype: torch.dtype) -> None:
    x, indices = torch.ones(3, 8, dtype=dtype, device=DEVICE), torch.tensor([[0, 1], [1, 0], [2, 1]], device=DEVICE)
    with ops.only("triton"):
        rows, _, places = qt.permute(x, indices, 3, pad=4)
        assert_bitwise(qt.unpermute(rows, places, 2), 2 * x)


def test_transforms_give_a_clear_error_before_a_kernel_runs() -> None:
    x, indices = torch.randn(1, 5, 16).to(DEVICE), torch.zeros(1, 5, 2, dtype=torch.int64, device=DEVICE)
    mixture = qt.MoE(16, 16, qt.MixtureConfig(experts=4, k=2), device=DEVICE)
    with ops.only("triton"):
        with pytest.raises(NotImplementedError, match=r"permute and unpermute do not run under torch.func"):
            torch.vmap(lambda t, i: qt.permute(t, i, 4).rows)(x, indices)
        with pytest.raises(NotImplementedError, match=r"grouped products, .* do not run under torch.func"):
            torch.func.grad(lambda t: mixture(t).sum())(x)
