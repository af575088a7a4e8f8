"""What `gpu.quantizing.both_ways` is for rows and blocks, for one scale a tensor: with the factors and the history of
delayed scaling, the amax that a first launch may measure, and sums for the gradient of a bias."""

from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.torch.backends.gpu.launching import launch
from quaver.torch.backends.gpu.launching.launch import workspace
from quaver.torch.backends.gpu.quantizing.both_ways import SMALL, Decided, empty_like_told, pattern, row_major
from quaver.torch.backends.gpu.quantizing.tensorwise import amax_launch, cast_launch, room_for_sums
from quaver.torch.numerics.quantized import FLOAT8


class Place(NamedTuple):
    """Memory that one thread on one stream writes and reads before it writes there again."""

    #: Where a launch's programs meet.
    work: Tensor
    #: An amax that a kernel writes and another reads.
    top: Tensor
    #: Codes, codes of the transpose and scale that the next GEMMs read and no layer keeps; None where they are large.
    written: tuple[Tensor, Tensor, Tensor] | None
    #: Sums of blocks of rows, which another kernel adds up at once; None if they are not wanted or codes are large.
    partial: Tensor | None


#: By thread, stream, device, shape, dtype, whether there are sums, and views: layers share them.
_places: dict[Any, Place] = {}


class TensorCast:
    """A matrix [rows, columns] to its codes, those of its transpose, and their scale.

    Args:
        x: a matrix like those to come.
        keeps: whether the transpose and the scale are kept, so that each call must write new ones.
        views: whether GEMMs read either direction, so that the transpose is a view and nothing writes it.
        sums: whether blocks of its rows are summed on the way, for the gradient of a bias.
    """

    __slots__ = (
        *("amax", "card", "codes", "device", "dtype", "keeps", "launches", "number"),
        *("places", "shape", "spec", "sums", "transposed", "turned", "views"),
    )

    def __init__(self, x: Tensor, spec: QuantSpec, keeps: bool, sums: bool, views: bool) -> None:
        rows, columns = x.shape
        self.sums, self.views = sums, views
        self.spec, self.device, self.dtype, self.keeps = spec, x.device, FLOAT8[spec.format.name], keeps
        self.shape, self.turned = (rows, columns), (columns, rows)
        #: Patterns of what a call makes: codes, those of the transpose where they are written, and a number.
        self.codes = pattern(row_major(self.shape, self.dtype), x.device)
        self.transposed = pattern(row_major(self.turned, self.dtype, keeps), x.device)
        self.number = pattern(row_major((1, 1), torch.float32), x.device)
        #: Index of the GPU, what tells the current one's, and what tells its stream.
        self.card = launch.card(x.device)[:3]
        #: By thread and stream.
        self.places: dict[tuple[int, int], Place] = {}
        #: By whether a factor is given, whether it is known to be set, and whether the amax is noted.
        self.launches: dict[tuple[bool, bool, bool], Any] = {}
        top = empty_like_told(row_major((1, 1), torch.float32), x.device)
        self.amax: Any = amax_launch((x, top, workspace(x.device)))

    def __call__(
        self,
        x: Tensor,
        factors: Tensor | None = None,
        column: int = 0,
        known: bool = False,
        newest: Tensor | None = None,
    ) -> Decided:
        """As `both_ways.Decided`; `per_tensor` says what the arguments mean."""
        index, current, stream_of = self.card
        stream = stream_of(index)
        work, top, written, partial = self.places.get((get_ident(), stream)) or self._place(stream)
        if written is not None and not self.keeps:
            q, qt, scale = written
        else:
            q = torch.empty_like(self.codes) if written is None or self.views else written[0]
            qt, scale = self._transpose(q), torch.empty_like(self.number)
        if partial is None and self.sums:
            partial = room_for_sums(*self.shape, self.device)
        one_pass = known and factors is not None
        run = self.launches.get((factors is not None, one_pass, newest is not None))
        if run is None or run.parts is None or current() != index:
            factor = None if factors is None else factors[column]
            x = x.detach().view(self.shape)
            turned = None if self.views else qt.t() if self.keeps else qt
            tensors = (x, q, turned, scale, top, factor, None, newest, work if one_pass else None, partial)
            if not one_pass:
                self.amax(x, top, work)
            if run is None:
                run = self._launch(x, tensors, one_pass)
            run(*tensors)
            return q, scale, qt, scale, partial
        at, meeting, of_top = x.data_ptr(), work.data_ptr(), top.data_ptr()
        if not one_pass:
            start, grid, middle, tail = self.amax.parts
            start(*grid, stream, *middle, at, of_top, meeting, *tail)
        start, grid, middle, tail = run.parts
        start(
            *grid,
            stream,
            *middle,
            at,
            q.data_ptr(),
            None if self.views else qt.data_ptr(),
            scale.data_ptr(),
            of_top,
            None if factors is None else factors.data_ptr() + 4 * column,
            None,
            None if newest is None else newest.data_ptr(),
            meeting if one_pass else None,
            None if partial is None else partial.data_ptr(),
            *tail,
        )
        return q, scale, qt, scale, partial

    def _transpose(self, q: Tensor) -> Tensor:
        """Of the codes, a view or room for it: as the left side of a GEMM, or the right one of what is kept."""
        if self.views:
            return q if self.keeps else q.t()
        return torch.empty_like(self.transposed)

    def _place(self, stream: int) -> Place:
        thread_and_stream = get_ident(), stream
        shared = *thread_and_stream, self.device, self.shape, self.dtype, self.sums, self.views
        if shared not in _places:
            with torch.inference_mode(False):
                written = partial = None
                if self.shape[0] * self.shape[1] <= SMALL:
                    q, scale = torch.empty_like(self.codes), torch.empty_like(self.number)
                    written = q, q.t() if self.views else torch.empty_like(self.transposed), scale
                    partial = room_for_sums(*self.shape, self.device) if self.sums else None
                _places[shared] = Place(workspace(self.device), torch.empty_like(self.number), written, partial)
        place = self.places[thread_and_stream] = _places[shared]
        return place

    def _launch(self, x: Tensor, tensors: tuple[Any, ...], one_pass: bool) -> Any:
        launch: Any = cast_launch(tensors, self.spec)
        run = launch if hasattr(launch, "parts") else _Interpreted(launch)
        if not hasattr(self.amax, "parts"):
            self.amax = _Interpreted(self.amax)
        self.launches[tensors[5] is not None, one_pass, tensors[7] is not None] = run
        return run


class _Interpreted(NamedTuple):
    """A launch that takes tensors and no addresses."""

    run: Any
    parts: None = None

    def __call__(self, *tensors: Any) -> None:
        self.run(*tensors)
