"""`is_tracing` is what torch says of a process with one thread, and of each thread where there are several."""

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
from tests.torch.beside import another_thread
from tests.torch.test_private_names import assigned_anew

#: (where it was asked, what the library says, what torch says).
said: list[tuple[str, bool, bool]] = []


def ask(where: str) -> None:
    said.append((where, is_tracing(), torch.compiler.is_compiling()))


def asked(where: str) -> None:
    # Dynamo makes no side effects of what it traces.
    if not torch.compiler.is_dynamo_compiling():
        ask(where)


@torch.library.custom_op("quaver_tests::traced", mutates_args=())
def operator(x: Tensor) -> Tensor:
    ask("operator")
    return x * 2


@operator.register_fake
def _(x: Tensor) -> Tensor:
    ask("fake")
    return torch.empty_like(x)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        asked("forward")
        return x * 3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        asked("backward")
        return g * 3


@torch._dynamo.allow_in_graph
def in_graph(x: Tensor) -> Tensor:
    """AOTAutograd alone traces it."""
    y: Tensor = Function.apply(x)
    return y


class Asking(nn.Module):
    def __init__(self, recomputes: bool = False, in_graph: bool = False) -> None:
        super().__init__()
        self.recomputes, self.in_graph = recomputes, in_graph

    def _forward(self, x: Tensor) -> Tensor:
        asked("module")
        y = operator(x.detach()) + (in_graph(x) if self.in_graph else Function.apply(x))
        return y if is_tracing() else y + 0

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            y: Tensor = checkpoint(self._forward, x, use_reentrant=False)
            return y
        return self._forward(x)


def compiled(module: nn.Module, x: Tensor, backend: str) -> None:
    torch._dynamo.reset()
    program = torch.compile(module, backend=backend, fullgraph=True)
    for _ in range(2):
        program(x).sum().backward()


WAYS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "eager": lambda module, x: module(x).sum().backward(),
    "compile for eager": lambda module, x: compiled(module, x, "eager"),
    "compile for AOTAutograd": lambda module, x: compiled(module, x, "aot_eager"),
    "export, strict": lambda module, x: torch.export.export(module, (x,), strict=True).run_decompositions(),
    "export, not strict": lambda module, x: torch.export.export(module, (x,), strict=False).run_decompositions(),
    "make_fx": lambda module, x: make_fx(module, tracing_mode="fake")(x.detach()),
}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own, when it decomposes
@pytest.mark.parametrize("module", [Asking(), Asking(recomputes=True), Asking(in_graph=True)])
@pytest.mark.parametrize("way", WAYS)
def test_one_thread_sees_what_torch_reports(way: str, module: Asking) -> None:
    if "export" in way and (module.recomputes or module.in_graph):
        pytest.skip("torch exports neither")
    said.clear()
    WAYS[way](module, torch.ones(3, requires_grad=True))
    assert said and [ours for _, ours, _ in said] == [theirs for *_, theirs in said], said
    answers = {where: {ours for there, ours, _ in said if there == where} for where, *_ in said}
    if way in ("eager", "make_fx"):
        assert not any(ours for _, ours, _ in said)
    elif way == "export, not strict":
        assert answers["module"] == answers["forward"] == answers["fake"] == {True}
    # torch 2.11 and 2.12 say it of exports alone.
    elif way == "compile for AOTAutograd" and torch.__version__ >= "2.13":
        assert answers["fake"] == {True} and answers["operator"] == {False}
        assert not module.in_graph or answers["backward"] == {True}


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
    """Dynamo compiles frames called by a frame it left to Python; this check is not compiled."""
    said.clear()
    torch._dynamo.reset()
    left_to_python = torch.compiler.disable(ask, recursive=False)

    def graph_breaks(x: Tensor) -> Tensor:
        y = x + 1
        left_to_python("beneath")
        return y * 2

    torch.compile(graph_breaks, backend="eager")(torch.ones(2))
    assert [(where, ours) for where, ours, _ in said] == [("beneath", False)]


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ask("mode")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dispatches", [False, True])
@pytest.mark.parametrize("way", ["eager", "make_fx"])
def test_a_thread_beside_one_that_compiles_is_eager(way: str, dispatches: bool) -> None:
    said.clear()
    x = torch.ones(3, requires_grad=True)
    with another_thread("export"):
        if dispatches:
            with Mode():
                WAYS[way](Asking(), x)
        else:
            WAYS[way](Asking(), x)
    assert said and not any(ours for _, ours, _ in said) and all(theirs for *_, theirs in said)


def test_a_flag_that_is_left_behind_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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
