"""PyTorch's devices by name."""

import torch

from quaver.core.text.given import shown

#: What is tested: a CPU, and NVIDIA's GPUs.
KINDS = ("cpu", "cuda")


def device_of(name: str) -> torch.device:
    """The device that a name means. Raises: ValueError if this machine has no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in KINDS:
            raise RuntimeError(f"quaver trains on {' and '.join(KINDS)}")
        torch.empty(0, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"the device {shown(name)} is not available ({why[:200]}); try --device cpu") from error
    return device
