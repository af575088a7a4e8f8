"""`Operation`: an operation declared with all its implementations and the operator that a compiler sees.

In eager mode the first implementation that supports the call runs. Under torch.compile the operation is the opaque
operator torch.ops.quaver.NAME, which runs the same implementation later. So a compiled graph has eager's bits, and
saves the operation's results instead of intermediate values.
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

# ---- FLOP formulas for torch's FlopCounterMode ----
# They are needed for opaque operators, such as those of exported programs, and for GPU GEMMs without a formula in
# torch. Eager layers on a CPU need none: the mode sees their plain GEMMs.

#: Formula by operator: (arguments of the operator, out_val=result) -> FLOPs.
FORMULAS: dict[Any, Callable[..., int]] = {}


def register_flop_formulas() -> None:
    """Register the missing formulas with torch's FLOP counter, if it has been imported (importing it would import
    Triton).

    A FlopCounterMode created before has none of them.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    registered = getattr(module, "flop_registry", None)
    # Another thread may be importing it.
    if module is None or registered is None:
        return
    for operator, formula in FORMULAS.items():
        if operator not in registered:
            module.register_flop_formula(operator, get_raw=True)(formula)


def _columns(x: Tensor) -> int:
    """Return the features of the last axis; a packed4 element holds two."""
    return x.shape[-1] * (2 if x.dtype is torch.float4_e2m1fn_x2 else 1)


