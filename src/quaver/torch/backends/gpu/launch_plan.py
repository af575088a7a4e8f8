"""Launch plans: the kernels, scalars and output buffers for tensors of one layout, worked out once and cached.

A call then only allocates the results and launches with addresses.
"""

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.torch.backends.gpu import launch
from quaver.torch.backends.gpu.buffers import PACKED4, BufferSpec, empty, example_argument, pattern
from quaver.torch.backends.gpu.device import tables

#: Function to map over tensors in C loops.
address_of = torch.Tensor.data_ptr


class LaunchSpec(NamedTuple):
    """One launch of a plan, with the arguments of `launch.launcher`."""

    kernel: Any
    grid: Sequence[int]
    #: Tensors and buffer specs of the plan in the kernel's order; None for an absent argument.
    tensors: Sequence[Tensor | BufferSpec | None]
    numbers: Sequence[int | float]
    constants: dict[str, Any]
    warps: int
    #: Maximum number of registers per thread, or None.
    registers: int | None = None

    def compiled(self, device: torch.device) -> launch.Run:
        """Compile the launch; return a function of its tensors."""
        kernel_args = [example_argument(x, device) if isinstance(x, BufferSpec) else x for x in self.tensors]
        return launch.launcher(self.kernel, self.grid, kernel_args, *self[3:])


class LaunchPlan:
    """Launches for tensors of one layout.

    Args:
        tensors_in: example tensors, each a distinct object; the first is not None.
        results: specs of the outputs, which may repeat or be in `tensors_in`; None for one that no kernel writes.
        launches: in order; specs that are no results are those of temporaries.
    """

    __slots__ = ("buffers", "card", "packed4", "parts", "patterns", "results", "runs", "specs", "zeroed")

    def __init__(
        self, tensors_in: Sequence[Any], results: Sequence[BufferSpec | None], launches: Sequence[LaunchSpec]
    ) -> None:
        device = tensors_in[0].device
        self.card, known = launch.card(device), {id(x) for x in tensors_in}
        named = [x for each in (results, *(one.tensors for one in launches)) for x in each if id(x) not in known]
        self.buffers = list({id(x): x for x in named if isinstance(x, BufferSpec)}.values())
        self.patterns = [pattern(buffer, device) for buffer in self.buffers]
        #: True if packed4 codes are among them, which torch cannot fill, as it does in deterministic mode.
        self.packed4 = any(like.dtype is PACKED4 for like in self.patterns)
        #: Indices of buffers that must be zero at first.
        self.zeroed = [i for i, buffer in enumerate(self.buffers) if buffer.zeros]
        every = (*tensors_in, *self.buffers)
        #: Specs among the arguments, and of the outputs.
        self.specs = [x if isinstance(x, BufferSpec) else None for x in every]
        places = {id(x): i for i, x in enumerate(every) if x is not None}
        places[id(None)] = -1
        #: Picks the results from all tensors with None appended.
        self.results = _select(results, places)
        #: Compiled launches, and functions that pick the tensors of each.
        self.runs: list[tuple[launch.Run, Callable[..., Any]]] = []
        for one in launches:
            self.runs.append((one.compiled(device), _select(one.tensors, places)))
        #: Start functions with their arguments, by stream; None if launches take tensors instead of addresses.
        self.parts: dict[int, list[Any]] | None = {} if all(hasattr(run, "on") for run, _ in self.runs) else None

    def __call__(self, tensors_in: Sequence[Tensor | None], addresses: Sequence[int | None]) -> Sequence[Any]:
        """Allocate the outputs and run the launches; returns the outputs, None where a spec is None.

        Args:
            tensors_in: read only if `parts` is None, or for results.
            addresses: those of the tensors.
        """
        index, current, stream_of, entering = self.card
        if self.parts is not None and current() != index:
            with entering(index):
                return self(tensors_in, addresses)
        written = self._allocate() if self.buffers else ()
        if self.parts is None:
            kernel_args = [
                x if spec is None or x is None else spec.kernel_args(x)
                for x, spec in zip((*tensors_in, *written), self.specs, strict=True)
            ]
            for run, select_arguments in self.runs:
                run(*select_arguments((*kernel_args, None)))
            return self.results((*tensors_in, *written, None))
        every = (*addresses, *map(address_of, written), None)
        stream = stream_of(index)
        for start, head, tail, select_arguments in self.parts.get(stream) or self._parts_on(stream):
            start(*(head + select_arguments(every) + tail))
        return self.results((*tensors_in, *written, None))

    def _allocate(self) -> list[Tensor]:
        if self.packed4 and torch.are_deterministic_algorithms_enabled():
            written = [empty(buffer, self.patterns[0].device) for buffer in self.buffers]
        else:
            written = list(map(torch.empty_like, self.patterns))
        for i in self.zeroed:
            written[i].zero_()
        return written

    def _parts_on(self, stream: int) -> list[Any]:
        parts = [(*run.on(stream), select) for run, select in self.runs]  # type: ignore[attr-defined]
        self.parts[stream] = parts  # type: ignore[index]
        return parts


def _select(tensors: Sequence[Any], places: dict[int, int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that picks some tensors, or their addresses, from all."""
    order = [places[id(x)] for x in tensors]
    return itemgetter(*order) if len(order) > 1 else lambda x: tuple(x[i] for i in order)


class LaunchPlanCache:
    """Cache of plans of one kind, called with tensors; each layout of tensors is planned once.

    Args:
        decide: (example tensors, *decided) -> plan, which must depend only on the key computed below.
    """

    def __init__(self, decide: Callable[..., LaunchPlan]) -> None:
        self.decide = decide
        self.plans: dict[Any, LaunchPlan] = {}
        tables.append(self.plans)

    def __call__(
        self, tensors_in: Sequence[Tensor | None], *options: Hashable, own: Sequence[Tensor | None] = ()
    ) -> Any:
        """Run the plan for these tensors and return its outputs.

        Args:
            tensors_in: tensors to read, with any strides; the first is not None.
            options: other values that the plan depends on.
            own: further tensors to read or write: new ones, whose shapes and strides follow from the others.
        """
        key_parts: list[Any] = [options, tensors_in[0].device]  # type: ignore[union-attr]
        addresses: list[int | None] = []
        for x in tensors_in:
            if x is None:
                key_parts.append(None)
                addresses.append(None)
                continue
            address = x.data_ptr()
            key_parts += x.shape, x.is_contiguous() or x.stride(), x.get_device(), x.dtype, address & 15
            addresses.append(address)
        for x in own:
            if x is None:
                key_parts.append(None)
                addresses.append(None)
                continue
            address = x.data_ptr()
            key_parts += x.dtype, address & 15
            addresses.append(address)
        key, tensors = tuple(key_parts), (*tensors_in, *own)
        known = self.plans.get(key) or self._make_plan(key, tensors, options)
        return known(tensors, addresses)

    def _make_plan(self, key: Any, tensors: Sequence[Tensor | None], options: tuple[Hashable, ...]) -> LaunchPlan:
        if len(self.plans) >= launch.MAX_CACHED:
            self.plans.clear()
        like = [None if x is None else x.detach() for x in tensors]
        known = self.plans[key] = self.decide(like, *options)
        return known
