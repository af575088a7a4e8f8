"""An operation is an ordered list of implementations; the first that has no reason to refuse runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quaver.core.text.spelling import suggest


class Unsupported(ValueError):
    """No implementation takes this call; the message gives the reason of each."""


@dataclass(frozen=True)
class Impl:
    """One way to run an operation."""

    name: str
    run: Callable[..., Any]
    #: Called with the operation's arguments: "" to take the call, else the reason why not.
    reason: Callable[..., str]


class Op:
    """A named operation with its implementations, the preferred one first."""

    def __init__(self, name: str, impls: list[Impl]) -> None:
        self.name = name
        self.impls = impls
        #: The implementations that `only` left; a call tries them in order.
        self.active = impls

    def __call__(self, *args: Any) -> Any:
        for impl in self.active:
            if not impl.reason(*args):
                return impl.run(*args)
        reasons = "; ".join(f"{name}: {why}" for name, why in self.explain(*args))
        raise Unsupported(f"no implementation of {self.name} takes this call. {reasons}")

    def pick(self, *args: Any) -> Callable[..., Any]:
        """The function that a call with these arguments would run; the operation itself if none would."""
        return next((impl.run for impl in self.active if not impl.reason(*args)), self)

    def explain(self, *args: Any) -> list[tuple[str, str]]:
        """(implementation, "" or why not) in order of preference; the first "" is the one that runs."""
        allowed = {impl.name for impl in self.active}
        return [(i.name, i.reason(*args) if i.name in allowed else "switched off by only()") for i in self.impls]


@contextmanager
def only(ops: list[Op], name: str) -> Iterator[None]:
    """Run one implementation by name, for tests and for bisecting; it holds for the whole process.

    Raises:
        ValueError: no operation has an implementation of that name.
    """
    known = list(dict.fromkeys(impl.name for op in ops for impl in op.impls))
    if name not in known:
        raise ValueError(f"no implementation {name!r}; {suggest(name, known)}")
    before = [op.active for op in ops]
    for op in ops:
        op.active = [impl for impl in op.impls if impl.name == name]
    try:
        yield
    finally:
        for op, active in zip(ops, before, strict=True):
            op.active = active
