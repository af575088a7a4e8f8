"""Programs of tests, forked from a process that has already imported their libraries: they take a tenth of the time.

Arguments, environment, folder, files, signals, session and exit code are those of a separate process. A test of what
Python does before a program's first line, or of the time of imports, starts a real process instead.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from tests import forking
from tests.conftest import PROGRAMS, ROOT

#: Seconds in which a process must have imported the libraries of its stage.
LONGEST = 300


def connected(stage: str) -> socket.socket:
    """A connection to the process of a stage; the first caller in a run of the tests starts that process."""
    place = os.open(os.environ[PROGRAMS], os.O_RDONLY)
    try:
        lock = os.open("lock", os.O_RDWR | os.O_CREAT, dir_fd=place)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            start(stage, place)
        finally:
            os.close(lock)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(forking.address(place, stage))
        return connection
    finally:
        os.close(place)


def start(stage: str, place: int) -> None:
    """Start the process of a stage, and those of all stages before it, in an open folder that is locked."""
    stages = list(forking.STAGES)
    if stage in os.listdir(place):
        return
    before = stages[: stages.index(stage)]
    if before:
        start(before[-1], place)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(forking.address(place, before[-1]))
            forking.send(connection, forking.Program(command=[], environment={}, folder="", stage=stage))
            connection.recv(8)
    else:
        command = [sys.executable, "-m", "tests.forking", os.environ[PROGRAMS]]
        files = dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL)
        # A second thread that waits takes no core from the other worker.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        # It forks itself and ends, so that nobody has to wait for it.
        subprocess.run(command, cwd=ROOT, env=environment, start_new_session=True, check=True, **files)
    end = time.monotonic() + LONGEST
    while stage not in os.listdir(place):
        assert time.monotonic() < end, f"no process with {stage} came"
        time.sleep(0.01)


@contextmanager
def _opened(requested: Sequence[Any]) -> Iterator[tuple[list[int], list[IO[bytes] | None]]]:
    """The numbers of the three files that a process starts with, and the read ends of pipes."""
    numbers, opened = [], []
    pipes: list[IO[bytes] | None] = [None] * len(requested)
    for place, file in enumerate(requested):
        if file == subprocess.PIPE:
            end, number = os.pipe()
            pipes[place] = os.fdopen(end, "rb")
            opened.append(number)
        elif file == subprocess.DEVNULL:
            number = os.open(os.devnull, os.O_RDWR)
            opened.append(number)
        elif file is None or isinstance(file, int):
            number = place if file is None else file
        else:
            number = file.fileno()
        numbers.append(number)
    try:
        yield numbers, pipes
    finally:
        for number in opened:
            os.close(number)


def take_terminal() -> None:
    """For `preexec_fn`: standard input is the terminal of the session that begins here."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Popen:
    """The part of `subprocess.Popen` used by the trainer and tests, with the stage whose libraries the program
    needs.
    """

    def __init__(
        self,
        command: Sequence[Any],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        start_new_session: bool = False,
        preexec_fn: Any = None,
        stage: str = "quaver",
    ) -> None:
        assert command[0] == sys.executable and preexec_fn in (None, take_terminal)
        environment = dict(os.environ if env is None else env)
        with _opened((stdin, stdout, stderr)) as (files, self.pipes):
            program = forking.Program(
                command=[os.fsdecode(part) for part in command[1:]],
                environment=environment,
                folder=str(cwd or os.getcwd()),
                session=start_new_session,
                terminal=preexec_fn is not None,
                files=files,
            )
            self.connection = connected(stage)
            forking.send(self.connection, program)
            reply = self.connection.recv(8)
        assert reply, f"the process with {stage} has ended"
        self.pid = int.from_bytes(reply, "little")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(0.0)

    def _ended(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            self.connection.settimeout(seconds)
            try:
                code = self.connection.recv(8)
            except (BlockingIOError, TimeoutError):
                return None
            assert code, "the process before it has ended"
            self.returncode = int.from_bytes(code, "little", signed=True)
            self.connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout and max(timeout, 0.001))
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float = 600.0) -> tuple[bytes | None, bytes | None]:
        """Output written to pipes; small enough for a pipe to hold the unread part."""
        end = time.monotonic() + timeout
        outputs: list[bytes | None] = []
        for pipe in self.pipes[1:]:
            with pipe or nullcontext():
                outputs.append(pipe and pipe.read())
        self.wait(end - time.monotonic())
        return outputs[0], outputs[1]


def run(
    command: Sequence[Any],
    *,
    capture_output: bool = False,
    text: bool = False,
    check: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> "subprocess.CompletedProcess[Any]":
    """Like `subprocess.run`; the output goes through files, so that it may be of any size."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        if capture_output:
            options |= {"stdout": out, "stderr": errors}
        process = Popen(command, **options)
        try:
            process.wait(timeout)
        except BaseException:
            process.send_signal(signal.SIGKILL)
            raise
        outputs: list[Any] = [None, None]
        if capture_output:
            for place, file in enumerate((out, errors)):
                file.seek(0)
                outputs[place] = file.read().decode() if text else file.read()
    assert process.returncode is not None
    done = subprocess.CompletedProcess(list(command), process.returncode, *outputs)
    if check:
        done.check_returncode()
    return done


def bare(stage: str) -> Any:
    """Like `quick`, with a process that has imported only the libraries of a stage."""
    if sys.platform != "linux":
        return subprocess
    return SimpleNamespace(Popen=partial(Popen, stage=stage), run=partial(run, stage=stage), **KINDS)


KINDS = {"PIPE": subprocess.PIPE, "DEVNULL": subprocess.DEVNULL}
#: Replaces the module `subprocess`; where processes cannot be forked like this, it is that module.
quick: Any = SimpleNamespace(Popen=Popen, run=run, **KINDS) if sys.platform == "linux" else subprocess
