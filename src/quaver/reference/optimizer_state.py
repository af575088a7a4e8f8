"""Codes of optimizer states as data: `StateCode`, the table `CODES`, `StateSpec`, presets, and their memory footprint.

States are not GEMM operands, so they need no floating-point format: integer codes with values denser near zero
(companded codes) lose less with the same bits. Every one-byte code is a list of ascending magnitudes from zero to the
largest, with or without a sign.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np

from quaver.recipes.formats import E4M3, E5M2, Format
from quaver.recipes.spec import QuantSpec
from quaver.recipes.text import suggest
from quaver.reference.numerics import decode as decode_format
from quaver.reference.numerics import encode as encode_format
from quaver.reference.numerics import round_to

# ---- codes ----

#: Unsigned, with one more mantissa bit instead of the sign: for square roots.
E4M4 = Format(name="e4m4", bits=8, exponent_bits=4, mantissa_bits=4, bias=7, max=496.0, has_nan=False, signed=False)


@dataclass(frozen=True, kw_only=True)
class StateCode:
    """One code of numbers; values of magnitudes are |x| / scale, at most `largest`."""

    name: str
    #: Meaning of a code: "float32" and "bfloat16" themselves, without a scale; "float16" times a scale; a "format";
    #: "softsign", c / (254 - c); "root", (c / top)²; "mitchell", near a power of c, see `halvings`; "dynamic", a table
    #: of 256 values; "expanded", a power of a format's value, see `quaver.reference.optimizer_state`.
    kind: str
    #: Bytes of a code.
    bytes: int
    #: True if negative numbers have codes.
    signed: bool = True
    #: Format of kind "format".
    format: Format | None = None
    #: True if the format stores the square root of the value; for unsigned codes only.
    root: bool = False
    #: Largest magnitude as a multiple of the scale; for kind "mitchell" less by a factor of 1 - 2**-16, so that no
    #: rounding exceeds it.
    largest: float = 1.0
    #: For kind "mitchell": the bits of a value, shifted right by this number, are those of its code as float32. So
    #: values are near c² / 2 or c⁴ / 8, on straight lines between codes. Source: Mitchell, "Computer Multiplication and
    #: Division Using Binary Logarithms", 1962.
    halvings: int = 0
    #: Number of float32 values stored per block, adjacent along the scales' last dimension.
    numbers: int = 1

    @property
    def scaled(self) -> bool:
        """True if the values of a block share a scale."""
        return self.kind not in ("float32", "bfloat16")

    @property
    def top(self) -> int:
        """Code of the largest magnitude, for integer codes."""
        return 127 if self.signed else 255


#: Kinds with integer codes; signed ones are int8.
INTEGERS = ("softsign", "root", "mitchell")

CODES: dict[str, StateCode] = {
    code.name: code
    for code in (
        StateCode(name="float32", kind="float32", bytes=4),
        StateCode(name="bfloat16", kind="bfloat16", bytes=2),
        # MS-AMP's code: a float16 number times a scale.
        StateCode(name="float16", kind="float16", bytes=2, largest=65504.0),
        StateCode(name="e4m3", kind="format", bytes=1, format=E4M3, largest=E4M3.max),
        StateCode(name="e5m2", kind="format", bytes=1, format=E5M2, largest=E5M2.max),
        # For second moments: the format stores √v.
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
        # Source: COAT, arXiv:2410.19313: three numbers per block.
        StateCode(name="e4m3_expanded", kind="expanded", bytes=1, format=E4M3, numbers=3),
    )
}
#: Bytes of a scale: bfloat16 rounded up; float32; float32 that is a power of two.
SCALES = {"bfloat16": 2, "float32": 4, "power_of_two": 4}


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """Storage of one state of a parameter.

    Raises:
        ValueError: unknown code or scale, a block that is not a positive number, or stochastic rounding for a code
            without it.
    """

    #: Key of `CODES`.
    code: str = "float32"
    #: Elements along the last dimension that share a scale, or None for one scale per tensor; ignored without scales.
    block: int | None = 64
    #: Key of `SCALES`.
    scale: str = "bfloat16"
    #: True to round stochastically so that the mean is the value; False rounds to nearest.
    stochastic: bool = False
    #: True to give nonzero numbers at least the smallest nonzero code.
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
                f"state code {self.code!r} stores float32 numbers per block; give a block and scale 'float32'"
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
        """Text that `parse` reads: `uint8_root/64 stochastic floor`."""
        words = [self.code]
        if self.of.scaled:
            words[0] += f"/{self.block or 'tensor'}"
            words += [self.scale] if self.scale != "bfloat16" else []
        words += ["stochastic"] if self.stochastic else []
        words += ["floor"] if self.floor else []
        return " ".join(words)

    @staticmethod
    def parse(text: str) -> "StateSpec":
        """Parse the text of a spec. Raises ValueError."""
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
        """Return the bytes of a state of this shape, including scales."""
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


# ---- dynamic map of eight-bit optimizers: 256 values up to 1, each decade with twice as many as the one below ----
# Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, section 2.2 and appendix.

DECADES = 7


@cache
def levels(signed: bool) -> np.ndarray:
    """Return all values in ascending order, indexed by code: float32 [256]. The signed map contains 1 but not -1."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        edges = np.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1)
        middles = 10.0 ** (decade + 1 - DECADES) * (edges[1:] + edges[:-1]) / 2
        values += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(values)).astype(np.float32)


