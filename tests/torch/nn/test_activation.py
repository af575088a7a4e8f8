"""Test activations: values and gradients against float64 for each table row, one rounding, only inputs saved."""

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.torch.nn import activation
from quaver.torch.nn.activation import ACTIVATIONS
from tests.close import assert_bitwise, assert_close
from tests.pairs import pairs

NAMES = pytest.mark.parametrize("name", ACTIVATIONS)
#: Relative RMS error of one rounding to the dtype.
ONE_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3, torch.float16: 3e-4}


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def gelu_exact(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.erf(x / 2**0.5))


def clamped(gate: Tensor, value: Tensor) -> Tensor:
    gate, value = gate.clamp(max=7.0), value.clamp(-7.0, 7.0)
    return gate * sigmoid(1.702 * gate) * (value + 1)


#: The formulas, for float64; for gated activations, the function of the gate.
EXACT = {
    "linear": lambda x: x,
    "gelu": gelu,
    "gelu_exact": gelu_exact,
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "relu": lambda x: x.clamp(min=0),
    "squared_relu": lambda x: x.clamp(min=0) ** 2,
    "silu": lambda x: x * sigmoid(x),
}
GATES = {"glu": sigmoid, "geglu": gelu, "geglu_exact": gelu_exact, "quick_geglu": EXACT["quick_gelu"]}
GATES |= {"reglu": EXACT["relu"], "squared_reglu": EXACT["squared_relu"], "swiglu": EXACT["silu"]}


def exact(name: str, *x: Tensor) -> Tensor:
    if name == "clamped_swiglu":
        return clamped(*x)
    return GATES[name](x[0]) * x[1] if name in GATES else EXACT[name](*x)


def test_the_formulas_cover_the_table() -> None:
    assert set(EXACT) | set(GATES) | {"clamped_swiglu"} == set(ACTIVATIONS)
    assert {name for name, row in ACTIVATIONS.items() if row.gated} == set(GATES) | {"clamped_swiglu"}


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "side_by_side"),
    pairs(ACTIVATIONS, ONE_ROUNDING, [(64, 32), (3, 5, 7), (0, 4)], [False, True]),
)
def test_values_and_gradients_are_float64s(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], side_by_side: bool
) -> None:
    n = ACTIVATIONS[name].inputs
    x = [(torch.randn(shape) * 4).to(dtype).requires_grad_() for _ in range(n)]
    g = torch.randn(shape).to(dtype)
    y = qt.activate(name, torch.cat(x, -1)) if side_by_side else qt.activate(name, *x)
    y.backward(g)
    wide = [a.detach().double().requires_grad_() for a in x]
    expected = exact(name, *wide)
    expected.backward(g.double())
    assert y.dtype == dtype and y.shape == shape
    assert_close("output", y, expected, ONE_ROUNDING[dtype])
    for i, (got, want) in enumerate(zip(x, wide, strict=True)):
        assert got.grad is not None and got.grad.dtype == dtype
        assert_close(f"gradient {i}", got.grad, want.grad, 2 * ONE_ROUNDING[dtype])


@NAMES
def test_edge_case_values(name: str) -> None:
    values = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e4, -1e4, 88.8, -88.8, float("nan")])
    x = [values.clone().requires_grad_()] + [torch.ones(9, requires_grad=True)] * (ACTIVATIONS[name].inputs - 1)
    y = qt.activate(name, *x)
    y.sum().backward()
    assert y[-1].isnan() and y[:-1].isfinite().all()
    assert x[0].grad is not None and x[0].grad[:-1].isfinite().all()
    assert_close("output", y, exact(name, *(a.detach().double() for a in x)), 1e-6)


@NAMES
def test_only_the_inputs_are_saved(name: str) -> None:
    n, saved = ACTIVATIONS[name].inputs, []
    x = torch.randn(16, 8 * n, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        qt.activate(name, x)
    assert sum(t.numel() * t.element_size() for t in saved) <= x.numel() * 2


@NAMES
@pytest.mark.parametrize("side_by_side", [False, True])
def test_block_by_block_gives_the_bits_of_the_whole(
    name: str, side_by_side: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ACTIVATIONS[name]
    both = torch.randn(3, 7, 10 * row.inputs).bfloat16()
    x = [both] if side_by_side or not row.gated else list(both.chunk(2, -1))
    g = torch.randn(3, 7, 10).bfloat16()
    options = tuple(row.options.values())
    whole = activation.ACTIVATE(name, options, x), *activation.ACTIVATE_BACKWARD(name, options, g, x)
    monkeypatch.setattr(activation, "BLOCK", 40)
    blocks = activation.ACTIVATE(name, options, x), *activation.ACTIVATE_BACKWARD(name, options, g, x)
    for a, b in zip(blocks, whole, strict=True):
        assert_bitwise(a, b)


def test_options_reach_the_function() -> None:
    gate, value = torch.full((4,), 5.0), torch.full((4,), 9.0)
    narrow = qt.activate("clamped_swiglu", gate, value, limit=1.0)
    assert_close("limit", narrow, torch.full((4,), 2 * float(sigmoid(torch.tensor(1.702)))), 1e-6)


def test_bad_input_gives_a_clear_error() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="did you mean 'swiglu'"):
        qt.activate("swigluu", x)
    with pytest.raises(ValueError, match="takes gate and value of one shape"):
        qt.activate("swiglu", x, torch.randn(3, 5))
    with pytest.raises(ValueError, match="an even width"):
        qt.activate("swiglu", torch.randn(3, 5))
    with pytest.raises(ValueError, match="takes one tensor"):
        qt.activate("gelu", x, x)
    with pytest.raises(ValueError, match="has no option 'limits'; did you mean 'limit'"):
        qt.activate("clamped_swiglu", x, x, limits=3.0)


@pytest.mark.parametrize("name", ["swiglu", "quick_gelu"])
def test_a_second_derivative_is_refused(name: str) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(qt.activate(name, x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


@NAMES
def test_opaque_operators_say_their_shapes_and_strides(name: str) -> None:
    row = ACTIVATIONS[name]
    options = list(activation.option_values(name, {}))
    # Tracing is checked for one activation of each kind: ungated, gated, and with options.
    traced = name in ("gelu", "swiglu", "clamped_swiglu")
    plain = torch.randn(3, 8, dtype=torch.bfloat16)
    transposed = torch.randn(8, 3, dtype=torch.bfloat16).t()
    for x in ([plain] * row.inputs, [plain], [transposed] * row.inputs):
        checks = {} if traced and x[0] is plain else {"test_utils": ("test_schema", "test_faketensor")}
        y = activation.ACTIVATE(name, options, x)
        torch.library.opcheck(torch.ops.quaver.activate, (name, options, x), **checks)
        torch.library.opcheck(torch.ops.quaver.activate_backward, (name, options, torch.ones_like(y), x), **checks)


@NAMES
def test_float64_stays_float64(name: str) -> None:
    x = [(torch.randn(4, 6, dtype=torch.float64) * 3).requires_grad_() for _ in range(ACTIVATIONS[name].inputs)]
    assert torch.autograd.gradcheck(lambda *_: qt.activate(name, *x), x)
