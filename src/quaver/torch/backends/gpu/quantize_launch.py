"""Planned quantization of a matrix and its transpose: the launches, and the buffers they write.

Kernels describe both for a shape, before there is a matrix: see `RowColQuantizer`. Two matrices quantized by the same
kernels may share launches.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.kernels import rowwise, tensorwise
from quaver.torch.backends.gpu import capture, launch
from quaver.torch.backends.gpu.buffers import PACKED4, BufferSpec, empty, pattern, row_major
from quaver.torch.backends.gpu.launch_plan import LaunchSpec

# ---- launches ----

#: Largest matrix in elements whose uncached codes are written to a reused buffer. For larger ones new memory is
#: allocated for as long as needed; their launches wait for the GPU anyway.
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


@dataclass(slots=True)
class DelayedInputs:
    """Delayed-scaling arguments of one matrix."""

    #: (True if the encode factor is known to be set, so that one pass suffices; True if the amax is recorded).
    launch_key: tuple[bool, bool]
    #: Encode factors of the layer's operands, and the column of this matrix.
    factors: Tensor
    column: int
    #: Newest amax of the history, float32 of one element, which is raised to this one; or None.
    newest: Tensor | None
    #: Addresses of factor and newest amax.
    factor_at: int
    newest_at: int | None


class RngInputs:
    """Noise arguments of one stochastically rounded matrix, passed in place of `DelayedInputs`.

    Args:
        streams: seed, stream of the matrix, stream of its transpose.
        wanted: which of the two operands are needed.
        counts: how often each was rounded before.
    """

    __slots__ = ("factor_at", "factors", "launch_key")

    column = slice(None)
    newest = newest_at = None

    def __init__(self, streams: tuple[int, int, int], wanted: tuple[bool, bool], counts: Tensor) -> None:
        #: Key by which the launches are chosen.
        self.launch_key = streams, wanted
        self.factors, self.factor_at = counts, counts.data_ptr()


def of_matrix(factors: Tensor, column: int, known: bool, newest: Tensor | None) -> DelayedInputs:
    address = None if newest is None else newest.data_ptr()
    return DelayedInputs((known, newest is not None), factors, column, newest, factors.data_ptr() + 4 * column, address)


class RequestedOperands(NamedTuple):
    """Operands that a `QuantizeLaunch` must produce."""

    #: True if the transpose (or the codes themselves, as of a weight) is cached, so that each call must allocate it.
    transpose: bool = False
    codes: bool = False
    #: True to sum blocks of rows if that costs no extra read, for the gradient of a bias.
    sums: bool = False
    #: True if GEMMs read either direction, so that with a common scale the transpose is a view.
    views: bool = False


class QuantizeLaunch(NamedTuple):
    """Buffers and launches that quantize matrices of one shape."""

    #: Placeholder of the contiguous matrix [rows, columns].
    x: Tensor
    #: Specs of codes, scales, transposed codes, their scales (None if not written), sums of blocks of rows, and
    #: temporaries.
    buffers: tuple[BufferSpec | None, ...]
    #: Returns the launches, which use the matrix, the buffers, `FACTOR` and `NEWEST`. Arguments: whether delayed
    #: scaling knows the factor, and whether it records the amax (both None without delayed scaling). For stochastic
    #: rounding the arguments are those of `RngInputs` instead.
    launches: Callable[[Any, Any], Sequence[LaunchSpec]]
    #: Indices of the buffers, from 1 on, that become `RowColOperands`; buffers that are not written are replaced by
    #: others.
    results: tuple[int, ...] = (1, 2, 3, 4, 5)
    #: True if the transpose is a view of the codes instead of the third buffer.
    transposed: bool = False
    #: Placeholders of the arguments that a call passes besides the matrix.
    inputs: tuple[BufferSpec, BufferSpec | None] = (FACTOR, NEWEST)


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
# Kernels and buffers are worked out once per shape. A call allocates what is cached or saved, and launches. Codes that
# only the next GEMMs read are written to a reused buffer.


class RowColQuantizer:
    """Quantizes a matrix to both operands, or two matrices in shared launches.

    Args:
        device: device of the matrices.
        matrix_launches: one `QuantizeLaunch` per matrix; two must satisfy `can_share_launches`.
    """

    __slots__ = (
        "buffers",
        "card",
        "device",
        "fresh",
        "matrix_launches",
        "packed4",
        "parts",
        "places",
        "reallocated",
        "results",
        "second",
        "transposed",
    )

    def __init__(self, device: torch.device, *matrix_launches: QuantizeLaunch) -> None:
        self.device, self.matrix_launches = device, matrix_launches
        self.card = launch.card(device)[:3]
        #: Per matrix: the matrix, its buffers, factor, newest amax, and None.
        self.buffers: list[BufferSpec | None] = []
        results: list[int] = []
        #: Offsets of the matrices whose transposes are views of their codes, and of those that allocate new codes per
        #: call.
        self.transposed: list[int] = []
        self.reallocated: list[int] = []
        for quantize_launch in matrix_launches:
            #: Offset of the last matrix.
            self.second = len(self.buffers)
            self.transposed += [self.second] if quantize_launch.transposed else []
            self.reallocated += (
                [self.second]
                if quantize_launch.transposed and quantize_launch.buffers[0] and quantize_launch.buffers[0].fresh
                else []
            )
            results += [self.second + i for i in quantize_launch.results]
            self.buffers += [None, *quantize_launch.buffers, None, None, None]
        self.results: Callable[[list[Any]], Any] = itemgetter(*results)
        #: Buffers that each call allocates, and patterns for them.
        self.fresh = [(i, pattern(buffer, device)) for i, buffer in enumerate(self.buffers) if buffer and buffer.fresh]
        #: True if packed4 codes are among them.
        self.packed4 = any(like.dtype is PACKED4 for _, like in self.fresh)
        #: Launches by (delayed-scaling key, stream).
        self.parts: dict[Any, list[Part]] = {}
        #: Tensors and addresses of the reused buffers by (thread, stream).
        self.places: dict[tuple[int, int], tuple[list[Any], list[Any]]] = {}

    def __call__(self, x: Tensor, inputs: DelayedInputs | RngInputs | None = None, *second: Any) -> Any:
        """Quantize a matrix like that of the first way; `second` is (matrix, arguments or None) of the second way.

        Returns the `RowColOperands` of the first matrix, followed by that of the second.
        """
        index, current, stream_of = self.card
        stream = stream_of(index)
        tensors, addresses = self.places.get((get_ident(), stream)) or self._place(stream)
        if self.fresh:
            tensors = tensors.copy()
            fills = self.packed4 and torch.are_deterministic_algorithms_enabled()
            for i, like in self.fresh:
                tensor = tensors[i] = empty(self.buffers[i], self.device) if fills else torch.empty_like(like)  # type: ignore[arg-type]
                addresses[i] = tensor.data_ptr()
            if self.reallocated:
                self._set_transposes(tensors, self.reallocated)
        addresses[0] = x.data_ptr()
        key: Any = None
        if inputs is not None:
            key = inputs.launch_key
            addresses[self.second - 3], addresses[self.second - 2] = inputs.factor_at, inputs.newest_at
        if second:
            key = key, self._address_second(addresses, *second)
        parts = self.parts.get((key, stream)) or self._decide(key, stream)
        try:
            if parts[0][0] is None or current() != index:
                self._run(tensors, parts, (x, inputs, *second))
            else:
                for start, head, take, tail, _ in parts:
                    start(*(head + take(addresses) + tail))
        except BaseException:
            # After an error, zero the buffers that a completed launch may have left nonzero for the next.
            for buffer, tensor in zip(self.buffers, tensors, strict=True):
                if buffer is not None and buffer.zeros:
                    tensor.zero_()
            raise
        return self.results(tensors)

    def _address_second(self, addresses: list[Any], x: Tensor, inputs: DelayedInputs | None) -> Any:
        addresses[self.second] = x.data_ptr()
        if inputs is None:
            return None
        addresses[-3], addresses[-2] = inputs.factor_at, inputs.newest_at
        return inputs.launch_key

    def _set_transposes(self, tensors: list[Any], matrix_launches: list[int]) -> None:
        for at in matrix_launches:
            codes = tensors[at + 1]
            tensors[at + 3] = None if codes is None else codes.t()

    def _decide(self, key: Any, stream: int) -> "list[Part]":
        by_launch, takes, at = [], [], 0
        for quantize_launch, one in zip(
            self.matrix_launches, (key,) if len(self.matrix_launches) == 1 else key, strict=True
        ):
            # Absent arguments map to the last entry, which is None.
            whose = (quantize_launch.x, *quantize_launch.buffers, *quantize_launch.inputs, None)
            places = {id(x): at + i for i, x in enumerate(whose)}
            launches = quantize_launch.launches(*(one or (None, None)))
            by_launch.append(launches)
            takes.append([[places[id(x)] for x in launch.tensors] for launch in launches])
            at += len(whose)
        shared = shared_launches(by_launch) if len(by_launch) == 2 else None
        if shared is None:
            pairs = zip(chain(*by_launch), chain(*takes), strict=True)
        else:
            pairs = zip(shared, ([*a, *b] for a, b in zip(*takes, strict=True)), strict=True)
        parts = [_part(one.compiled(self.device), taken, stream) for one, taken in pairs]
        if len(self.parts) >= launch.MAX_CACHED:
            # Each layer with stochastic rounding has entries of its own.
            self.parts.clear()
        self.parts[key, stream] = parts
        return parts

    def _run(self, tensors: list[Any], parts: "list[Part]", taken: Sequence[Any]) -> None:
        """Run launches that take tensors instead of addresses."""
        kernel_args = [
            None if buffer is None else buffer.kernel_args(t) for buffer, t in zip(self.buffers, tensors, strict=True)
        ]
        ends = (self.second, len(kernel_args)) if len(self.matrix_launches) == 2 else (len(kernel_args),)
        for number, (quantize_launch, end) in enumerate(zip(self.matrix_launches, ends, strict=True)):
            x, inputs = taken[2 * number : 2 * number + 2]
            kernel_args[number * self.second] = x.detach().view(quantize_launch.x.shape)
            if inputs is not None:
                kernel_args[end - 3], kernel_args[end - 2] = inputs.factors[inputs.column], inputs.newest
        for part in parts:
            part[-1](*part[2](kernel_args))

    def _place(self, stream: int) -> tuple[list[Any], list[Any]]:
        thread_and_stream = get_ident(), stream
        buffers = tuple(None if buffer is None or buffer.fresh else buffer for buffer in self.buffers)
        shared = *thread_and_stream, self.device, buffers, *self.transposed
        if shared not in _places:
            with torch.inference_mode(False):
                tensors = [None if buffer is None else empty(buffer, self.device) for buffer in buffers]
                self._set_transposes(tensors, self.transposed)
            place = tensors, [None if t is None else t.data_ptr() for t in tensors]
            if capture.capturing(self.device):
                # Memory of this graph, filled at each replay and useless to other work.
                return place
            if len(_places) >= launch.MAX_CACHED:
                _places.clear()
            _places[shared] = place
        place = self.places[thread_and_stream] = _places[shared]
        return place


#: Reused buffers by thread, stream, device and specs; layers share them.
_places: dict[Any, tuple[list[Any], list[Any]]] = {}

#: A launch: Triton's launcher (None if interpreted), arguments before the addresses, a function that picks the
#: addresses, arguments after them, and the launch as a function of tensors.
Part = tuple[Any, Any, Callable[[Sequence[Any]], tuple[Any, ...]], Any, launch.Run]


def _part(run: Any, takes: Sequence[int], stream: int) -> Part:
    start, head, tail = run.on(stream) if hasattr(run, "on") else (None, None, None)
    return start, head, itemgetter(*takes), tail, run
