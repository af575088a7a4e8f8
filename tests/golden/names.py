"""Public names that a commit before has under another name: cases find them by the new one in both."""

import importlib
from typing import Any

#: By the name of this tree, names of earlier ones.
EARLIER: dict[str, tuple[str, ...]] = {
    "quaver.torch.CapturedStep": ("quaver.torch.model.programs.graph.CapturedStep",),
    "quaver.torch.parallel.ColwiseParallel": ("quaver.torch.parallel.Column",),
    "quaver.torch.parallel.HeadParallel": ("quaver.torch.parallel.Heads",),
    "quaver.torch.parallel.RowwiseParallel": ("quaver.torch.parallel.Row",),
    "quaver.torch.parallel.SequenceParallel": ("quaver.torch.parallel.Sequence",),
    "quaver.torch.parallel.VocabParallel": ("quaver.torch.parallel.Vocabulary",),
}


def public(name: str) -> Any:
    """What a dotted public name stands for, by this tree's name or an earlier one. Raises: AttributeError."""
    for each in (name, *EARLIER.get(name, ())):
        module, _, attribute = each.rpartition(".")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):
            continue
    raise AttributeError(f"neither {name} nor an earlier name of it is there")
