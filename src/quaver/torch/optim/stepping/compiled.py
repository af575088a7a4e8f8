"""A piece's step as one compiled program, for pieces of one shape of all matrices.

Where nothing in the way depends on rows, matrices are read as lines of equal width, so that those of every shape
share a program; what is left at a matrix's end steps without one, by the same bits.
"""

import warnings
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.core.numbers.formats import E4M3
from quaver.torch.numerics.quantized import FLOAT8
from quaver.torch.optim.stepping import fours, noise
from quaver.torch.optim.stepping.pieces import Drawn, Parts, Way, Written, move, put

#: Programs of one optimizer, one for each size of a piece; matrices that would need another step without one.
MOST = 16

#: A tensor of a piece to a compiler.
Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


class Program(NamedTuple):
    """What is compiled: the way, what a piece consists of, which numbers are not given, and whether four bytes step at
    once."""

    way: Way
    kinds: tuple[Kind, ...]
    no_factor: bool
    no_keep: bool
    four: bool


#: A piece is called a thousand times a second with what `Program` has compared, so the compiler compares nothing.
OPTIONS: dict[str, Any] = {
    "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
    "size_asserts": False,
    "alignment_asserts": False,
}
#: Bytes of what a program computes with, at least. glibc gives what is freed back to the system where that is more than
#: twice the largest block that was mapped and freed before, and the next piece has it mapped anew: in some processes
#: that have freed no large tensor 3,000 page faults a piece, two fifths of a step.
TEMPORARIES = 1 << 24
#: Of this process: an optimizer's program is another's.
_programs: dict[Program, Callable[..., Written]] = {}


class Compiled:
    """The programs of an optimizer, compiled when they are first needed."""

    def __init__(self) -> None:
        self.programs: set[Program] = set()
        self.failed = False
        torch.empty(TEMPORARIES, dtype=torch.uint8, device="cpu")

    def program(self, key: Program) -> Callable[..., Written] | None:
        """What steps such pieces; None if there are too many programs."""
        if self.failed or (key not in self.programs and len(self.programs) >= MOST):
            return None
        self.programs.add(key)
        if key not in _programs:
            # What the compiler knows of a function belongs to its code: each program has one of its own.
            run = fours.run if key.four else _run
            code = run.__code__.replace(co_name=f"optimizer_step_{len(_programs)}")
            own = FunctionType(code, run.__globals__)
            _programs[key] = torch.compile(own, dynamic=False, fullgraph=True, options=OPTIONS)
        return _programs[key]

    def begin(
        self,
        way: Way,
        scalars: tuple[Tensor, ...],
        factor: Tensor | None,
        drawn: Drawn,
        keep: Tensor | None,
    ) -> Callable[[Parts, int, Tensor | None], Callable[[], Written | None] | None]:
        """What makes steps of a parameter's pieces, as `Programs` says it."""
        # Of one parameter pieces differ in how many rows they have: whether those are read in fours, what steps them.
        runs: dict[int, tuple[bool, Callable[..., Written] | None]] = {}
        # A program compares nothing, and would read the bits of another dtype.
        numbers = scalars if factor is None else (*scalars, factor)
        read = all(number.dtype is torch.float32 and not number.dim() for number in numbers)
        given: tuple[Tensor, Tensor] | None = None

        def step_of(own: Parts, first: int, amax: Tensor | None) -> Callable[[], Written | None] | None:
            nonlocal given
            if self.failed or not read or (way.draws and first % 4):
                return None
            rows, elements = own.weight[0].shape[0], own.weight[0].numel()
            if rows not in runs and not all(type(t) is Tensor for t in _tensors(own)):
                # A program reads memory, which a fake tensor has none of.
                runs[rows] = False, None
            four = runs[rows][0] if rows in runs else fours.fits(way, own)
            # Counters of four elements each: beyond it the upper word is another one.
            if four and first >> 34 != (first + elements - 1) >> 34:
                return None
            own = fours.viewed(own) if four else _typed(way, own)
            if rows not in runs:
                kinds = tuple((t.shape, t.stride(), t.dtype, t.device) for t in _tensors(own))
                runs[rows] = four, self.program(Program(way, kinds, factor is None, keep is None, four))
            run = runs[rows][1]
            if run is None:
                return None
            place = None
            if way.draws:
                device = own.weight[0].device
                if given is None:
                    given = noise.keyed(*drawn[:3], device, torch.int32 if in_bytes(own.weight[0]) else torch.int64)
                place = _place(first, four, *given)
            return partial(self._run, run, (way, own, scalars, factor, place, amax, keep))

        return step_of

    def _run(self, program: Callable[..., Written], given: tuple[Any, ...]) -> Written | None:
        """A piece's step by its program; None if that cannot be compiled."""
        if self.failed:
            return None
        try:
            return program(*given)
        except Exception as error:
            # Compilation fails before anything is written to.
            self.failed = True
            said = (str(error).strip() or "no reason given").splitlines()[0]
            warnings.warn(
                f"the optimizer's step was not compiled ({type(error).__name__}: {said}); its steps go on without: "
                "the same numbers, slower",
                stacklevel=2,
            )
            return None


def _tensors(own: Parts) -> tuple[Tensor, ...]:
    return (*own.weight, *(t for held in own.moments for t in held), *own.gradient)


def _place(first: int, four: bool, keys: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a program is given of a piece's noise: of four elements at once the lower word of its first counter."""
    if not four:
        return torch.tensor(first, dtype=torch.int64, device=keys.device), keys, upper
    high, low = divmod(first // 4, 1 << 32)
    low = (low ^ 1 << 31) - (1 << 31) if keys.dtype is torch.int32 else low
    at = torch.tensor(low, dtype=keys.dtype, device=keys.device)
    return at, keys, upper ^ high if high else upper


def _typed(way: Way, own: Parts) -> Parts:
    """A piece whose codes have the dtype of which a compiler for CPUs makes vectors: their format's; bytes, where they
    are E4M3 and `in_bytes`. What it views as another dtype itself it takes one after the other."""
    gradient, weight, keeping = own.gradient, own.weight, way.keeping
    if way.gradient is not None and way.gradient.of.format is not None:
        fmt = way.gradient.of.format
        bytes = fmt == E4M3 and in_bytes(gradient[0])
        gradient = (gradient[0].view(torch.uint8 if bytes else FLOAT8.get(fmt.name, torch.uint8)), *gradient[1:])
    if keeping.spec is not None and keeping.spec.format == E4M3 and keeping.kind[:8] == "residual":
        weight = (weight[0].view(torch.uint8), *weight[1:])
    return own._replace(gradient=gradient, weight=weight)


def in_bytes(t: Tensor) -> bool:
    """Whether a compiler converts float8 one number after the other, and has no products of vectors of int64: on CPUs
    without AVX-512."""
    return t.is_cpu and torch.backends.cpu.get_cpu_capability() != "AVX512"


def _run(
    way: Way,
    own: Parts,
    scalars: tuple[Tensor, ...],
    factor: Tensor | None,
    place: tuple[Tensor, ...] | None,
    amax: Tensor | None,
    keep: Tensor | None,
) -> Written:
    shape = own.weight[0].shape
    word = None if place is None else noise.traced_words(shape.numel(), *place).view(shape)
    moved = move(way, own, scalars, factor, word, amax)
    return put(way, own, moved, keep)
