"""Kernels that do what the rules forbid, so that a test sees each rule fire: `python -m tests.kernels.gate.bad`.

Prints, as JSON, the rules that each breaks on sm_89 and sm_90.
"""

import os

os.environ.pop("TRITON_INTERPRET", None)

import json

import torch
import triton
import triton.language as tl
from torch import Tensor

from quaver.torch.backends.gpu.launching.launch import Launch, describe
from tests.kernels.gate.machine_code import compiled, read
from tests.kernels.gate.rules import RULES

ARCHITECTURES = 89, 90


@triton.jit
def turns_bytes(x, out, stride, out_stride, BM: tl.constexpr, BN: tl.constexpr):
    """A transpose of single bytes, which pass through shared memory one by one."""
    r = tl.program_id(1) * BM + tl.arange(0, BM)
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    v = tl.load(x + r[:, None].to(tl.int64) * stride + c[None, :])
    tl.store(out + c[:, None].to(tl.int64) * out_stride + r[None, :], tl.trans(v))


@triton.jit
def clamps(x, out, stride, out_stride, BM: tl.constexpr, BN: tl.constexpr):
    """A transposed cast to FP8 of what was clamped, NaN passed on."""
    r = tl.program_id(1) * BM + tl.arange(0, BM)
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    v = tl.load(x + r[:, None].to(tl.int64) * stride + c[None, :])
    v = tl.maximum(v, -448.0, propagate_nan=tl.PropagateNan.ALL).to(out.dtype.element_ty)
    tl.store(out + c[:, None].to(tl.int64) * out_stride + r[None, :], tl.trans(v))


@triton.jit
def holds_too_much(x, out, N: tl.constexpr):
    """A softmax over more elements than four warps have registers for."""
    at = tl.arange(0, N)
    v = tl.load(x + at).to(tl.float32)
    v = tl.exp(v - tl.max(v, 0))
    tl.store(out + at, (v / tl.sum(v, 0)).to(tl.bfloat16))


@triton.jit
def casts(x, out, N: tl.constexpr):
    """float32 to FP8 by the compiler's own cast."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def copies(x, out, stride, BM: tl.constexpr, BN: tl.constexpr):
    """Rows whose distance nobody knows to be a multiple of 16."""
    at = tl.arange(0, BM)[:, None] * stride + tl.arange(0, BN)[None, :]
    tl.store(out + at, tl.load(x + at))


def data(dtype: torch.dtype) -> Tensor:
    return torch.empty(1024, 1024, dtype=dtype, device="meta")


def launches() -> dict[str, Launch]:
    """By name."""
    one, codes, bf16, float32 = (1, 1, 1), data(torch.uint8), data(torch.bfloat16), data(torch.float32)
    block = {"BM": 64, "BN": 64}
    fp8 = data(torch.float8_e5m2)
    return {
        "turns bytes": describe(turns_bytes, one, (codes, codes), (1024, 1024), block, 4),
        "clamps": describe(clamps, one, (float32, fp8), (1024, 1024), block, 4),
        "holds too much": describe(holds_too_much, one, (bf16, bf16), (), {"N": 32768}, 4),
        "casts": describe(casts, one, (float32, data(torch.float8_e4m3fn)), (), {"N": 2048}, 4),
        "strides of 1023": describe(copies, one, (bf16, bf16), (1023,), block, 4),
        "strides of 1024": describe(copies, one, (bf16, bf16), (1024,), block, 4),
    }


def broken(named: dict[str, Launch], arch: int) -> dict[str, list[str]]:
    """By the name of a launch, the rules that it breaks."""
    codes = read([compiled(launch, arch) for launch in named.values()], arch)
    return {
        name: [rule for rule, offence in RULES.items() if offence(code, launch)]
        for (name, launch), code in zip(named.items(), codes, strict=True)
    }


if __name__ == "__main__":
    named = launches()
    by_arch = {arch: broken(named, arch) for arch in ARCHITECTURES}
    by_name = {name: {arch: rules[name] for arch, rules in by_arch.items()} for name in named}
    print(json.dumps({"triton": triton.__version__, "broken": by_name}))
