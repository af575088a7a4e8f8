"""Codes in which optimizer states are kept, as data: one `StateCode` each, the table `CODES`, and `StateSpec`.

States are no operands of GEMMs, so nothing asks for a floating-point format: integers whose values lie closer near zero
(companded ones) lose less in as many bits. Every code of a byte is a row of ascending magnitudes, zero first and the
largest last, with or without a sign.
"""

import math
import re
from dataclasses import dataclass
from functools import cache

import numpy as np

from quaver.recipes.formats import E4M3, E5M2, Format
from quaver.recipes.spec import QuantSpec
from quaver.reference.numerics import decode as decode_format
from quaver.reference.numerics import encode as encode_format
from quaver.reference.numerics import round_to

# ---- codes -----------------------------------------------------------------------------------------------

#: Unsigned, so that the bit of the sign is one of the mantissa: for square roots.
E4M4 = Format(name="e4m4", bits=8, exponent_bits=4, mantissa_bits=4, bias=7, max=496.0, has_nan=False, signed=False)


@dataclass(frozen=True, kw_only=True)
class StateCode:
    """One way to write a number.

    Values of magnitudes are |x| / scale, at most `largest`.
    """

    name: str
    #: What a code means: "float32" and "bfloat16" themselves, without a scale; "float16" times a scale; a "format";
    #: "softsign", c / (254 - c); "root", (c / top)²; "mitchell", near a power of c, see `halvings`; "dynamic", a table
    #: of 256 values; "expanded", a power of a format's, see `quaver.reference.optimizer_state`.
    kind: str
    #: Bytes of a code.
    bytes: int
    #: Whether negative numbers have codes.
    signed: bool = True
    #: Of kind "format".
    format: Format | None = None
    #: Whether the format holds the square root of the value: only of codes without a sign.
    root: bool = False
    #: The largest magnitude as a multiple of the scale; of kind "mitchell" 2**-16 less, so that no rounding exceeds it.
    largest: float = 1.0
    #: Of kind "mitchell": a value's bits, halved so often, are those of its code, as float32; so values lie near c² / 2
    #: or c⁴ / 8, on straight lines from one code to the next. Source: Mitchell, "Computer Multiplication and Division
    #: Using Binary Logarithms", 1962.
    halvings: int = 0
    #: How many float32 numbers a block keeps, side by side along the scales' last dimension.
    numbers: int = 1

    @property
    def scaled(self) -> bool:
        """Whether values of a block share a scale."""
        return self.kind not in ("float32", "bfloat16")

    @property
    def top(self) -> int:
        """The code of the largest magnitude, of integers."""
        return 127 if self.signed else 255


#: Kinds whose codes are integers; those with a sign are int8.
INTEGERS = ("softsign", "root", "mitchell")

