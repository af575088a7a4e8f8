"""Operations: the first implementation without a reason to refuse runs, the others say why not; compilers see one."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch
from quaver.torch.operations import operation
from quaver.torch.operations.operation import Implementation, Operation, Unsupported, narrowed
from tests import forked

assert quaver.torch


@pytest.fixture(autouse=True)
def own_operations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`narrowed` sees only the operations of the current test."""
    monkeypatch.setattr(operation, "OPERATIONS", [])
    yield


def make(name: str = "double", **options: Any) -> Operation:
    """Doubles ints by shifting and everything by adding, but no strings."""
    fast = Implementation("fast", lambda x: ("fast", x << 1), lambda x: "" if isinstance(x, int) else "it is for ints")
    slow = Implementation(
        "slow", lambda x: ("slow", x + x), lambda x: "it is for numbers" if isinstance(x, str) else ""
    )
    return Operation(name, [fast, slow], **options)


def test_the_first_that_takes_the_call_runs() -> None:
    double = make()
    assert double(3) == ("fast", 6)
    assert double(1.5) == ("slow", 3.0)
    assert double.pick(3)(3) == ("fast", 6)
    assert double.pick(1.5)(1.5) == ("slow", 3.0)


def test_a_call_that_each_refuses_is_an_error_with_every_reason() -> None:
    double = make()
    with pytest.raises(Unsupported, match=r"double supports this call\. fast: it is for ints; slow: it is for numbers"):
        double("text")
    with pytest.raises(Unsupported):
        double.pick("text")("text")


def test_narrowed_leaves_one_and_puts_the_others_back_even_after_an_error() -> None:
    double = make()
    with pytest.raises(ZeroDivisionError), narrowed("slow"):
        assert double(3) == ("slow", 6)
        assert double.explain(3) == [("fast", "switched off by only()"), ("slow", "")]
        1 / 0  # noqa: B018
    assert double(3) == ("fast", 6)


def test_narrowed_keeps_the_fallback_and_operations_without_that_implementation() -> None:
    double, other = make(), Operation("other", lambda x: x)
    with narrowed("fast"):
        assert other(1) == 1
        with pytest.raises(Unsupported, match="slow: switched off"):
            double(1.5)
    with narrowed("fast", "slow"):
        assert double(3) == ("fast", 6) and double(1.5) == ("slow", 3.0)


def test_narrowed_suggests_the_nearest_name() -> None:
    make()
    with pytest.raises(ValueError, match="no implementation 'fsat'; did you mean 'fast'"), narrowed("fsat"):
        pass


def test_a_compiler_sees_one_operator_that_runs_the_implementation_of_eager_mode() -> None:
    ran: list[str] = []

    def shifted(x: Tensor, by: float) -> Tensor:
        ran.append("fast")
        return x + by

    shift = Operation(
        "test_shift(Tensor x, float by) -> Tensor",
        [
            Implementation("fast", shifted, lambda x, by: "" if by else "nothing to do"),
            Implementation("slow", lambda x, by: x.clone()),
        ],
        fake=lambda x, by: torch.empty_like(x),
    )
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x = torch.arange(4.0)
    compiled = torch.compile(lambda x, by: shift(x, by) * 2, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x, 1.0), shift(x, 1.0) * 2) and ran == ["fast", "fast"]
    assert torch.equal(compiled(x, 0.0), x * 2) and ran == ["fast", "fast"]
    calls = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert any("quaver.test_shift" in str(target) for target in calls), calls
    torch.library.opcheck(torch.ops.quaver.test_shift, (x, 1.0))
    # Also for CUDA graphs: buffers created at the first call must not be in a graph's memory pool.
    assert torch.Tag.cudagraph_unsafe in torch.ops.quaver.test_shift.default.tags


def test_every_operator_is_an_operation_and_importing_them_imports_no_triton() -> None:
    code = (
        "import sys, torch, quaver.torch\n"
        "from quaver.torch.operations.operation import OPERATIONS\n"
        "names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith('quaver::')}\n"
        "declared = [o.name for o in OPERATIONS]\n"
        "assert len(set(declared)) == len(declared), declared\n"
        "assert names and names == {f'quaver::{o.name}' for o in OPERATIONS if o.operator != o.eager}, names\n"
        "assert 'triton' not in sys.modules\n"
    )
    done = forked.bare("torch").run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
