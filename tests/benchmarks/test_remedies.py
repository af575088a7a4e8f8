"""Check that remedies help where docs/guides/diverged.md says, by the figures that it has."""

import inspect
import re
from collections.abc import Callable

import pytest

from benchmarks import remedies
from benchmarks.remedies import PAGE, Settings

#: Remedies measured without training.
SNR = [remedies.hadamard, remedies.smooth_swiglu, remedies.gradient_format, remedies.margin]


def pairs(text: str) -> list[float]:
    """Figures in dB before and after each remedy, in one list."""
    return [float(value) for pair in re.findall(r"([\d.]+) → ([\d.]+) dB", text) for value in pair]


@pytest.mark.parametrize("measure", SNR, ids=lambda f: f.__name__)
def test_the_page_has_the_snr_that_is_measured_and_the_remedy_raises_it(measure: Callable[[Settings], str]) -> None:
    name = next(remedy.name for remedy in remedies.REMEDIES if remedy.measure is measure)
    row = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |"))
    measured = pairs(measure(Settings()))
    assert measured == pytest.approx(pairs(row), abs=0.3)
    assert measured[1] > measured[0] + 1


def test_the_page_has_the_function_that_is_measured() -> None:
    _, body = inspect.getsource(remedies.smooth).split('"""Move', 1)
    assert body in PAGE.read_text(encoding="utf-8")


def test_a_schedule_trains_unquantized_after_the_change() -> None:
    differences = remedies.trained(Settings(steps=1, seeds=1))  # whose only step is after the change
    assert differences["schedule"] == [0.0]
    assert differences["nvfp4"] != [0.0] and abs(differences["nvfp4"][0]) < 0.1
    assert set(differences) == {*remedies.RUNS, "null"}
