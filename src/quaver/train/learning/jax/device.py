"""JAX's devices by name."""

import os

import jax

from quaver.core.text.given import shown


def find(name: str, threads: int = 0) -> jax.Device:
    """The device that a name means: cpu, cuda, cuda:1; auto is JAX's default.

    Args:
        name: of the device.
        threads: of a CPU, 0 for one; without effect where the process has used JAX before.
    Raises: ValueError if this machine has no such device.
    """
    # The size of XLA's thread pool on a CPU, read once, when JAX first looks for devices.
    os.environ.setdefault("NPROC", str(threads or 1))
    if name == "auto":
        return jax.devices()[0]
    platform, colon, number = name.partition(":")
    try:
        if colon and not (number.isascii() and number.isdigit()):
            raise ValueError(f"{number!r} is not a number")
        return jax.devices(platform)[int(number or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        known = ", ".join(f"{device.platform}:{device.id}" for device in jax.devices())
        raise ValueError(
            f"the device {shown(name)} is not available to JAX, which has {known}; try --device cpu"
        ) from error
