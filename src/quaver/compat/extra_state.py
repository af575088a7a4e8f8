"""Safe reader of Transformer Engine's `_extra_state`, for its delayed-scaling histories.

A module's `_extra_state` is a pickle in a byte tensor, or in 1.x in a file. Only tensors, numbers and containers are
built, and stand-ins for Transformer Engine's own classes; any other name raises an error. No foreign code runs.
"""

import collections
import io
import math
import pickle
import warnings
from typing import Any

import torch
from torch import Tensor

from quaver.compat.checkpoints import StandIn


class Refused(pickle.UnpicklingError):
    """The pickle contains an unexpected name, or a tensor larger than its data."""


class _Tensor:
    """Builds a tensor from a storage, without the pickled hooks."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
        # A small file must not expand to a large tensor in memory.
        if math.prod(size) * storage.dtype.itemsize > storage.nbytes():
            raise Refused(f"it has a tensor {list(size)} of {storage.nbytes()} bytes")
        return torch.empty(0, dtype=storage.dtype, device="cpu").set_(storage.untyped(), offset, size, stride)


class _Storage:
    """Reads the storage of a pickled tensor, which is itself a torch file."""

    __slots__ = ()

    def __call__(self, data: bytes) -> Any:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


KNOWN = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _Tensor(),
    ("torch.storage", "_load_from_bytes"): _Storage(),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "transformer_engine":
            return type(name, (StandIn,), {})
        if (module, name) not in KNOWN:
            raise Refused(f"it contains {module}.{name}, which no state of Transformer Engine has")
        return KNOWN[module, name]


def _read(value: Any) -> Any:
    if isinstance(value, io.BytesIO):
        value.seek(0)
        return torch.load(value, map_location="cpu", weights_only=True)
    data = bytes(value.cpu().numpy().tobytes() if isinstance(value, Tensor) else value or b"")
    return _Reader(io.BytesIO(data)).load() if data else None


def read(value: Any, where: str) -> dict[str, Any] | None:
    """Return the state stored in an `_extra_state`, or None if it is empty.

    Args:
        value: byte tensor, bytes, or a file in memory.
        where: name in the checkpoint, for the error.
    Raises:
        ValueError: invalid data or unexpected names; nothing was executed.
    """
    try:
        # torch warns about its typed storages.
        with warnings.catch_warnings(action="ignore"):
            state = _read(value)
    except Exception as error:
        why = (
            error
            if isinstance(error, Refused)
            else f"its bytes are no state: reading them raises a {type(error).__name__}"
        )
        raise ValueError(
            f"cannot read {where}: {why}. Leave it out of the state dict: histories then start anew"
        ) from None
    if state is not None and not isinstance(state, dict):
        raise ValueError(f"{where} holds a {type(state).__name__}, where Transformer Engine 1 and 2 have a dict")
    return state


def histories(state: dict[str, Any], where: str, gemms: int) -> list[dict[str, Tensor]]:
    """Return `history` [length, 3] and `factor` [3] of each linear layer of a module; empty without delayed scaling.

    Transformer Engine's columns are (input, weight, output) of each layer forward and (grad_output, grad_input)
    backward. In 1.x the gradients of an MLP's layers are in the order of backward. A scale without recorded amaxes is
    unset (0).

    Args:
        state: result of `read`.
        where: name in the checkpoint, for the error.
        gemms: number of linear layers of the module.
    Raises:
        ValueError: tensors of other sizes, from another version.
    """
    names = "amax_history_fwd", "scale_fwd", "amax_history_bwd", "scale_bwd"
    if not any(name in state for name in names):
        return []
    values = [state.get(name) for name in names]
    sizes = 3 * gemms, 3 * gemms, 2 * gemms, 2 * gemms
    if not all(isinstance(v, Tensor) and v.shape[-1:] == (n,) for v, n in zip(values, sizes, strict=True)):
        value = ", ".join(f"{n} {list(getattr(v, 'shape', ()))}" for n, v in zip(names, values, strict=True))
        raise ValueError(
            f"{where} has {value}; Transformer Engine from 1.0 on has {sizes[0]} columns forward and {sizes[2]} "
            "backward for this module: it is of another version, or of another module. Leave it out of the state dict"
        )
    forward, scale, backward, scale_back = (v.detach().float().cpu() for v in values)  # type: ignore[union-attr]
    results = []
    for i in range(gemms):
        j = i if "recipe" in state else gemms - 1 - i
        history = torch.stack([forward[:, 3 * i], forward[:, 3 * i + 1], backward[:, 2 * j]], 1)
        factor = torch.stack([scale[3 * i], scale[3 * i + 1], scale_back[2 * j]])
        results.append({"history": history, "factor": torch.where(history.any(0), factor, 0.0)})
    return results
