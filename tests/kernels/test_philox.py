"""The noise inside a kernel is that of the specification."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from quaver.kernels.numerics import noise_stream, philox
from quaver.reference import numerics
from quaver.torch.backends.gpu.launch import launcher
from tests.kernels.compare import DEVICE


@triton.jit
def stream(count, out, tensor_id, seed_low, seed_high):
    key, upper = noise_stream(tensor_id, tl.load(count), seed_low, seed_high)
    tl.store(out, key.to(tl.int32, bitcast=True))
    tl.store(out + 1, upper.to(tl.int32, bitcast=True))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 + 5], ids=hex)
@pytest.mark.parametrize("count", [0, 7, 2**32 + 9])
def test_the_stream_of_a_tensor_matches_the_specification(seed: int, count: int) -> None:
    tensor_id = 3_000_000_000
    out = torch.empty(2, dtype=torch.int32, device=DEVICE)
    tensors = torch.tensor([count], device=DEVICE), out
    words = [(word ^ 0x80000000) - 0x80000000 for word in (tensor_id, seed & 0xFFFFFFFF, seed >> 32)]
    launcher(stream, (1,), tensors, words, {})(*tensors)
    assert tuple(out.cpu().numpy().view(np.uint32).tolist()) == numerics.noise_stream(seed, tensor_id, count)


@triton.jit
def draw(counters, out, upper, key, N: tl.constexpr):
    i = tl.arange(0, N)
    words = philox(tl.load(counters + i), upper.to(tl.uint32), key.to(tl.uint32))
    for j in tl.static_range(2):
        tl.store(out + N * j + i, words[j].to(tl.int32, bitcast=True))


@pytest.mark.parametrize("upper, key", [(0, 0), (5, 2**32 - 1), (2**32 - 1, 3_000_000_000)])
def test_random_words_match_the_specification(upper: int, key: int) -> None:
    counters = np.array([0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 3], np.int64)
    low, high = counters.astype(np.uint64) & 0xFFFFFFFF, counters.astype(np.uint64) >> np.uint64(32)
    expected = numerics.philox2x32((low, high ^ np.uint64(upper)), key)
    out = torch.empty((2, 8), dtype=torch.int32, device=DEVICE)
    tensors = torch.from_numpy(counters).to(DEVICE), out
    numbers = [(word ^ 0x80000000) - 0x80000000 for word in (upper, key)]
    launcher(draw, (1,), tensors, numbers, {"N": 8})(*tensors)
    assert np.array_equal(out.cpu().numpy().view(np.uint32), expected.T)
