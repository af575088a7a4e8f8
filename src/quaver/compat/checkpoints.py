"""Files of checkpoints that other libraries have pickled, read without running anything of theirs.

torch's own restricted unpickler builds tensors, numbers and containers, and for classes of other libraries stand-ins
that hold what they were given; any other name in a file is refused before it is called. A tensor of such a class
becomes a plain one:

    torchao   WeightWithDynamicFloat8CastTensor   the weight in high precision that it holds
    MS-AMP    ScalingTensor, ScalingParameter     codes × scale_inv, float32: E4M3 or E5M2 in bytes, or float16

Source: torchao 0.18's float8/fsdp_utils.py; MS-AMP's common/tensor/tensor.py and meta.py (github.com/Azure/MS-AMP at
0367bdc), common/dtype/dtypes.py (1cde970, where QType was DType), and optim/optimizer.py (1283c27), whose state dict
is torch's with such tensors in it.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quaver.compat import flattened

#: Which names torch builds is a setting of the process: one file at a time changes it.
_ONE = threading.Lock()
#: What `read` takes in place of a file's suffix.
SAFETENSORS = ".safetensors"


class StandIn:
    """An object of another library's: what it was made of, and nothing that it does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


class HeldTensor(Tensor):
    """A tensor without values of its own, in the place of a subclass of another library's that holds others."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ValueError(f"{function} reads a tensor whose values lie in another, which `read` gives")


def _float8_weight(held: Any) -> Tensor:
    """torchao's weight under float8 all-gather, which holds the weight in high precision."""
    value: Tensor = held._tensor
    return value.detach()


#: What MS-AMP's codes are, by the number of their type.
MSAMP_CODES = {5: torch.float8_e4m3fn, 6: torch.float8_e5m2}


def _scaled(held: Any) -> Tensor:
    """MS-AMP's tensor with a scale; the bytes of an eight-bit one are codes."""
    value, meta = held.value, held.meta
    codes = MSAMP_CODES.get(int(meta.qtype.value))
    if codes is not None:
        if value.dtype not in (torch.uint8, torch.int8):
            raise AttributeError(f"codes in {value.dtype}")
        value = value.contiguous().view(codes)
    values: Tensor = value.detach().float() * meta.scale_inv.float()
    return values


#: Of which class a stand-in holds a tensor, and how a plain one is made of it.
TENSORS: dict[str, Callable[[Any], Tensor]] = {
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": _float8_weight,
    "msamp.common.tensor.tensor.ScalingTensor": _scaled,
    "msamp.nn.parameter.ScalingParameter": _scaled,
}
#: Of these, subclasses of torch's own.
SUBCLASSES = ("torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor",)
#: Classes whose objects say how, and not what.
OTHERS = (
    "torchao.float8.float8_training_tensor.LinearMMConfig",
    "torchao.float8.float8_training_tensor.ScaledMMConfig",
    "msamp.common.tensor.meta.ScalingMeta",
    "msamp.common.dtype.dtypes.QType",
    "msamp.common.dtype.dtypes.DType",
)


def read(file: str | Path) -> Any:
    """What a checkpoint holds, with plain tensors in the places of torchao's weights and of MS-AMP's.

    Args:
        file: of torch.save, safetensors, or the index of several (*.safetensors.index.json).
    Returns:
        The same dicts, lists and numbers; tensors on the CPU.
    Raises:
        ValueError: a file that is not there, is cut off, is no checkpoint, or asks for a name that none of these has;
            nothing of it has run then.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"{path} is no file; give a checkpoint of torch.save or safetensors")
    if path.suffix == SAFETENSORS or path.name.endswith(flattened.INDEX):
        return flattened.read(path)
    stands = {name: _stand_in(name) for name in (*TENSORS, *OTHERS)}
    try:
        with _ONE, torch.serialization.safe_globals([(kind, name) for name, kind in stands.items()]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{path} is not read ({type(error).__name__}: {first}); it is no whole checkpoint of tensors, or one of "
            "another version or library. Nothing of it has run"
        ) from error
    try:
        return _plain(content, path, {})
    except RecursionError:
        raise ValueError(f"{path} has containers within containers, deeper than any checkpoint has them") from None


def _stand_in(name: str) -> type:
    """A class of this name; a process that has the library may have its own among those that torch builds."""
    module, _, last = name.rpartition(".")
    return type(last, (HeldTensor if name in SUBCLASSES else StandIn,), {"__module__": module})


def _plain(value: Any, path: Path, seen: dict[int, Any]) -> Any:
    """A value with plain tensors in the places of stand-ins; what stands in it several times does so afterwards."""
    if id(value) in seen:
        return seen[id(value)]
    function = TENSORS.get(f"{type(value).__module__}.{type(value).__name__}")
    if function is not None:
        try:
            seen[id(value)] = function(value)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{path} has a {type(value).__name__} of another version, without what this one holds ({error})"
            ) from error
    elif isinstance(value, Tensor) and type(value) not in (Tensor, torch.nn.Parameter):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise ValueError(
            f"{path} has a tensor of {kind}, which a library in this process has registered with torch: `read` gives "
            "plain tensors, and knows none in it. Load the file with that library, and save plain tensors"
        )
    elif isinstance(value, dict):
        held: dict[Any, Any] = {}
        seen[id(value)] = held
        held.update({key: _plain(each, path, seen) for key, each in value.items()})
    elif isinstance(value, list):
        items: list[Any] = []
        seen[id(value)] = items
        items.extend(_plain(one, path, seen) for one in value)
    elif isinstance(value, tuple):
        seen[id(value)] = tuple(_plain(one, path, seen) for one in value)
    return seen.get(id(value), value)
