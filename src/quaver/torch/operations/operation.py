"""`Operation`: what is computed, declared in one place, with what runs it and what a compiler sees of it.

In eager mode the first implementation that has no reason to refuse runs. While torch.compile traces, the operation is
the opaque operator torch.ops.quaver.NAME, which runs that same implementation later: a compiled graph has eager's bits
and keeps what the operation returns, not what it decodes on the way.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor

from quaver.recipes.text import suggest
from quaver.torch.numerics.rounding import is_tracing

# ---- counting --------------------------------------------------------------------------------------------
# What torch's FlopCounterMode counts for operators into which it does not look, as those of exported programs.
#
# Eager layers need no formula on a CPU: the mode sees the product that stands for a GEMM in eight bits. On a GPU that
# is an operator of torch's own for which torch has no formula.

#: (the operator's arguments, out_val=what it returned) to FLOPs, by operator.
FORMULAS: dict[Any, Callable[..., int]] = {}


def register() -> None:
    """Tell torch's counter of FLOPs the formulas that it lacks, if it has been imported: that takes Triton's time.

    A FlopCounterMode made before has none of them.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    registered = getattr(module, "flop_registry", None)
    # While another thread imports it, it has no names yet.
    if module is None or registered is None:
        return
    for operator, formula in FORMULAS.items():
        if operator not in registered:
            module.register_flop_formula(operator, get_raw=True)(formula)


def _columns(x: Tensor) -> int:
    """Features along the last axis, of which codes of four bits hold two in one."""
    return x.shape[-1] * (2 if x.dtype is torch.float4_e2m1fn_x2 else 1)


