"""Codes of optimizer states in a kernel have the bits of the reference."""

import numpy as np
import pytest
import torch

from quaver.reference import optim
from quaver.reference.optimizer_state import StateSpec
from quaver.torch.backends.gpu import interpreter
from tests.kernels.compare import DEVICE
from tests.kernels.optim import roundtrip
from tests.states import KINDS, drawn

ROWS, BLOCK = 64, 64


@pytest.mark.parametrize("text", roundtrip.SPECS)
def test_a_kernel_writes_and_reads_the_same_codes_as_numpy(text: str) -> None:
    interpreter.install_fixes()
    spec = StateSpec.parse(text)
    rng = np.random.default_rng(0)
    for kind in KINDS:
        x = drawn(kind, (ROWS, BLOCK), rng)
        x[:4] = [np.zeros(BLOCK), np.full(BLOCK, -0.0), np.full(BLOCK, 3.0), np.arange(BLOCK) == 5]
        x = x if spec.of.signed else np.abs(x)
        noise = (rng.integers(0, 2**15, x.shape) * (rng.random(x.shape) < 0.9)).astype(np.int32)
        compare(spec, x, noise)


@pytest.mark.parametrize("text", [text for text in roundtrip.SPECS if "bfloat16" not in text])
def test_values_around_every_code_and_midpoint(text: str) -> None:
    """Each value, each middle, and their neighbours."""
    interpreter.install_fixes()
    spec = StateSpec.parse(text)
    every = np.arange(256).astype(np.uint8)
    signed = spec.of.signed and spec.of.kind != "format"
    values = np.unique(np.abs(optim.table_values(every.view(np.int8) if signed else every, spec.of)))
    values = values[np.isfinite(values)].astype(np.float64) / spec.of.largest
    # The map is linear between values: the middles of values are those of codes.
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    near = (points.view(np.int32)[:, None] + np.arange(-12, 13, dtype=np.int32)).ravel()
    near = near[(near >= 0) & (near < 0x3F800000)].view(np.float32)
    rng = np.random.default_rng(0)
    for scale in (1.0, 3.0, 2.0**-100 * 1.7):
        x = np.zeros((-(-len(near) // (BLOCK - 1)), BLOCK), np.float32)
        x[:, 0] = scale
        x[:, 1:].flat[: len(near)] = near * np.float32(scale)
        x = np.pad(x, ((0, -len(x) % ROWS), (0, 0)))
        for extreme in (0, 2**15 - 1):
            noise = np.where(rng.random(x.shape) < 0.8, extreme, rng.integers(0, 2**15, x.shape)).astype(np.int32)
            signs = rng.choice(np.float32([-1, 1] if spec.of.signed else [1]), x.shape)
            compare(spec, x * signs, noise)


def test_every_scale_has_its_inverse() -> None:
    interpreter.install_fixes()
    bits = torch.arange(0, 0x7F81, dtype=torch.int32).to(DEVICE) << 16
    bits = torch.nn.functional.pad(bits, (0, -len(bits) % 1024))
    inverse, least = torch.empty(len(bits), device=DEVICE), torch.empty_like(bits)
    roundtrip.inverses[(len(bits) // 1024,)](bits, inverse, least)
    usable = (bits >= 0x00800000) & (bits <= 0x7E800000)
    scale = torch.where(usable, bits, 0x3F800000).view(torch.float32)
    assert torch.equal(inverse, torch.where(usable, 1 / scale, 0.0))
    assert torch.equal(least, usable.int())


def compare(spec: StateSpec, x: np.ndarray, noise: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        want, want_scale = optim.encode(x, spec, noise)
        want_values = optim.decode(want, want_scale, spec)
    codes, scale, values = roundtrip.run(torch.from_numpy(x).to(DEVICE), torch.from_numpy(noise).to(DEVICE), spec)
    differs = codes != want
    at = tuple(np.argwhere(differs)[0]) if differs.any() else ()
    assert not differs.any(), (
        f"{spec.text}: {x[at]!r} by {noise[at]} is {codes[at]}, not {want[at]}; {differs.sum()} such"
    )
    if want_scale is not None:
        np.testing.assert_array_equal(scale, want_scale.ravel())
    np.testing.assert_array_equal(values, want_values)
