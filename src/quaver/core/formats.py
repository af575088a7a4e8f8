"""Number formats as data: one `Format` each, and the table `FORMATS`.

Sources: OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2); OCP Microscaling Formats 1.0 (E2M1, E8M0).
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class Format:
    """A small floating-point format: sign, exponent, mantissa from the highest bit down.

    The largest magnitude is finite and saturates; no format here stores an infinity that Quaver would produce.
    """

    #: Lower-case name, the key in `FORMATS`.
    name: str
    #: Bits of one code, the sign included where there is one.
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    #: Largest finite magnitude.
    max: float
    #: Whether the format can store NaN.
    has_nan: bool = True
    #: Whether it has a sign (scale formats have none).
    signed: bool = True

    def __post_init__(self) -> None:
        # Known from the start: a compiler that traces a first access would trip over the cache's lock.
        for name in ("emin", "emax", "max_mantissa"):
            getattr(self, name)

    @cached_property
    def emin(self) -> int:
        """Exponent of the smallest normal number: 2**emin."""
        return 1 - self.bias

    @cached_property
    def emax(self) -> int:
        """Exponent of the largest finite number: max = (1 + fraction) * 2**emax."""
        return int(self.max).bit_length() - 1

    @cached_property
    def max_mantissa(self) -> int:
        """The 23 mantissa bits of `max` as a float32."""
        return int((self.max / 2.0**self.emax - 1.0) * 2.0**23)

    def __str__(self) -> str:
        return self.name


E4M3 = Format(name="e4m3", bits=8, exponent_bits=4, mantissa_bits=3, bias=7, max=448.0)
E5M2 = Format(name="e5m2", bits=8, exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0)
E2M1 = Format(name="e2m1", bits=4, exponent_bits=2, mantissa_bits=1, bias=1, max=6.0, has_nan=False)
#: Scales only: code c is 2**(c - 127), 255 is NaN.
E8M0 = Format(name="e8m0", bits=8, exponent_bits=8, mantissa_bits=0, bias=127, max=2.0**127, signed=False)

FORMATS = {f.name: f for f in (E4M3, E5M2, E2M1, E8M0)}
