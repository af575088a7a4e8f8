"""A small layer's forward and backward under a recipe, run on this machine: what `quaver doctor` has seen."""

import warnings

import torch

import quaver.torch as qt
from quaver.core.spec import Recipe

#: In features and out features of the layer, and tokens: sizes that every GPU's GEMMs take.
SIZE = 256


def trial(recipe: Recipe) -> list[tuple[str, str, str]]:
    """The three GEMMs of a layer that has run: its name, the implementation, and why not the native one.

    The device is the first GPU where there is one, else the CPU.
    Raises: RuntimeError if the layer cannot run there.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = qt.Linear(SIZE, SIZE, device=device, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a GPU emulates is what the table says
        layer(x).sum().backward()
        rows = qt.explain(layer, x).rows
    return [
        (row.what.removesuffix(" GEMM"), row.runs, dict(row.passed_over).get("native", ""))
        for row in rows
        if row.what.endswith(" GEMM")
    ]
