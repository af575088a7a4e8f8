"""Test the format table against ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest

from quaver.recipes.formats import FORMATS, Format
from quaver.reference.numerics import NAN_CODE, decode, encode, magnitudes
from tests.close import assert_bitwise

PEERS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
#: The formats that it has.
KNOWN = [fmt for fmt in FORMATS.values() if fmt.name in PEERS]
SIGNED = [f for f in FORMATS.values() if f.signed]


def every_code(fmt: Format) -> np.ndarray:
    return np.arange(2**fmt.bits, dtype=np.uint8)


@pytest.mark.parametrize("fmt", KNOWN, ids=str)
def test_fields_agree_with_ml_dtypes(fmt: Format) -> None:
    peer = ml_dtypes.finfo(PEERS[fmt.name])
    assert fmt.bits == fmt.signed + fmt.exponent_bits + fmt.mantissa_bits
    assert (fmt.bits, fmt.mantissa_bits, fmt.exponent_bits) == (peer.bits, peer.nmant, peer.nexp)
    assert fmt.max == float(peer.max)
    if fmt.signed:
        assert 2.0**fmt.emin == float(peer.smallest_normal)
        assert 2.0 ** (fmt.emin - fmt.mantissa_bits) == float(peer.smallest_subnormal)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_emax_and_max_mantissa_give_the_largest_number(fmt: Format) -> None:
    assert (1 + fmt.max_mantissa / 2**23) * 2.0**fmt.emax == fmt.max
    bits = int(np.float32(fmt.max).view(np.uint32))
    assert (fmt.max_mantissa, fmt.emax) == (bits & 0x7FFFFF, (bits >> 23) - 127)


@pytest.mark.parametrize("fmt", [f for f in KNOWN if f.signed], ids=str)
def test_every_code_decodes_as_in_ml_dtypes(fmt: Format) -> None:
    peer = every_code(fmt).view(PEERS[fmt.name]).astype(np.float32)
    expected = np.where(np.isinf(peer), np.float32(np.nan), peer)  # infinities are never produced, so never decoded
    assert_bitwise(decode(every_code(fmt), fmt), expected)


@pytest.mark.parametrize("fmt", SIGNED, ids=str)
def test_encode_inverts_decode_for_every_code(fmt: Format) -> None:
    values = decode(every_code(fmt), fmt)
    expected = np.where(np.isnan(values), np.uint8(NAN_CODE), every_code(fmt))
    assert_bitwise(encode(values, fmt), expected)


@pytest.mark.parametrize("fmt", SIGNED, ids=str)
def test_magnitudes_ascend_from_zero_to_max(fmt: Format) -> None:
    finite = magnitudes(fmt)[np.isfinite(magnitudes(fmt))]
    assert finite[0] == 0 and finite[-1] == fmt.max
    assert (np.diff(finite) > 0).all()
    assert np.isfinite(magnitudes(fmt)).all() == (not fmt.has_nan)


@pytest.mark.parametrize("largest", [1.5, 2.0**127, 0.1])
def test_the_largest_number_of_a_format_without_a_sign_has_a_code(largest: float) -> None:
    with pytest.raises(ValueError, match="not one of its normal numbers"):
        Format(name="scale", bits=7, exponent_bits=7, mantissa_bits=0, bias=63, max=largest, signed=False)
