"""`compute_error` and the statistics of codes, by torchao's names."""

import torch
from torch import Tensor

from quaver.compat.stand_in import TORCHAO, unknown


def compute_error(x: Tensor, y: Tensor) -> Tensor:
    """20 log10(‖x‖ / ‖x - y‖): the ratio of signal to noise, in decibels.

    Args:
        x: the values themselves, of any shape.
        y: what stands for them, of the same shape.
    """
    return 20 * torch.log10(torch.linalg.vector_norm(x) / torch.linalg.vector_norm(x - y))


def fp8_tensor_statistics(tensor: Tensor, float8_dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[int, int]:
    """How many elements of a float8 tensor are zero, and how many are the format's largest.

    Args:
        tensor: codes in a float8 dtype, or values on the format's grid.
        float8_dtype: the format.
    """
    values = tensor.float()
    return int((values == 0).sum()), int((values.abs() == torch.finfo(float8_dtype).max).sum())


__getattr__ = unknown(__name__, ("compute_error", "fp8_tensor_statistics"), TORCHAO)
