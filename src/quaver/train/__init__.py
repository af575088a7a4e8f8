"""The trainer behind the command line: trains a language model under any recipe and compares recipes.

`run_training` and `compare_runs` are the functions behind the commands `quaver train` and `quaver compare`. No other
package imports this one. Names are imported at first use, so that the command line can say what to install if extras
are missing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quaver.train.commands import installation

if TYPE_CHECKING:
    from quaver.comparison import Comparison
    from quaver.train.compare import compare_runs
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
    if sentence := installation.missing_packages():
        raise ImportError(sentence)
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names only."""
    return sorted(__all__)
