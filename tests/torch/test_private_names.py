"""Test the private torch names used by the library: they exist, behave as needed, or have a fallback."""

import ast
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import quaver
from quaver.torch.numerics import versions
from quaver.torch.operations import autograd, ops
from quaver.torch.operations.autograd import forward_level
from quaver.torch.parallel.tensor import symmetric_memory
from quaver.torch.state import layer_state, weight_cache
from quaver.torch.state.history import sync

C = (
    *("_are_functorch_transforms_active", "_current_graph_task_id", "_is_any_autocast_enabled"),
    "_is_cached_tensor",
)


@pytest.fixture(params=["as it is", "without"])
def names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], bool]:
    """Look up a module's value with torch's private names or without them; and return whether torch has them."""
    present = request.param == "as it is"
    if not present:
        for name in C:
            monkeypatch.delattr(torch._C, name)
    return partial(assigned_anew, monkeypatch), present


def assigned_anew(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> Any:
    """Re-run a module's assignment of this name, and restore names removed from torch."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    (value,) = [
        node.value for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name
    ]
    assert value is not None
    given = eval(ast.unparse(value), vars(module))
    monkeypatch.undo()
    return given


def test_torch_has_them() -> None:
    assert all(hasattr(torch._C, name) for name in C) and hasattr(forward_ad, "_current_level")
    assert hasattr(torch.UntypedStorage, "_cdata") and hasattr(torch, "_scaled_mm_v2")
    assert hasattr(torch, "_has_compatible_shallow_copy_type") and hasattr(torch, "_foreach_copy_")
    assert hasattr(torch.autograd, "_get_sequence_nr") and hasattr(torch.cpu, "_is_avx512_bf16_supported")
    assert hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert callable(torch.autograd.Variable._execution_engine.queue_callback)  # type: ignore[attr-defined]
    assert hasattr(torch.distributed.distributed_c10d, "_set_pg_timeout")
    memory = symmetric_memory.symmetric_memory()._SymmetricMemory
    assert callable(memory.has_multicast_support) and hasattr(torch.autograd.DeviceType, "CUDA")


def test_tokens_travel_beside_gemms_where_torch_has_no_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    names = symmetric_memory.GATHER, symmetric_memory.SCATTER
    assert all(symmetric_memory.operation(name) is not None for name in names)
    assert symmetric_memory.operation("gather_and_think") is None
    monkeypatch.delattr(torch.distributed, "_symmetric_memory")
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", None)
    assert symmetric_memory.operation(symmetric_memory.GATHER) is None
    assert not symmetric_memory._is_supported_here()


def test_new_groups_wait_as_long_as_the_default_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = timedelta(seconds=17)
    dist.init_process_group("gloo", (tmp_path / "meeting").as_uri(), rank=0, world_size=1, timeout=limit)
    try:
        assert sync.timeout(sync.new_group()) == limit == sync.timeout()
        assert sync.timeout(dist.new_group()) != limit, "torch does so by itself now: leave it to torch"
        monkeypatch.delattr(dist.ProcessGroup, "_get_backend")
        assert sync.timeout() is None and sync.new_group() is not None
    finally:
        dist.destroy_process_group()
    makers = [path.name for path in Path(quaver.__file__).parent.rglob("*.py") if "dist.new_group" in path.read_text()]
    assert makers == ["sync.py"], "others wait for 30 minutes"


def test_a_transform_is_seen_inside_alone(names: tuple[Callable[..., Any], bool]) -> None:
    given, present = names
    transforms_active = given(autograd, "transforms_active")
    inside: list[bool] = []

    def noting(x: torch.Tensor) -> torch.Tensor:
        inside.append(transforms_active())
        return x * 2

    torch.func.vmap(noting)(torch.ones(2))
    assert inside == [present] and not transforms_active()


def test_each_backward_has_its_own_number(names: tuple[Callable[..., Any], bool]) -> None:
    given, present = names
    graph_task_id = given(layer_state, "graph_task_id")
    numbers: list[int] = []
    for _ in range(2):
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda g: numbers.append(graph_task_id()))
        x.sum().backward()
    assert graph_task_id() == -1
    assert (numbers[0] != numbers[1] and -1 not in numbers) if present else numbers == [-1, -1]


def test_autocast_is_seen_with_and_without(names: tuple[Callable[..., Any], bool]) -> None:
    given, _ = names
    any_autocast_enabled = given(ops, "any_autocast_enabled")
    assert not any_autocast_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert any_autocast_enabled()
        with torch.autocast("cpu", enabled=False):
            assert not any_autocast_enabled()


def test_an_output_that_cuda_graphs_write_to_again_has_no_version(names: tuple[Callable[..., Any], bool]) -> None:
    given, present = names
    is_replayed = given(versions, "is_replayed")
    x = torch.ones(2)
    torch._C._set_cached_tensors_enabled(True)
    torch._C._add_cached_tensor(x)
    try:
        assert is_replayed(x) is present and not is_replayed(x.clone())
    finally:
        torch._C._remove_cached_tensor(x)
        torch._C._set_cached_tensors_enabled(False)


def test_forward_mode_is_seen() -> None:
    assert forward_level() < 0
    with forward_ad.dual_level():
        assert forward_level() >= 0
    compiled = torch.compile(lambda x: x * -forward_level(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))


def test_without_its_name_forward_mode_is_never_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(forward_ad, "_current_level")
    assert forward_level() < 0


def test_views_share_a_storage_and_copies_do_not() -> None:
    x = torch.arange(4.0)
    for identity in (weight_cache.storage_id, torch.UntypedStorage.data_ptr):
        same, other = x[1:].untyped_storage(), x.clone().untyped_storage()
        assert identity(x.untyped_storage()) == identity(same) != identity(other)


def test_a_step_on_a_gpu_needs_the_private_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    from quaver import recipes
    from quaver.torch.linear import plan_gpu

    monkeypatch.delattr(torch, "_scaled_mm_v2")
    assert plan_gpu.build(torch.ones(16, 16), torch.ones(16, 16), None, recipes.get("rowwise")) is None


def test_copies_one_by_one_are_the_copies_at_once() -> None:

    source = list(torch.arange(6.0).split(3))
    for copy in (sync.copy_each, sync._copy_each):
        targets = [torch.zeros(3), torch.zeros(3)]
        copy(targets, source)
        assert torch.equal(torch.cat(targets), torch.arange(6.0))
