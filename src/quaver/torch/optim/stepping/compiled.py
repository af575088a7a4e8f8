"""A piece's step as one compiled program, for pieces of one shape of all matrices.

Where nothing in the way depends on rows, matrices are read as lines of equal width, so that those of every shape
share a program; what is left at a matrix's end steps without one, by the same bits.
"""

import warnings

import torch
from torch import Tensor

from quaver.torch.numerics.philox import round_keys
from quaver.torch.optim.stepping import noise
from quaver.torch.optim.stepping.pieces import Drawn, Parts, Way, Written, move, put

#: Programs of one optimizer; matrices that would need another step without one.
MOST = 8

Program = tuple[Way, tuple[torch.Size, ...], tuple[torch.dtype, ...], bool, bool]


class Compiled:
    """The programs of an optimizer, compiled when they are first needed."""

    def __init__(self) -> None:
        #: By what makes them differ: the way, first equal to it.
        self.programs: dict[Program, Way] = {}
        self.failed = False
        self._run = torch.compile(_run, dynamic=False, fullgraph=True)

    def program(self, way: Way, own: Parts, factor: Tensor | None, keep: Tensor | None) -> Way | None:
        """The way as the program of such pieces knows it; None if there are too many programs."""
        tensors = (*own.weight, *(t for held in own.moments for t in held), *own.gradient)
        shapes, dtypes = tuple(t.shape for t in tensors), tuple(t.dtype for t in tensors)
        key = (way, shapes, dtypes, factor is None, keep is None)
        if self.failed or (key not in self.programs and len(self.programs) >= MOST):
            return None
        return self.programs.setdefault(key, way)

    def step(
        self,
        way: Way,
        own: Parts,
        scalars: tuple[Tensor, ...],
        factor: Tensor | None,
        drawn: Drawn,
        first: int,
        amax: Tensor | None,
        keep: Tensor | None,
    ) -> Written | None:
        """A piece's step in place, as `Programs` says it."""
        known = self.program(way, own, factor, keep)
        if known is None or (way.draws and first % 4):
            return None
        device = own.weight[0].device
        place = None
        if way.draws:
            count = (
                drawn.step
                if isinstance(drawn.step, Tensor)
                else torch.tensor(drawn.step, dtype=torch.int64, device="cpu")
            )
            place = (
                torch.tensor(first, dtype=torch.int64, device=device),
                torch.tensor(drawn.parameter, dtype=torch.int64, device=device),
                count.reshape(()).to(device, torch.int64),
                round_keys(drawn.seed, device),
            )
        try:
            return self._run(known, own, scalars, factor, place, amax, keep)
        except Exception as error:
            # Compilation fails before anything is written to.
            self.failed = True
            said = (str(error).strip() or "no reason given").splitlines()[0]
            warnings.warn(
                f"the optimizer's step was not compiled ({type(error).__name__}: {said}); its steps go on without: the "
                "same numbers, slower",
                stacklevel=2,
            )
            return None


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
