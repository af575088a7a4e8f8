"""Ctrl-C (or a scheduler's SIGTERM) lets a run finish its step and save, instead of killing it anywhere.

A second Ctrl-C stops at once.
"""

import signal
import threading
from types import FrameType, TracebackType


class Interrupted(Exception):
    """A run was asked to stop and did; `exit_code` is the shell's for that signal (130 for Ctrl-C)."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Interrupt:
    """While entered, notes the first signal in `number`; a thread that is not the main one is left alone."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.number: int | None = None

    def __enter__(self) -> "Interrupt":
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
