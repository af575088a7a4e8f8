"""Rounding to FP8 by the bits, as on sm_89, equals the reference for every value that could be told apart."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from quaver import E4M3, E5M2, Format
from quaver.core.rounding import magnitudes
from quaver.kernels.numbers import encode, widened
from quaver.torch.gpu import interpreter
from quaver.torch.gpu.codes import DTYPES
from quaver.torch.quantized import STORAGE
from tests.kernels.compare import DEVICE


@triton.jit
def encoded(x, q, BLOCK: tl.constexpr, dtype: tl.constexpr, INTEGERS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(q + at, encode(widened(tl.load(x + at)), dtype, INTEGERS))


def telling(fmt: Format) -> Tensor:
    """Every bf16; every value of the format and halfway between two, and a float32 and a half to each side."""
    values = np.append(magnitudes(fmt), np.float32(2 * fmt.max)).astype(np.float32)
    middles = (values[1:] + values[:-1]) / 2
    points = np.concatenate([values, middles, [1e-10, 2.0**-14, 65504, 65520, 1e30]]).astype(np.float32)
    bits = points.view(np.int32)[:, None] + np.array([-8192, -4096, -1, 0, 1, 4095, 4096, 8192], np.int32)
    near = torch.from_numpy(bits.astype(np.int32).reshape(-1)).view(torch.float32)
    bf16 = (torch.arange(65536, dtype=torch.int32) << 16).view(torch.float32)
    noise = torch.randn(40000) * 2.0 ** torch.randint(-20, 18, (40000,))
    odd = torch.tensor([0x7F800001, 0x7FC00000, 0x7F800000], dtype=torch.int32).view(torch.float32)
    every = torch.cat([near, -near, bf16, noise, odd, -odd])
    return torch.nn.functional.pad(every, (0, -len(every) % 4096))


@pytest.mark.parametrize("integers", [True, False], ids=["by bits", "by a cast"])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_every_telling_value_rounds_to_nearest_even_and_saturates(fmt: Format, integers: bool) -> None:
    interpreter.mend()
    x = telling(fmt).to(DEVICE)
    q = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    with np.errstate(all="ignore"):
        encoded[(len(x) // 4096,)](x, q, 4096, DTYPES[fmt.name], integers)
    held = torch.where(x.isnan(), x, x.clamp(-fmt.max, fmt.max))
    expected = held.to(STORAGE[fmt.name])
    found = q.view(STORAGE[fmt.name])
    assert torch.equal(found.isnan(), expected.isnan())
    differs = (q != expected.view(torch.uint8)) & ~expected.isnan()
    assert not differs.any(), (x[differs][0].item(), q[differs][0].item())
