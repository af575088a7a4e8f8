"""torchao's `compute_error` and `fp8_tensor_statistics`."""

import torch
from torch import Tensor

from quaver.compat.stand_in import TORCHAO, unknown


def compute_error(x: Tensor, y: Tensor) -> Tensor:
    """Return the signal-to-noise ratio 20 log10(‖x‖ / ‖x - y‖) in decibels.

    Args:
        x: original values, of any shape.
        y: approximation, of the same shape.
    """
    return 20 * torch.log10(torch.linalg.vector_norm(x) / torch.linalg.vector_norm(x - y))


def fp8_tensor_statistics(tensor: Tensor, float8_dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[int, int]:
    """Count the zeros and the largest magnitudes of the format in a float8 tensor.

    Args:
        tensor: codes in a float8 dtype, or dequantized values without a scale.
        float8_dtype: the format.
    """
    values = tensor.float()
    return int((values == 0).sum()), int((values.abs() == torch.finfo(float8_dtype).max).sum())


__getattr__ = unknown(__name__, ("compute_error", "fp8_tensor_statistics"), TORCHAO)
