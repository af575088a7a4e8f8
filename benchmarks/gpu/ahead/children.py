"""Processes of `benchmarks.gpu.ahead.walk`: what they note, what they are asked to compile, and what they count."""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[3]
#: How a line begins that has what a process counted; one that has a launch; and what answers one that was compiled.
COUNTED, NOTED, DONE = (f"benchmarks.gpu.ahead, {kind}: " for kind in ("counted", "recorded_amax", "compiled"))


class Child:
    """A walk in a process of its own; one that is left before its end is ended."""

    def __init__(self, walk: str, arch: int, environment: dict[str, str], arguments: Sequence[str] = ()) -> None:
        self.name = f"sm_{arch} {' '.join([walk, *(one for one in arguments if not one.startswith('-'))])}"
        #: Read at the end alone.
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-m", "benchmarks.gpu.ahead.walk", walk, str(arch), *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)
        self.counted = ""

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # What could not be written to one that has ended is written again when its input is closed.
        with self.errors, suppress(BrokenPipeError), self.process:
            self.process.kill()

    def lines(self, kind: str) -> Iterator[str]:
        """What follows in the lines of a kind, to the end of its output."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(COUNTED):
                self.counted = line.removeprefix(COUNTED)
            elif line.startswith(kind):
                yield line.removeprefix(kind).rstrip("\n")

    def ask(self, line: str) -> None:
        """Have it compile a launch, and wait until it has. Raises: RuntimeError: it ended."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{NOTED}{line}\n")
            self.process.stdin.flush()
        if next(self.lines(DONE), None) is None:
            raise self.ended()

    def end(self, say: Callable[[str], None], failures: bool = True) -> Counter[str]:
        """What it counted, when it is done; says that, and what failed there or else what it compiled.

        Raises:
            RuntimeError: it did not come to its end.
        """
        assert self.process.stdin is not None
        self.process.stdin.close()
        for _ in self.lines(NOTED):
            pass
        if not self.counted:
            raise self.ended()
        kernel_args = json.loads(self.counted)
        names, failed, seconds = kernel_args.pop("names"), kernel_args.pop("failed"), kernel_args.pop("seconds")
        for line in failed if failures else [f"was left to compile {name}" for name in names]:
            say(f"{self.name}: {line}")
        counts = ", ".join(f"{value} {name}" for name, value in kernel_args.items()) or "nothing launched"
        say(f"{self.name}: {counts}; {seconds:.0f} s of the processor")
        return Counter(kernel_args)

    def ended(self) -> RuntimeError:
        code = self.process.wait()
        self.errors.seek(0)
        return RuntimeError(f"{self.name} ended with code {code}:\n{self.errors.read()[-3000:]}")
