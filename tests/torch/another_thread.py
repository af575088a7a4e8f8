"""Run a test while another thread compiles or exports."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

#: Seconds after which the compiling thread continues without being released.
LIMIT = 120


class _Waiting(nn.Module):
    """Block the thread that traces this module."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__()
        self.wait = wait

    def forward(self, x: Tensor) -> Tensor:
        self.wait()
        return x + 1


@contextlib.contextmanager
def another_thread(kind: str) -> Iterator[None]:
    """Keep another thread in the middle of a trace while the context is open.

    Args:
        kind: "compile", which blocks in torch.compile's backend (`is_compiling` is true there since torch 2.13), or
            "export".
    """
    tracing, over = threading.Event(), threading.Event()
    errors: list[BaseException] = []
    torch._dynamo.reset()

    def wait() -> None:
        tracing.set()
        over.wait(LIMIT)

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        wait()
        return graph

    def run() -> None:
        try:
            if kind == "compile":
                torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
            else:
                torch.export.export(_Waiting(wait), (torch.ones(2),), strict=False)
        except BaseException as error:
            errors.append(error)
        finally:
            tracing.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert tracing.wait(LIMIT) and not errors, errors
        assert torch.compiler.is_compiling() or (kind == "compile" and torch.__version__ < "2.13")
        yield
    finally:
        over.set()
        thread.join()
    assert not errors, errors
