"""Reader of other libraries' pickled checkpoints that runs none of their code.

torch's restricted unpickler builds tensors, numbers and containers, and stand-ins for classes of other libraries that
store their contents. Any other name in a file raises an error before it is called. Tensors of such classes are
converted to plain ones:

    torchao   WeightWithDynamicFloat8CastTensor   the high-precision weight inside
    MS-AMP    ScalingTensor, ScalingParameter     codes × scale_inv in float32: E4M3 or E5M2 in bytes, or float16

Source: torchao 0.18's float8/fsdp_utils.py; MS-AMP's common/tensor/tensor.py and meta.py (github.com/Azure/MS-AMP at
0367bdc), common/dtype/dtypes.py (1cde970, where QType was DType), and optim/optimizer.py (1283c27), whose state dict is
torch's with such tensors in it.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quaver.compat import flattened

#: Lock, because the list of names that torch may build is global to the process.
_ONE = threading.Lock()
#: File suffix that `read` treats as safetensors.
SAFETENSORS = ".safetensors"


class StandIn:
    """Stand-in for an object of another library: stores its data without behaviour."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


class HeldTensor(Tensor):
    """Stand-in for a tensor subclass of another library that wraps other tensors; it has no values itself."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ValueError(f"{function} reads a tensor whose values are stored in another one, which `read` returns")


def _float8_weight(source: Any) -> Tensor:
    """Return the high-precision weight inside torchao's wrapper for float8 all-gather."""
    value: Tensor = source._tensor
    return value.detach()


#: dtypes of MS-AMP's codes, by its type number.
MSAMP_CODES = {5: torch.float8_e4m3fn, 6: torch.float8_e5m2}


def _scaled(source: Any) -> Tensor:
    """Dequantize MS-AMP's tensor; 8-bit data are codes."""
    value, meta = source.value, source.meta
    codes = MSAMP_CODES.get(int(meta.qtype.value))
    if codes is not None:
        if value.dtype not in (torch.uint8, torch.int8):
            raise AttributeError(f"codes in {value.dtype}")
        value = value.contiguous().view(codes)
    values: Tensor = value.detach().float() * meta.scale_inv.float()
    return values


#: Conversion functions to plain tensors, by class name.
TENSORS: dict[str, Callable[[Any], Tensor]] = {
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": _float8_weight,
    "msamp.common.tensor.tensor.ScalingTensor": _scaled,
    "msamp.nn.parameter.ScalingParameter": _scaled,
}
#: Those of them that are subclasses of torch.Tensor.
SUBCLASSES = ("torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor",)
#: Classes without tensor data, such as options.
OTHERS = (
    "torchao.float8.float8_training_tensor.LinearMMConfig",
    "torchao.float8.float8_training_tensor.ScaledMMConfig",
    "msamp.common.tensor.meta.ScalingMeta",
    "msamp.common.dtype.dtypes.QType",
    "msamp.common.dtype.dtypes.DType",
)


def read(file: str | Path) -> Any:
    """Return the contents of a checkpoint, with plain tensors instead of torchao's and MS-AMP's classes.

    Args:
        file: file of torch.save, safetensors, or an index of several (*.safetensors.index.json).
    Returns:
        The same dicts, lists and numbers; tensors on the CPU.
    Raises:
        ValueError: a file that is missing, truncated, no checkpoint, or contains unknown names; nothing was executed.
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
            f"cannot read {path} ({type(error).__name__}: {first}); it is truncated, no checkpoint of "
            "tensors, or from another version or library. None of its code was executed"
        ) from error
    try:
        return _plain(content, path, {})
    except RecursionError:
        raise ValueError(f"{path} is nested deeper than any checkpoint") from None


def _stand_in(name: str) -> type:
    """Create a stand-in class of this name, regardless of whether the library itself is loaded."""
    module, _, last = name.rpartition(".")
    return type(last, (HeldTensor if name in SUBCLASSES else StandIn,), {"__module__": module})


def _plain(value: Any, path: Path, seen: dict[int, Any]) -> Any:
    """Replace stand-ins in a value by plain tensors; shared references stay shared."""
    if id(value) in seen:
        return seen[id(value)]
    function = TENSORS.get(f"{type(value).__module__}.{type(value).__name__}")
    if function is not None:
        try:
            seen[id(value)] = function(value)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{path} has a {type(value).__name__} of another version, which lacks an expected field ({error})"
            ) from error
    elif isinstance(value, Tensor) and type(value) not in (Tensor, torch.nn.Parameter):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise ValueError(
            f"{path} has a tensor of {kind}, which a library in this process has registered with torch: "
            "`read` returns plain tensors only. Load the file with that library, and save plain tensors"
        )
    elif isinstance(value, dict):
        source: dict[Any, Any] = {}
        seen[id(value)] = source
        source.update({key: _plain(each, path, seen) for key, each in value.items()})
    elif isinstance(value, list):
        items: list[Any] = []
        seen[id(value)] = items
        items.extend(_plain(one, path, seen) for one in value)
    elif isinstance(value, tuple):
        seen[id(value)] = tuple(_plain(one, path, seen) for one in value)
    return seen.get(id(value), value)