def _scaled_mm(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """FLOPs of a [m, k] @ b [k, n]."""
    return 2 * out_val.numel() * _columns(a)


def _scaled_grouped_mm(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """FLOPs of a [T, k] @ b [groups, k, n], or, for two matrices grouped along the contraction axis, of a [n, T] @ b
    [T, k].
    """
    columns = out_val.shape[-1]
    return 2 * a.shape[-2] * _columns(a) * columns * (a.shape[0] if a.dim() == 3 else 1)


for _name, _formula in (("_scaled_mm_v2", _scaled_mm), ("_scaled_grouped_mm_v2", _scaled_grouped_mm)):
    if hasattr(torch.ops.aten, _name):
        FORMULAS[getattr(torch.ops.aten, _name)] = _formula


# ---- operations ----

R = TypeVar("R")
#: A function, or "module:function" to import at first use.
Function = Callable[..., Any] | str
#: All operations; `only` selects among their implementations.
OPERATIONS: list["Operation[Any]"] = []
_library = torch.library.Library("quaver", "DEF")


class Unsupported(ValueError):
    """No implementation supports this call; the message has the reason of each."""


def never(*_: object) -> str:
    """Return "": the implementation supports every call."""
    return ""


def row_by_row(results: Any) -> Any:
    """Make the results of an operator contiguous, as its fake declares; torch may return the layout of its input."""
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
    """One implementation of an operation."""

    name: str
    function: Function
    #: Called with the operation's arguments; returns "" to accept the call, else the reason against it.
    refusal: Function = never
    #: Checks the device of the operands first; if it rejects the call, nothing is imported.
    place: Callable[..., str] | None = None

    def __post_init__(self) -> None:
        # Set eagerly if nothing must be imported, because Dynamo on Python 3.11 cannot trace the lock of a
        # cached_property.
        if callable(self.function):
            self.__dict__["run"] = self.function
        if callable(self.refusal) and self.place is None:
            self.__dict__["reason"] = self.refusal

    @cached_property
    def run(self) -> Callable[..., Any]:
        """The function, imported at first use."""
        return _imported(self.function)

    @cached_property
    def reason(self) -> Callable[..., str]:
        """Function that returns "" if the implementation supports a call with these arguments, else the reason against
        it.
        """
        place = self.place
        if place is None or self.refusal is never:
            return place or _imported(self.refusal)
        return lambda *args: place(*args) or self._refusal(*args)

    @cached_property
    def _refusal(self) -> Callable[..., str]:
        return _imported(self.refusal)


class Operation(Generic[R]):
    """A named operation with its implementations in order of preference; R is its return type.

    Args:
        schema: its name; or, for one that compilers see, "NAME(Tensor x, ...) -> Tensor", as torch.library takes it.
        implementations: in order of preference, or a single function.
        fake: shape and dtype function of the operator; needed if the schema has arguments.
        kernel: function of the operator, if its arguments differ from the operation's.
        traced: function for traced calls, which calls `operator`, if their arguments differ.
        flops: (arguments of the operator, out_val=result) -> FLOPs, for torch's FLOP counter.
        parts: operation that this one is composed of; `only` then keeps the implementations whose names it keeps there.
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
        self.implementations = (
            [Implementation("reference", implementations)] if callable(implementations) else list(implementations)
        )
        #: Implementations that `only` has left; a call tries them in order.
        self.enabled = self.implementations
        self.parts = parts
        #: Operator that a compiler sees.
        self.operator: Callable[..., Any] = self.eager
        if fake is not None:
            # Under torch.compile(mode="reduce-overhead") Inductor runs operators with this tag outside of its CUDA
            # graphs. Ours cache workspaces, which would be memory of a graph's pool that later replays overwrite. They
            # also probe GEMMs and record amaxes on the host, which no replay does.
            _library.define(schema, tags=torch.Tag.cudagraph_unsafe)
            _library.impl(self.name, kernel or self.eager, "CompositeExplicitAutograd")
            torch.library.register_fake(f"quaver::{self.name}", partial(_faked, fake), lib=_library)
            self.operator = getattr(torch.ops.quaver, self.name)
            if flops is not None:
                FORMULAS[self.operator] = flops
        self.traced: Callable[..., R] = traced or self.operator
        OPERATIONS.append(self)

    def __call__(self, *args: Any) -> R:
        """Run the first implementation that supports the call, or call the operator while a compiler traces."""
        if is_tracing():
            return self.traced(*args)
        # Inlined copy of `eager`, which saves a frame.
        for impl in self.enabled:
            reason = impl.reason
            if reason is never or not reason(*args):
                result: R = impl.run(*args)
                return result
        return self._refuse(*args)

    def eager(self, *args: Any) -> R:
        """Run the first implementation that supports the call."""
        return self.pick(*args)(*args)

    def pick(self, *args: Any) -> Callable[..., R]:
        """Return the function that a call with these arguments runs, or one that raises if none supports it."""
        for impl in self.enabled:
            if not impl.reason(*args):
                return impl.run
        return self._refuse

    def _refuse(self, *args: Any) -> NoReturn:
        reasons = "; ".join(f"{name}: {why}" for name, why in self.explain(*args))
        raise Unsupported(f"no implementation of {self.name} supports this call. {reasons}")

    def named(self, name: str) -> Implementation:
        """Return the implementation of this name."""
        return next(impl for impl in self.implementations if impl.name == name)

    def explain(self, *args: Any) -> list[tuple[str, str]]:
        """Return (implementation, "" or reason) pairs in order of preference; the first with "" runs."""
        allowed = {impl.name for impl in self.enabled}
        return [
            (i.name, i.reason(*args) if i.name in allowed else "switched off by only()") for i in self.implementations
        ]

    def allows(self, name: str) -> bool:
        """Return True unless `only` has disabled the implementation of this name."""
        return any(impl.name == name for impl in self.enabled)


def _faked(fake: Callable[..., Any], *args: Any, **options: Any) -> Any:
    # Calls traced now may be counted later.
    register_flop_formulas()
    return fake(*args, **options)


@contextmanager
def narrowed(name: str, fallback: str | None = None) -> Iterator[None]:
    """Keep only the named implementation of every operation that has it, in the whole process.

    Args:
        fallback: name of the implementation that runs if the named one does not support a call.

    Raises:
        ValueError: no operation has an implementation of that name.
    """
    known = list(dict.fromkeys(impl.name for operation in OPERATIONS for impl in operation.implementations))
    if name not in known:
        raise ValueError(f"no implementation {name!r}; {suggest(name, known)}")
    before = [(operation, operation.enabled) for operation in OPERATIONS]
    for operation, _ in before:
        whole = operation.parts or operation
        if any(impl.name == name for impl in whole.implementations):
            off = {impl.name for impl in whole.implementations} - {name, fallback}
            operation.enabled = [impl for impl in operation.implementations if impl.name not in off]
    try:
        yield
    finally:
        for operation, active in before:
            operation.enabled = active


@contextmanager
def traced_plainly(but: Sequence[str]) -> Iterator[None]:
    """Trace plain torch operations in place of our operators, except those named in `but`.

    Applies to the whole process; for programs that must run where our operators are not available.
    """
    before = [(operation, operation.traced) for operation in OPERATIONS if operation.name not in but]
    for operation, _ in before:
        operation.traced = operation.implementations[-1].run
    try:
        yield
    finally:
        for operation, traced in before:
            operation.traced = traced
