"""Scaling histories on a GPU: one launch rolls all histories of a model, another records an amax.

Histories and factors remain ordinary buffers, so that moving, copying, loading and pickling layers need no special
care. The launch reads a table of their addresses, which is rebuilt when a buffer changes. (One shared allocation would
be split up by each of those operations, by `to_empty` and by load_state_dict(assign=True).)
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quaver.kernels.tensorwise import note as note_kernel
from quaver.kernels.tensorwise import roll as roll_kernel
from quaver.recipes.spec import Delayed, QuantSpec
from quaver.torch.backends.gpu import capture
from quaver.torch.backends.gpu.buffers import whole
from quaver.torch.backends.gpu.launch import LaunchPlan, LaunchPlanCache, LaunchSpec, power_above
from quaver.torch.state.layer_state import state_of

#: Longest history that one program reads.
LONGEST = 16384
#: Bound of margins; 2**-margin beyond it saturates any factor.
MARGIN = 600
WARPS = 4

#: Stacks whose tables captured graphs read at every replay, by layer; they live as long as one of their layers. A graph
#: that outlives its layers reads freed parameters anyway.
_captured: "weakref.WeakKeyDictionary[nn.Module, set[LayerStack]]" = weakref.WeakKeyDictionary()


def reason(history: Tensor, factor: Tensor) -> str:
    """Return why no kernel rolls this history, or ""; the caller has checked the device."""
    if history.dtype is not torch.float32 or factor.dtype is not torch.float32 or not factor.is_contiguous():
        return "history and factor are not float32 as they were made"
    if history.shape[-2] > LONGEST:
        return f"a history of {history.shape[-2]} steps is longer than {LONGEST}, which one program reads at once"
    return ""


class LayerStack:
    """Layers rolled by one launch: same recipe, device, history length and layout."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.histories = [layer._buffers["history"] for layer in layers]
        self.factors = [layer._buffers["factor"] for layer in layers]
        self.addresses = _addresses(self.histories, self.factors)
        self.device = self.histories[0].device  # type: ignore[union-attr]
        flat = torch.tensor(self.addresses, dtype=torch.int64, device="cpu").view(-1, 2)
        self.table = flat.to(self.device)
        #: Factors after the last roll [layers and members, 3], and the buffer versions at that time.
        self.rolled: Tensor | None = None
        self.versions: list[int] = []
        #: True if that roll was captured into a graph, or rehearsed.
        self.captured = False
        #: Flags of factors known to be nonzero, and a pending copy to the host that updates them.
        self.known: list[list[bool]] | None = None
        self._host: Tensor | None = None
        self._arrived: Any = None
        #: First row of each layer in the table; a layer has one row per member.
        self.rows = [0, *itertools.accumulate(max(1, len(state_of(layer).members)) for layer in layers)]
        for index, layer in enumerate(layers):
            state_of(layer).stacked = self, index

    def fits(self, layers: Sequence[nn.Module]) -> bool:
        """Return True if layers and buffer addresses are unchanged."""
        if len(layers) != len(self.histories):
            return False
        for i, layer in enumerate(layers):
            buffers, stacked = layer._buffers, state_of(layer).stacked
            if stacked is None or stacked[0] is not self or stacked[1] != i:
                return False
            if buffers["history"] is not self.histories[i] or buffers["factor"] is not self.factors[i]:
                return False
        return _addresses(self.histories, self.factors) == self.addresses

    def snapshot(self, index: int, factor: Tensor) -> Tensor | None:
        """Return a layer's factors after the last roll, which later rolls do not overwrite; None if they have changed
        since.
        """
        if (
            self.rolled is None
            or not self._holds(index, factor)
            or self.captured != capture.is_captured_or_rehearsed(self.device)
        ):
            return None
        first, end = self.rows[index : index + 2]
        return self.rolled[first:end] if factor.dim() > 1 else self.rolled[first]

    def is_set(self, index: int, factor: Tensor) -> list[bool]:
        """Return which of a layer's factors are known to be nonzero, without synchronization."""
        known = self.known is not None and factor.dim() == 1 and self._holds(index, factor)
        return self.known[self.rows[index]] if known else [False] * 3  # type: ignore[index]

    def _holds(self, index: int, factor: Tensor) -> bool:
        # Loading and zeroing raise the version.
        same = factor is self.factors[index] and bool(self.versions)
        return same and not factor.is_inference() and factor._version == self.versions[index]

    def roll(self, delayed: Delayed, specs: tuple[QuantSpec, QuantSpec, QuantSpec]) -> None:
        """Roll the histories of all layers; each column equals `quaver.reference.operations.roll`."""
        capturing = capture.capturing(self.device)
        if not capturing:
            self._look()
        history = self.histories[0]
        assert history is not None
        rolled = launch(self.table, history, delayed, specs)
        if _versions(self.factors) != self.versions:
            self.known, self._host, self._arrived = None, None, None
        # The kernel wrote the buffers, so their versions must change: the weight cache uses them as keys.
        written = [t for t in (*self.histories, *self.factors) if t is not None and not t.is_inference()]
        torch.autograd.graph.increment_version(written)
        self.rolled, self.versions = rolled, _versions(self.factors)
        self.captured = capture.is_captured_or_rehearsed(self.device)
        if not capturing and self._host is None and not (self.known and all(map(all, self.known))):
            self._ask(rolled)

    def _ask(self, rolled: Tensor) -> None:
        """Copy the factors to the host asynchronously."""
        if self.device.type != "cuda":
            self._host = rolled
            return
        self._host = torch.empty(rolled.shape, dtype=rolled.dtype, device="cpu", pin_memory=True)
        self._host.copy_(rolled, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(self.device))

    def _look(self) -> None:
        if self._host is None or (self._arrived is not None and not self._arrived.query()):
            return
        self.known = (self._host != 0).tolist()
        self._host = self._arrived = None


