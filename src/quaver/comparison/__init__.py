"""Comparisons of training runs: paired differences from a baseline with 95 % intervals, verdicts, a report and a plot.

`quaver.torch.compare`, `quaver.jax.compare` and the command `quaver compare` train the runs; `compare_files` reads the
losses of runs that any program has written.
"""

from quaver.comparison.files import compare_files
from quaver.comparison.results import ComparedRun, Comparison

__all__ = ["ComparedRun", "Comparison", "compare_files"]


def __dir__() -> list[str]:
    """Return only the public names."""
    return sorted(__all__)
