"""Reader of safetensors files, including torchao's float8 weights as written by flatten_tensor_state_dict.

There `layer.weight` is stored as `layer._weight_qdata` and `layer._weight_scale`, and the file's metadata has its
class, dtype and the names of its parts as JSON. transformers saves models with a TorchAoConfig this way.

Source: torchao 0.18's prototype/safetensors and quantization/quantize_/workflows/float8.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

#: Suffix of an index file that lists the files of a sharded checkpoint.
INDEX = ".safetensors.index.json"
CODES = torch.float8_e4m3fn, torch.float8_e5m2


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, or of all files in an index; torchao's float8 weights are dequantized to their
    dtype.

    Raises:
        ValueError: a missing or invalid file, an unsupported torchao class, or missing parts of a tensor.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for file in _files(path):
        try:
            with safe_open(file, "pt") as opened:
                metadata |= opened.metadata() or {}
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"cannot read {file} ({error}); it is not a complete safetensors file") from error
    for name in _names(metadata):
        _join(name, tensors, metadata, path)
    return tensors


def _files(path: Path) -> list[Path]:
    if not path.name.endswith(INDEX):
        return [path]
    try:
        return [path.parent / name for name in sorted(set(json.loads(path.read_text())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot read {path} ({error!r}); it has no weight_map of tensors to files") from None


def _names(metadata: Mapping[str, str]) -> list[str]:
    """Return the names of torchao tensors in the metadata; empty for other files."""
    return [name for name, text in metadata.items() if name != "tensor_names" and '"_type"' in text]


def _join(name: str, tensors: dict[str, Tensor], metadata: Mapping[str, str], path: Path) -> None:
    """Replace the parts of a weight by its dequantized values."""
    try:
        description = json.loads(metadata[name])
        kind, parts = description["_type"], description.get("_tensor_data_names", [])
        if kind == "Tensor":
            return
        if kind != "Float8Tensor":
            raise ValueError(
                f"{path} has {name} as torchao's {kind}, and only Float8Tensor is supported: load it with "
                "torchao, and save the result of its dequantize()"
            )
        module, _, last = name.rpartition(".")
        places = [f"{module}._{last}_{part}" for part in parts]
        absent = [place for place in places if place not in tensors]
        if absent:
            raise ValueError(
                f"{path} has {name} without {', '.join(absent)}: pass the whole checkpoint, or its file "
                f"*{INDEX} if it is sharded"
            )
        codes, scale = (tensors.pop(f"{module}._{last}_{part}") for part in ("qdata", "scale"))
        tensors[name] = _values(codes, scale).to(getattr(torch, description["_data"]["dtype"]["_data"]))
    except (KeyError, TypeError, AttributeError, RuntimeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} has {name} in a form that no known version of torchao writes ({error!r})") from None


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    """Multiply codes by their scales in float32; the block shape follows from both shapes."""
    if codes.dtype not in CODES or (scale.numel() > 1 and scale.ndim != codes.ndim):
        raise TypeError(f"codes in {codes.dtype} with scales {list(scale.shape)}")
    if scale.numel() > 1:
        for dim, size in enumerate(codes.shape):
            if size % scale.shape[dim]:
                raise TypeError(f"scales {list(scale.shape)} of codes {list(codes.shape)}")
            scale = scale.repeat_interleave(size // scale.shape[dim], dim)
    values: Tensor = codes.float() * scale
    return values
