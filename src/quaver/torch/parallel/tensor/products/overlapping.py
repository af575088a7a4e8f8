"""A gather of tokens, or a sum over ranks, within the GEMM beside it: torch's operations on symmetric memory.

A GPU multiplies by the tokens of one rank while those of the next come, and sends one rank's sums while it computes the
next one's. Only operands in high precision go so. Untried on GPUs: tests run what torch itself puts in their place
elsewhere, on CPUs. Source: torch.distributed._symmetric_memory, whose operations these are.
"""

import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.torch.parallel.traffic import during

GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"


def symmetric_memory() -> Any:
    """torch's module, whose import defines the operations; None where this torch has none."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return None
    return _symmetric_memory


def operation(name: str) -> Callable[..., Any] | None:
    """One of torch's; None where this torch does not define it."""
    return None if symmetric_memory() is None else getattr(torch.ops.symm_mem, name, None)


def why_not(mesh: Any) -> str:
    """What keeps the ranks of a mesh from it, the same on all of them; "" where nothing does.

    It takes GPUs of one machine that write into one another's memory over an NVLink switch.
    """
    told: list[Any] = [None] * mesh.size()
    dist.all_gather_object(told, (socket.gethostname(), _own_reason(mesh.device_type)), mesh.get_group())
    if len({host for host, _ in told}) > 1:
        return "the ranks are on several machines"
    return next((reason for _, reason in told if reason), "")


def _own_reason(kind: str) -> str:
    if kind != "cuda":
        return f"the mesh is of {kind}, and symmetric memory is of GPUs"
    missing = [name for name in (GATHER, SCATTER) if operation(name) is None]
    if missing:
        return f"torch {torch.__version__} has no torch.ops.symm_mem.{missing[0]}"
    here, count = torch.cuda.current_device(), torch.cuda.device_count()
    if not all(torch.cuda.can_device_access_peer(here, other) for other in range(count) if other != here):
        return "GPUs of this machine do not reach one another's memory"
    memory: Any = getattr(symmetric_memory(), "_SymmetricMemory", None)
    if memory is None or not memory.has_multicast_support(torch.autograd.DeviceType.CUDA, here):  # type: ignore[attr-defined]
        return "no NVLink switch joins the GPUs"
    return ""


def gathered_product(x: Tensor, weight: Tensor, group: Any, batches: int) -> tuple[Tensor, Tensor]:
    """All ranks' tokens, and what they are multiplied to.

    Args:
        x: this rank's [T / ranks, k], of so many sequences one after the other.
        weight: [n, k], of x's dtype.
    Returns:
        [T, k] in the order of one process, and [T, k] @ weight.T.
    Exact: the products of each rank's tokens.
    """
    run = operation(GATHER)
    assert run is not None
    with during("activations", "gather", x, group):
        whole, (product,) = run(x.unflatten(0, (batches, -1)), [weight.t()], 1, group.group_name)
    return whole.flatten(0, 1), product.flatten(0, 1)


def scattered_product(x: Tensor, weight: Tensor, group: Any, batches: int) -> Tensor:
    """This rank's tokens of the sum over ranks of x [T, k] @ weight [n, k].T: [T / ranks, n] of x's dtype.

    Bounded: each rank's part is rounded to that dtype before it is summed, where `wire.scatter_sums` sums float32.
    """
    run = operation(SCATTER)
    assert run is not None
    with during("activations", "scatter", x.new_empty((x.shape[0], weight.shape[0]), device="meta"), group):
        total: Tensor = run(x.unflatten(0, (batches, -1)), weight.t(), "sum", 1, group.group_name)
    return total.flatten(0, 1)
