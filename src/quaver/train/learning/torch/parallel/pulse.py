"""A sign of life of each rank in the store that all have, so that a run's end names the rank that is furthest behind.

A thread writes it, so that a rank that computes for long is no dead one, and one that is stopped or gone falls silent.
A rank that has waited in vain looks at all signs for a while, without asking any clock but its own.
"""

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from quaver.torch.parallel.traffic import Sent

#: Seconds between two signs of a rank, and how long one that gives none is waited for.
EVERY, SILENT = 0.5, 4.0
#: Seconds that the store may take to answer.
ANSWER = timedelta(seconds=5)


@dataclass(frozen=True)
class Sign:
    """Where a rank was."""

    #: How many signs came before.
    number: int
    step: int
    #: "training", "validation", "saving".
    phase: str
    #: Collectives that it has begun, by its own count.
    calls: int
    #: What it waited for; "" for nothing.
    waiting: str
    #: Seconds since its step, phase or calls changed.
    idle: float
    #: It leaves, since the run ends.
    left: bool = False

    def place(self) -> str:
        return f"at step {self.step} ({self.phase})" if self.step else f"before step 1 ({self.phase})"


class Pulse:
    """This rank's signs, and those of all.

    Args:
        store: of torch.distributed; the signs have a connection of their own where it can be had.
        rank: of this process.
        world: how many ranks there are.
        sent: what this rank has sent so far.
    """

    def __init__(self, store: Any, rank: int, world: int, sent: Sent) -> None:
        with suppress(NotImplementedError, RuntimeError):
            store = store.clone()
        store.set_timeout(ANSWER)
        self.store, self.rank, self.world, self.sent = store, rank, world, sent
        self.step, self.phase = 0, "setting up"
        self._number, self._moved = 0, time.monotonic()
        self._seen: tuple[int, str, int, str] | None = None
        self._ended, self._woken = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="quaver-pulse", daemon=True)

    def at(self, step: int, phase: str) -> None:
        """Say where this rank is now."""
        self.step, self.phase = step, phase
        self._woken.set()

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Give a last sign, which says that this rank leaves."""
        self._ended.set()
        self._woken.set()
        self._thread.join(2 * ANSWER.total_seconds())
        with suppress(RuntimeError):
            self._write(left=True)

    def _beat(self) -> None:
        while not self._ended.is_set():
            self._woken.wait(EVERY)
            self._woken.clear()
            try:
                self._write()
            except RuntimeError:  # the store is gone, or stands still: a rank that looks for a sign will see
                continue

    def _write(self, left: bool = False) -> None:
        seen = (self.step, self.phase, sum(self.sent.calls.values()), self.sent.waiting)
        if seen != self._seen:
            self._seen, self._moved = seen, time.monotonic()
        self._number += 1
        sign = Sign(self._number, *seen, time.monotonic() - self._moved, left)
        self.store.set(f"pulse/{self.rank}", json.dumps(asdict(sign)))

    def signs(self) -> dict[int, Sign]:
        """The newest of each rank that has given any. Raises: RuntimeError if the store does not answer."""
        keys = {rank: f"pulse/{rank}" for rank in range(self.world)}
        keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {rank: Sign(**json.loads(self.store.get(key))) for rank, key in keys.items()}

    def behind(self) -> tuple[list[int], list[int], Mapping[int, Sign]]:
        """Look at all ranks until each has given a new sign or `SILENT` seconds have gone.

        Returns:
            The silent ranks; of the others those that are furthest behind; and the newest sign of each.
        """
        first, begun = self.signs(), time.monotonic()
        others = [rank for rank in range(self.world) if rank != self.rank]
        while True:
            # Those that wait in vain like this one have time to leave.
            time.sleep(2 * EVERY)
            newest = self.signs()
            silent = [rank for rank in others if _silent(first, newest, rank)]
            if not silent or time.monotonic() > begun + SILENT:
                alive = {rank: newest[rank] for rank in others if rank not in silent and not newest[rank].left}
                return silent, _furthest(alive), newest


def _silent(first: Mapping[int, Sign], newest: Mapping[int, Sign], rank: int) -> bool:
    if rank not in newest:
        return True
    return not newest[rank].left and rank in first and newest[rank].number == first[rank].number


def _furthest(alive: Mapping[int, Sign]) -> list[int]:
    """Of ranks that live, those in the earliest step that do not wait; else those that began fewest collectives."""
    if not alive:
        return []
    step = min(sign.step for sign in alive.values())
    alive = {rank: sign for rank, sign in alive.items() if sign.step == step}
    busy = [rank for rank, sign in alive.items() if not sign.waiting]
    if busy and len(busy) < len(alive):
        return busy
    fewest = min(sign.calls for sign in alive.values())
    return [rank for rank, sign in alive.items() if sign.calls == fewest]