CODES: dict[str, StateCode] = {
    code.name: code
    for code in (
        StateCode(name="float32", kind="float32", bytes=4),
        StateCode(name="bfloat16", kind="bfloat16", bytes=2),
        # MS-AMP's: a float16 number times a scale.
        StateCode(name="float16", kind="float16", bytes=2, largest=65504.0),
        StateCode(name="e4m3", kind="format", bytes=1, format=E4M3, largest=E4M3.max),
        StateCode(name="e5m2", kind="format", bytes=1, format=E5M2, largest=E5M2.max),
        # Of second moments: the format holds √v.
        StateCode(name="root_e4m3", kind="format", bytes=1, signed=False, format=E4M3, root=True, largest=E4M3.max**2),
        StateCode(name="root_e5m2", kind="format", bytes=1, signed=False, format=E5M2, root=True, largest=E5M2.max**2),
        StateCode(name="root_e4m4", kind="format", bytes=1, signed=False, format=E4M4, root=True, largest=E4M4.max**2),
        # Source: FlashOptim, arXiv:2602.23349.
        StateCode(name="int8_softsign", kind="softsign", bytes=1),
        StateCode(name="int8_root", kind="root", bytes=1),
        StateCode(name="uint8_root", kind="root", bytes=1, signed=False),
        StateCode(name="int8_mitchell", kind="mitchell", bytes=1, halvings=1, largest=8063.876953125),
        StateCode(name="uint8_mitchell", kind="mitchell", bytes=1, signed=False, halvings=1, largest=32511.50390625),
        StateCode(name="uint8_mitchell4", kind="mitchell", bytes=1, signed=False, halvings=2, largest=528474240.0),
        # Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861.
        StateCode(name="int8_dynamic", kind="dynamic", bytes=1),
        StateCode(name="uint8_dynamic", kind="dynamic", bytes=1, signed=False),
        # Source: COAT, arXiv:2410.19313: three numbers a block.
        StateCode(name="e4m3_expanded", kind="expanded", bytes=1, format=E4M3, numbers=3),
    )
}
#: What a scale may be: bfloat16 rounded up; float32; float32 that is a power of two.
SCALES = {"bfloat16": 2, "float32": 4, "power_of_two": 4}


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """How one state of a parameter is kept.

    Raises:
        ValueError: an unknown code or scale, a block that is no positive number, noise where a code takes none.
    """

    #: A name in `CODES`.
    code: str = "float32"
    #: Elements along the last dimension that share a scale; None: the whole tensor. Of codes that have a scale.
    block: int | None = 64
    #: A name in `SCALES`.
    scale: str = "bfloat16"
    #: Rounds at random so that the expectation is the value; else to nearest.
    stochastic: bool = False
    #: Gives a number that is not zero at least the smallest code that is not zero.
    floor: bool = False

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"state code {self.code!r} is not known; give one of {', '.join(CODES)}")
        if self.scale not in SCALES:
            raise ValueError(f"scale of a state is {self.scale!r}; give one of {', '.join(SCALES)}")
        if self.block is not None and (not isinstance(self.block, int) or self.block < 1):
            raise ValueError(
                f"block of a state is {self.block!r}; give a positive number, or None for one scale in all"
            )
        if CODES[self.code].numbers > 1 and (self.block is None or self.scale != "float32"):
            raise ValueError(
                f"state code {self.code!r} keeps float32 numbers of blocks; give a block and scale 'float32'"
            )
        if self.stochastic and (CODES[self.code].kind in ("float32", "float16", "dynamic", "expanded")):
            raise ValueError(f"state code {self.code!r} is rounded to nearest only; leave stochastic out")
        if self.floor and self.of.kind not in ("format", *INTEGERS):
            raise ValueError(f"state code {self.code!r} has no smallest code to hold values at; leave floor out")

    @property
    def of(self) -> StateCode:
        return CODES[self.code]

    @property
    def text(self) -> str:
        """What `parse` reads: `uint8_root/64 stochastic floor`."""
        words = [self.code]
        if self.of.scaled:
            words[0] += f"/{self.block or 'tensor'}"
            words += [self.scale] if self.scale != "bfloat16" else []
        words += ["stochastic"] if self.stochastic else []
        words += ["floor"] if self.floor else []
        return " ".join(words)

    @staticmethod
    def parse(text: str) -> "StateSpec":
        """The spec that `text` wrote. Raises: ValueError."""
        match = re.fullmatch(r"(\w+)(?:/(\d+|tensor))?((?: \w+)*)", text)
        if match is None:
            raise ValueError(f"state spec {text!r} cannot be read; write such as 'uint8_root/64 stochastic floor'")
        code, block, rest = match.groups()
        words = rest.split()
        scale = [word for word in words if word in SCALES]
        unknown = [word for word in words if word not in (*SCALES, "stochastic", "floor")]
        if unknown or len(scale) > 1:
            raise ValueError(f"state spec {text!r} cannot be read; write such as 'uint8_root/64 stochastic floor'")
        return StateSpec(
            code=code,
            block=64 if block is None else None if block == "tensor" else int(block),
            scale=scale[0] if scale else "bfloat16",
            stochastic="stochastic" in words,
            floor="floor" in words,
        )

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a state of this shape, scales included."""
        number = 1
        for size in shape:
            number *= size
        if not self.of.scaled:
            return number * self.of.bytes
        scales = 1
        if self.block is not None:
            last = shape[-1] if shape else 1
            scales = (number // last if last else 0) * -(-last // self.block) * self.of.numbers
        return number * self.of.bytes + scales * SCALES[self.scale]


FLOAT32 = StateSpec()


# ---- dynamic ---------------------------------------------------------------------------------------------
# The dynamic map of eight-bit optimizers: 256 values from ±1e-6 to 1, in each decade twice as many as in the last.
#
# Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, section 2.2 and appendix.

DECADES = 7


@cache
def levels(signed: bool) -> np.ndarray:
    """All values in ascending order, by which codes count: float32 [256]. With a sign 1 is there and -1 is not."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        edges = np.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1)
        middles = 10.0 ** (decade + 1 - DECADES) * (edges[1:] + edges[:-1]) / 2
        values += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(values)).astype(np.float32)


