"""The tables of experts in docs/performance.md are those of the launches that a stand-in GPU records."""

import pytest

from benchmarks.measuring import stub_driver
from benchmarks.pages import experts
from benchmarks.pages.performance import PAGE

pytestmark = pytest.mark.skipif(stub_driver.compiler() is None, reason="the stand-in's driver needs a C compiler")


@pytest.mark.parametrize("gpu", ["h200", pytest.param("b200", marks=pytest.mark.slow)])
def test_the_page_has_what_the_launches_say(gpu: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    recorded = experts.recorded(gpu)
    rows = {module: experts.lines(gpu, module, recorded[module]) for module in experts.MARKERS}
    for row in rows["layer"] + rows["experts"]:
        assert "| " + " | ".join(row) + " |" in text, "write it by `python -m benchmarks ledger --moe`"
    # With torch operations: 105 launches and 14.4 GB.
    assert int(rows["experts"][0][2]) <= 22 and float(rows["experts"][0][3]) <= 6.6
    four_bits = "nvfp4"
    for _, name, launches, gigabytes, _, _, gain in rows["layer"][1:]:
        assert float(gigabytes) <= (8.0 if name == four_bits else 6.5)
        assert name == four_bits or int(launches) <= 14
        if (gpu, name) in (("h200", "rowwise"), ("h200", "tensorwise-e4m3")):
            assert float(gain) >= 1.4
        if (gpu, name) in (("b200", "mxfp8"), ("b200", "nvfp4")):
            assert float(gain) >= 1.2