@cache
def boundaries(signed: bool) -> np.ndarray:
    """Return the midpoints of neighbouring values; a value above one gets the higher code. float32 [255]."""
    table = levels(signed)
    return (table[1:] + table[:-1]) * np.float32(0.5)


# ---- dynamic range expansion: magnitudes of a block are raised to a power, so that they fill a format's range ----
#
#     k = min(16, floor(16 log2(448² / 2) / log2(largest / smallest)) / 16)       c = √(largest smallest)
#     S = (largest / c)^k / 448         code = e4m3(±(|x| / c)^k / S)         x = ±(|code| S)^(1 / k) c
#
# `smallest` is that of the nonzero numbers (subnormals count as zeros), so zeros do not cost a block its precision; k
# is at least 1/16. Powers are computed in float64, whose logarithms differ between libraries in the last bit.
#
# Source: Xi et al., "COAT: Compressing Optimizer states and Activation for Memory-Efficient FP8 Training",
# arXiv:2410.19313, section 4.

F = np.float32
#: Numbers stored per block: k, c and S, adjacent float32.
NUMBERS = 3
#: k is a multiple of 1 / PARTS, between LEAST and MOST.
PARTS, LEAST, MOST = 16, 1 / 16, 16.0
#: log2 of E4M3's largest number squared, over two: the range that keeps full mantissas.
REACH = math.log2(E4M3.max**2 / 2)
SMALLEST_NORMAL = F(2.0**-126)


