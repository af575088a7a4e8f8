"""Setting of a run, cases, and their results."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.measuring.figure import Figure
from benchmarks.subjects import peer


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Device and thoroughness, the same for every case of a run."""

    device: torch.device
    #: Toy sizes, which only check that everything runs.
    toy: bool = False
    #: Fewer sizes and rounds.
    quick: bool = False
    #: A card that is not there (`benchmarks.gpu.ahead`): everything is launched once, at the sizes of a run.
    hollow: bool = False

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def rounds(self) -> int:
        """Number of rounds of a timing."""
        return 1 if self.toy or self.hollow else 5 if self.quick else 11

    def why_no_peer(self) -> str:
        """Return why torchao cannot be measured, or ""."""
        return "torchao is not measured where there is no card" if self.hollow else peer.available()

    def compiled(self, model: nn.Module) -> nn.Module:
        """Compile a model for one shape; a dry run leaves out machine code, which takes a minute."""
        module: nn.Module = torch.compile(model, dynamic=False, backend="aot_eager" if self.toy else "inductor")
        return module

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Without a GPU, use its implementations with interpreted kernels; on a GPU they are the default."""
        if self.cuda:
            yield
            return
        import quaver.torch as qt

        with qt.only("triton"):
            yield


@dataclass
class Findings:
    """Result of a case: its figures, and a sentence for each subject that could not be measured."""

    figures: list[Figure] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, subject: str, column: str, value: float, unit: str) -> None:
        self.figures.append(Figure(subject, column, value, unit))


class Case(NamedTuple):
    """One measurement, which takes a few seconds."""

    name: str
    #: Adds findings as it measures them, so that those before a failure remain.
    measure: Callable[[Setting, Findings], None]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Cases that make one table."""

    name: str
    title: str
    #: How it is measured, and how to read it.
    notes: str
    #: Maximum seconds of all its cases, to which unused time of other sections is added.
    seconds: float
    cases: Callable[[Setting], list[Case]]
    #: True for a process of its own: the section may break the GPU's context, or changes what others measure.
    alone: bool = False


class GpuLost(RuntimeError):
    """The GPU's context is broken, so this process cannot measure any more."""


def check_gpu(setting: Setting) -> None:
    """After a failure: raise GpuLost unless the GPU still works."""
    if not setting.cuda:
        return
    try:
        torch.cuda.synchronize()
        torch.ones(8, device=setting.device).sum().item()
    except Exception as error:
        raise GpuLost(first_line(error)) from error


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
