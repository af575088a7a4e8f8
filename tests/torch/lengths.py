"""How a process grows while a layer trains on more and more lengths: `python -m tests.torch.lengths RECIPE DTYPE`.

Prints the resident megabytes that 500 lengths of sequence added after the first few.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import quaver.torch as qt

FEATURES, FIRST, LENGTHS, WARM = 256, 33, 500, 10


def resident() -> float:
    """Resident memory of this process in megabytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def growth(recipe: str, dtype: torch.dtype) -> float:
    """Megabytes added by the run over many lengths, under a recipe or for "nn.Linear"."""
    layer: nn.Linear = (
        nn.Linear(FEATURES, FEATURES, dtype=dtype)
        if recipe == "nn.Linear"
        else qt.Linear(FEATURES, FEATURES, dtype=dtype, recipe=recipe)
    )
    before = 0.0
    for i in range(LENGTHS):
        if i == WARM:
            before = resident()
        x = torch.randn(FIRST + i, FEATURES, dtype=dtype, requires_grad=True)
        layer(x).sum().backward()
    return resident() - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(growth(sys.argv[1], getattr(torch, sys.argv[2])))
