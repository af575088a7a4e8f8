"""Test that a compiled launch is valid for every call that finds it in the table, for any tensor addresses."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from quaver.torch.backends.gpu import activation, cross_entropy, norm, quantize
from quaver.torch.backends.gpu.decode import decode
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import FLOAT8
from tests.operands import SPECS
from tests.torch.backends.gpu.pretend import Driver, as_on_a_gpu, become

ROWS, COLUMNS = 32, 64
#: The same values: from a multiple of 16 bytes on, beyond one, rows apart, and rows apart beyond one.
Lying = Callable[[Tensor], Tensor]


def beyond(x: Tensor) -> Tensor:
    buffer = torch.zeros(x.numel() + 16, dtype=x.dtype)
    return buffer[1 : x.numel() + 1].view(x.shape).copy_(x)


def apart(x: Tensor, by: int = 16, first: int = 0) -> Tensor:
    buffer = torch.zeros((*x.shape[:-1], x.shape[-1] + by), dtype=x.dtype)
    buffer[..., first : first + x.shape[-1]] = x
    return buffer[..., first : first + x.shape[-1]]


LYING: list[Lying] = [torch.clone, beyond, apart, lambda x: apart(x, 16, 1), lambda x: apart(x, 3)]


@pytest.fixture(params=[90, 100])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    with as_on_a_gpu(monkeypatch):
        become(request.param, monkeypatch)
        yield Driver(monkeypatch, runs=False)


def matrix() -> Tensor:
    return torch.randn(ROWS, COLUMNS).bfloat16()


#: Formats that a kernel writes, and formats that one reads.
WRITTEN = [name for name, spec in SPECS.items() if spec.format.name in FLOAT8 or spec.two_level]
READ = [name for name, spec in SPECS.items() if spec.format.name in FLOAT8 or spec.format.packed]


@pytest.mark.parametrize("name", WRITTEN)
def test_of_quantize(name: str, driver: Driver) -> None:
    spec = SPECS[name]
    for lie in LYING:
        x = lie(matrix())
        quantize.quantize(x, spec)
        quantize.quantize(x.t(), spec)
        quantize.quantize_both(x, spec, spec)
        if spec.per_tensor:
            quantize.quantize(x, spec, None, torch.ones(3)[1:2], newest=torch.zeros(3)[2:])
        elif not spec.two_level and not spec.hadamard:
            q = reference.quantize(matrix(), spec)
            quantize.quantize(x, spec, lie(q.scales()) if q.scales().dim() == 2 else None)
    assert driver.launched


@pytest.mark.parametrize("name", READ)
def test_of_decode(name: str, driver: Driver) -> None:
    q = reference.quantize(matrix(), SPECS[name])
    codes, scale = q.data, q.scale
    for lie in LYING:
        q.data = lie(codes.view(torch.uint8)).view(codes.dtype)
        q.scale = lie(scale) if isinstance(scale, Tensor) else scale
        decode(q, torch.float32)
    assert driver.launched


@pytest.mark.parametrize("kind", norm.CENTRED)
def test_of_norms(kind: str, driver: Driver) -> None:
    for lie in LYING:
        for wise in LYING:
            x, g, (gamma, beta) = lie(matrix()), wise(matrix()), lie(torch.randn(2, COLUMNS))
            beta = beta if kind == "LayerNorm" else None
            gamma = None if kind == "L2" else gamma
            _, mean, inverse = norm.forward(x, gamma, beta, kind, 1e-5)
            norm.backward(g, x, gamma, beta, mean, inverse, kind)
    assert driver.launched


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_of_activations(name: str, driver: Driver) -> None:
    for lie in LYING:
        for wise in LYING:
            x = [lie(matrix())]
            activation.forward(name, (), x)
            wide = COLUMNS // 2 if name == "swiglu" else COLUMNS
            activation.backward(name, (), wise(matrix()[:, :wide]), x)
            if name == "swiglu":
                activation.backward(name, (), wise(matrix()), [lie(matrix()), wise(matrix())])
    assert driver.launched


def test_of_rope_and_sums_and_cross_entropy(driver: Driver) -> None:
    angles = torch.randn(1, ROWS, 1, 16)
    for lie in LYING:
        for wise in LYING:
            q, k, (cos, sin) = (
                lie(matrix().view(1, ROWS, 4, 16)),
                wise(matrix().view(1, ROWS, 4, 16)),
                wise(torch.stack([angles, angles])),
            )
            if not norm.reason(q, k, cos, sin):
                norm.turn(q, k, cos, sin, False, False)
            cross_entropy.column_sum(lie(matrix()), torch.float32)
            targets, weights = wise(torch.zeros(ROWS, dtype=torch.int64)), lie(torch.ones(ROWS))
            cross_entropy.rows(lie(matrix()), targets, weights, True, (-100, 0.0, 0.0, 0.0))
    assert driver.launched
