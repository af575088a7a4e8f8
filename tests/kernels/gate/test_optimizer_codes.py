"""Codes of optimizer states compile to few instructions, without multiply-adds that the interpreter does not have."""

import json

import pytest

from tests.kernels.test_gate import compiling

#: `tl.fma` of an element written and read; the most instructions of each on Hopper, amax, scale and memory included.
COMPILED = {
    "int8_mitchell/64 stochastic": (0, 0, (44, 20)),
    "uint8_mitchell4/64 stochastic floor": (0, 0, (40, 20)),
    "bfloat16 stochastic": (0, 0, (12, 12)),
}


@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.slow) for arch in (89, 100, 120))])
def test_the_compiler_fuses_no_multiply_add_unless_written(arch: int) -> None:
    """A product that enters a sum is rounded first, unless `tl.fma` is used: checked in the PTX."""
    done = compiling("-m", "tests.kernels.optim.roundtrip", str(arch), *COMPILED)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 2 * len(COMPILED)
    for row in rows:
        written, read, most = COMPILED[row["spec"]]
        # Eight elements a thread, and the inverse of a scale for them.
        inverse = 2 if row["kernel"] == "write" and "bfloat16" not in row["spec"] else 0
        assert row["fused"] == 8 * (written if row["kernel"] == "write" else read) + inverse, row
        assert row["stack"] == 0, row
        assert arch != 90 or row["instructions"] <= most[row["kernel"] == "read"], row
