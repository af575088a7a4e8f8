"""A kernel that writes and reads a state by `quaver.kernels.optim.codes`, blocks of 64, several a program.

Run as a program it compiles for every architecture and prints the figures as JSON: Triton compiles only where it does
not interpret.
"""

import json
import re
import sys
from itertools import product
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quaver.kernels.optim import codes as written
from quaver.reference.optimizer_state import StateSpec
from tests.kernels.gate import machine_code

#: Formats that a kernel can write, and their numbers there.
SPECS = {
    "int8_mitchell/64": 0,
    "uint8_mitchell4/64 floor": 1,
    "uint8_mitchell4/64 stochastic floor": 2,
    "bfloat16 stochastic": 3,
    "int8_mitchell/64 stochastic": 4,
}


@triton.jit
def encoded(x, inverse, least, noise, CODE: tl.constexpr):
    if CODE == 0 or CODE == 4:
        c = written.encode_mitchell(x, inverse, least, noise, 1, True, CODE == 4)
    else:
        c = written.encode_mitchell(x, inverse, least, noise, 2, False, CODE == 2)
    return c


@triton.jit
def values(c, CODE: tl.constexpr):
    return written.decode_mitchell(c, 1 if CODE == 0 or CODE == 4 else 2)


@triton.jit
def write(
    x,
    noise,
    q,
    scales,
    ROWS: tl.constexpr,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
    SIGNED: tl.constexpr,
    NOISY: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.expand_dims(row, 1) * 64 + tl.expand_dims(tl.arange(0, 64), 0)
    a = tl.load(x + at)  # [ROWS, 64]
    u = tl.load(noise + at) if NOISY else 0
    if CODE == 3:
        tl.store(q + at, written.bfloat16_at_random(a, u))
    else:
        scale = written.scale_of(written.block_amax(a, SIGNED), LARGEST)
        inverse, least = written.inverse_of(scale)
        tl.store(q + at, encoded(a, inverse, least, u, CODE))
        tl.store(scales + row, (scale >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))


@triton.jit
def read(q, scales, x, ROWS: tl.constexpr, CODE: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.expand_dims(row, 1) * 64 + tl.expand_dims(tl.arange(0, 64), 0)
    if CODE == 3:
        tl.store(x + at, tl.load(q + at).to(tl.float32))
    else:
        scale = tl.load(scales + row).to(tl.float32)
        tl.store(x + at, values(tl.load(q + at), CODE) * tl.expand_dims(scale, 1))


@triton.jit
def inverses(scale, inverse, least):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    e, one = written.inverse_of(tl.load(scale + at))
    tl.store(inverse + at, tl.reshape(e, [1024]))
    tl.store(least + at, tl.reshape(one, [1024]))


def dtype_of(spec: StateSpec) -> torch.dtype:
    if spec.code == "bfloat16":
        return torch.bfloat16
    return torch.int8 if spec.code.startswith("int8") else torch.uint8


def run(x: Tensor, noise: Tensor, spec: StateSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (bfloat16's as their bits), scales and values of float32 x [R, 64], R a multiple of 16."""
    code, rows = SPECS[spec.text], 16
    q, scales = torch.empty(x.shape, dtype=dtype_of(spec), device=x.device), torch.empty(len(x), dtype=torch.bfloat16)
    scales, out = scales.to(x.device), torch.empty_like(x)
    grid = (len(x) // rows,)
    with np.errstate(all="ignore"):
        write[grid](
            x,
            noise,
            q,
            scales,
            rows,
            code,
            spec.of.largest,
            spec.of.signed,
            spec.stochastic,
            enable_fp_fusion=False,
        )
        read[grid](q, scales, out, rows, code, enable_fp_fusion=False)
    bits = q.view(torch.uint16) if q.dtype is torch.bfloat16 else q
    return bits.cpu().numpy(), scales.float().cpu().numpy(), out.cpu().numpy()


def compiled(spec: StateSpec, arch: int) -> list[Any]:
    """Both kernels for sm_`arch`, compiled as the library compiles: a product and a sum are two roundings."""
    # Ada rounds on the bits, and Ampere has no FP8 at all.
    code = SPECS[spec.text]
    q = {torch.int8: "*i8", torch.uint8: "*u8", torch.bfloat16: "*bf16"}[dtype_of(spec)]
    numbers = {"ROWS": 16, "CODE": code}
    more = {"LARGEST": spec.of.largest, "SIGNED": spec.of.signed, "NOISY": spec.stochastic}
    kernels = []
    for fn, given, constants in (
        (write, {"x": "*fp32", "noise": "*i32", "q": q, "scales": "*bf16"}, numbers | more),
        (read, {"q": q, "scales": "*bf16", "x": "*fp32"}, numbers),
    ):
        signature = given | dict.fromkeys(constants, "constexpr")
        attrs = {(i,): [["tt.divisibility", 16]] for i in range(len(given))}
        source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attrs)
        options = {"num_warps": 4, "enable_fp_fusion": False}
        kernels.append(triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options))
    return kernels


if __name__ == "__main__":
    rows = []
    for arch, text in product(map(int, sys.argv[1].split(",")), sys.argv[2:] or SPECS):
        both = compiled(StateSpec.parse(text), arch)
        for kernel, code in zip(both, machine_code.read(both, arch), strict=True):
            ptx = kernel.asm["ptx"]
            # Blackwell has an instruction for two at a time.
            fused = sum(2 if pair else 1 for pair in re.findall(r"\bfma\.rn\.f32(x2)?\b", ptx))
            row = {"spec": text, "arch": arch, "kernel": kernel.name, "fused": fused, "stack": code.stack}
            # 16 × 64 elements by 128 threads.
            rows.append(row | {"instructions": code.instructions / 8, "registers": code.registers})
    print(json.dumps(rows))
