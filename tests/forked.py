"""Processes that are forked from one that has imported what each of them would: a tenth of their time.

Arguments, environment, files and signals are those of a process of its own; what Python does before and after a program
is left out, so some tests start one.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

#: What a training in PyTorch imports; torch's optimizers import Dynamo.
IMPORTED = ["quaver.train.commands.cli", "quaver.train.learning.torch.learner", "quaver.train.showing.plots"]
IMPORTED += ["torch._dynamo", "benchmarks.acceptance.training", "tests.forked"]
FORKING = multiprocessing.get_context("forkserver") if sys.platform == "linux" else None
if FORKING:
    FORKING.set_forkserver_preload(IMPORTED)


class Sent:
    """A file's number, which is another one in the process that it is sent to."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (DupFd(self.number),)


def _arrived(file: Any) -> int:
    number: int = file.detach()
    return number


def _run(command: Sequence[str], environment: Mapping[str, str], folder: str, files: Sequence[int]) -> None:
    """In the forked process: be `python -m MODULE ARGUMENTS`."""
    for place, file in enumerate(files):
        os.dup2(file, place)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (as long as the process)
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if command[2] == "quaver.train":
        # A comparison's own runs.
        from quaver.train.running import compare

        compare.subprocess = quick  # type: ignore[assignment]
    sys.argv = [*command[2:]]
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)


@contextmanager
def _opened(asked: Sequence[Any]) -> Iterator[tuple[list[Sent], list[IO[bytes] | None]]]:
    """What is sent in the place of the three files that a process begins with; and the ends of pipes to read."""
    numbers, opened = [], []
    pipes: list[IO[bytes] | None] = [None] * len(asked)
    for place, file in enumerate(asked):
        if file == subprocess.PIPE:
            end, number = os.pipe()
            pipes[place] = os.fdopen(end, "rb")
            opened.append(number)
        elif file == subprocess.DEVNULL:
            number = os.open(os.devnull, os.O_RDWR)
            opened.append(number)
        else:
            number = place if file is None else file.fileno()
        numbers.append(number)
    try:
        yield list(map(Sent, numbers)), pipes
    finally:
        for number in opened:
            os.close(number)


class Popen:
    """What the trainer and tests use of `subprocess.Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
    ) -> None:
        assert FORKING is not None and list(command[:2]) == [sys.executable, "-m"]
        environment = dict(os.environ if env is None else env)
        with _opened((stdin, stdout, stderr)) as (files, self.pipes):
            arguments = [*command], environment, str(cwd or os.getcwd()), files
            self.process = FORKING.Process(target=_run, args=arguments)
            self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float = 600.0) -> tuple[bytes | None, bytes | None]:
        """What it wrote into pipes; little enough for a pipe to hold what is read last."""
        end = time.monotonic() + timeout
        said: list[bytes | None] = []
        for pipe in self.pipes[1:]:
            with pipe or nullcontext():
                said.append(pipe and pipe.read())
        self.wait(end - time.monotonic())
        return said[0], said[1]


#: In the place of the module of that name; where there is no such server, the module.
quick: Any = SimpleNamespace(Popen=Popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL) if FORKING else subprocess
