"""Test norms: values and gradients against float64, one rounding, only the input and two numbers per row saved."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver.torch.nn import norm
from quaver.torch.nn.mlp import LayerNormLinear
from quaver.torch.nn.norm import NORMALIZATIONS, Normalization, NormKind
from tests.close import assert_bitwise, assert_close
from tests.pairs import pairs

ALL = NORMALIZATIONS
KINDS = pytest.mark.parametrize("kind", ALL)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
#: Relative RMS error of one rounding to the dtype.
ONE_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3, torch.float16: 3e-4}


def exact(kind: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """The formula, in x's dtype."""
    centred = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    y = centred / torch.sqrt(centred.square().mean(-1, True) + eps)
    if weight is not None:
        y = y * (weight + 1 if zero_centered else weight)
    return y if bias is None else y + bias


def normalize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    kind: str = "LayerNorm",
    eps: float = 1e-5,
    zero_centered: bool = False,
) -> Tensor:
    return Normalization(kind, eps, zero_centered)(x, weight, bias)


def parameters(kind: str, dim: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    weight = None if kind == "L2" else torch.randn(dim, dtype=dtype, requires_grad=True)
    return weight, torch.randn(dim, dtype=dtype, requires_grad=True) if kind == "LayerNorm" else None


def wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().double().requires_grad_()


@pytest.mark.parametrize(
    ("kind", "dtype", "shape", "zero_centered"),
    pairs(ALL, ONE_ROUNDING, [(5, 48), (2, 3, 7), (1, 1), (0, 16), (300, 24)], [False, True]),
)
def test_values_and_gradients_are_float64s(
    kind: str, dtype: torch.dtype, shape: tuple[int, ...], zero_centered: bool
) -> None:
    x = (torch.randn(shape) * 3 + 1).to(dtype).requires_grad_()
    weight, bias = parameters(kind, shape[-1], dtype)
    g = torch.randn(shape).to(dtype)
    y = normalize(x, weight, bias, kind, 1e-5, zero_centered)
    y.backward(g)
    given = wide(x), wide(weight), wide(bias)
    assert given[0] is not None
    expected = exact(kind, given[0], given[1], given[2], 1e-5, zero_centered)
    expected.backward(g.double())
    assert y.dtype == dtype
    assert_close("output", y, expected, ONE_ROUNDING[dtype])
    for name, got, want in zip(("x", "weight", "bias"), (x, weight, bias), given, strict=True):
        if got is not None:
            assert got.grad is not None and want is not None and got.grad.dtype == dtype
            if shape[-1] > 1 or name == "bias":  # a single feature is normalized to nothing: what is left is rounding
                assert_close(f"gradient of {name}", got.grad, want.grad, 2 * ONE_ROUNDING[dtype])


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_the_gradient_of_gamma_is_summed_in_float32(kind: str) -> None:
    # torch's LayerNorm is 5 % off here: its CPU kernel sums in bf16.
    x, g = (torch.randn(4096, 32).bfloat16() + 0.3 for _ in range(2))
    weight = torch.randn(32).bfloat16().requires_grad_()
    normalize(x, weight, None, kind).backward(g)
    given = weight.detach().double().requires_grad_()
    exact(kind, x.double(), given, None, 1e-5, False).backward(g.double())
    assert_close("gradient of gamma", weight.grad, given.grad, ONE_ROUNDING[torch.bfloat16])


@KINDS
@DTYPES
@pytest.mark.parametrize("which", ["x", "g", "both"])
def test_no_bit_depends_on_how_the_operands_lie(kind: str, dtype: torch.dtype, which: str) -> None:
    x, g = (torch.randn(3, 300, 24).to(dtype) * torch.logspace(-2, 2, 24).to(dtype) for _ in range(2))
    weight, bias = parameters(kind, 24, dtype)

    def outputs(laid_out: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = (x if which == "g" else laid_out(x)).detach().requires_grad_()
        y = normalize(leaf, weight, bias, kind)
        parts = [p for p in (leaf, weight, bias) if p is not None]
        return [y, *torch.autograd.grad(y, parts, g if which == "x" else laid_out(g))]

    expected = outputs(lambda t: t)
    for order in ((2, 0, 1), (1, 0, 2), (2, 1, 0)):
        back = [order.index(i) for i in range(3)]
        for one, other in zip(
            outputs(lambda t, o=order, b=back: t.permute(o).contiguous().permute(b)),  # type: ignore[misc]
            expected,
            strict=True,
        ):
            assert_bitwise(one, other)


@KINDS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_values_stay_in_their_row(kind: str, value: float) -> None:
    x = torch.randn(3, 16)
    x[1, 5] = value
    x[2] = 0
    y = normalize(x, None, None, kind)
    assert y[0].isfinite().all() and y[1].isnan().any()
    assert_bitwise(y[2], torch.zeros(16))


@KINDS
def test_an_outlier_and_subnormals(kind: str) -> None:
    x = torch.randn(4, 16)
    x[0, 3] = 1e18
    x[1] = 1e-40
    assert_close("output", normalize(x, None, None, kind), exact(kind, x.double(), None, None, 1e-5, False), 1e-6)


@DTYPES
def test_modules_equal_torchs(dtype: torch.dtype) -> None:
    x = torch.randn(6, 24).to(dtype)
    for ours, theirs in (
        (qt.LayerNorm(24, dtype=dtype), nn.LayerNorm(24, dtype=dtype)),
        (qt.RMSNorm(24, dtype=dtype), nn.RMSNorm(24, eps=1e-5, dtype=dtype)),
    ):
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.normal_()
        theirs.load_state_dict(ours.state_dict())
        assert_close(type(ours).__name__, ours(x), theirs(x), ONE_ROUNDING[dtype])


def test_only_the_input_is_saved() -> None:
    saved = []
    x = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        qt.RMSNorm(32, dtype=torch.bfloat16)(x)
    assert sum(t.numel() * t.element_size() for t in saved) == 64 * 32 * 2 + 64 * 4 + 32 * 2


def test_bad_input_gives_a_clear_error() -> None:
    with pytest.raises(ValueError, match="did you mean 'RMSNorm'"):
        NormKind("RMSnorm", 8)
    with pytest.raises(ValueError, match="its last axis must be 8"):
        qt.RMSNorm(8)(torch.randn(2, 7))


@pytest.mark.parametrize("transposed", [False, True], ids=["row by row", "transposed"])
def test_opaque_operators_say_their_shapes_and_strides(transposed: bool) -> None:
    """Norms of queries get inputs and gradients with heads and tokens transposed."""
    x, gamma = torch.randn(3, 4, 8, dtype=torch.bfloat16), torch.randn(8)
    if transposed:
        x = x.transpose(0, 1)
    for kind in NORMALIZATIONS:
        beta = gamma if kind == "LayerNorm" else None
        y, mean, factor = norm.NORMALIZE(x, gamma, beta, kind, 1e-5)
        checks = {"test_utils": ("test_schema", "test_faketensor")} if transposed else {}
        torch.library.opcheck(torch.ops.quaver.normalize, (x, gamma, beta, kind, 1e-5), **checks)
        y = y.transpose(0, 1).contiguous().transpose(0, 1) if transposed else y
        torch.library.opcheck(torch.ops.quaver.normalize_backward, (y, x, gamma, beta, mean, factor, kind), **checks)


@pytest.mark.parametrize("recipe", [None, "bf16", "tensorwise", "mxfp8"])
def test_a_layer_norm_without_a_bias_has_gradients(recipe: str | None) -> None:
    """Alone and before a projection, with the results of a zero bias."""
    x, g = torch.randn(5, 32), torch.randn(5, 16)
    grads = {}
    for norm_bias in (True, False):
        torch.manual_seed(0)
        layer = LayerNormLinear(32, 16, norm_bias=norm_bias, recipe=recipe)
        for module, of_y in ((layer, g), (layer.norm, torch.ones(5, 32))):
            leaf = x.clone().requires_grad_()
            module(leaf).backward(of_y)
            grads[norm_bias, module is layer] = leaf.grad
    for whole in (True, False):
        assert_close(f"{whole}", grads[False, whole], grads[True, whole], 0)


@KINDS
def test_float64_stays_float64(kind: str) -> None:
    x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    weight, bias = parameters(kind, 16, torch.float64)
    given = [t for t in (x, weight, bias) if t is not None]
    assert torch.autograd.gradcheck(lambda *_: normalize(x, weight, bias, kind), given)


def test_torch_func_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"no torch\.func"):
        torch.func.vmap(qt.LayerNorm(8))(torch.randn(2, 3, 8))
