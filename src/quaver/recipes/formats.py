"""Number formats as data: the class `Format`, and the table `FORMATS`.

Sources: OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2); OCP Microscaling Formats 1.0 (E3M2, E2M3, E2M1, E8M0).
"""

import math
import re
from dataclasses import dataclass, field

#: Range of signed formats, that of E5M2. Scales are multiplied into values before the float32 product, and no product
#: of two may overflow or underflow.
SMALLEST_STEP, LARGEST = 2.0**-16, 2.0**16
#: Largest exponent bias, that of float32.
WIDEST_BIAS = 127


@dataclass(frozen=True, kw_only=True)
class Format:
    """A small floating-point format: sign, exponent, mantissa from the highest bit down.

    The largest magnitude is finite and saturates; Quaver never produces a stored infinity. Custom formats are constants
    of this class and are computed by emulation, with a code per byte.

    Raises:
        ValueError: fields contradict each other, or the range is wider than E5M2's.
    """

    #: Lower-case name: key in `FORMATS`, and printed in specs.
    name: str
    #: Bits of one code, including the sign if there is one: at most 8.
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    #: Largest finite magnitude, a value of the format.
    max: float
    #: True if the format can store NaN, in codes above that of the largest number. Other formats store the largest
    #: number instead.
    has_nan: bool = True
    #: True if the format has a sign (scale formats have none).
    signed: bool = True
    #: Exponent of the smallest normal number: 2**emin.
    emin: int = field(init=False, repr=False, compare=False)
    #: Exponent of the largest finite number: max = (1 + fraction) * 2**emax.
    emax: int = field(init=False, repr=False, compare=False)
    #: The 23 mantissa bits of `max` as a float32.
    max_mantissa: int = field(init=False, repr=False, compare=False)
    #: True if two codes share a byte, as with E2M1.
    packed: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_fields(self)
        numbers = self.bits, self.exponent_bits, self.mantissa_bits, self.bias, self.max, self.has_nan
        emax = math.frexp(self.max)[1] - 1
        derived = {
            # A format without mantissa bits has no subnormals: code 0 is a normal number.
            "emin": (self.mantissa_bits > 0) - self.bias,
            "emax": emax,
            "max_mantissa": int((self.max / 2.0**emax - 1.0) * 2.0**23),
            "packed": numbers == (4, 2, 1, 1, 6.0, False),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        _check_largest(self)
        if self.signed:
            _check_range(self)

    @property
    def stored_bits(self) -> int:
        """Bits of a code in memory; formats of five to seven bits use a byte."""
        return 4 if self.packed else 8

    @property
    def max_code(self) -> int:
        """Code of `max`."""
        fraction = self.max_mantissa >> (23 - self.mantissa_bits)
        return ((self.emax + self.bias) << self.mantissa_bits) + fraction

    @property
    def text(self) -> str:
        """Name of a format in `FORMATS`, else the name and the numbers; `parse` reads both."""
        if FORMATS.get(self.name) == self:
            return self.name
        nan = "nan" if self.has_nan else "finite"
        return f"{self.name}({self.exponent_bits},{self.mantissa_bits},{self.bias},{float(self.max)!r},{nan})"

    @staticmethod
    def parse(text: str) -> "Format":
        """Return the signed format written as `text`."""
        name, _, numbers = text.rstrip(")").partition("(")
        if not numbers:
            return FORMATS[name]
        exponent, mantissa, bias, largest, nan = numbers.split(",")
        e, m = int(exponent), int(mantissa)
        return Format(
            name=name,
            bits=1 + e + m,
            exponent_bits=e,
            mantissa_bits=m,
            bias=int(bias),
            max=float(largest),
            has_nan=nan == "nan",
        )

    def __str__(self) -> str:
        return self.name


def _check_fields(fmt: Format) -> None:
    if not isinstance(fmt.name, str) or not re.fullmatch("[a-z][a-z0-9_]*", fmt.name):
        raise ValueError(f"Format.name is {fmt.name!r}; give lower-case letters, digits and _, such as 'e3m4'")
    for name in ("bits", "exponent_bits", "mantissa_bits", "bias"):
        value = getattr(fmt, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"format {fmt.name!r}: {name} is {value!r}; give a whole number")
    for name in ("has_nan", "signed"):
        if not isinstance(getattr(fmt, name), bool):
            raise ValueError(f"format {fmt.name!r}: {name} is {getattr(fmt, name)!r}; give True or False")
    total = fmt.signed + fmt.exponent_bits + fmt.mantissa_bits
    if fmt.bits != total or fmt.bits > 8 or fmt.exponent_bits < 1 or fmt.mantissa_bits < fmt.signed:
        raise ValueError(
            f"format {fmt.name!r} has bits={fmt.bits}, exponent_bits={fmt.exponent_bits} and "
            f"mantissa_bits={fmt.mantissa_bits}; give at least one of each, and as bits the sum of both and of the "
            f"sign ({total} here), at most 8"
        )
    if not -WIDEST_BIAS <= fmt.bias <= WIDEST_BIAS:
        raise ValueError(f"format {fmt.name!r}: bias is {fmt.bias}; give one from -{WIDEST_BIAS} to {WIDEST_BIAS}")
    if not isinstance(fmt.max, int | float) or isinstance(fmt.max, bool) or not 0 < fmt.max <= 2.0**WIDEST_BIAS:
        raise ValueError(f"format {fmt.name!r}: max is {fmt.max!r}; give its largest finite number")


def _check_largest(fmt: Format) -> None:
    last = 2 ** (fmt.bits - fmt.signed) - 1
    steps = fmt.max / 2.0 ** (max(fmt.emax, fmt.emin) - fmt.mantissa_bits)
    if steps != int(steps) or fmt.emax < fmt.emin or fmt.max_code > last - fmt.has_nan:
        top = f"below code {last}, which is NaN's" if fmt.has_nan else f"up to code {last}"
        raise ValueError(
            f"format {fmt.name!r}: max is {fmt.max}, which is not one of its normal numbers {top}; give its largest "
            "finite number"
        )


def _check_range(fmt: Format) -> None:
    if fmt.max > LARGEST or 2.0 ** (fmt.emin - fmt.mantissa_bits) < SMALLEST_STEP:
        raise ValueError(
            f"format {fmt.name!r} ranges from {2.0 ** (fmt.emin - fmt.mantissa_bits):g} to {fmt.max:g}; GEMMs support "
            f"the range of E5M2, {SMALLEST_STEP:g} to {LARGEST:g}: give another bias, which the scales compensate"
        )


FORMATS: dict[str, Format] = {}

E4M3 = Format(name="e4m3", bits=8, exponent_bits=4, mantissa_bits=3, bias=7, max=448.0)
E5M2 = Format(name="e5m2", bits=8, exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0)
E3M2 = Format(name="e3m2", bits=6, exponent_bits=3, mantissa_bits=2, bias=3, max=28.0, has_nan=False)
E2M3 = Format(name="e2m3", bits=6, exponent_bits=2, mantissa_bits=3, bias=1, max=7.5, has_nan=False)
E2M1 = Format(name="e2m1", bits=4, exponent_bits=2, mantissa_bits=1, bias=1, max=6.0, has_nan=False)
#: For scales only: code c is 2**(c - 127), 255 is NaN.
E8M0 = Format(name="e8m0", bits=8, exponent_bits=8, mantissa_bits=0, bias=127, max=2.0**127, signed=False)

FORMATS.update((f.name, f) for f in (E4M3, E5M2, E3M2, E2M3, E2M1, E8M0))
