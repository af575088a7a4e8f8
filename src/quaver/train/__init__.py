"""The trainer behind the command line: trains a language model under any recipe, compares recipes; nothing imports it.

`run_training` and `compare_runs` are the two
functions that the commands `quaver train` and `quaver compare` call, for use from Python.

The names are imported when they are first used: without the extras the command line says what to install.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quaver.train.commands import installation

if TYPE_CHECKING:
    from quaver.train.compare import Comparison, compare_runs
    from quaver.train.config import TrainConfig
    from quaver.train.loop import TrainResult, run_training

__all__ = ["Comparison", "TrainConfig", "TrainResult", "compare_runs", "run_training"]

HOMES = {
    "Comparison": "compare",
    "TrainConfig": "config",
    "TrainResult": "loop",
    "compare_runs": "compare",
    "run_training": "loop",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if sentence := installation.missing():
        raise ImportError(sentence)
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
