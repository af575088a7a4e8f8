"""Planned quantization of a matrix and its transpose: the launches, and the buffers they write.

Kernels describe both for a shape, before there is a matrix: see `RowColQuantizer`. Two matrices quantized by the same
kernels may share launches.
"""

import math
from collections.abc import Callable, Sequence
from itertools import chain
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


def of_two(a: LaunchSpec, b: LaunchSpec) -> LaunchSpec | None:
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


#: Placeholders for the delayed-scaling tensors of a matrix: encode factor, and newest amax of the history.
FACTOR, NEWEST = row_major((1, 1), torch.float32), row_major((1, 1), torch.float32)
#: Placeholder for the counts of stochastic roundings of a matrix and its transpose: two int64.
COUNTS = row_major((1, 1), torch.int64)


class QuantizeInputs(NamedTuple):
    """Arguments of a quantization besides the matrix; see `delayed_inputs` and `noise_inputs`."""

    #: Arguments of `QuantizeLaunch.launches`.
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
    """Buffers and launches that quantize matrices of one shape."""

    #: Placeholder of the contiguous matrix [rows, columns].
    x: Tensor
    #: Specs of the `RowColOperands`, and of further results.
    results: tuple[BufferSpec | None, ...]
    #: Specs of small temporaries and results that calls reuse; those that must be zero are zero again after the
    #: launches.
    reused: tuple[BufferSpec, ...]
    #: Returns the launches, which use the matrix, the buffers and `inputs`. Arguments: whether delayed scaling knows
    #: the factor, and whether it records the amax; for stochastic rounding `streams` and `wanted` of `noise_inputs`.
    #: Both are None without `QuantizeInputs`.
    launches: Callable[[Any, Any], Sequence[LaunchSpec]]
    #: Placeholders of `QuantizeInputs`.
    inputs: tuple[BufferSpec, BufferSpec | None] = (FACTOR, NEWEST)


def reuse_results(one: QuantizeLaunch, codes: bool, transpose: bool) -> QuantizeLaunch:
    """Let calls for a small matrix reuse results that neither a cache nor autograd saves.

    A step of a layer of 16 × 16 takes the host 4 to 6 % longer if each call allocates them.

    Args:
        codes: True if the codes and their scales are saved.
        transpose: True if those of the transpose are.
    """
    if one.x.numel() > SMALL:
        return one
    operands = one.results[:4] + one.results[5:]
    # Two-level scales have inverse tensor factors after the five `RowColOperands`.
    of_transpose = (False, False, True, True, False, True)
    saved = {id(b) for b, t in zip(operands, of_transpose, strict=False) if (transpose if t else codes)}
    unsaved = {id(b): b for b in operands if b is not None and id(b) not in saved}
    return one._replace(reused=(*one.reused, *unsaved.values()))


def can_share_launches(a: QuantizeLaunch, b: QuantizeLaunch) -> bool:
    """Return True if all launches of two matrices can be merged."""
    return shared_launches([quantize_launch.launches(None, None) for quantize_launch in (a, b)]) is not None


def shared_launches(by_launch: Sequence[Sequence[LaunchSpec]]) -> list[LaunchSpec] | None:
    """Merge the launches of two matrices pairwise; None if any pair cannot be merged."""
    if len(by_launch[0]) != len(by_launch[1]):
        return None
    shared = []
    for a, b in zip(*by_launch, strict=True):
        one = of_two(a, b)
        if one is None:
            return None
        shared.append(one)
    return shared


# ---- planned quantization, used by `linear.plan_gpu` ----


class RowColQuantizer:
    """Quantizes a matrix to both operands, or two matrices in shared launches.

    Kernels are planned once. Calls allocate the results that are saved; the calls of a thread on a stream reuse
    temporaries and small results.

    Args:
        device: device of the matrices.
        matrices: one `QuantizeLaunch` per matrix; two must satisfy `can_share_launches`.
    """

    __slots__ = ("card", "device", "matrices", "places", "plans", "reused")

    def __init__(self, device: torch.device, *matrices: QuantizeLaunch) -> None:
        self.device, self.matrices, self.card = device, matrices, launch.card(device)
        self.reused = [buffer for one in matrices for buffer in one.reused]
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
            w, of_w = second
            addresses[3] = w.data_ptr()
            key = key, None
            if of_w is not None:
                key, addresses[4:6] = (key[0], of_w.launch_key), of_w.addresses
        plan = self.plans.get(key) or self._make_plan(key)
        if plan.parts is None:
            # No addresses: an interpreter looks at the tensors.
            tensors = tensors.copy()
            for i, (matrix, (y, given)) in enumerate(zip(self.matrices, ((x, inputs), second), strict=False)):
                tensors[3 * i] = y.detach().view(matrix.x.shape)
                if given is not None:
                    tensors[3 * i + 1 : 3 * i + 3] = given.tensors()
        try:
            return plan(tensors, addresses, stream)
        except BaseException:
            # A completed launch may have left temporaries nonzero for the next.
            self.places.pop(place, None)
            raise

    def _allocate(self, place: tuple[int, int]) -> tuple[list[Any], list[Any]]:
        with torch.inference_mode(False):
            reused = [empty(buffer, self.device) for buffer in self.reused]
        absent = [None] * 3 * len(self.matrices)
        allocated = [*absent, *reused], [*absent, *(t.data_ptr() for t in reused)]
        # Memory of a captured graph is filled at each replay, and useless to other work.
        if not capture.capturing(self.device):
            self.places[place] = allocated
        return allocated

    def _make_plan(self, key: Any) -> LaunchPlan:
        tensors_in: list[Any] = []
        by_matrix: list[Sequence[LaunchSpec]] = []
        results: list[BufferSpec | None] = []
        for matrix, own in zip(self.matrices, (key,) if len(self.matrices) == 1 else key, strict=True):
            # Distinct placeholders for each matrix.
            inputs = {id(one): one._replace() for one in matrix.inputs if one is not None}
            tensors_in += (matrix.x, *(None if one is None else inputs[id(one)] for one in matrix.inputs))
            by_matrix.append(
                [
                    one._replace(tensors=[inputs.get(id(t), t) for t in one.tensors])
                    for one in matrix.launches(*(own or (None, None)))
                ]
            )
            results += matrix.results
        launches = shared_launches(by_matrix) if len(by_matrix) == 2 else by_matrix[0]
        if launches is None:
            launches = [*chain(*by_matrix)]
        if len(self.plans) >= launch.MAX_CACHED:
            # Each layer with stochastic rounding has plans of its own.
            self.plans.clear()
        plan = self.plans[key] = LaunchPlan([*tensors_in, *self.reused], results, launches)
        return plan
