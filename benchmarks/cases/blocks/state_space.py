"""Time of Mamba-2's scan and mixer over transformers' own in plain torch, and error against float64."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import quaver.torch as qt
from benchmarks.measuring.figure import Case, Figure, NotMeasurable, at_most
from benchmarks.measuring.timing import Step, interleave
from quaver.torch.nn.ssm.chunked_scan import recurrence, steps_of

#: Batch, tokens, heads, features of a head, groups, features of a state: of a layer of Mamba-2 130M or so, of heads
#: that share less, and of a tiny model.
SIZES = {
    "quaver, 16 heads of 64, state 128": (1, 1024, 16, 64, 1, 128),
    "quaver, 24 heads of 64 in 8 groups, state 128": (1, 1024, 24, 64, 8, 128),
    "quaver, 8 heads of 32 in 2 groups, state 64": (2, 512, 8, 32, 2, 64),
}
QUICK_SIZES = {"quaver, 4 heads of 16, state 16": (2, 64, 4, 16, 1, 16)}
#: Chunk sizes of transformers' scan: the default of its configurations, and that of small models.
CHUNKS = (256, 64)
ROUNDS = 7
#: Targets: time over transformers' scan, and error against the recurrence in float64, in ppm.
TIME, ERROR = at_most(0.8), at_most(0.9)
#: Batch and tokens for the comparison with float64.
SHORT = (2, 300)
SCAN = "transformers' scan"


def drawn(size: tuple[int, ...]) -> dict[str, Tensor]:
    """Return random inputs of a scan, with the argument names of `quaver.torch.ssd`."""
    batch, tokens, heads, dim, groups, state = size
    torch.manual_seed(0)
    return {
        "x": torch.randn(batch, tokens, heads, dim),
        "dt": torch.randn(batch, tokens, heads),
        "A": -torch.rand(heads) * 15 - 1,
        "B": torch.randn(batch, tokens, groups, state) * state**-0.5,
        "C": torch.randn(batch, tokens, groups, state),
        "D": torch.ones(heads),
        "dt_bias": torch.randn(heads) - 4,
    }


def theirs(values: dict[str, Tensor], chunk_size: int) -> Tensor:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    scan: Any = mamba2_chunk_scan.__wrapped__
    given = {"hidden_states" if name == "x" else name: value for name, value in values.items()}
    y: Tensor = scan(**given, chunk_size=chunk_size, dt_softplus=True)
    return y


def ours(values: dict[str, Tensor], chunk_size: int) -> Tensor:
    return qt.ssd(**values)[0]


def step(run: Any, size: tuple[int, ...], chunk: int, backward: bool) -> Step:
    values = {name: value.requires_grad_(backward) for name, value in drawn(size).items()}
    leaves = list(values.values())
    g = torch.randn(*size[:4])

    def once() -> None:
        y = run(values, chunk)
        if backward:
            torch.autograd.grad(y, leaves, g)

    return once


def error(size: tuple[int, ...]) -> float:
    """Return the largest relative RMS error of output and gradients against the recurrence in float64, in ppm."""
    results = []
    for wide in (False, True):
        drawn_values = drawn((*SHORT, *size[2:]))
        values = {n: (v.double() if wide else v).requires_grad_() for n, v in drawn_values.items()}
        if wide:
            steps = steps_of(values["dt"], values["dt_bias"])
            y, _ = recurrence(values["x"], steps, values["A"], values["B"], values["C"], values["D"])
        else:
            y = ours(values, 0)
        g = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
        results.append([y.detach(), *torch.autograd.grad(y, list(values.values()), g)])
    errors = [(a.double() - b).norm() / b.norm() for a, b in zip(*results, strict=True)]
    return 1e6 * torch.stack(errors).max().item()


def measure(quick: bool) -> Iterator[Figure]:
    if find_spec("transformers") is None:
        raise NotMeasurable("transformers is not installed")
    target = None if quick else TIME
    for name, size in (QUICK_SIZES if quick else SIZES).items():
        for chunk in CHUNKS:
            for backward, of in ((False, "forward"), (True, "forward and backward")):
                steps = {SCAN: step(theirs, size, chunk, backward), "ours": step(ours, size, chunk, backward)}
                timing = interleave(steps, rounds=1 if quick else ROUNDS, steps=1 if quick else 2)["ours"]
                judged = target if backward else None
                yield Figure(name, f"{of}, of chunks of {chunk}", timing.ratio, "x", judged)
        yield Figure(name, "time, both", timing.seconds * 1e3, "ms")
        yield Figure(name, "from float64", error(size), "ppm", ERROR)


CASE = Case(
    name="state-space",
    title="The scan of Mamba-2 over transformers' in plain torch",
    notes=(
        "float32, one thread; `quaver.torch.ssd` over transformers' `mamba2_chunk_scan`, the path that its mixers take "
        "without the package mamba-ssm, by turns in one process, medians of each round's ratio; its chunks of 256 "
        "tokens are what its configurations begin with, ours choose their own. The last column is the largest of "
        f"outputs and all gradients of {SHORT[1]} tokens, relative RMS against the recurrence in float64."
    ),
    measure=measure,
)
