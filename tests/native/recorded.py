"""Checks of recorded launches and their variants, in a process in which Triton compiles.

`python -m tests.native.recorded` prints the error of each check, "" for none, as JSON.
"""

import dataclasses
import json
import traceback
from collections.abc import Callable

import pytest
import torch

from quaver.capi.cases import FAMILIES, Selection, record
from quaver.capi.variants import variants
from quaver.kernels.tensorwise import transpose

MX = Selection(families=("mx",))


def every_key_has_a_general_variant() -> None:
    selection = Selection(families=tuple(FAMILIES))
    for arch in (80, 90, 100):
        found = variants(record(selection, arch))
        assert {(v.kernel, v.key) for v in found if v.general} == {(v.kernel, v.key) for v in found}


def variants_are_in_order_from_the_most_special_to_the_general_one() -> None:
    found = variants(record(MX, 90))
    first = [v for v in found if (v.kernel, v.key) == (found[0].kernel, found[0].key)]
    assert [v.whole for v in first] == [True, False, False]
    assert first[1].assumes.bit_count() > first[2].assumes.bit_count()
    assert first[2].general


def a_key_without_a_general_variant_is_refused() -> None:
    special = [one for one in record(MX, 90) if one.constants["EVEN"]]
    with pytest.raises(ValueError, match=r"mxfp8_\w+ has no general variant of key 0x"):
        variants(special)


def a_constant_that_no_key_tells_is_refused() -> None:
    launches = record(MX, 90)
    other = dataclasses.replace(launches[0], constants={**launches[0].constants, "EMAX": 99})
    with pytest.raises(ValueError, match="two variants of one key: EMAX is 8 and 99"):
        variants([*launches, other])


def a_kernel_that_c_does_not_launch_is_refused() -> None:
    other = dataclasses.replace(record(MX, 90)[0], fn=transpose)
    with pytest.raises(ValueError, match="transpose is no kernel of the C API"):
        variants([other])


def dtypes_multiply_the_variants() -> None:
    two = Selection(families=("mx",), dtypes=(torch.bfloat16, torch.float32))
    assert len(variants(record(two, 90))) == 2 * len(variants(record(MX, 90)))


CHECKS: list[Callable[[], None]] = [
    every_key_has_a_general_variant,
    variants_are_in_order_from_the_most_special_to_the_general_one,
    a_key_without_a_general_variant_is_refused,
    a_constant_that_no_key_tells_is_refused,
    a_kernel_that_c_does_not_launch_is_refused,
    dtypes_multiply_the_variants,
]


def error(check: Callable[[], None]) -> str:
    try:
        check()
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    print(json.dumps({check.__name__: error(check) for check in CHECKS}))
