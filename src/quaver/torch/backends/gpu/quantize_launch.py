"""Planned quantization of a matrix and its transpose: the launches, and the buffers they write.

Kernels describe both for a shape, before there is a matrix: see `RowColQuantizer`. Two matrices quantized by the same
kernels may share launches.
"""

import math
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.kernels import rowwise, tensorwise
from quaver.torch.backends.gpu import capture, launch
from quaver.torch.backends.gpu.buffers import BufferSpec, empty, pattern, row_major
from quaver.torch.backends.gpu.launch import LaunchPlan, LaunchSpec

# ---- launches ----

#: Largest matrix in elements whose unsaved codes are written to a reused buffer. Launches of larger ones wait for the
#: GPU anyway.
SMALL = 1 << 16
#: Largest number of elements of two matrices that share launches. The cast reads what was measured from the L2 cache,
#: which holds both; with larger ones it would read the first from memory again, which takes longer than a launch.
TOGETHER = 1 << 23

#: Operands of a matrix [rows, columns] as scaled GEMMs take them: (codes, scales, codes of the transpose, scales of the
#: transpose, extra). If cached as the right side of a GEMM, the transposed codes are [rows, columns] stored as
#: [columns, rows]; they are None if no GEMM reads them. `extra` is the sum over rows (float32, per block of rows unless
#: further launches add the blocks), or the amax, or None.
RowColOperands = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def zeros(n: int) -> BufferSpec:
    """Return the spec of n zero int32, through which programs of a launch, or of consecutive launches, synchronize."""
    return BufferSpec((n,), (1,), torch.int32, zeros=True)


def without_memory(x: Tensor) -> Tensor:
    """Return a contiguous tensor without memory with the shape and dtype of x, for planning launches."""
    return pattern(row_major((x.shape[0], x.shape[1]), x.dtype), x.device)


#: Pairs of kernels: one matrix per launch, and two matrices per launch. Not a dict, because that would hash the kernels
#: at import, before `hash_callees_first` can.
OF_TWO = (
    (tensorwise.amax, tensorwise.amax_of_two),
    (tensorwise.cast, tensorwise.cast_two),
    (rowwise.rowwise, rowwise.rowwise_two),
    (rowwise.columnwise, rowwise.columnwise_two),
)


def _merge(a: LaunchSpec, b: LaunchSpec) -> LaunchSpec | None:
    """Merge two launches into one; None if no kernel does both."""
    fn = next((two for one, two in OF_TWO if one is a.kernel), None)
    if fn is None or a.kernel is not b.kernel or a.warps != b.warps:
        return None
    # The merged launch has one axis of programs, from which the kernel computes rows and columns.
    constants = {name: value for name, value in a.constants.items() if name in fn.arg_names}
    for name, value in b.constants.items():
        if f"{name}_2" in fn.arg_names:
            constants[f"{name}_2"] = value
        elif name in constants and value != constants[name]:
            return None
    first, second = math.prod(a.grid), math.prod(b.grid)
    return LaunchSpec(
        fn, (first + second,), (*a.tensors, *b.tensors), (*a.numbers, *b.numbers, first), constants, a.warps
    )


class QuantizeInputs(NamedTuple):
    """Arguments of a quantization besides the matrix; see `delayed_inputs` and `noise_inputs`."""

    #: Argument of `QuantizeLaunch.launches`: whether delayed scaling knows the factor, and whether it records the amax;
    #: for stochastic rounding `streams` and `wanted` of `noise_inputs`.
    launch_key: tuple[Any, Any]
    #: Encode factors of the layer's operands, or noise counts; and the first element that the kernels read.
    values: Tensor
    column: int
    #: Newest amax of the history, float32 of one element, which is raised to this one; or None.
    newest: Tensor | None
    #: Addresses of that element and of `newest`.
    addresses: tuple[int, int | None]

    def tensors(self) -> tuple[Tensor, Tensor | None]:
        return self.values[self.column :], self.newest


def delayed_inputs(factors: Tensor, column: int, known: bool, newest: Tensor | None) -> QuantizeInputs:
    """Return the arguments for delayed scaling; `known` is True if the factor is set, so that one pass suffices."""
    addresses = factors.data_ptr() + 4 * column, None if newest is None else newest.data_ptr()
    return QuantizeInputs((known, newest is not None), factors, column, newest, addresses)


def noise_inputs(streams: tuple[int, int, int], wanted: tuple[bool, bool], counts: Tensor) -> QuantizeInputs:
    """Return the arguments for stochastic rounding.

    Args:
        streams: seed, stream of the matrix, stream of its transpose.
        wanted: which of the two operands are needed.
        counts: how often each was rounded before.
    """
    return QuantizeInputs((streams, wanted), counts, 0, None, (counts.data_ptr(), None))


class RequestedOperands(NamedTuple):
    """Operands that a `QuantizeLaunch` must produce."""

    #: True for a matrix whose transpose is cached or saved as the right side of a GEMM.
    transpose: bool = False
    #: True to sum blocks of rows if that costs no extra read, for the gradient of a bias.
    sums: bool = False
    #: True if GEMMs read either direction, so that with a common scale the transpose is a view.
    views: bool = False


