"""This process as one on a card of an architecture: torch and quaver see a card, Triton a driver that does nothing.

Everything up to the driver's doorstep is what runs on a card: which kernels a layer launches, how they are compiled,
and Triton's own launcher.
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
from quaver.torch.backends.gpu import capture, device, launch, scaled_mm
from quaver.torch.state.history import roll_gpu


class Stream:
    """A stream on which nothing runs."""

    device, cuda_stream = CARD, 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: Event()


class Event:
    """An event that has come."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def elapsed_time(self, other: object) -> float:
        return 1.0

    def query(self) -> bool:
        return True

    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...


class Graph:
    """What was captured, which replays nothing."""

    def replay(self) -> None: ...


@contextmanager
def nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def become(arch: int) -> None:
    """For the rest of this process."""
    name, multiprocessors = CARDS[arch]
    properties = SimpleNamespace(
        name=name,
        major=arch // 10,
        minor=arch % 10,
        multi_processor_count=multiprocessors,
        total_memory=2**37,
        L2_cache_size=2**25,
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": name,
        "get_device_capability": (arch // 10, arch % 10),
        "get_device_properties": properties,
        "is_current_stream_capturing": False,
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), 0),
        **dict.fromkeys(("synchronize", "empty_cache", "set_stream", "set_sync_debug_mode", "set_device"), None),
        **dict.fromkeys(("reset_peak_memory_stats", "_sleep", "_lazy_init", "manual_seed_all"), None),
    }
    for asked, answer in answers.items():
        setattr(torch.cuda, asked, lambda *_, answer=answer, **__: answer)
    classes = {"Stream": Stream, "Event": Event, "CUDAGraph": Graph, "current_stream": Stream, "default_stream": Stream}
    for asked, kind in {**classes, "stream": nothing, "graph": nothing, "device": nothing}.items():
        setattr(torch.cuda, asked, kind)
    drive(arch)
    ask_no_driver()
    device._architecture = lambda _: arch  # type: ignore[assignment]
    scaled_mm._probe = tried(scaled_mm._probe)  # type: ignore[assignment]
    roll_gpu.LayerStack._look = arrived  # type: ignore[method-assign]
    BackwardCFunction.apply = on_card(BackwardCFunction.apply)  # type: ignore[method-assign]
    for mode in (OnCard(), Hollow()):
        mode.__enter__()


def ask_no_driver() -> None:
    """Where quaver asks torch's C for a stream or the current card: a build with CUDA ends there without a driver."""
    for home, name in ((capture, "raw_stream"), (launch, "current_gpu")):
        asks = getattr(home, name)
        for module in [module for known, module in sys.modules.items() if known.partition(".")[0] == "quaver"]:
            if vars(module).get(name) is asks:
                setattr(module, name, lambda *_: 0)


def on_card(apply: Any) -> Any:
    """A function's backward under the mode that autograd leaves."""

    def within(*args: Any) -> Any:
        with OnCard():
            return apply(*args)

    return within


def drive(arch: int) -> None:
    """Have Triton compile for a card that is not there, and put the kernels nowhere."""
    triton.runtime.driver.set_active(Driver(arch))
    launch.card = lambda _: (0, lambda: 0, lambda _: 0, nothing)


def tried(probe: Any) -> Any:
    """A probe's launches, and the answer of a card that has the GEMM: what is multiplied here says nothing."""

    def try_it(*args: Any) -> str:
        try:
            probe(*args)
        except Exception as error:
            print(f"a probe fails: {error}", file=sys.stderr)
        return ""

    return try_it


def arrived(stack: Any) -> None:
    """Of delayed scaling's factors, that they are set, as they are after a step with numbers in it."""
    if stack._host is not None:
        stack.known = [[True] * 3 for _ in stack.histories]
        stack._host = stack._arrived = None