def _scaled_mm(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """a [m, k] @ b [k, n]."""
    return 2 * out_val.numel() * _columns(a)


def _scaled_grouped_mm(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """a [T, k] @ b [groups, k, n]; of two matrices, whose groups lie along what is summed, a [n, T] @ b [T, k]."""
    columns = out_val.shape[-1]
    return 2 * a.shape[-2] * _columns(a) * columns * (a.shape[0] if a.dim() == 3 else 1)


for _name, _formula in (("_scaled_mm_v2", _scaled_mm), ("_scaled_grouped_mm_v2", _scaled_grouped_mm)):
    if hasattr(torch.ops.aten, _name):
        FORMULAS[getattr(torch.ops.aten, _name)] = _formula


# ---- operation -------------------------------------------------------------------------------------------

R = TypeVar("R")
#: A function, or "module:function", which is imported when it is first wanted.
Function = Callable[..., Any] | str
#: All that there are: `only` chooses among their implementations.
OPERATIONS: list["Operation[Any]"] = []
_library = torch.library.Library("quaver", "DEF")


class Unsupported(ValueError):
    """No implementation takes this call; the message gives the reason of each."""


def never(*_: object) -> str:
    """The reason of an implementation that takes every call."""
    return ""


def row_by_row(results: Any) -> Any:
    """The results of an operator whose fake says that they lie row by row: what torch computes may lie as its input."""
    if isinstance(results, torch.Tensor):
        return results.contiguous()
    return type(results)(result.contiguous() for result in results)


def _imported(function: Function) -> Callable[..., Any]:
    if not isinstance(function, str):
        return function
    module, name = function.split(":")
    imported: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return imported


@dataclass(frozen=True)
class Implementation:
    """One way to run an operation."""

    name: str
    function: Function
    #: Called with the operation's arguments: "" to take the call, else the reason why not.
    refusal: Function = never
    #: Asked before it, of where the operands are: where this refuses, nothing is imported.
    place: Callable[..., str] | None = None

    def __post_init__(self) -> None:
        # What needs no import is there already: Dynamo of Python 3.11 does not enter the lock of a cached_property.
        if callable(self.function):
            self.__dict__["run"] = self.function
        if callable(self.refusal) and self.place is None:
            self.__dict__["reason"] = self.refusal

    @cached_property
    def run(self) -> Callable[..., Any]:
        """The function itself, imported."""
        return _imported(self.function)

    @cached_property
    def reason(self) -> Callable[..., str]:
        """ "" to take a call with these arguments, else why not."""
        place = self.place
        if place is None or self.refusal is never:
            return place or _imported(self.refusal)
        return lambda *args: place(*args) or self._refusal(*args)

    @cached_property
    def _refusal(self) -> Callable[..., str]:
        return _imported(self.refusal)


class Operation(Generic[R]):
    """A named operation with its implementations, the preferred one first; R is what a call of it returns.

    Args:
        schema: its name; or, for one that compilers see, "NAME(Tensor x, ...) -> Tensor", as torch.library takes it.
        implementations: in order of preference; or the function that is the only one.
        fake: what the operator does to shapes and dtypes alone; needed with a schema of arguments.
        kernel: what the operator does, where its arguments are not the operation's.
        traced: what a traced call does, where the operation's arguments are not the operator's: calls `operator`.
        flops: (the operator's arguments, out_val=what it returned) to the FLOPs that torch's counter notes for it.
        parts: the operation that this one is composed of: `only` leaves of its implementations those whose name it
            leaves there.
    """

    def __init__(
        self,
        schema: str,
        implementations: Sequence[Implementation] | Callable[..., R],
        *,
        fake: Callable[..., Any] | None = None,
        kernel: Callable[..., Any] | None = None,
        traced: Callable[..., Any] | None = None,
        flops: Callable[..., int] | None = None,
        parts: "Operation[Any] | None" = None,
    ) -> None:
        self.name = schema.partition("(")[0]
        self.impls = (
            [Implementation("reference", implementations)] if callable(implementations) else list(implementations)
        )
        #: The implementations that `only` left; a call tries them in order.
        self.active = self.impls
        self.parts = parts
        #: What a compiler sees.
        self.operator: Callable[..., Any] = self.eager
        if fake is not None:
            # Under torch.compile(mode="reduce-overhead") Inductor runs operators with this tag outside of its CUDA
            # graphs. Ours cache workspaces, which would be memory of a graph's pool that later replays overwrite, and
            # probe GEMMs and note amaxes by way of the host, which no replay does.
            _library.define(schema, tags=torch.Tag.cudagraph_unsafe)
            _library.impl(self.name, kernel or self.eager, "CompositeExplicitAutograd")
            torch.library.register_fake(f"quaver::{self.name}", partial(_faked, fake), lib=_library)
            self.operator = getattr(torch.ops.quaver, self.name)
            if flops is not None:
                FORMULAS[self.operator] = flops
        self.traced: Callable[..., R] = traced or self.operator
        OPERATIONS.append(self)

    def __call__(self, *args: Any) -> R:
        """Run the first implementation that takes the call, or hand the operator to a compiler that traces."""
        if is_tracing():
            return self.traced(*args)
        # As `eager`: a frame less, which a small operation feels.
        for impl in self.active:
            reason = impl.reason
            if reason is never or not reason(*args):
                result: R = impl.run(*args)
                return result
        return self._refuse(*args)

    def eager(self, *args: Any) -> R:
        """Run the first implementation that takes the call."""
        return self.pick(*args)(*args)

    def pick(self, *args: Any) -> Callable[..., R]:
        """The function that a call with these arguments would run; one that says why none would, if none would."""
        for impl in self.active:
            if not impl.reason(*args):
                return impl.run
        return self._refuse

    def _refuse(self, *args: Any) -> NoReturn:
        reasons = "; ".join(f"{name}: {why}" for name, why in self.explain(*args))
        raise Unsupported(f"no implementation of {self.name} takes this call. {reasons}")

    def named(self, name: str) -> Implementation:
        """The implementation of this name."""
        return next(impl for impl in self.impls if impl.name == name)

    def explain(self, *args: Any) -> list[tuple[str, str]]:
        """(implementation, "" or why not) in order of preference; the first "" is the one that runs."""
        allowed = {impl.name for impl in self.active}
        return [(i.name, i.reason(*args) if i.name in allowed else "switched off by only()") for i in self.impls]

    def allows(self, name: str) -> bool:
        """True unless `only` has switched the implementation of this name off."""
        return any(impl.name == name for impl in self.active)


def _faked(fake: Callable[..., Any], *args: Any, **options: Any) -> Any:
    # What is traced now may be counted later.
    register()
    return fake(*args, **options)


@contextmanager
def narrowed(name: str, fallback: str | None = None) -> Iterator[None]:
    """Leave one implementation, by name, of every operation that has it; it holds for the whole process.

    Args:
        fallback: the implementation that runs in place of it where it refuses.
    Raises:
        ValueError: no operation has an implementation of that name.
    """
    known = list(dict.fromkeys(impl.name for operation in OPERATIONS for impl in operation.impls))
    if name not in known:
        raise ValueError(f"no implementation {name!r}; {suggest(name, known)}")
    before = [(operation, operation.active) for operation in OPERATIONS]
    for operation, _ in before:
        whole = operation.parts or operation
        if any(impl.name == name for impl in whole.impls):
            off = {impl.name for impl in whole.impls} - {name, fallback}
            operation.active = [impl for impl in operation.impls if impl.name not in off]
    try:
        yield
    finally:
        for operation, active in before:
            operation.active = active


@contextmanager
def traced_plainly(but: Sequence[str]) -> Iterator[None]:
    """Inside, what is traced has plain torch in the place of our operators: of all operations but those of some names.

    It holds for the whole process: for a program that goes where our operators are not.
    """
    before = [(operation, operation.traced) for operation in OPERATIONS if operation.name not in but]
    for operation, _ in before:
        operation.traced = operation.impls[-1].run
    try:
        yield
    finally:
        for operation, traced in before:
            operation.traced = traced