@cache
def boundaries(signed: bool) -> np.ndarray:
    """Halfway between neighbours: a value above one belongs to the code above it. float32 [255]."""
    table = levels(signed)
    return (table[1:] + table[:-1]) * np.float32(0.5)


# ---- expanded --------------------------------------------------------------------------------------------
# Dynamic range expansion: the magnitudes of a block are raised to a power, so that they fill a format's whole range.
#
#     k = min(16, floor(16 log2(448² / 2) / log2(largest / smallest)) / 16)       c = √(largest smallest)
#     S = (largest / c)^k / 448         code = e4m3(±(|x| / c)^k / S)         x = ±(|code| S)^(1 / k) c
#
# The smallest is that of the numbers that are not zero (subnormals count as zeros), so a block keeps its mantissa where
# one element is zero; k is at least 1/16. Powers are taken in float64, whose logarithms differ between libraries in the
# last bit.
#
# Source: Xi et al., "COAT: Compressing Optimizer states and Activation for Memory-Efficient FP8 Training",
# arXiv:2410.19313, section 4.

F = np.float32
#: What a block keeps: k, c and S, float32, side by side.
NUMBERS = 3
#: What k is a multiple of, one over; its bounds.
PARTS, LEAST, MOST = 16, 1 / 16, 16.0
#: The powers of two between E4M3's largest number and its smallest that keeps its mantissa, squared and halved.
REACH = math.log2(E4M3.max**2 / 2)
SMALLEST_NORMAL = F(2.0**-126)


