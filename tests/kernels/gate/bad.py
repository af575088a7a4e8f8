"""Kernels that break the rules, so that a test sees each rule fire.

Their figures on sm_89 and sm_90 are in measured.json. `python -m tests.kernels.gate.bad` compiles them and prints,
as JSON, the rules that each breaks.
"""

import os

if __name__ == "__main__":
    # Triton decides whether it interprets when a kernel is defined.
    os.environ.pop("TRITON_INTERPRET", None)

import json
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from quaver.kernels.tensorwise import amax
from quaver.torch.backends.gpu.launch import KernelLaunch, describe
from tests.kernels.cases import Case
from tests.kernels.gate.keys import key
from tests.kernels.gate.machine_code import Code, compiled, read
from tests.kernels.gate.measured import Measured, code
from tests.kernels.gate.record import Recorded
from tests.kernels.gate.rules import RULES

ARCHITECTURES = 89, 90
#: The row that these launches belong to, which is not in cases.py.
ROW = "planted"


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
    """Kernel with rows at a distance not known to be a multiple of 16."""
    at = tl.arange(0, BM)[:, None] * stride + tl.arange(0, BN)[None, :]
    tl.store(out + at, tl.load(x + at))


@triton.jit
def turns(x, out, stride, out_stride, BM: tl.constexpr, BN: tl.constexpr):
    """A transpose of so large a block that one program's takes more than half of the shared memory."""
    r, c = tl.arange(0, BM), tl.arange(0, BN)
    v = tl.load(x + r[:, None] * stride + c[None, :])
    tl.store(out + c[:, None] * out_stride + r[None, :], tl.trans(v))


@triton.jit
def grinds(x, out, ROUNDS: tl.constexpr, N: tl.constexpr):
    """More arithmetic than memory has time for."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    v = tl.load(x + at)
    for _ in tl.static_range(ROUNDS):
        v = v * v - 1.0
    tl.store(out + at, v)


@triton.jit
def goes_round(x, out, rounds, N: tl.constexpr):
    """Kernel with a loop whose row has no iteration count."""
    for i in range(rounds):
        at = (tl.program_id(0) * rounds + i) * N + tl.arange(0, N)
        tl.store(out + at, tl.load(x + at) + 1.0)


def data(dtype: torch.dtype, side: int = 512) -> Tensor:
    return torch.empty(side, side, dtype=dtype, device="meta")


def launches() -> dict[str, KernelLaunch]:
    """By name."""
    one, codes, bf16, float32 = (1, 1, 1), data(torch.uint8), data(torch.bfloat16), data(torch.float32)
    block = {"BM": 64, "BN": 64}
    fp8, words, wide = data(torch.float8_e5m2), data(torch.int32), data(torch.float32, 2048)
    narrow = {"BM": 2048, "BN": 8}
    return {
        "turns bytes": describe(turns_bytes, one, (codes, codes), (1024, 1024), block, 4),
        "clamps": describe(clamps, one, (float32, fp8), (1024, 1024), block, 4),
        "holds too much": describe(holds_too_much, one, (bf16, bf16), (), {"N": 32768}, 4),
        "casts": describe(casts, one, (float32, data(torch.float8_e4m3fn)), (), {"N": 2048}, 4),
        "strides of 1023": describe(copies, one, (bf16, bf16), (1023,), block, 4),
        "strides of 1024": describe(copies, one, (bf16, bf16), (1024,), block, 4),
        # A program reads or writes half of each sector of 32 bytes.
        "half of a sector read": describe(
            amax, one, (bf16, float32, words), (8192, 4096, 4096, 1), {**narrow, "EVEN": True, "TALL": False}, 4
        ),
        "half of a sector written": describe(copies, one, (bf16, bf16), (1024,), narrow, 4),
        "one program": describe(turns, one, (float32, float32), (1024, 1024), {"BM": 128, "BN": 256}, 8),
        "grinds": describe(grinds, (4096, 1, 1), (wide, wide), (), {"ROUNDS": 64, "N": 1024}, 4),
        "goes round": describe(goes_round, (64, 1, 1), (wide, wide), (64,), {"N": 1024}, 4),
    }


def recorded() -> list[Recorded]:
    """The same as launches of one row."""
    row = Case(name=ROW, launch=lambda: None)
    return [Recorded(row, f"{ROW}: {name}", launch) for name, launch in launches().items()]


def known(stored: Measured) -> dict[int, dict[str, Code]]:
    """By architecture and name, the code figures in measured.json of the kernels that did not change since."""
    planted = recorded()
    current = {arch: stored.current({one.name: key(one, arch) for one in planted}, arch) for arch in ARCHITECTURES}
    return {
        arch: {name: code(codes_of_arch, arch) for name, codes_of_arch in figures.items()}
        for arch, figures in current.items()
    }


def fresh() -> dict[int, dict[str, Code]]:
    """Compile all of them, and return the same."""
    planted = recorded()
    codes = {arch: read([compiled(one.launch, arch) for one in planted], arch) for arch in ARCHITECTURES}
    return {
        arch: {one.name: code for one, code in zip(planted, codes_of_arch, strict=True)}
        for arch, codes_of_arch in codes.items()
    }


def broken(codes: Mapping[int, Mapping[str, Code]]) -> dict[str, dict[str, list[str]]]:
    """By kernel and architecture, the rules that it breaks."""
    return {
        one.kernel: {
            str(arch): [rule for rule, offence in RULES.items() if offence(codes_of_arch[one.name], one)]
            for arch, codes_of_arch in codes.items()
        }
        for one in recorded()
    }


if __name__ == "__main__":
    print(json.dumps(broken(fresh())))
