"""Cost model of activation offloading: keep, move to the host, or recompute each tensor that a layer saves.

    a copy to the host     overlaps the next layer's forward; the compute stream stalls if the copies take longer
    a copy back            overlaps the backward of the layer after it, in the same way
    recomputation          runs the GEMMs or kernels that computed the tensor a second time, in backward

A tensor is kept if moving or recomputing it takes more time per byte than a second forward of the whole layer, which
would free everything but the layer's input. Tensors that take longest to recompute per byte are moved first.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

Choice = Literal["keep", "offload", "recompute"]


class SavedActivation(NamedTuple):
    """A tensor that a layer saves for backward."""

    name: str
    bytes: float
    #: Time to recompute it from the other tensors; infinity for the layer's input.
    seconds: float = math.inf


class Placement(NamedTuple):
    """Choice for a saved tensor, and the seconds that the choice adds to its layer."""

    activation: SavedActivation
    choice: Choice
    seconds: float = 0.0


class LayerOffload(NamedTuple):
    """Choices for the saved tensors of one layer, and their totals."""

    placements: list[Placement]
    #: Seconds of the layer without offloading.
    forward: float
    backward: float
    #: Bytes a second between device and host, each way.
    rate: float

    def bytes(self, *choices: Choice) -> float:
        """Return the bytes of the tensors with one of these choices; without arguments, of all tensors."""
        return sum(p.activation.bytes for p in self.placements if not choices or p.choice in choices)

    @property
    def copy_all(self) -> float:
        """Seconds to copy all saved tensors of the layer one way."""
        return self.bytes() / self.rate

    @property
    def stall_all(self) -> float:
        """Seconds that the layer stalls, forward and backward, if all its saved tensors are moved."""
        return _stall(self.copy_all, self.forward) + _stall(self.copy_all, self.backward)

    @property
    def seconds(self) -> float:
        """Seconds that these choices add to the layer."""
        return sum(p.seconds for p in self.placements)


def _stall(copy: float, work: float) -> float:
    return max(0.0, copy - work)


def place(activations: Sequence[SavedActivation], forward: float, backward: float, rate: float) -> LayerOffload:
    """Choose for each saved tensor of a layer whether to keep, move or recompute it.

    Args:
        activations: tensors that the layer saves.
        forward, backward: seconds of the layer.
        rate: bytes a second between device and host, each way.
    """
    size = sum(a.bytes for a in activations)
    # Seconds per byte of a second forward of the whole layer.
    limit = forward / size if size else 0.0
    # Seconds of the copies chosen so far, one way.
    copying, chosen = 0.0, dict[str, Placement]()
    for a in sorted(activations, key=lambda a: -a.seconds / max(a.bytes, 1.0)):
        with_it = copying + a.bytes / rate
        stall = sum(_stall(with_it, work) - _stall(copying, work) for work in (forward, backward))
        if min(stall, a.seconds) > limit * a.bytes:
            chosen[a.name] = Placement(a, "keep")
        elif stall <= a.seconds:
            chosen[a.name], copying = Placement(a, "offload", stall), with_it
        else:
            chosen[a.name] = Placement(a, "recompute", a.seconds)
    return LayerOffload([chosen[a.name] for a in activations], forward, backward, rate)
