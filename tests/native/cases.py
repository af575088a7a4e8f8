"""Inputs and results of `quaver.reference` as records that `tests/native/numerics.c` reads."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from quaver import reference
from quaver.recipes.formats import E2M1, E2M3, E4M3, FORMATS, Format
from quaver.recipes.spec import QuantSpec
from quaver.reference import numerics
from quaver.torch.conversion.export.layouts import (
    COMPRESSED_TENSORS,
    DEEPSEEK,
    MODELOPT,
    MXFP4,
    FileFormat,
    Inputs,
    UnsupportedByFormat,
    layout_of,
)
from quaver.torch.conversion.export.operands import decoded
from quaver.torch.numerics.quantized import swizzle
from quaver.torch.numerics.reference import quantize as torch_quantize


class Kind(IntEnum):
    """Kinds of records, in the order of the enumeration in C."""

    END = 0
    FORMAT = 1
    VALUES = 2
    ENCODE = 3
    STOCHASTIC = 4
    DECODE = 5
    FACTORS = 6
    BLOCKS = 7
    NOISE = 8
    OPERAND = 9
    PACK = 10
    SWIZZLE = 11
    WEIGHT = 12
    ROTATE = 13


def own(
    name: str, exponent_bits: int, mantissa_bits: int, bias: int, largest: float, nan: bool, signed: bool = True
) -> Format:
    return Format(
        name=name,
        bits=signed + exponent_bits + mantissa_bits,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        bias=bias,
        max=largest,
        has_nan=nan,
        signed=signed,
    )


#: Formats of users: few and many exponent bits, unusual biases, largest numbers below the last code, no sign.
OWN = [
    own("e1m6", 1, 6, 0, 3.96875, False),
    own("e3m4", 3, 4, 3, 28.0, True),
    own("e5m1", 5, 1, 14, 65536.0, False),
    own("e2m2", 2, 2, -9, 2.0**12, True),
    own("e6m1", 6, 1, 16, 49152.0, True),
    own("e1m1", 1, 1, 1, 1.5, False),
    own("u5m3", 5, 3, 15, 114688.0, True, signed=False),
    own("u4m4", 4, 4, 7, 496.0, False, signed=False),
    own("u6m2", 6, 2, 127, 2.0**-64, True, signed=False),
    own("u6m0", 6, 0, 20, 2.0**40, False, signed=False),
    own("u1m7", 1, 7, 127, 255 * 2.0**-133, False, signed=False),
]
EVERY = [*FORMATS.values(), *OWN]
SIGNED = [fmt for fmt in EVERY if fmt.signed]
#: In the order of qvn_scale_kind.
SCALES = ["power_of_two", "fp32", "e8m0", "two_level", "two_level_fp32", "unit"]
BLOCKS: list[tuple[int | None, int | None]] = [
    *((None, None), (1, None), (None, 1), (1, 16), (16, 16), (1, 32), (32, 32), (1, 128), (128, 128)),
    *((7, 5), (10**12, 32)),
]
DATA = ("normal", "bits", "subnormal", "huge", "zeros", "special")


class Records:
    """Writer of a file of records; results are those of the reference."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")
        self.x = np.zeros(0, np.float32)

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._write(Kind.END)
        self.file.close()

    def _write(self, *parts: int | bool | np.ndarray) -> None:
        """Write ints as int64 and arrays as they are."""
        for part in parts:
            if isinstance(part, np.ndarray):
                self.file.write(np.ascontiguousarray(part).tobytes())
            else:
                self.file.write(int(part).to_bytes(8, "little", signed=int(part) < 2**63))

    def format(self, fmt: Format) -> None:
        """Set the format of the records that follow."""
        index = list(FORMATS).index(fmt.name) if fmt.name in FORMATS else -1
        self._fields(index, fmt.exponent_bits, fmt.mantissa_bits, fmt.bias, fmt.max, fmt.has_nan, fmt.signed, True)
        self.fmt = fmt

    def fields(self, exponent: int, mantissa: int, bias: int, top: float, nan: bool, sign: bool) -> None:
        """Write the fields of a format, and whether the reference takes them."""
        valid = True
        try:
            own("own", exponent, mantissa, bias, top, nan, sign)
        except ValueError:
            valid = False
        self._fields(-1, exponent, mantissa, bias, top, nan, sign, valid)

    def _fields(
        self, index: int, exponent: int, mantissa: int, bias: int, top: float, nan: bool, sign: bool, valid: bool
    ) -> None:
        bits = sign + exponent + mantissa
        self._write(Kind.FORMAT, index, bits, exponent, mantissa, bias, nan, sign, np.float32(top).reshape(1), valid)

    def values(self, x: np.ndarray) -> None:
        """Set the values that the records ENCODE and STOCHASTIC round."""
        self.x = x
        self._write(Kind.VALUES, x.size, x)

    def encode(self) -> None:
        self._write(Kind.ENCODE, numerics.encode(numerics.round_to(self.x, self.fmt), self.fmt))

    def stochastic(self, random: np.ndarray) -> None:
        """Round with sixteen random bits per value."""
        u = (random.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-16)
        codes = numerics.encode(numerics.round_to(self.x, self.fmt, u), self.fmt)
        self._write(Kind.STOCHASTIC, random, codes)

    def decode(self) -> None:
        self._write(Kind.DECODE, numerics.decode(np.arange(256), self.fmt))

    def factors(self, amax: np.ndarray) -> None:
        results = [numerics.encode_factor(amax, self.fmt, True), numerics.encode_factor(amax, self.fmt, False)]
        results += [numerics.tensor_factor(amax, True), numerics.tensor_factor(amax, False)]
        self._write(Kind.FACTORS, amax.size, amax, *(result.astype(np.float32) for result in results))

    def blocks(self, amax: np.ndarray, tensor_factor: np.ndarray) -> None:
        scale = numerics.block_scale(amax, tensor_factor)
        factor = numerics.block_factor(scale, tensor_factor)
        self._write(Kind.BLOCKS, amax.size, amax, tensor_factor, numerics.encode(scale, E4M3), factor)

    def noise(self, rows: int, k: int, seed: int, tensor_id: int, count: int) -> None:
        u = numerics.uniform(rows, k, seed, tensor_id, count)
        self._write(Kind.NOISE, seed, tensor_id, count, u.size, np.arange(u.size, dtype=np.uint64), u)

    def noise_of_groups(self, groups: np.ndarray, seed: int, tensor_id: int, count: int) -> None:
        """Draw for groups of four elements anywhere in an operand that need not fit in memory."""
        key, upper = numerics.noise_stream(seed, tensor_id, count)
        words = numerics.philox2x32((groups & 0xFFFFFFFF, groups >> np.uint64(32) ^ np.uint64(upper)), key)
        halves = np.stack([words >> np.uint32(16), words & np.uint32(0xFFFF)], -1).reshape(-1)
        u = (halves.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-16)
        elements = groups[:, None] * np.uint64(4) + np.arange(4, dtype=np.uint64)
        self._write(Kind.NOISE, seed, tensor_id, count, u.size, elements, u)

    def operand(
        self,
        x: np.ndarray,
        stride: int,
        spec: QuantSpec,
        amax: np.ndarray | None,
        factor: float,
        noise: tuple[int, ...],
    ) -> None:
        """Quantize and dequantize; the stored form of the scales is that of `quaver.torch`."""
        rows, k = x.shape
        seed, tensor_id, count = noise
        q = reference.quantize(x, spec, amax, factor=factor or None, seed=seed, tensor_id=tensor_id, count=count)
        padded = np.full((rows, stride), np.nan, np.float32)
        padded[:, :k] = x
        self._write(Kind.OPERAND, rows, k, stride, *(block or 0 for block in spec.block))
        self._write(SCALES.index(spec.scale), spec.rounding == "stochastic", spec.hadamard)
        self._write(0 if amax is None else amax.size, seed, tensor_id, count, np.float32(factor).reshape(1))
        self._write(*([] if amax is None else [amax]), padded.reshape(-1)[: max(rows * stride - (stride - k), 0)])
        self._write(q.codes(), q.scale)
        tensor_factor = np.ones(1, np.float32)
        if spec.scale == "e8m0" or spec.two_level:
            given = None if amax is None else torch.from_numpy(amax)
            stored = torch_quantize(torch.from_numpy(x), replace(spec, rounding="nearest"), given)
            assert isinstance(stored.scale, torch.Tensor)
            self._write(stored.scale.numpy())
            if stored.tensor_factor is not None:
                tensor_factor = stored.tensor_factor.reshape(1).numpy()
        self._write(tensor_factor, q.dequantize())

    def rotate(self, group: np.ndarray) -> None:
        self._write(Kind.ROTATE, group, numerics.rotate(group.reshape(1, 16)))

    def pack(self, codes: np.ndarray, bits: int) -> None:
        """Pack the lowest bits of each byte of a row, from the lowest one up."""
        stream = codes[:, None] >> np.arange(bits) & 1
        self._write(Kind.PACK, bits, codes.size, codes, np.packbits(stream.astype(np.uint8), bitorder="little"))

    def swizzle(self, scale: np.ndarray) -> None:
        swizzled = swizzle(torch.from_numpy(scale)).numpy()
        self._write(Kind.SWIZZLE, *scale.shape, scale, swizzled.size, swizzled)

    def weight(self, fmt: FileFormat, spec: QuantSpec, w: torch.Tensor, inputs: Inputs) -> bool:
        """Write a weight as a checkpoint stores it, and as the independent reader of checkpoints decodes it; return
        False if the file format has no place for the spec.
        """
        layout = layout_of(spec)
        try:
            scheme = fmt.scheme(layout, spec, inputs)
        except UnsupportedByFormat:
            return False
        tensors = fmt.tensors(torch_quantize(w, spec), scheme, inputs)
        codes = next(tensors[name] for name in ("weight", "weight_packed", "_blocks") if name in tensors)
        scale = next(tensors[name] for name in ("weight_scale", "weight_scale_inv", "_scales") if name in tensors)
        tensor_scale = tensors.get("weight_global_scale", tensors.get("weight_scale_2", torch.ones(1)))
        name = "block" if fmt is DEEPSEEK else layout
        # In the order of qvn_layout.
        number = ["tensor", "channel", "block", "mx", "nv"].index(name) + (name == "nv" and fmt is MODELOPT)
        self.format(spec.format)
        self._write(Kind.WEIGHT, number, *w.shape, tensor_scale.reshape(1).numpy())
        for stored in (codes, scale):
            data = stored.contiguous().reshape(-1).view(torch.uint8).numpy()
            self._write(data.size, data)
        self._write(decoded(tensors, fmt.method).dense().numpy())
        return True


