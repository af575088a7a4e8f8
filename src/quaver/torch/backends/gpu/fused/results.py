"""What kernels that make the input of linear layers write for a spec, and what they give."""

from typing import Any, NamedTuple

from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.torch.numerics.quantized import FLOAT8, Quantized

#: The widest row that lies in registers, forward.
WIDEST = 16384


class Made(NamedTuple):
    """The results of a prologue that quantizes."""

    #: Its result, or None where the caller did not want it.
    y: Tensor | None
    #: That as an operand; None where only the amax was found.
    quantized: Quantized | None
    amax: Tensor | None
    #: The tensors that its backward needs.
    saved: tuple[Any, ...]


def mode(spec: QuantSpec, one_pass: bool, columns: int) -> str:
    """The name of what a kernel writes for a spec, or "" where one pass saves nothing.

    Args:
        one_pass: whether the encode factor of the tensor is known.
    """
    if spec.format.name not in FLOAT8 or spec.rounding != "nearest" or spec.hadamard:
        return ""
    if spec.per_tensor and spec.scale in ("fp32", "power_of_two"):
        return "tensor" if one_pass else "amax"
    if columns > WIDEST:
        return ""
    if spec.block == (1, None) and spec.scale in ("fp32", "power_of_two"):
        return "row"
    if spec.block == (1, 128) and spec.scale in ("fp32", "power_of_two"):
        return "blocks"
    return "e8m0" if spec.block == (1, 32) and spec.scale == "e8m0" else ""
