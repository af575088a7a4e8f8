"""An independent reader of what is exported: float32 weights from files, by the published formulas of their formats.

Nothing of the library's own decoding is used: element values are computed from the fields of the OCP formats, scales as
each format's page says. Readers of the formats' own projects are held to it bit by bit (`tests/integrations`).

    compressed-tensors  codes × weight_scale; of four bits with two scales codes × (weight_scale / weight_global_scale)
    deepseek            codes × weight_scale_inv of their 128 × 128
    modelopt            codes × weight_scale; of four bits with two scales codes × (weight_scale × weight_scale_2)
    mxfp4               blocks × scales, the rows of all experts below one another

Source: OCP Microscaling Formats 1.0, sections 5.3 and 5.4; the formats' sources that `compressed_tensors`, `deepseek`,
`modelopt` and `mxfp4` beside this name.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decoded:
    """A weight as a file has it."""

    #: float32 [N, K], the elements without scales.
    values: Tensor
    #: float32 [blocks of rows, blocks of k], both levels of two multiplied.
    scales: Tensor
    #: The scales of blocks as they lie in the file.
    stored: Tensor | None = None
    #: Of two levels, what those are divided by.
    factor: Tensor | None = None

    def dense(self) -> Tensor:
        """float32 [N, K]."""
        return self.values * stretched(self.scales, tuple(self.values.shape))


#: What the name of a weight's scales ends with, by `quant_method`.
SCALES = {
    "compressed-tensors": "weight_scale",
    "fp8": "weight_scale_inv",
    "modelopt": "weight_scale",
    "mxfp4": "_scales",
}


class Reader:
    """A folder that holds a model in one of the formats.

    Raises:
        ValueError: its config.json names none of them.
    """

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.config: dict[str, Any] = config["quantization_config"]
        self.method = self.config["quant_method"]
        if self.method not in SCALES:
            raise ValueError(f"{folder} has quant_method {self.method!r}; known: {', '.join(SCALES)}")
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self.where: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            with self._open("model.safetensors") as file:
                self.where = dict.fromkeys(file.keys(), "model.safetensors")

    def _open(self, name: str) -> Any:
        from safetensors import safe_open

        return safe_open(self.folder / name, framework="pt")

    def tensor(self, name: str) -> Tensor:
        with self._open(self.where[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def quantized(self) -> list[str]:
        """What stands before "weight" in the names of quantized weights, of stacks before "_blocks"."""
        suffix = SCALES[self.method]
        return [name.removesuffix(suffix) for name in self.where if name.endswith(suffix)]

    def decoded(self, prefix: str) -> Decoded:
        """The weight of a layer."""
        names = {name.removeprefix(prefix): name for name in self.where if name.startswith(prefix)}
        get = {suffix: self.tensor(name) for suffix, name in names.items() if "." not in suffix}
        return decoded(get, self.method)


def decoded(tensors: Mapping[str, Tensor], method: str) -> Decoded:
    """A layer's weight from its tensors by the names that they have in a format."""
    if method == "mxfp4":
        blocks, stored = tensors["_blocks"].flatten(0, -3), tensors["_scales"].flatten(0, -2)
        values = E2M1[torch.stack([blocks & 15, blocks >> 4], -1).flatten(1).long()]
        return Decoded(values, E8M0[stored.long()], stored)
    codes = tensors["weight_packed"] if "weight_packed" in tensors else tensors["weight"]
    if method == "fp8":
        return Decoded(E4M3[codes.view(torch.uint8).long()], tensors["weight_scale_inv"])
    stored = tensors["weight_scale"]
    if codes.dtype is torch.float8_e4m3fn:
        values = E4M3[codes.view(torch.uint8).long()]
    elif codes.shape[1] == 24 * stored.shape[1]:
        values = _six(codes)
    else:
        values = E2M1[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    if stored.dtype is torch.uint8:
        return Decoded(values, E8M0[stored.long()], stored)
    if stored.dtype is torch.float8_e4m3fn:
        scales = E4M3[stored.view(torch.uint8).long()]
        if method == "modelopt":
            of_tensor = tensors["weight_scale_2"]
            return Decoded(values, scales * of_tensor, stored, 1.0 / of_tensor)
        of_tensor = tensors["weight_global_scale"].reshape(())
        return Decoded(values, scales / of_tensor, stored, of_tensor)
    return Decoded(values, stored.reshape(-1, 1) if stored.dim() < 2 else stored)


def _six(packed: Tensor) -> Tensor:
    """Values of six bits: four codes in three bytes, the first in the lowest bits."""
    bits = torch.stack([packed.int() >> i & 1 for i in range(8)], -1).reshape(packed.shape[0], -1, 6)
    return E2M3[sum(bits[..., i].long() << i for i in range(6))]


def stretched(scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One scale for every element, [N, K]: blocks are 16, 32 or 128 long, or whole axes."""
    for dim in (0, 1):
        count, size = scales.shape[dim], shape[dim]
        if count not in (1, size):
            block = next(block for block in (16, 32, 128) if -(-size // block) == count)
            scales = scales.repeat_interleave(block, dim).narrow(dim, 0, size)
    return scales.expand(*shape)


def _table(exponent_bits: int, mantissa_bits: int, has_nan: bool) -> Tensor:
    """The numbers of all codes of a format, by their fields."""
    bias, numbers = 2 ** (exponent_bits - 1) - 1, []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        numbers.append(2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction))
    if has_nan:
        numbers[-1] = float("nan")
    return torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.float32, device="cpu")


#: Powers of two by their bytes; the last is no number.
E8M0 = torch.tensor([*(2.0 ** (code - 127) for code in range(255)), float("nan")], dtype=torch.float32, device="cpu")
E4M3, E2M3, E2M1 = _table(4, 3, True), _table(2, 3, False), _table(2, 1, False)
