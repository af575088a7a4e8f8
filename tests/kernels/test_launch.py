"""Launches: kernels compile once, threads load one only once, and a plan is not used for tensors that do not fit it."""

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from quaver import E4M3, QuantSpec
from quaver.kernels.tensorwise import amax
from quaver.torch.backends.gpu import launch, quantize, tensorwise
from quaver.torch.backends.gpu.decode import decode
from quaver.torch.numerics import reference
from tests.close import assert_bitwise
from tests.kernels.compare import DEVICE


def described(rows: int, columns: int, stride: int) -> launch.KernelLaunch:
    x = torch.empty((1, columns), dtype=torch.bfloat16)
    numbers = (rows, columns, stride, rows)
    constants = {"BM": 32, "BN": 512, "EVEN": False, "TALL": False}
    return launch.describe(
        amax, (rows, 1, 1), (x, torch.empty(1), torch.zeros(4, dtype=torch.int32)), numbers, constants, 4
    )


class Loaded:
    """What `triton.compile` gives."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.run = self.function = self.packed_metadata = None


def test_shapes_with_equal_kernels_share_the_loaded_program(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(launch, "_load", lambda one: loaded.append(one) or Loaded())
    assert launch._loaded(described(33, 64, 64), 0) is launch._loaded(described(35, 80, 80), 0)
    assert len(loaded) == 1
    # One side is now a multiple of 16; the grid does not matter.
    launch._loaded(described(32, 64, 64), 0)
    launch._loaded(described(33, 64, 64), 1)
    assert len(loaded) == 3


def test_loaded_programs_stay_on_the_gpu_when_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(launch, "_load", Loaded)
    let_go = weakref.ref(launch._loaded(described(33, 64, 64), 0).kernel)
    launch._forget()
    gc.collect()
    assert let_go() is not None


def test_threads_that_want_a_kernel_at_once_load_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second load would free the kernel that the first thread launches. A kernel is loaded when its launcher is
    first requested."""
    compiled, put = [], []

    class Slow(Loaded):
        function = packed_metadata = None

        def __init__(self, *_: Any) -> None:
            time.sleep(0.01)
            compiled.append(self)

        @property
        def run(self) -> None:
            time.sleep(0.01)
            put.append(self)

    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(launch, "_load", Slow)
    start, loaded = threading.Barrier(8), []

    def want() -> None:
        start.wait()
        loaded.append(launch._loaded(described(33, 64, 64), 0))

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == len(put) == 1
    assert len(loaded) == 8 and all(one is loaded[0] for one in loaded)


def test_tensors_on_two_devices_are_refused_by_name() -> None:
    tensors = (torch.empty(4, 64), torch.empty(1, device="meta"), torch.zeros(4, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="amax got tensors on cpu and meta; move them to one device"):
        launch._compiled(described(4, 64, 64), tensors, ())


@pytest.mark.parametrize(
    ("stride", "kind"), [(1, "i32"), (2**29 - 1, "i32"), (2**29, "i64"), (2**31 - 1, "i64"), (2**40, "i64")]
)
def test_three_strides_never_leave_the_integers_that_count_them(stride: int, kind: str) -> None:
    assert described(4, 64, stride).signature["stride"] == kind


def test_concurrent_threads_use_separate_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_buffers", {})
    monkeypatch.setattr(launch, "_workspaces", {})
    cpu, start = torch.device("cpu"), threading.Barrier(16)
    row_of: dict[int, Tensor] = {}

    def begin(number: int) -> None:
        start.wait()
        # Two threads to a stream.
        row_of[number] = launch._row(cpu, number // 2)

    threads = [threading.Thread(target=begin, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    places = [row_of[i].data_ptr() for i in range(16)]
    assert places[::2] == places[1::2]
    assert len(set(places)) == 8
    assert len(launch._buffers) == 1


def test_more_streams_than_places_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_buffers", {})
    monkeypatch.setattr(launch, "_workspaces", {})
    for stream in range(launch.STREAMS):
        launch._row(torch.device("cpu"), stream)
    with pytest.raises(RuntimeError, match="use fewer CUDA streams"):
        launch._row(torch.device("cpu"), launch.STREAMS)


def unaligned(x: Tensor) -> Tensor:
    """The same numbers, contiguous, 4 bytes beyond a multiple of 16."""
    buffer = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return buffer[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("block", [(1, None), (1, 128), (128, 128)], ids=str)
def test_given_amaxes_may_have_any_layout(block: tuple[int, int | None]) -> None:
    spec = QuantSpec(E4M3, block)
    x = torch.randn(160, 512, device=DEVICE)
    amax = reference.quantize(x, spec).scales().mul(448.0 * 2)
    in_order = amax.t().contiguous() if block == (1, 128) else amax.contiguous()
    plans = []
    for buffer in (in_order, unaligned(in_order)):
        given = buffer.t() if block == (1, 128) else buffer
        q = quantize.quantize(x, spec, given)
        assert_bitwise(q.dequantize(), reference.quantize(x, spec, given).dequantize())
        plans.append(len(tensorwise._quantizations.plans))
    # Scales of squares are copied to their place in the output.
    assert plans[1] - plans[0] == (block != (128, 128))


def test_scales_in_any_layout_are_decoded() -> None:
    spec = QuantSpec(E4M3, (1, 128))
    q = reference.quantize(torch.randn(64, 256, device=DEVICE), spec)
    expected = decode(q)
    assert isinstance(q.scale, Tensor)
    q.scale = unaligned(q.scale.contiguous())
    assert_bitwise(decode(q), expected)