class QuantizeLaunch(NamedTuple):
    """Buffers and launches that quantize matrices of one shape, or two matrices."""

    #: Placeholders of the contiguous matrix [rows, columns] and of the tensors of `QuantizeInputs`, each distinct; then
    #: those of a second matrix.
    inputs: tuple[Any, ...]
    #: Specs of the `RowColOperands`, and of further results.
    results: tuple[BufferSpec | None, ...]
    #: Specs of small temporaries and results that calls reuse; those that must be zero are zero again after the
    #: launches.
    reused: tuple[BufferSpec, ...]
    #: Returns the launches for `QuantizeInputs.launch_key` (None without `QuantizeInputs`), or a pair of them for two
    #: matrices.
    launches: Callable[[Any], Sequence[LaunchSpec]]


def reuse_results(one: QuantizeLaunch, codes: bool, transpose: bool) -> QuantizeLaunch:
    """Let calls for a small matrix reuse results that neither a cache nor autograd saves.

    A step of a layer of 16 × 16 takes the host 4 to 6 % longer if each call allocates them.

    Args:
        codes: True if the codes, their scales and the amax are saved.
        transpose: True if those of the transpose are.
    """
    if one.inputs[0].numel() > SMALL:
        return one
    # Two-level scales have inverse tensor factors after the five `RowColOperands`.
    transposed_results = (False, False, True, True, False, False, True)
    saved = {id(b) for b, t in zip(one.results, transposed_results, strict=False) if (transpose if t else codes)}
    unsaved = {id(b): b for b in one.results if b is not None and id(b) not in saved}
    return one._replace(reused=(*one.reused, *unsaved.values()))


def combine_launches(a: QuantizeLaunch, b: QuantizeLaunch) -> QuantizeLaunch | None:
    """Combine two matrices, whose launches are merged for each pair of keys that allows it; None if none does."""

    def launches(keys: tuple[Any, Any]) -> Sequence[LaunchSpec]:
        first, second = a.launches(keys[0]), b.launches(keys[1])
        return _shared(first, second) or [*first, *second]

    if _shared(a.launches(None), b.launches(None)) is None:
        return None
    return QuantizeLaunch(a.inputs + b.inputs, a.results + b.results, a.reused + b.reused, launches)


def _shared(first: Sequence[LaunchSpec], second: Sequence[LaunchSpec]) -> list[LaunchSpec] | None:
    """Merge the launches of two matrices pairwise; None if any pair cannot be merged."""
    merged = [_merge(a, b) for a, b in zip(first, second, strict=False)]
    return None if len(first) != len(second) or None in merged else merged  # type: ignore[return-value]


# ---- planned quantization, used by `linear.plan_gpu` ----


class RowColQuantizer:
    """Quantizes a matrix to both operands, or two matrices in shared launches.

    Kernels are planned once. Calls allocate the results that are saved; the calls of a thread on a stream reuse
    temporaries and small results.

    Args:
        device: device of the matrices.
        planned: the launches of a matrix, or `combine_launches`.
    """

    __slots__ = ("card", "device", "places", "planned", "plans")

    def __init__(self, device: torch.device, planned: QuantizeLaunch) -> None:
        self.device, self.planned, self.card = device, planned, launch.card(device)
        #: Plans by the keys of `QuantizeInputs`.
        self.plans: dict[Any, LaunchPlan] = {}
        #: By (thread, stream) the tensors of the plans and their addresses: per matrix x and `inputs`, which each call
        #: sets, and the reused ones.
        self.places: dict[tuple[int, int], tuple[list[Any], list[Any]]] = {}

    def __call__(self, x: Tensor, inputs: QuantizeInputs | None = None, *second: Any) -> Any:
        """Quantize a matrix of the planned shape; `second` is (matrix, `QuantizeInputs` or None) of the other one.

        Returns the `RowColOperands` and further results of the first matrix, followed by those of the second.
        """
        key: Any = None
        stream = self.card[2](self.card[0])
        place = get_ident(), stream
        tensors, addresses = self.places.get(place) or self._allocate(place)
        addresses[0] = x.data_ptr()
        if inputs is not None:
            key, addresses[1:3] = inputs.launch_key, inputs.addresses
        if second:
            w, w_delayed = second
            addresses[3] = w.data_ptr()
            key = key, None
            if w_delayed is not None:
                key, addresses[4:6] = (key[0], w_delayed.launch_key), w_delayed.addresses
        plan = self.plans.get(key) or self._make_plan(key)
        if plan.parts is None:
            # No addresses: an interpreter looks at the tensors.
            tensors = tensors.copy()
            starts = range(0, len(self.planned.inputs), 3)
            for i, (y, given) in zip(starts, ((x, inputs), second), strict=False):
                tensors[i] = y.detach().view(self.planned.inputs[i].shape)
                if given is not None:
                    tensors[i + 1 : i + 3] = given.tensors()
        try:
            return plan(tensors, addresses, stream)
        except BaseException:
            # A completed launch may have left temporaries nonzero for the next.
            self.places.pop(place, None)
            raise

    def _allocate(self, place: tuple[int, int]) -> tuple[list[Any], list[Any]]:
        with torch.inference_mode(False):
            reused = [empty(buffer, self.device) for buffer in self.planned.reused]
        absent = [None] * len(self.planned.inputs)
        allocated = [*absent, *reused], [*absent, *(t.data_ptr() for t in reused)]
        # Memory of a captured graph is filled at each replay, and useless to other work.
        if not capture.capturing(self.device):
            self.places[place] = allocated
        return allocated

    def _make_plan(self, key: Any) -> LaunchPlan:
        if len(self.plans) >= launch.MAX_CACHED:
            # Each layer with stochastic rounding has plans of its own.
            self.plans.clear()
        one = self.planned
        plan = self.plans[key] = LaunchPlan([*one.inputs, *one.reused], one.results, one.launches(key))
        return plan
