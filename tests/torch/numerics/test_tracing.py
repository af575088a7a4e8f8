"""`is_tracing` equals `torch.compiler.is_compiling` in a process with one thread, and is right for each of several."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from quaver.torch.numerics import rounding
from quaver.torch.numerics.rounding import is_tracing
from tests.torch.another_thread import another_thread
from tests.torch.test_private_names import assigned_anew

#: (place of the call, `is_tracing()`, `torch.compiler.is_compiling()`).
records: list[tuple[str, bool, bool]] = []


def record(where: str) -> None:
    records.append((where, is_tracing(), torch.compiler.is_compiling()))


def record_unless_traced_by_dynamo(where: str) -> None:
    # Side effects of code that Dynamo traces are lost.
    if not torch.compiler.is_dynamo_compiling():
        record(where)


@torch.library.custom_op("quaver_tests::traced", mutates_args=())
def operator(x: Tensor) -> Tensor:
    record("operator")
    return x * 2


@operator.register_fake
def _(x: Tensor) -> Tensor:
    record("fake")
    return torch.empty_like(x)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        record_unless_traced_by_dynamo("forward")
        return x * 3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        record_unless_traced_by_dynamo("backward")
        return g * 3


@torch._dynamo.allow_in_graph
def in_graph(x: Tensor) -> Tensor:
    """Only AOTAutograd traces this function, not Dynamo."""
    y: Tensor = Function.apply(x)
    return y


class RecordingModule(nn.Module):
    def __init__(self, recomputes: bool = False, in_graph: bool = False) -> None:
        super().__init__()
        self.recomputes, self.in_graph = recomputes, in_graph

    def _forward(self, x: Tensor) -> Tensor:
        record_unless_traced_by_dynamo("module")
        y = operator(x.detach()) + (in_graph(x) if self.in_graph else Function.apply(x))
        return y if is_tracing() else y + 0

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            y: Tensor = checkpoint(self._forward, x, use_reentrant=False)
            return y
        return self._forward(x)


def run_compiled(module: nn.Module, x: Tensor, backend: str) -> None:
    torch._dynamo.reset()
    program = torch.compile(module, backend=backend, fullgraph=True)
    for _ in range(2):
        program(x).sum().backward()


RUNS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "eager": lambda module, x: module(x).sum().backward(),
    "compile for eager": lambda module, x: run_compiled(module, x, "eager"),
    "compile for AOTAutograd": lambda module, x: run_compiled(module, x, "aot_eager"),
    "export, strict": lambda module, x: torch.export.export(module, (x,), strict=True).run_decompositions(),
    "export, not strict": lambda module, x: torch.export.export(module, (x,), strict=False).run_decompositions(),
    "make_fx": lambda module, x: make_fx(module, tracing_mode="fake")(x.detach()),
}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # raised inside torch by run_decompositions
@pytest.mark.parametrize(
    "module", [RecordingModule(), RecordingModule(recomputes=True), RecordingModule(in_graph=True)]
)
@pytest.mark.parametrize("run_name", RUNS)
def test_one_thread_sees_what_torch_reports(run_name: str, module: RecordingModule) -> None:
    if "export" in run_name and (module.recomputes or module.in_graph):
        pytest.skip("torch exports neither")
    records.clear()
    RUNS[run_name](module, torch.ones(3, requires_grad=True))
    assert records and [ours for _, ours, _ in records] == [theirs for *_, theirs in records], records
    results = {where: {ours for there, ours, _ in records if there == where} for where, *_ in records}
    if run_name in ("eager", "make_fx"):
        assert not any(ours for _, ours, _ in records)
    elif run_name == "export, not strict":
        assert results["module"] == results["forward"] == results["fake"] == {True}
    # In torch 2.11 and 2.12, `is_compiling` is true in exports only.
    elif run_name == "compile for AOTAutograd" and torch.__version__ >= "2.13":
        assert results["fake"] == {True} and results["operator"] == {False}
        assert not module.in_graph or results["backward"] == {True}


def test_dynamo_treats_it_as_true_without_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    program = torch.compile(lambda x: x.sin() if is_tracing() else x.cos(), backend=backend, fullgraph=True)
    x = torch.ones(2)
    assert torch.equal(program(x), x.sin()) and graphs == [["sin"]]
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(program(x), x.sin())


def test_an_eager_frame_beneath_a_compiled_one_is_eager() -> None:
    """Dynamo may compile frames below a frame that runs in Python; this call is not compiled."""
    records.clear()
    torch._dynamo.reset()
    record_in_python = torch.compiler.disable(record, recursive=False)

    def graph_breaks(x: Tensor) -> Tensor:
        y = x + 1
        record_in_python("beneath")
        return y * 2

    torch.compile(graph_breaks, backend="eager")(torch.ones(2))
    assert [(where, ours) for where, ours, _ in records] == [("beneath", False)]


class RecordingMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        record("mode")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dispatches", [False, True])
@pytest.mark.parametrize("run_name", ["eager", "make_fx"])
def test_a_thread_is_eager_while_another_thread_compiles(run_name: str, dispatches: bool) -> None:
    records.clear()
    x = torch.ones(3, requires_grad=True)
    with another_thread("export"):
        if dispatches:
            with RecordingMode():
                RUNS[run_name](RecordingModule(), x)
        else:
            RUNS[run_name](RecordingModule(), x)
    assert records and not any(ours for _, ours, _ in records) and all(theirs for *_, theirs in records)


def test_a_stale_compiling_flag_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates two overlapping compilations."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling() and not is_tracing()


def test_without_torch_private_names_the_process_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hasattr(torch.compiler, "_is_compiling_flag") and torch._guards.TracingContext.try_get() is None
    monkeypatch.setattr(rounding, "_Context", None)
    context = assigned_anew(monkeypatch, rounding, "context")
    monkeypatch.setattr(rounding, "context", context)
    assert not is_tracing()
    with another_thread("export"):
        assert is_tracing()
    monkeypatch.undo()
    monkeypatch.delattr(torch.compiler, "_is_compiling_flag")
    flags = assigned_anew(monkeypatch, rounding, "flags")
    monkeypatch.setattr(rounding, "flags", flags)
    assert flags is not vars(torch.compiler) and not is_tracing()
    with another_thread("export"):
        assert not is_tracing()