# ---- inputs ----


def floats(bits: np.ndarray) -> np.ndarray:
    return np.asarray(bits, np.uint32).view(np.float32)


def edges(fmt: Format) -> np.ndarray:
    """Return the bits of all numbers of a format and of the midpoints between them, each with its neighbours."""
    numbers = numerics.magnitudes(fmt).astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    middles = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2]).astype(np.float32)
    bits = middles.view(np.uint32).astype(np.int64)
    near = np.concatenate([bits + ulps for ulps in range(-3, 4)])
    near = near[near >= 0].astype(np.uint32)
    return np.concatenate([near, near | np.uint32(0x80000000)])


def hard_values(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return every bf16 value and the value after it, small subnormals, and random bits, half of them near 1."""
    bf16 = np.arange(2**16, dtype=np.uint32) << 16
    near = rng.integers(100, 145, count // 2) << 23 | rng.integers(0, 2**23, count // 2)
    anywhere = rng.integers(0, 2**32, count // 2, dtype=np.uint32)
    return floats(np.concatenate([bf16, bf16 | 1, np.arange(4096, dtype=np.uint32), anywhere, near.astype(np.uint32)]))


def matrix(rng: np.random.Generator, rows: int, k: int, data: str) -> np.ndarray:
    if data == "bits":
        return floats(rng.integers(0, 2**32, (rows, k), dtype=np.uint32))
    if data == "subnormal":
        around = np.array([0, 1, 0x007FFFFF, 0x00800000, 0x00800001, 0x80000001, 0x80800000], np.uint32)
        bits = rng.integers(0, 0x01000000, (rows, k), dtype=np.uint32)
        return floats(around[rng.integers(0, around.size, (rows, k))] if rng.random() < 0.5 else bits)
    if data == "huge":
        return floats(0x7F000000 + rng.integers(0, 0x800000, (rows, k), dtype=np.uint32))
    if data == "zeros":
        return np.where(np.arange(rows)[:, None] % 2, np.float32(0), np.float32(-0.0)) * np.ones((1, k), np.float32)
    x = (rng.standard_normal((rows, k)) * np.exp2(rng.integers(-20, 20, (rows, 1)))).astype(np.float32)
    if data == "special" and x.size:
        for value in (np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, -0.0):
            places = rng.integers(0, x.size, max(1, x.size // 97))
            x.reshape(-1)[places] = value
    return x


def specs() -> Iterator[QuantSpec]:
    """Yield every combination that is a spec."""
    options = itertools.product(SIGNED, BLOCKS, SCALES, ("nearest", "stochastic"), (False, True))
    for fmt, block, scale, rounding, hadamard in options:
        if scale not in ("two_level", "two_level_fp32") or (fmt is E2M1 and None not in block):
            yield QuantSpec(fmt, block, scale, rounding, hadamard)  # type: ignore[arg-type]


def draw_operand(records: Records, rng: np.random.Generator, spec: QuantSpec, data: str, given: str) -> None:
    """Write an operand of random shape; given: "measured", "amax" or "factor"."""
    rows, k = int(rng.choice([0, 1, 3, 16, 33, 40])), int(rng.choice([0, 1, 5, 16, 31, 32, 64, 130]))
    # A spec with few elements of few rows is rarely a block's end.
    rows, k = (rows, k) if rng.random() < 0.1 else (max(rows, 1), max(k, 1))
    shape = (1, 1) if spec.two_level else spec.blocks(rows, spec.padded(k))
    if given == "factor" and not (spec.per_tensor and spec.scale in ("fp32", "power_of_two")):
        given = "measured"
    if given == "amax" and (spec.scale == "unit" or 0 in shape):
        given = "measured"
    amax = matrix(rng, *shape, data) if given == "amax" else None
    factor = float(np.float32(rng.choice([1.0, 0.37, 2.0**100, 1e-30]))) if given == "factor" else 0.0
    noise = int(rng.integers(0, 2**64, dtype=np.uint64)), int(rng.integers(0, 2**32)), int(rng.integers(0, 2**40))
    noise = noise if rng.random() < 0.8 else (0, 0, 0)
    x = np.ascontiguousarray(matrix(rng, rows, k, data))
    records.operand(x, k + int(rng.choice([0, 0, 3])), spec, amax, factor, noise)


# ---- files ----


def write(path: Path, thorough: bool = False, seed: int = 0) -> None:
    """Write a file of records: the quick selection, or for minutes of work."""
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"), Records(path) as records:
        write_formats(records, rng, 3_000_000 if thorough else 100_000)
        write_scales(records, rng, 500_000 if thorough else 20_000)
        write_noise(records, rng)
        write_operands(records, rng, thorough)
        write_storage(records, rng)


def write_formats(records: Records, rng: np.random.Generator, count: int) -> None:
    values = hard_values(rng, count)
    for fmt in EVERY:
        records.format(fmt)
        records.decode()
        records.values(np.concatenate([values, floats(edges(fmt))]))
        records.encode()
        random = rng.integers(0, 2**16, records.x.size, dtype=np.uint16)
        random[::5], random[1::5] = 0, 0xFFFF
        records.stochastic(random)
    for _ in range(3000):
        exponent, mantissa, sign = int(rng.integers(0, 9)), int(rng.integers(0, 8)), bool(rng.integers(2))
        bias, nan = int(rng.integers(-130, 130)), bool(rng.integers(2))
        if rng.random() < 0.8:
            bias = int(rng.integers(0, 2 ** max(exponent - 1, 1) + 1))
        top = (1 + int(rng.integers(0, 2 ** (mantissa + (rng.random() < 0.1)))) / 2**mantissa) * 2.0 ** max(
            min(2**exponent - 1 - bias - int(rng.integers(0, 2)), 127), -126
        )
        records.fields(exponent, mantissa, bias, top, nan, sign)

    # The ends of the ranges of bias and max, and largest numbers that are a bit off the grid.
    for fields in (
        *((1, 0, -127, 2.0**127, False, False), (1, 0, -128, 2.0**127, False, False)),
        *((1, 1, 127, 2.0**-126, False, False), (1, 1, 128, 2.0**-126, False, False)),
        *(
            (4, 3, 7, float(np.nextafter(np.float32(448), np.float32(449))), True, True),
            (5, 2, 14, 81920.0, True, True),
        ),
        *((8, 0, 127, 2.0**127, False, False), (8, 0, 126, 2.0**127, False, False)),
    ):
        records.fields(*fields)


def write_scales(records: Records, rng: np.random.Generator, count: int) -> None:
    """Write factors of amaxes, which are not negative and not subnormal."""
    bits = rng.integers(0, 0x7F800001, count, dtype=np.uint32)
    for fmt in SIGNED:
        near = np.concatenate([edges(fmt), np.arange(2**16, dtype=np.uint32) << 15, bits, [0x7F800000, 0x7FC00000]])
        near = near.astype(np.uint32) & np.uint32(0x7FFFFFFF)
        amax = floats(np.where(near < 0x00800000, np.uint32(0), near))
        records.format(fmt)
        records.factors(amax)
    amax = amax[rng.permutation(amax.size)]
    for power_of_two in (True, False):
        tensor = np.maximum(amax, rng.permutation(amax))
        records.blocks(amax, numerics.tensor_factor(tensor, power_of_two).astype(np.float32))


def write_noise(records: Records, rng: np.random.Generator) -> None:
    for seed, tensor_id, count in ((0, 0, 0), (2**64 - 1, 2**32 - 1, 2**32 - 1), (1, 2, 2**32 + 3)):
        records.noise(5, 131, seed, tensor_id, count)
    for _ in range(20):
        seed, tensor_id = int(rng.integers(0, 2**64, dtype=np.uint64)), int(rng.integers(0, 2**32))
        records.noise(3, 17, seed, tensor_id, int(rng.integers(0, 2**40)))
        groups = rng.integers(0, 2 ** int(rng.integers(31, 59)), 50, dtype=np.uint64)
        records.noise_of_groups(groups, seed, tensor_id, 7)


def write_operands(records: Records, rng: np.random.Generator, thorough: bool) -> None:
    """Write operands of every spec; thorough: with all data and all ways to set scales."""
    for number, spec in enumerate(specs()):
        if records.fmt != spec.format:
            records.format(spec.format)
        cases = list(itertools.product(DATA, ("measured", "amax", "factor")))
        for data, given in cases if thorough else [cases[(number + i * 7) % len(cases)] for i in range(2)]:
            draw_operand(records, rng, spec, data, given)
    for data in DATA:
        for _ in range(50):
            group = matrix(rng, 1, 16, data)
            records.rotate(np.ascontiguousarray(group.reshape(16)))


def write_storage(records: Records, rng: np.random.Generator) -> None:
    for bits, k in itertools.product(range(1, 9), (0, 1, 3, 4, 7, 8, 9, 32, 61)):
        records.pack(rng.integers(0, 256, k, dtype=np.uint8), bits)
    for shape in ((0, 3), (1, 1), (5, 3), (128, 4), (200, 8), (257, 2), (300, 17)):
        records.swizzle(rng.integers(0, 256, shape, dtype=np.uint8))
    weights = [
        *(QuantSpec(E4M3, block) for block in ((None, None), (1, None), (128, 128))),
        *(QuantSpec(E4M3, block, "fp32") for block in ((None, None), (1, None), (128, 128))),
        *(QuantSpec(fmt, block, "e8m0") for fmt in (E4M3, E2M3, E2M1) for block in ((1, 32), (32, 32))),
        *(QuantSpec(E2M1, block, "two_level") for block in ((1, 16), (16, 16))),
        QuantSpec(E2M1, (16, 16), "two_level_fp32"),
    ]
    generator = torch.Generator().manual_seed(0)
    written = 0
    for spec, fmt in itertools.product(weights, (COMPRESSED_TENSORS, DEEPSEEK, MODELOPT, MXFP4)):
        shape = {"power_of_two": (130, 257), "fp32": (160, 256)}.get(spec.scale, (160, 192))
        w = torch.randn(shape, generator=generator) * 3
        reads = QuantSpec(E4M3, (None, None), "fp32")
        written += records.weight(fmt, spec, w, Inputs(spec=reads, scale=0.5, amax=4.0))
    assert written > 20, f"{written} of the layouts"
