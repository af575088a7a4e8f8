"""Cost model of activation offloading: keep, move to the host, or recompute each tensor that a layer saves.

    a copy to the host     runs beside the next layer's forward; copies that take longer than it stall
    a copy back            runs beside the next layer's backward
    recomputation          runs the GEMMs or kernels that made the tensor again, in backward

A tensor leaves the device if that takes less time per byte than running the whole layer again, which frees all but its
input. Tensors that take longest to recompute are moved first, while their copies fit beside a forward.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

Choice = Literal["keep", "offload", "recompute"]


class SavedActivation(NamedTuple):
    """A tensor that a layer saves for backward."""

    name: str
    bytes: float
    #: Seconds to recompute it from the others; infinity for the layer's input.
    seconds: float = math.inf


class Placement(NamedTuple):
    """Choice for a saved tensor, and the seconds by which it makes its layer longer."""

    activation: SavedActivation
    choice: Choice
    seconds: float = 0.0


class LayerOffload(NamedTuple):
    """Choice for each saved tensor of a layer, and its sums."""

    placements: list[Placement]
    #: Seconds of the layer without offloading.
    forward: float
    backward: float
    #: Bytes a second to the host, and back.
    rate: float

    def bytes(self, *choices: Choice) -> float:
        """Return the bytes of the tensors with these choices; of all tensors without one."""
        return sum(p.activation.bytes for p in self.placements if not choices or p.choice in choices)

    @property
    def copy_all(self) -> float:
        """Seconds to copy all saved tensors of the layer one way."""
        return self.bytes() / self.rate

    @property
    def stall_all(self) -> float:
        """Seconds by which a layer gets longer if all its saved tensors are moved."""
        return _stall(self.copy_all, self.forward) + _stall(self.copy_all, self.backward)

    @property
    def seconds(self) -> float:
        """Seconds by which a layer gets longer under these choices."""
        return sum(p.seconds for p in self.placements)


def _stall(copy: float, work: float) -> float:
    return max(0.0, copy - work)


def place(activations: Sequence[SavedActivation], forward: float, backward: float, rate: float) -> LayerOffload:
    """Choose for each saved tensor whether it is kept, moved or recomputed.

    Args:
        activations: tensors that a layer saves.
        forward, backward: seconds of the layer.
        rate: bytes a second between device and host, one way.
    """
    size = sum(a.bytes for a in activations)
    #: Seconds per byte of recomputing the whole layer.
    price = forward / size if size else 0.0
    copied, chosen = 0.0, dict[str, Placement]()
    for a in sorted(activations, key=lambda a: -a.seconds / max(a.bytes, 1.0)):
        longer = copied + a.bytes / rate
        stall = sum(_stall(longer, work) - _stall(copied, work) for work in (forward, backward))
        seconds = min(stall, a.seconds)
        if seconds > price * a.bytes:
            chosen[a.name] = Placement(a, "keep")
        elif stall <= a.seconds:
            chosen[a.name], copied = Placement(a, "offload", stall), longer
        else:
            chosen[a.name] = Placement(a, "recompute", a.seconds)
    return LayerOffload([chosen[a.name] for a in activations], forward, backward, rate)
