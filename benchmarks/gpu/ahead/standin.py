"""Make this process behave as on a GPU of an architecture, with a Triton driver that does nothing.

Everything above the driver runs as on a GPU: the choice of kernels, their compilation, and Triton's own launcher.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch.autograd.function import BackwardCFunction

from benchmarks.gpu.ahead.cards import CARDS
from benchmarks.gpu.ahead.hollow import CARD, Hollow, OnCard
from benchmarks.measuring.stub_driver import Driver
from quaver.torch.backends.gpu import capture, device, grouped_mm, launch, scaled_mm
from quaver.torch.state.history import roll_gpu


class Stream:
    """A stream on which nothing runs."""

    device, cuda_stream = CARD, 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: Event()


class Event:
    """An event that has completed."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def elapsed_time(self, other: object) -> float:
        return 1.0

    def query(self) -> bool:
        return True

    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...


class Graph:
    """A captured graph, whose replay does nothing."""

    def replay(self) -> None: ...


@contextmanager
def nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def become(arch: int) -> None:
    """Stand in for a GPU of this architecture until the process ends."""
    card_name, multiprocessors = CARDS[arch]
    properties = SimpleNamespace(
        name=card_name,
        major=arch // 10,
        minor=arch % 10,
        multi_processor_count=multiprocessors,
        total_memory=2**37,
        L2_cache_size=2**25,
    )
    results: dict[str, Any] = {
        "is_available": True,
        "is_initialized": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": card_name,
        "get_device_capability": (arch // 10, arch % 10),
        "get_device_properties": properties,
        "is_current_stream_capturing": False,
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), 0),
        **dict.fromkeys(("synchronize", "empty_cache", "set_stream", "set_sync_debug_mode", "set_device"), None),
        **dict.fromkeys(("reset_peak_memory_stats", "_sleep", "_lazy_init", "manual_seed_all"), None),
    }
    for name, result in results.items():
        setattr(torch.cuda, name, lambda *_, result=result, **__: result)
    classes = {"Stream": Stream, "Event": Event, "CUDAGraph": Graph, "current_stream": Stream, "default_stream": Stream}
    for name, kind in {**classes, "stream": nothing, "graph": nothing, "device": nothing}.items():
        setattr(torch.cuda, name, kind)
    drive(arch)
    replace_driver_queries()
    device._architecture = lambda _: arch  # type: ignore[assignment]
    scaled_mm._probe = accepting(scaled_mm._probe)  # type: ignore[assignment]
    grouped_mm._probe = accepting(grouped_mm._probe)  # type: ignore[assignment]
    roll_gpu.LayerStack._look = mark_factors_set  # type: ignore[method-assign]
    BackwardCFunction.apply = in_card_mode(BackwardCFunction.apply)  # type: ignore[method-assign]
    for mode in (OnCard(), Hollow()):
        mode.__enter__()


def replace_driver_queries() -> None:
    """Replace queries of the stream and current GPU, which crash without a driver in a build with CUDA."""
    for home, name in ((capture, "raw_stream"), (launch, "current_gpu")):
        original = getattr(home, name)
        for module in [module for known, module in sys.modules.items() if known.partition(".")[0] == "quaver"]:
            if vars(module).get(name) is original:
                setattr(module, name, lambda *_: 0)


def in_card_mode(apply: Any) -> Any:
    """Wrap a function's backward to run in `OnCard`, which autograd disables."""

    def within(*args: Any) -> Any:
        with OnCard():
            return apply(*args)

    return within


def drive(arch: int) -> None:
    """Have Triton compile for an absent GPU, and launch kernels nowhere."""
    triton.runtime.driver.set_active(Driver(arch))
    launch.card = lambda _: (0, lambda: 0, lambda _: 0, nothing)


def accepting(probe: Any) -> Any:
    """Wrap a probe: run its launches and report that the GEMM works, because values have no meaning here."""

    def try_it(*args: Any) -> str:
        try:
            probe(*args)
        except Exception as error:
            print(f"a probe fails: {error}", file=sys.stderr)
        return ""

    return try_it


def mark_factors_set(stack: Any) -> None:
    """Mark the factors of delayed scaling as set, as after a step with finite values."""
    if stack._host is not None:
        stack.known = [[True] * 3 for _ in stack.histories]
        stack._host = stack._arrived = None
