"""What a checkpoint of Transformer Engine's says of delayed scaling, read without running anything of it.

A module's `_extra_state` is a pickle within a tensor of bytes, or in 1.x within a file. Of that tensors, numbers and
containers are made, and stand-ins for Transformer Engine's own classes; any other name is refused.
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
    """A name that no state has, or a tensor larger than its values."""


class _Tensor:
    """Builds a tensor of a storage; what a pickle gives for hooks is left out."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
        # One value of a file may not become many in memory.
        if math.prod(size) * storage.dtype.itemsize > storage.nbytes():
            raise Refused(f"it has a tensor {list(size)} of {storage.nbytes()} bytes")
        return torch.empty(0, dtype=storage.dtype, device="cpu").set_(storage.untyped(), offset, size, stride)


class _Storage:
    """Reads the storage of a pickled tensor, which is a file of torch's."""

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
            raise Refused(f"it asks for {module}.{name}, which no state of Transformer Engine's has")
        return KNOWN[module, name]


def _read(given: Any) -> Any:
    if isinstance(given, io.BytesIO):
        given.seek(0)
        return torch.load(given, map_location="cpu", weights_only=True)
    data = bytes(given.cpu().numpy().tobytes() if isinstance(given, Tensor) else given or b"")
    return _Reader(io.BytesIO(data)).load() if data else None


def read(given: Any, where: str) -> dict[str, Any] | None:
    """The state in what a checkpoint has as `_extra_state`; None where it has none.

    Args:
        given: a tensor of bytes, bytes, or a file in memory.
        where: its name in the checkpoint.
    Raises:
        ValueError: whatever is no such state, or asks for what no such state has. Nothing has run then.
    """
    try:
        # Storages of torch's warn of themselves.
        with warnings.catch_warnings(action="ignore"):
            state = _read(given)
    except Exception as error:
        why = error if isinstance(error, Refused) else f"its bytes are no state, they give a {type(error).__name__}"
        raise ValueError(f"{where} is not read: {why}. Leave it out of the state dict: histories begin anew") from None
    if state is not None and not isinstance(state, dict):
        raise ValueError(f"{where} holds a {type(state).__name__}, where Transformer Engine 1 and 2 have a dict")
    return state


def histories(state: dict[str, Any], where: str, gemms: int) -> list[dict[str, Tensor]]:
    """`history` [length, 3] and `factor` [3] of each linear layer of a module; nothing without delayed scaling.

    Columns there are (input, weight, output) of each layer forward, (grad_output, grad_input) backward; 1.x has the
    gradients of an MLP's layers in the order in which backward meets them. A scale that nothing has been recorded for
    is unset.

    Raises:
        ValueError: tensors of other sizes, as another version has them.
    """
    names = "amax_history_fwd", "scale_fwd", "amax_history_bwd", "scale_bwd"
    if not any(name in state for name in names):
        return []
    values = [state.get(name) for name in names]
    sizes = 3 * gemms, 3 * gemms, 2 * gemms, 2 * gemms
    if not all(isinstance(v, Tensor) and v.shape[-1:] == (n,) for v, n in zip(values, sizes, strict=True)):
        given = ", ".join(f"{n} {list(getattr(v, 'shape', ()))}" for n, v in zip(names, values, strict=True))
        raise ValueError(
            f"{where} has {given}; Transformer Engine from 1.0 on has {sizes[0]} columns forward and {sizes[2]} "
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