def encode(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 of blocks float32 [..., n], and their k, c and S: float32 [..., 3].

    A block of zeros has S = 0 and codes 0; one with a number that is not finite, NaN thrice and codes 0.
    Bounded: as in every other library, but for the last bit of a logarithm; see the module.
    """
    a = np.abs(blocks).astype(np.float64)
    counted = a >= SMALLEST_NORMAL
    finite = np.isfinite(a).all(-1, keepdims=True)
    usable = finite & counted.any(-1, keepdims=True)
    largest = np.where(usable, a.max(-1, keepdims=True, initial=0), 1.0)
    smallest = np.where(usable, np.where(counted, a, np.inf).min(-1, keepdims=True, initial=np.inf), 1.0)
    spread = np.maximum(np.log2(largest / smallest), REACH / MOST)
    k = np.maximum(np.floor(PARTS * REACH / spread) / PARTS, LEAST)
    # What is stored is what codes are made with.
    c = np.sqrt(largest * smallest).astype(F)
    s = (np.exp2(k * np.log2(largest / c)) / E4M3.max).astype(F)
    power = np.exp2(k * np.log2(np.where(counted, a, c) / c)) / s
    y = np.where(usable & counted, power, 0.0).astype(F)
    rounded = round_to(np.minimum(y, F(E4M3.max)), E4M3)
    codes = encode_format(np.copysign(rounded, blocks), E4M3)
    kept = np.concatenate([k.astype(F), np.where(usable, c, 1), np.where(usable, s, 0)], -1).astype(F)
    return np.where(codes & 0x7F, codes, 0).astype(np.uint8), np.where(finite, kept, F(np.nan))


def decode(codes: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Values of codes uint8 [..., n], float32, by k, c and S [..., 3]. Bounded: within an ulp."""
    k, c, s = (kept[..., i : i + 1].astype(np.float64) for i in range(NUMBERS))
    values = decode_format(codes, E4M3).astype(np.float64)
    reached = np.abs(values) * s
    x = np.exp2(np.log2(np.where(reached > 0, reached, 1.0)) / k) * c
    x = np.where(reached > 0, x, np.where(np.isnan(s), np.nan, 0.0))
    with np.errstate(over="ignore"):
        return np.copysign(x, values).astype(F)


# ---- presets ---------------------------------------------------------------------------------------------
# Presets: what an optimizer keeps for a parameter, in how many bits; the libraries' own for comparison.
#
# Sources: MS-AMP, arXiv:2310.18313; Transformer Engine's FusedAdam; COAT, arXiv:2410.19313; bitsandbytes,
# arXiv:2110.02861; torchao.optim; FlashOptim, arXiv:2602.23349.

#: What a weight that a GEMM reads in few bits keeps besides, so that small steps add up.
MASTERS = ("none", "residual8", "residual16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What is kept for a matrix. Norms, biases, embeddings and small tensors are kept as `float32` keeps them."""

    name: str
    #: What quaver's trainer keeps matrices as: "codes" of the recipe, where it has any, "bfloat16" or "float32".
    weights: str = "float32"
    #: The first moment of Adam, and the momentum of other rules.
    first: StateSpec = FLOAT32
    #: The second moment of Adam.
    second: StateSpec = FLOAT32
    #: Of weights that exist only in eight bits, one of `MASTERS`: what the step adds up in.
    codes: str = "float32"
    #: Of bfloat16 weights: "remainder", the 16 bits that float32 has more; "residual8", eight of them; "none";
    #: "float16", a master with one scale, of float16 weights too, which have a float32 one unless this is "none".
    bfloat16: str = "remainder"
    #: Whether `codes` and float16 masters are rounded at random.
    stochastic: bool = False
    #: How gradients are kept between backward and step: a dtype's name, or a spec.
    gradient: str | StateSpec = "float32"
    #: Whether updates of Adam are held to their bound.
    clamp: bool = True


_BFLOAT16 = StateSpec(code="bfloat16", stochastic=True)
#: At random: to nearest 0.9 of a small code is that code again, so a moment whose gradient stops would never decay.
_FIRST = StateSpec(code="int8_mitchell", stochastic=True)
_SECOND = StateSpec(code="uint8_mitchell4", stochastic=True, floor=True)
_MSAMP = StateSpec(code="e4m3", block=None, scale="power_of_two")
_COAT = StateSpec(code="e4m3_expanded", block=128, scale="float32")
_DYNAMIC_FIRST = StateSpec(code="int8_dynamic", block=256, scale="float32")
_DYNAMIC_SECOND = StateSpec(code="uint8_dynamic", block=256, scale="float32")

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(name="float32"),
        Preset(name="exact", weights="bfloat16", first=_BFLOAT16, second=_BFLOAT16, gradient="bfloat16"),
        Preset(name="balanced", weights="codes", first=_FIRST, second=_SECOND, codes="residual16", gradient="bfloat16"),
        Preset(
            name="lean",
            weights="codes",
            first=_FIRST,
            second=_SECOND,
            codes="residual8",
            bfloat16="residual8",
            stochastic=True,
            gradient=StateSpec(code="e4m3", block=128),
        ),
        Preset(
            name="msamp",
            weights="codes",
            first=_MSAMP,
            second=StateSpec(code="float16", block=None, scale="power_of_two"),
            codes="float16",
            gradient=_MSAMP,
            clamp=False,
        ),
        Preset(
            name="te",
            weights="bfloat16",
            first=StateSpec(code="e4m3", block=None, scale="float32"),
            second=StateSpec(code="float16", block=None, scale="float32"),
            gradient="bfloat16",
            clamp=False,
        ),
        Preset(name="coat", first=_COAT, second=_COAT, clamp=False),
        # Its scales are float16, which a block of √v below 6e-8 has none of; its masters have 24 bits, these 32.
        Preset(
            name="flashoptim",
            weights="bfloat16",
            first=StateSpec(code="int8_softsign", block=32),
            second=StateSpec(code="uint8_root", block=32),
            gradient="bfloat16",
            clamp=False,
        ),
        Preset(
            name="bnb8",
            first=_DYNAMIC_FIRST,
            second=_DYNAMIC_SECOND,
            clamp=False,
        ),
        Preset(
            name="torchao8",
            weights="bfloat16",
            first=_DYNAMIC_FIRST,
            second=_DYNAMIC_SECOND,
            gradient="bfloat16",
            clamp=False,
        ),
    )
}


