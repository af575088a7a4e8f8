"""Delayed scaling's state on a GPU: the histories of a model rolled by one launch, what a step saw noted by another.

Histories and factors stay ordinary buffers of their layers, so that moving, copying, loading and pickling a layer need
no care: a table of their addresses on the device is made once and again when a buffer is another. (One allocation that
all buffers are views of would be torn apart by each of those, by `to_empty` and by load_state_dict(assign=True).)
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
from quaver.torch.backends.gpu.launch import power_above
from quaver.torch.backends.gpu.launch_plan import LaunchPlan, LaunchPlanCache, LaunchSpec
from quaver.torch.state.layer_state import state_of

#: The longest history that one program reads at once.
LONGEST = 16384
#: 2**-margin beyond these bounds saturates any factor.
MARGIN = 600
WARPS = 4

#: By layer, the stacks whose tables a captured graph reads at every replay: they stay while one of their layers lives.
#: A graph that outlives its layers reads parameters that are gone.
_captured: "weakref.WeakKeyDictionary[nn.Module, set[LayerStack]]" = weakref.WeakKeyDictionary()


def reason(history: Tensor, factor: Tensor) -> str:
    """Why no kernel rolls this history, or ""; the device has been asked before."""
    if history.dtype is not torch.float32 or factor.dtype is not torch.float32 or not factor.is_contiguous():
        return "history and factor are not float32 as they were made"
    if history.shape[-2] > LONGEST:
        return f"a history of {history.shape[-2]} steps is longer than {LONGEST}, which one program reads at once"
    return ""


class LayerStack:
    """The layers that one launch rolls: one rule, one device, histories that lie alike."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.histories = [layer._buffers["history"] for layer in layers]
        self.factors = [layer._buffers["factor"] for layer in layers]
        self.addresses = _addresses(self.histories, self.factors)
        self.device = self.histories[0].device  # type: ignore[union-attr]
        flat = torch.tensor(self.addresses, dtype=torch.int64, device="cpu").view(-1, 2)
        self.table = flat.to(self.device)
        #: All factors after the last roll [layers and members, 3], and the versions that the buffers had then.
        self.rolled: Tensor | None = None
        self.versions: list[int] = []
        #: Whether that roll was captured into a graph, or that was rehearsed.
        self.captured = False
        #: Which factors are known not to be 0, and a copy under way that will tell.
        self.known: list[list[bool]] | None = None
        self._host: Tensor | None = None
        self._arrived: Any = None
        #: Of each layer its row of the table, the first one of its members.
        self.rows = [0, *itertools.accumulate(max(1, len(state_of(layer).members)) for layer in layers)]
        for index, layer in enumerate(layers):
            state_of(layer).stacked = self, index

    def fits(self, layers: Sequence[nn.Module]) -> bool:
        """True if these are still its layers, with the buffers whose addresses the table has."""
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
        """A layer's factors as the last roll left them, which later rolls do not change; None if they are others."""
        if self.rolled is None or not self._holds(index, factor) or self.captured != capture.as_captured(self.device):
            return None
        first, end = self.rows[index : index + 2]
        return self.rolled[first:end] if factor.dim() > 1 else self.rolled[first]

    def is_set(self, index: int, factor: Tensor) -> list[bool]:
        """Which of a layer's factors are known not to be 0: neither a guess nor a synchronization."""
        known = self.known is not None and factor.dim() == 1 and self._holds(index, factor)
        return self.known[self.rows[index]] if known else [False] * 3  # type: ignore[index]

    def _holds(self, index: int, factor: Tensor) -> bool:
        # Loading and zeroing raise the version.
        same = factor is self.factors[index] and bool(self.versions)
        return same and not factor.is_inference() and factor._version == self.versions[index]

    def roll(self, delayed: Delayed, specs: tuple[QuantSpec, QuantSpec, QuantSpec]) -> None:
        """End a step for its layers. Exact: `quaver.reference.operations.roll` of each column."""
        capturing = capture.capturing(self.device)
        if not capturing:
            self._look()
        history = self.histories[0]
        assert history is not None
        rolled = launch(self.table, history, delayed, specs)
        if _versions(self.factors) != self.versions:
            self.known, self._host, self._arrived = None, None, None
        # What goes by a factor's version, such as a weight that is kept in eight bits, must see that it was written.
        written = [t for t in (*self.histories, *self.factors) if t is not None and not t.is_inference()]
        torch.autograd.graph.increment_version(written)
        self.rolled, self.versions = rolled, _versions(self.factors)
        self.captured = capture.as_captured(self.device)
        if not capturing and self._host is None and not (self.known and all(map(all, self.known))):
            self._ask(rolled)

    def _ask(self, rolled: Tensor) -> None:
        """Copy the factors to the host behind the work that is queued there."""
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
    """Roll layers of one rule, device, length and layout in one launch; False where a table would have to be made while
    a CUDA graph is captured, which cannot copy it."""
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
    """The kernel; returns the factors, float32 [layers, 3].

    Args:
        addresses: int64 [layers, 2].
        history: one of them, [length, 3] of each member: how they lie.
    """
    factors: Tensor = _rolls((addresses,), (history.shape[-2], *history.stride()[-2:]), delayed, specs)[0]
    return factors


def _roll_pass(
    given: Sequence[Any], layout: tuple[int, int, int], delayed: Delayed, specs: tuple[QuantSpec, ...]
) -> LaunchPlan:
    """layout: a history's length and strides."""
    (addresses,) = given
    factors = whole((addresses.shape[0], 3), torch.float32)
    constants: dict[str, Any] = {"BLOCK": power_above(layout[0]), "LARGEST": delayed.algorithm == "max"}
    for i, spec in enumerate(specs):
        fmt = spec.format
        constants |= {f"POWER{i}": spec.power_of_two, f"EMAX{i}": fmt.emax}
        constants |= {f"TOP{i}": fmt.max_mantissa, f"MAX{i}": float(fmt.max)}
    margin = max(-MARGIN, min(MARGIN, delayed.margin))
    rolling = LaunchSpec(roll_kernel, factors.shape, (addresses, factors), (*layout, margin), constants, WARPS)
    return LaunchPlan(given, (factors,), [rolling])


_rolls = LaunchPlanCache(_roll_pass)


def note(history: Tensor, column: int, top: Tensor) -> None:
    """history[0, column] = the larger of itself and top, float32 of one element; not finite ones are not noted."""
    _notes((history,), column, own=(top,))


def _note_pass(given: Sequence[Any], column: int) -> LaunchPlan:
    return LaunchPlan(given, (), [LaunchSpec(note_kernel, (1,), given, (column * given[0].stride(1),), {}, 1)])


_notes = LaunchPlanCache(_note_pass)


def _versions(factors: Sequence[Tensor | None]) -> list[int]:
    return [-1 if f is None or f.is_inference() else f._version for f in factors]


def _addresses(histories: Sequence[Tensor | None], factors: Sequence[Tensor | None]) -> list[int]:
    """Of a history and a factor by turns, those of each member one after the other."""
    addresses: list[int] = []
    for pair in zip(histories, factors, strict=True):
        first = [t.data_ptr() for t in pair if t is not None]
        each = [4 * t.stride(0) for t in pair if t is not None]
        if pair[0] is None or pair[0].dim() == 2:
            addresses += first
            continue
        for member in range(pair[0].shape[0]):
            addresses += [at + member * apart for at, apart in zip(first, each, strict=True)]
    return addresses