def encode(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encode blocks float32 [..., n]; return uint8 codes, and k, c and S: float32 [..., 3].

    A block of zeros has S = 0 and codes 0; one with a number that is not finite has three NaN and codes 0. Equal to
    other libraries up to the last bit of a logarithm; see the module.
    """
    a = np.abs(blocks).astype(np.float64)
    counted = a >= SMALLEST_NORMAL
    finite = np.isfinite(a).all(-1, keepdims=True)
    usable = finite & counted.any(-1, keepdims=True)
    largest = np.where(usable, a.max(-1, keepdims=True, initial=0), 1.0)
    smallest = np.where(usable, np.where(counted, a, np.inf).min(-1, keepdims=True, initial=np.inf), 1.0)
    spread = np.maximum(np.log2(largest / smallest), REACH / MOST)
    k = np.maximum(np.floor(PARTS * REACH / spread) / PARTS, LEAST)
    # Use the stored, rounded c and S for encoding.
    c = np.sqrt(largest * smallest).astype(F)
    s = (np.exp2(k * np.log2(largest / c)) / E4M3.max).astype(F)
    power = np.exp2(k * np.log2(np.where(counted, a, c) / c)) / s
    y = np.where(usable & counted, power, 0.0).astype(F)
    rounded = round_to(np.minimum(y, F(E4M3.max)), E4M3)
    codes = encode_format(np.copysign(rounded, blocks), E4M3)
    weight_storage = np.concatenate([k.astype(F), np.where(usable, c, 1), np.where(usable, s, 0)], -1).astype(F)
    return np.where(codes & 0x7F, codes, 0).astype(np.uint8), np.where(finite, weight_storage, F(np.nan))


def decode(codes: np.ndarray, weight_storage: np.ndarray) -> np.ndarray:
    """Decode uint8 codes [..., n] to float32 with k, c and S [..., 3]; accurate within an ulp."""
    k, c, s = (weight_storage[..., i : i + 1].astype(np.float64) for i in range(NUMBERS))
    values = decode_format(codes, E4M3).astype(np.float64)
    reached = np.abs(values) * s
    x = np.exp2(np.log2(np.where(reached > 0, reached, 1.0)) / k) * c
    x = np.where(reached > 0, x, np.where(np.isnan(s), np.nan, 0.0))
    with np.errstate(over="ignore"):
        return np.copysign(x, values).astype(F)


# ---- presets: storage of parameters and states, including those of other libraries for comparison ----
# Sources: MS-AMP, arXiv:2310.18313; Transformer Engine's FusedAdam; COAT, arXiv:2410.19313; bitsandbytes,
# arXiv:2110.02861; torchao.optim; FlashOptim, arXiv:2602.23349.

#: Masters or residuals stored in addition to a low-bit weight, so that small steps accumulate.
MASTERS = ("none", "residual8", "residual16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Storage of a matrix and its states. Norms, biases, embeddings and small tensors are stored as in `float32`."""

    name: str
    #: Storage of matrices in quaver's trainer: "codes" of the recipe, if it has any, "bfloat16" or "float32".
    weights: str = "float32"
    #: First moment of Adam, and the momentum of other rules.
    first: StateSpec = FLOAT32
    #: Second moment of Adam.
    second: StateSpec = FLOAT32
    #: Master of weights stored as codes, one of `MASTERS`: the values that steps accumulate in.
    codes: str = "float32"
    #: Master of bfloat16 weights: "remainder", the other 16 bits of float32; "residual8", eight of them; "none";
    #: "float16", a master with one scale, also for float16 weights, which have a float32 master unless this is "none".
    bfloat16: str = "remainder"
    #: True if `codes` and float16 masters are rounded stochastically.
    stochastic: bool = False
    #: Storage of gradients between backward and step: a dtype's name, or a spec.
    gradient: str | StateSpec = "float32"
    #: True to clamp Adam updates to their bound.
    clamp: bool = True


_BFLOAT16 = StateSpec(code="bfloat16", stochastic=True)
#: Stochastic: to nearest, 0.9 times a small code would be the same code, so a moment without gradient would not decay.
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
        # Differs from FlashOptim in scales (theirs are float16, which has none for a block of √v below 6e-8) and
        # masters (24 bits there, 32 here).
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


# ---- presets as plain data, which `torch.load` reads with `weights_only=True` ----

#: Version of the layout of moments and residuals: suffix of a preset's name, or a key next to its fields.
LAYOUT, LAYOUT_KEY = 2, "form"


def preset_of(preset: Any) -> Preset:
    """Return a `Preset` from a name, from the fields that `packed` returns (without the marker), or unchanged.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(preset, Preset):
        return preset
    if isinstance(preset, Mapping):
        options: dict[str, Any] = dict(preset)
        options |= {name: StateSpec.parse(options[name]) for name in ("first", "second")}
        if "/" in options["gradient"]:
            options["gradient"] = StateSpec.parse(options["gradient"])
        return Preset(**options)
    if preset not in PRESETS:
        raise ValueError(f"preset {preset!r} is not known; {suggest(str(preset), list(PRESETS))}")
    return PRESETS[preset]


def packed(preset: Any) -> str | dict[str, Any]:
    """Return a preset as plain data: its name if it is one of `PRESETS`, else its fields; with the version of the
    layout if it may store residuals.
    """
    preset = preset_of(preset)
    versioned = "residual" in preset.codes + preset.bfloat16
    if PRESETS.get(preset.name) == preset:
        return f"{preset.name}/{LAYOUT}" if versioned else preset.name
    values = {field.name: getattr(preset, field.name) for field in fields(preset)}
    plain = {name: value.text if isinstance(value, StateSpec) else value for name, value in values.items()}
    return plain | ({LAYOUT_KEY: LAYOUT} if versioned else {})


def saved_preset(saved: Any) -> Preset:
    """Return the preset that wrote the states of a parameter group, from the group's entry as `packed` wrote it.

    Raises:
        ValueError: an unknown preset, or states in another version of the layout.
    """
    preset = preset_of(
        {name: value for name, value in saved.items() if name != LAYOUT_KEY}
        if isinstance(saved, Mapping)
        else str(saved).removesuffix(f"/{LAYOUT}")
    )
    if packed(preset) != saved:
        raise ValueError(
            f"the state dict has states of preset {preset.name} in a layout of another version of quaver; nothing was "
            "loaded: start the optimizer without it"
        )
    return preset


# ---- memory footprint of a matrix: weight, master or residual, gradient, moments ----

#: Smaller tensors have float32 states, unless they are stored as codes.
SMALL = 4096
_RESIDUAL_BYTES = {"none": 0, "residual8": 1, "residual16": 2, "remainder": 2, "float16": 2, "float32": 4}
_FLOATS = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Footprint:
    """Bytes of a matrix, or of a whole model."""

    weight: int
    #: Master, residual or remainder.
    additional: int
    gradient: int
    moments: int

    @property
    def total(self) -> int:
        return self.weight + self.additional + self.gradient + self.moments

    @property
    def states(self) -> int:
        """Bytes of all that the optimizer stores."""
        return self.additional + self.moments

    @property
    def moved(self) -> int:
        """Bytes that a one-pass step transfers: everything is read, and everything but the gradient is written."""
        return 2 * self.total - self.gradient

    def __add__(self, other: "Footprint") -> "Footprint":
        own, its = (tuple(vars(each).values()) for each in (self, other))
        return Footprint(*(a + b for a, b in zip(own, its, strict=True)))


NOTHING = Footprint(0, 0, 0, 0)


def plain(number: int, moments: int = 2) -> Footprint:
    """Return the footprint of `number` elements, all in float32."""
    return Footprint(4 * number, 0, 4 * number, 4 * number * moments)


def matrix_footprint(
    preset: Preset, shape: tuple[int, int], weight_storage: str, spec: QuantSpec | None = None, moments: int = 2
) -> Footprint:
    """Return the footprint of a matrix [rows, k].

    Exact, except for step counts and the amaxes that predict scales: four bytes per matrix or block.

    Args:
        weight_storage: storage of the weight: "codes", "bfloat16" or "float32".
        spec: spec of codes.
        moments: 2 for Adam, 1 for Lion and for SGD with momentum.
    """
    number = shape[0] * shape[1]
    additional = 0
    if weight_storage == "codes":
        assert spec is not None
        rows, columns = spec.blocks(*shape)
        weight = number + rows * columns * (1 if spec.scale == "e8m0" else 4)
        additional = number * _RESIDUAL_BYTES[preset.codes] + (4 if preset.codes == "float16" else 0)
    else:
        weight = number * _FLOATS[weight_storage]
        additional = number * _RESIDUAL_BYTES[preset.bfloat16] if weight_storage == "bfloat16" else 0
    specs = (preset.first, preset.second)[:moments]
    gradient_kind = preset.gradient
    if isinstance(gradient_kind, StateSpec):
        gradient = gradient_kind.bytes(shape)
    else:
        gradient = number * min(_FLOATS[gradient_kind], _FLOATS.get(weight_storage, 4))
    return Footprint(weight, additional, gradient, sum(each.bytes(shape) for each in specs))
