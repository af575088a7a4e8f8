"""PyTorch's devices by name."""

import torch


def device_of(name: str) -> torch.device:
    """The device that a name means. Raises: ValueError if this machine has no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"the device {name!r} is not available ({why}); try --device cpu") from error
    return device
