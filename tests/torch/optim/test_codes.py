"""Optimizer states in torch are those of the reference in numpy, bit by bit, every spec and shape, on hard values."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from quaver.reference import optim
from quaver.reference.optimizer_state import CODES, StateSpec
from quaver.torch.optim import codes
from tests.states import KINDS, drawn, every_spec

#: Rows that end in a partial block.
RAGGED = (9, 200)
SHAPES = (RAGGED, (0, 5), (5, 0), (7,), (), (2, 64), (2, 3, 70))


def as_numpy(x: torch.Tensor) -> np.ndarray:
    return x.float().numpy() if x.dtype is torch.bfloat16 else x.numpy()


def values(x: np.ndarray) -> np.ndarray:
    """Convert bfloat16 bits to float32; return other arrays unchanged."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def assert_expanded(
    want: np.ndarray, want_scale: np.ndarray, want_values: np.ndarray, got: Tensor, scale: Tensor, values: Tensor
) -> None:
    """Logarithms may differ in the last bit, which changes block numbers by an ulp and 1 in 100,000 codes by one."""
    np.testing.assert_allclose(as_numpy(scale), want_scale, rtol=2e-7)
    difference = np.abs(as_numpy(got).astype(int) - want.astype(int))
    assert difference.max(initial=0) <= 1 and difference.sum() <= 1 + difference.size // 100_000
    assert as_numpy(got).shape == want.shape
    same = difference == 0
    np.testing.assert_allclose(as_numpy(values)[same], want_values[same], rtol=5e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", CODES)
def test_torch_writes_and_reads_the_same_codes_as_numpy(code: str, kind: str) -> None:
    rng = np.random.default_rng(0)
    # Normal values are tested in every shape, hard values in the shape with all kinds of blocks.
    shapes = SHAPES if kind == "normal" else (RAGGED,)
    for spec, shape in product((spec for spec in every_spec() if spec.code == code), shapes):
        x = drawn(kind, shape, rng)
        if not spec.of.signed:
            x = np.abs(x)
        noise = rng.integers(0, 2**15, shape).astype(np.int32)
        with np.errstate(all="ignore"):
            want, want_scale = optim.encode(x, spec, noise)
            want_values = optim.decode(want, want_scale, spec)
        got, scale = codes.encode(torch.tensor(x), spec, torch.tensor(noise) if spec.stochastic else None)
        assert got.dtype is codes.code_dtype(spec.of)
        if spec.of.kind == "expanded":
            assert scale is not None and want_scale is not None
            assert_expanded(want, want_scale, want_values, got, scale, codes.decode(got, scale, spec))
            continue
        np.testing.assert_array_equal(as_numpy(got), values(want), err_msg=f"{spec.text} {shape}")
        np.testing.assert_array_equal(as_numpy(codes.decode(got, scale, spec)), want_values, err_msg=spec.text)
        if scale is None:
            assert want_scale is None
        else:
            assert scale.shape == codes.scale_shape(shape, spec.block, spec.of.numbers)
            np.testing.assert_array_equal(as_numpy(scale), want_scale, err_msg=spec.text)


def test_a_spec_round_trips_through_its_text() -> None:
    for spec in every_spec():
        assert StateSpec.parse(spec.text) == spec


def test_e4m3_for_vectors_is_torchs_cast() -> None:
    """All codes except NaN."""
    every = torch.arange(256).to(torch.uint8)
    every = every[(every & 0x7F) != 0x7F]
    assert torch.equal(
        codes.e4m3_values(every).view(torch.int32), every.view(torch.float8_e4m3fn).float().view(torch.int32)
    )
