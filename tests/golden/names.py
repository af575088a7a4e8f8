"""Public names that have changed, so that the same cases run on this tree and on an earlier commit's.

Each name maps to the object under its present name, or under the earlier one where the imported tree has only that.
"""

import importlib
from typing import Any

#: A present name to the earlier one, in the order in which they are tried.
PARALLEL = {
    "ColwiseParallel": "Column",
    "RowwiseParallel": "Row",
    "SequenceParallel": "Sequence",
    "HeadParallel": "Heads",
    "VocabParallel": "Vocabulary",
}
#: Constants of kernels: an earlier name to the present one.
CONSTANTS: dict[str, str] = {}
#: Kernels: an earlier name to the present one.
KERNELS: dict[str, str] = {}


def first(*places: str) -> Any:
    """The first object that exists of "module:name"."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise AttributeError(f"no tree has any of {', '.join(places)}")


def parallel(name: str) -> Any:
    """A name of `quaver.torch.parallel`, given as it is called at present."""
    module = "quaver.torch.parallel"
    earlier = PARALLEL.get(name)
    return first(f"{module}:{name}", *([f"{module}:{earlier}"] if earlier else []))
