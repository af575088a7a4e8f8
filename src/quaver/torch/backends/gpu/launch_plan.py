"""Launch plans: the kernels, scalars and output buffers for tensors of one layout, worked out once and cached.

A call then only allocates the results and launches with addresses.
"""

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.torch.backends.gpu import launch
from quaver.torch.backends.gpu.buffers import BufferSpec, example_argument, pattern
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
        buffers: specs of the outputs; None for an output that no kernel writes.
        launches: in order.
    """

    __slots__ = ("buffers", "card", "parts", "patterns", "results", "runs", "zeroed")

    def __init__(
        self, tensors_in: Sequence[Tensor | None], buffers: Sequence[BufferSpec | None], launches: Sequence[LaunchSpec]
    ) -> None:
        device = tensors_in[0].device  # type: ignore[union-attr]
        self.card, self.buffers = launch.card(device)[:3], [buffer for buffer in buffers if buffer is not None]
        self.patterns = [pattern(buffer, device) for buffer in self.buffers]
        #: Indices of buffers that must be zero at first.
        self.zeroed = [i for i, buffer in enumerate(self.buffers) if buffer.zeros]
        #: Picks the results, in the order of `buffers`, from the written tensors with None appended.
        numbers = iter(range(len(buffers)))
        order = [-1 if buffer is None else next(numbers) for buffer in buffers]
        self.results: Callable[[list[Any]], Sequence[Any]] = itemgetter(*order) if len(order) > 1 else list
        places = {id(x): i for i, x in enumerate((*tensors_in, *self.buffers)) if x is not None}
        #: Compiled launches, and functions that pick the tensors of each.
        self.runs: list[tuple[launch.Run, Callable[..., Any]]] = []
        for one in launches:
            select_arguments = itemgetter(*(-1 if x is None else places[id(x)] for x in one.tensors))
            self.runs.append((one.compiled(device), select_arguments))
        #: Start functions with their arguments, by stream; None if the kernels are interpreted.
        self.parts: dict[int, list[Any]] | None = {} if all(hasattr(run, "on") for run, _ in self.runs) else None

    def __call__(self, tensors_in: Sequence[Tensor | None], addresses: list[int | None]) -> Sequence[Any]:
        """Allocate the outputs and run the launches; returns the outputs, None where a spec is None."""
        written: list[Any] = list(map(torch.empty_like, self.patterns))
        for i in self.zeroed:
            written[i].zero_()
        index, current, stream_of = self.card
        if self.parts is None or current() != index:
            kernel_args = [buffer.kernel_args(x) for x, buffer in zip(written, self.buffers, strict=True)]
            for run, select_arguments in self.runs:
                run(*select_arguments((*tensors_in, *kernel_args, None)))
        else:
            addresses += map(address_of, written)
            addresses.append(None)
            stream = stream_of(index)
            parts = self.parts.get(stream)
            if parts is None:
                parts = self.parts[stream] = [
                    (*run.on(stream), select)  # type: ignore[attr-defined]
                    for run, select in self.runs
                ]
            for start, head, tail, select_arguments in parts:
                start(*(head + select_arguments(addresses) + tail))
        written.append(None)
        return self.results(written)


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
