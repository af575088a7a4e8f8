"""A compiled launch is valid for every later call with the same key, for any tensor addresses and strides."""

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
#: Copies a tensor into another memory layout: aligned to 16 bytes, misaligned, or with gaps between rows.
Layout = Callable[[Tensor], Tensor]


def misaligned(x: Tensor) -> Tensor:
    buffer = torch.zeros(x.numel() + 16, dtype=x.dtype)
    return buffer[1 : x.numel() + 1].view(x.shape).copy_(x)


def strided(x: Tensor, by: int = 16, first: int = 0) -> Tensor:
    buffer = torch.zeros((*x.shape[:-1], x.shape[-1] + by), dtype=x.dtype)
    buffer[..., first : first + x.shape[-1]] = x
    return buffer[..., first : first + x.shape[-1]]


LAYOUTS: list[Layout] = [torch.clone, misaligned, strided, lambda x: strided(x, 16, 1), lambda x: strided(x, 3)]


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
def test_quantize_launches_accept_every_layout(name: str, driver: Driver) -> None:
    spec = SPECS[name]
    for layout in LAYOUTS:
        x = layout(matrix())
        quantize.quantize(x, spec)
        quantize.quantize(x.t(), spec)
        quantize.quantize_both(x, spec, spec)
        if spec.per_tensor:
            quantize.quantize(x, spec, None, torch.ones(3)[1:2], newest=torch.zeros(3)[2:])
        elif not spec.two_level and not spec.hadamard:
            q = reference.quantize(matrix(), spec)
            quantize.quantize(x, spec, layout(q.scales()) if q.scales().dim() == 2 else None)
    assert driver.launched


@pytest.mark.parametrize("name", READ)
def test_decode_launches_accept_every_layout(name: str, driver: Driver) -> None:
    q = reference.quantize(matrix(), SPECS[name])
    codes, scale = q.data, q.scale
    for layout in LAYOUTS:
        q.data = layout(codes.view(torch.uint8)).view(codes.dtype)
        q.scale = layout(scale) if isinstance(scale, Tensor) else scale
        decode(q, torch.float32)
    assert driver.launched


@pytest.mark.parametrize("kind", norm.CENTRED)
def test_norm_launches_accept_every_layout(kind: str, driver: Driver) -> None:
    for layout in LAYOUTS:
        for grad_layout in LAYOUTS:
            x, g, (gamma, beta) = layout(matrix()), grad_layout(matrix()), layout(torch.randn(2, COLUMNS))
            beta = beta if kind == "LayerNorm" else None
            gamma = None if kind == "L2" else gamma
            _, mean, inverse = norm.forward(x, gamma, beta, kind, 1e-5)
            norm.backward(g, x, gamma, beta, mean, inverse, kind)
    assert driver.launched


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_activation_launches_accept_every_layout(name: str, driver: Driver) -> None:
    for layout in LAYOUTS:
        for grad_layout in LAYOUTS:
            x = [layout(matrix())]
            activation.forward(name, (), x)
            wide = COLUMNS // 2 if name == "swiglu" else COLUMNS
            activation.backward(name, (), grad_layout(matrix()[:, :wide]), x)
            if name == "swiglu":
                activation.backward(name, (), grad_layout(matrix()), [layout(matrix()), grad_layout(matrix())])
    assert driver.launched


def test_rope_sum_and_cross_entropy_launches_accept_every_layout(driver: Driver) -> None:
    angles = torch.randn(1, ROWS, 1, 16)
    for layout in LAYOUTS:
        for grad_layout in LAYOUTS:
            q, k, (cos, sin) = (
                layout(matrix().view(1, ROWS, 4, 16)),
                grad_layout(matrix().view(1, ROWS, 4, 16)),
                grad_layout(torch.stack([angles, angles])),
            )
            if not norm.reason(q, k, cos, sin):
                norm.turn(q, k, cos, sin, False, False)
            cross_entropy.column_sum(layout(matrix()), torch.float32)
            targets, weights = grad_layout(torch.zeros(ROWS, dtype=torch.int64)), layout(torch.ones(ROWS))
            cross_entropy.rows(layout(matrix()), targets, weights, True, (-100, 0.0, 0.0, 0.0))
    assert driver.launched
