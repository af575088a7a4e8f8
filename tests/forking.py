"""Processes from which the programs of tests are forked: `python -m tests.forking FOLDER` starts the first of them.

Each has imported the libraries of its stage, is forked from that of the stage before, listens on a socket of FOLDER,
and forks itself once for every program that is requested (tests/forked.py). They end with the run of the tests,
which holds FOLDER's pipe open. No backend and no thread of a library is alive in them: those do not survive a fork.
"""

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import termios
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

#: What each stage imports beyond the stages before it.
STAGES: dict[str, list[str]] = {
    "torch": ["torch"],
    "jax": ["jax"],
    # What a training imports; torch's optimizers import Dynamo.
    "quaver": [
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "quaver.train.commands.cli",
        "quaver.train.jax.learner",
        "quaver.train.torch.learner",
        "quaver.train.plots",
        "benchmarks.acceptance.training",
        "tests.forked",
    ],
}
#: Each program imports these again: the first checks its terminal at import, the second is a program itself.
FRESH = ("quaver.train.commands.cli", "benchmarks.acceptance.training")
#: In FOLDER: the pipe that the run of the tests holds open.
ALIVE = "alive"


@dataclass(kw_only=True)
class Program:
    """A requested program with the properties of a separate process."""

    # After the name of the interpreter: options -W, then -m MODULE, -c CODE or a file, then arguments.
    command: list[str]
    environment: dict[str, str]
    folder: str
    # Whether it leads a session of its own, and whether its input is the terminal of that session.
    session: bool = False
    terminal: bool = False
    # If not empty, the request starts the process of this stage instead of a program.
    stage: str = ""
    # Descriptors of standard input, output and errors.
    files: list[int] = field(default_factory=list)


def address(folder: int, stage: str) -> str:
    """Path of a stage's socket in an open folder, whose name may be longer than a socket name."""
    return f"/proc/self/fd/{folder}/{stage}"


def send(connection: socket.socket, program: Program) -> None:
    """Request a program; its files are sent as descriptors."""
    data = json.dumps({**vars(program), "files": []}).encode()
    socket.send_fds(connection, [len(data).to_bytes(8, "little")], program.files)
    connection.sendall(data)


def receive(connection: socket.socket) -> Program | None:
    """Receive a request, or None if the sender has closed the connection."""
    size, files, *_ = socket.recv_fds(connection, 8, 3)
    if not size:
        return None
    with connection.makefile("rb") as stream:
        return Program(**json.loads(stream.read(int.from_bytes(size, "little"))) | {"files": files})


def serve(stage: str, folder: int, alive: int) -> None:
    """Import the libraries of the stage and fork programs until the run of the tests ends."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(folder, f"{stage}-"))
        listener.listen(64)
        os.rename(f"{stage}-", stage, src_dir_fd=folder, dst_dir_fd=folder)
        imports(stage)
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        running: dict[int, socket.socket] = {}
        stages: set[int] = set()
        while True:
            ready = select.select([listener, alive, wake_read], [], [])[0]
            if alive in ready:
                break
            if wake_read in ready:
                os.read(wake_read, 4096)
                send_exit_codes(running)
            if listener in ready:
                connection = listener.accept()[0]
                program = receive(connection)
                if program is None:
                    continue
                # JAX and Python warn about threads, but there are none.
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    child = os.fork()
                if child:
                    running[child] = connection
                    stages |= {child} if program.stage else set()
                    connection.sendall(child.to_bytes(8, "little"))
                    for number in program.files:
                        os.close(number)
                    continue
                signal.set_wakeup_fd(-1)
                for number in (wake_read, wake_write):
                    os.close(number)
                for each in (listener, connection, *running.values()):
                    each.close()
                become(program, folder, alive)
    for child in running.keys() - stages:
        os.kill(child, signal.SIGKILL)


def send_exit_codes(running: dict[int, socket.socket]) -> None:
    """Send the exit codes of programs that have ended to the processes that requested them."""
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        with running.pop(child) as connection, suppress(OSError):
            connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "little", signed=True))


def imports(stage: str) -> None:
    gc.disable()
    for name in STAGES[stage]:
        importlib.import_module(name)
    if stage == "jax":
        from tests import conftest

        conftest.compile_quickly()
    for name in FRESH:
        sys.modules.pop(name, None)
    # Garbage collection in the programs skips the objects that exist already.
    gc.collect()
    gc.freeze()
    gc.enable()


def become(program: Program, folder: int, alive: int) -> NoReturn:
    """Run the requested program in the forked process, from its first line to its exit code."""
    code = 1
    try:
        if program.stage:
            serve(program.stage, folder, alive)
            code = 0
        else:
            for number in (folder, alive):
                os.close(number)
            code = end(program)
    finally:
        os._exit(code)


def begin(program: Program) -> Callable[[], object]:
    """Files, signals, environment, folder and arguments as Python sets them; returns the program."""
    if program.session:
        os.setsid()
    for place, number in enumerate(program.files):
        os.dup2(number, place)
        os.close(number)
    if program.terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Streams that Python opened in this process write to other files now.
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    requested, own = (read_at_import(each) for each in (program.environment, os.environ))
    assert requested == own, f"this process has imported libraries under {own}, not {requested}"
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.folder)
    arguments = program.command
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
    return load(arguments)


def load(arguments: Sequence[str]) -> Callable[[], object]:
    """The program that a command line names, whose arguments it sets."""
    kind, *rest = arguments
    if kind == "-m":
        sys.path[0], sys.argv = os.getcwd(), list(rest)
        if rest[0] == "quaver.train":
            # A comparison's own runs.
            from quaver.train import compare
            from tests import forked

            compare.subprocess = forked.quick
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    if kind == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        module = sys.modules["__main__"] = ModuleType("__main__")
        return lambda: exec(compile(rest[0], "<string>", "exec"), vars(module))
    assert not kind.startswith("-"), f"no program is forked with {kind}"
    sys.path[0], sys.argv = str(Path(kind).resolve().parent), list(arguments)
    return lambda: runpy.run_path(kind, run_name="__main__")


def end(program: Program) -> int:
    """Run it, and do what Python does when a program has ended; returns its exit code."""
    code: Any = 0
    try:
        begin(program)()
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or 120
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return int(code) & 0xFF


def main(folder: str) -> None:
    # An interrupt from the tests' terminal is meant for the tests only.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    place = os.open(folder, os.O_RDONLY)
    if os.fork():
        return
    serve(next(iter(STAGES)), place, os.open(ALIVE, os.O_RDONLY | os.O_NONBLOCK, dir_fd=place))


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that libraries read when they are imported; all programs have one thread."""
    names = ("JAX_", "TRITON_", "TORCH", "MKL_", "PYTHON", "MPL")
    return {name: value for name, value in environment.items() if name.startswith(names)}


if __name__ == "__main__":
    main(sys.argv[1])