def roll(layers: Sequence[nn.Module], delayed: Delayed, specs: tuple[QuantSpec, QuantSpec, QuantSpec]) -> bool:
    """Roll layers of the same recipe, device, length and layout in one launch.

    Returns False if that needs a new table while a CUDA graph is captured, because a capture cannot copy it.
    """
    stacked = state_of(layers[0]).stacked
    stack: LayerStack | None = None if stacked is None else stacked[0]
    if stack is None or not stack.fits(layers):
        device: torch.device = layers[0]._buffers["history"].device  # type: ignore[union-attr]
        if capture.capturing(device):
            return False
        stack = LayerStack(layers)
    if capture.capturing(stack.device):
        for layer in layers:
            _captured.setdefault(layer, set()).add(stack)
    stack.roll(delayed, specs)
    return True


def launch(
    addresses: Tensor, history: Tensor, delayed: Delayed, specs: tuple[QuantSpec, QuantSpec, QuantSpec]
) -> Tensor:
    """Run the roll kernel and return the factors, float32 [layers, 3].

    Args:
        addresses: int64 [layers, 2].
        history: an example, [length, 3] per member, for its strides.
    """
    factors: Tensor = _rolls((addresses,), (history.shape[-2], *history.stride()[-2:]), delayed, specs)[0]
    return factors


@LaunchPlanCache
def _rolls(
    tensors_in: Sequence[Any], layout: tuple[int, int, int], delayed: Delayed, specs: tuple[QuantSpec, ...]
) -> LaunchPlan:
    """Plan the roll; `layout` is a history's length and strides."""
    (addresses,) = tensors_in
    factors = whole((addresses.shape[0], 3), torch.float32)
    constants: dict[str, Any] = {"BLOCK": power_above(layout[0]), "LARGEST": delayed.algorithm == "max"}
    for i, spec in enumerate(specs):
        fmt = spec.format
        constants |= {f"POWER{i}": spec.power_of_two, f"EMAX{i}": fmt.emax}
        constants |= {f"TOP{i}": fmt.max_mantissa, f"MAX{i}": float(fmt.max)}
    margin = max(-MARGIN, min(MARGIN, delayed.margin))
    rolling = LaunchSpec(roll_kernel, factors.shape, (addresses, factors), (*layout, margin), constants, WARPS)
    return LaunchPlan(tensors_in, (factors,), [rolling])


def record_amax(history: Tensor, column: int, amax: Tensor) -> None:
    """Set history[0, column] to the maximum of itself and `amax`, float32 of one element; ignores values that are not
    finite.
    """
    _record_launches((history,), column, own=(amax,))


@LaunchPlanCache
def _record_launches(tensors_in: Sequence[Any], column: int) -> LaunchPlan:
    return LaunchPlan(
        tensors_in, (), [LaunchSpec(note_kernel, (1,), tensors_in, (column * tensors_in[0].stride(1),), {}, 1)]
    )


def _versions(factors: Sequence[Tensor | None]) -> list[int]:
    return [-1 if f is None or f.is_inference() else f._version for f in factors]


def _addresses(histories: Sequence[Tensor | None], factors: Sequence[Tensor | None]) -> list[int]:
    """Return the addresses of history and factor alternately, for each member in turn."""
    addresses: list[int] = []
    for pair in zip(histories, factors, strict=True):
        first = [t.data_ptr() for t in pair if t is not None]
        each = [4 * t.stride(0) for t in pair if t is not None]
        if pair[0] is None or pair[0].dim() == 2:
            addresses += first
            continue
        for member in range(pair[0].shape[0]):
            addresses += [at + member * stride for at, stride in zip(first, each, strict=True)]
    return addresses
