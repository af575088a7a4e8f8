"""The rotation inside a kernel equals the specification's, bit for bit."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from quaver.kernels.numerics import NEGATIVE, rotate
from quaver.reference.numerics import SIGNS
from quaver.reference.numerics import rotate as specified
from quaver.torch.backends.gpu.launch import launcher
from tests.kernels.compare import DEVICE
from tests.operands import nasty


@triton.jit
def turn(x, out, GROUPS: tl.constexpr):
    g = tl.arange(0, GROUPS)
    v = ()
    for j in tl.static_range(16):
        v += (tl.load(x + 16 * g + j),)
    v = rotate(v)
    for j in tl.static_range(16):
        tl.store(out + 16 * g + j, v[j])


def test_signs_are_the_specifications() -> None:
    assert tuple(-1 if NEGATIVE.value >> j & 1 else 1 for j in range(16)) == SIGNS


@pytest.mark.parametrize("name", nasty((8, 64)))
def test_rotation_equals_the_specification(name: str) -> None:
    x = nasty((8, 64))[name]
    out = torch.empty((8, 64), device=DEVICE)
    tensors = torch.from_numpy(x).to(DEVICE), out
    launcher(turn, (1,), tensors, (), {"GROUPS": 32})(*tensors)
    expected, rotated = specified(x), out.cpu().numpy()
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(rotated), nan)
    assert np.array_equal(rotated[~nan].view(np.int32), expected[~nan].view(np.int32))
