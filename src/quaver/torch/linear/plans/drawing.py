"""What a decided step on a GPU draws from where it rounds at random, and the count that its kernels move on."""

import torch
from torch import Tensor, nn

from quaver.torch.backends.gpu.emulating import two_level
from quaver.torch.state.noise import fresh_count, tensor_ids


def noise_of(layer: nn.Module, device: torch.device) -> two_level.Noise:
    """What grad_output and its transpose draw from: `state.noise.draw` of both, the count not copied."""
    count = layer._buffers.get("count")
    count = fresh_count(layer) if count is None else count
    if count.device != device or count.dtype is not torch.int64:
        count = count.to(device, torch.int64)
    straight, turned = tensor_ids(layer, "grad_output")
    return two_level.Noise(layer.__dict__.get("seed", 0), straight, turned, count)


def bring_back(layer: nn.Module, count: Tensor) -> None:
    """A layer's count, from where the kernels moved it on."""
    own = layer._buffers.get("count")
    if own is not None:
        own.copy_(count)