# ---- footprint -------------------------------------------------------------------------------------------
# Bytes that training keeps of a matrix by a preset: its weight, what is beside it, its gradient, its moments.

#: Tensors below are kept in float32, if they are no codes.
SMALL = 4096
_BESIDE = {"none": 0, "residual8": 1, "residual16": 2, "remainder": 2, "float16": 2, "float32": 4}
_FLOATS = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Footprint:
    """Bytes of a matrix, or of a whole model."""

    weight: int
    #: Master, residual or remainder.
    beside: int
    gradient: int
    moments: int

    @property
    def total(self) -> int:
        return self.weight + self.beside + self.gradient + self.moments

    @property
    def moved(self) -> int:
        """Bytes that a step in one pass moves: all is read, and all but the gradient is written."""
        return 2 * self.total - self.gradient

    def __add__(self, other: "Footprint") -> "Footprint":
        own, its = (tuple(vars(each).values()) for each in (self, other))
        return Footprint(*(a + b for a, b in zip(own, its, strict=True)))


NOTHING = Footprint(0, 0, 0, 0)


def plain(number: int, moments: int = 2) -> Footprint:
    """Of so many elements, all in float32."""
    return Footprint(4 * number, 0, 4 * number, 4 * number * moments)


def of_matrix(
    preset: Preset, shape: tuple[int, int], kept: str, spec: QuantSpec | None = None, moments: int = 2
) -> Footprint:
    """Of a matrix [rows, k].

    Args:
        kept: what its weight is: "codes", "bfloat16" or "float32".
        spec: of codes.
        moments: 2 of Adam, 1 of Lion and of SGD with momentum.
    Exact, but for the counts of steps and the amaxes that predict scales: four bytes a matrix, or a block.
    """
    number = shape[0] * shape[1]
    beside = 0
    if kept == "codes":
        assert spec is not None
        rows, columns = spec.blocks(*shape)
        weight = number + rows * columns * (1 if spec.scale == "e8m0" else 4)
        beside = number * _BESIDE[preset.codes] + (4 if preset.codes == "float16" else 0)
    else:
        weight = number * _FLOATS[kept]
        beside = number * _BESIDE[preset.bfloat16] if kept == "bfloat16" else 0
    specs = (preset.first, preset.second)[:moments]
    held = preset.gradient
    if isinstance(held, StateSpec):
        gradient = held.bytes(shape)
    else:
        gradient = number * min(_FLOATS[held], _FLOATS.get(kept, 4))
    return Footprint(weight, beside, gradient, sum(each.bytes(shape) for each in specs))
