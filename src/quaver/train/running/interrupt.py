"""Ctrl-C, a scheduler's SIGTERM or a closed terminal's SIGHUP lets a run finish its step and save.

A second Ctrl-C stops at once, but not with several ranks, to which torchrun sends each signal once more. Under nohup,
which has SIGHUP ignored, it stays ignored.
"""

import signal
import threading
from types import FrameType


class Interrupted(Exception):
    """A run was asked to stop and did; `exit_code` is the shell's for that signal (130 for Ctrl-C)."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Interrupt:
    """While entered, notes the first signal in `number`; a thread that is not the main one is left alone.

    Args:
        patient: note a second signal, too, where otherwise it does what it would without this.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))

    def __init__(self, patient: bool = False) -> None:
        self.patient = patient
        self.number: int | None = None

    def __enter__(self) -> "Interrupt":
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            noted = [number for number in self.SIGNALS if not ignored_on_purpose(number)]
            self._before = {number: signal.signal(number, self._note) for number in noted}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        if not self.patient:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def ignored_on_purpose(number: int) -> bool:
    """Whether a signal is ignored as nohup has it; a shell's background jobs ignore SIGINT, which is to be noted."""
    return number != signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN
