"""Codes in which optimizer states are kept, as data: one `StateCode` each, the table `CODES`, and `StateSpec`.

States are no operands of GEMMs, so nothing asks for a floating-point format: integers whose values lie closer near zero
(companded ones) lose less in as many bits. Every code of a byte is a row of ascending magnitudes, zero first and the
largest last, with or without a sign.
"""

import re
from dataclasses import dataclass

from quaver.core.numbers.formats import E4M3, E5M2, Format

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
    #: of 256 values; "expanded", a power of a format's, see `quaver.core.states.expanded`.
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
