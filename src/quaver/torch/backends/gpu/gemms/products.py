"""GEMMs of bf16 values with float32 sums, where a product becomes a result by one rounding.

torch's default lets cuBLAS add up parts of a sum in the output's dtype where it splits the sum over multiprocessors
that the output leaves idle (`allow_bf16_reduced_precision_reduction`): in bf16 each part would be rounded. The setting
is the process's, which the library does not change, so a product whose output does not fill a GPU is written in
float32, whose parts are float32 too, and rounded by a launch more.

Source: cuBLAS's documentation of CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION; torch's notes on numerical accuracy.
"""

import torch
from torch import Tensor

from quaver.torch.backends.gpu.launching.device import architecture

#: The oldest capability with bf16 tensor cores.
HALF = 80
#: Elements of an output that leaves no multiprocessor idle: four tiles of 256 × 128 for each of some 130.
FILLS = 1 << 24


def fills(m: int, n: int) -> bool:
    """True if the sums of an output [m, n] are not split, so that a GEMM may write bf16 itself."""
    return m * n >= FILLS


def wide(x: Tensor, y: Tensor) -> Tensor:
    """x @ y in float32, of two bf16 matrices or in true float32, whatever the process allows torch."""
    if x.is_cuda:
        if x.dtype is y.dtype is torch.bfloat16 and torch.version.hip is None and architecture(x.device) >= HALF:
            return torch.mm(x, y, out_dtype=torch.float32)
        if torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee"):
            # TF32 would round the operands, and the setting is the process's: other threads would see it change.
            return (x.double() @ y.double()).float()
    return x.float() @ y.float()


def narrow(x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
    """x @ y + bias of bf16 matrices in bf16, where the output `fills` a GPU."""
    if x.is_cuda:
        return torch.mm(x, y) if bias is None else torch.addmm(bias, x, y)
    z = x.float() @ y.float()
    return (z if bias is None else z.add_(bias)).to(torch.bfloat16)
