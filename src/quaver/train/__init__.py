"""The trainer behind the command line: trains a language model under any recipe, and compares recipes.

It imports everything below it and is imported by nothing. `run_training` and `compare_runs` are the two
functions that the commands `quaver train` and `quaver compare` call, for use from Python.
"""

from quaver.train.compare import compare_runs
from quaver.train.comparison import Comparison
from quaver.train.config import TrainConfig
from quaver.train.loop import TrainResult, run_training

__all__ = ["Comparison", "TrainConfig", "TrainResult", "compare_runs", "run_training"]


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
