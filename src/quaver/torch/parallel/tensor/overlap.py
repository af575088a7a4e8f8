"""Overlap of communication and GEMMs: an all-gather of tokens, or a reduce-scatter, inside the adjacent GEMM.

A GPU multiplies one rank's tokens while those of the next arrive, and sends one rank's sums while it computes the
next. Only high-precision operands are supported. Not tested on GPUs: tests run the fallbacks that torch provides on
CPUs. Source: torch.distributed._symmetric_memory.
"""

import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.torch.parallel.comm_counter import count_collective

GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"


def symmetric_memory() -> Any:
    """Import the torch module that defines the operations; None if this torch lacks it."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return None
    return _symmetric_memory


def operation(name: str) -> Callable[..., Any] | None:
    """Return a symmetric-memory operation by name, or None if this torch does not define it."""
    return None if symmetric_memory() is None else getattr(torch.ops.symm_mem, name, None)


def reason_unsupported(mesh: Any) -> str:
    """Return why the ranks of a mesh cannot overlap, the same text on all of them, or "".

    Overlap needs GPUs of one machine with peer access over an NVLink switch.
    """
    reasons: list[Any] = [None] * mesh.size()
    dist.all_gather_object(reasons, (socket.gethostname(), _own_reason(mesh.device_type)), mesh.get_group())
    if len({host for host, _ in reasons}) > 1:
        return "the ranks are on several machines"
    return next((reason for _, reason in reasons if reason), "")


def _own_reason(kind: str) -> str:
    if kind != "cuda":
        return f"the mesh is on {kind}, and symmetric memory needs GPUs"
    missing = [name for name in (GATHER, SCATTER) if operation(name) is None]
    if missing:
        return f"torch {torch.__version__} has no torch.ops.symm_mem.{missing[0]}"
    here, count = torch.cuda.current_device(), torch.cuda.device_count()
    if not all(torch.cuda.can_device_access_peer(here, other) for other in range(count) if other != here):
        return "GPUs of this machine have no peer access to one another"
    memory: Any = getattr(symmetric_memory(), "_SymmetricMemory", None)
    if memory is None or not memory.has_multicast_support(torch.autograd.DeviceType.CUDA, here):  # type: ignore[attr-defined]
        return "no NVLink switch connects the GPUs"
    return ""


def gathered_product(x: Tensor, weight: Tensor, group: Any, batches: int) -> tuple[Tensor, Tensor]:
    """All-gather tokens and multiply them by the weight in one operation.

    Args:
        x: this rank's tokens [T / ranks, k], of `batches` stacked sequences.
        weight: [n, k] in x's dtype.
        group: process group.
        batches: number of sequences.
    Returns:
        All tokens [T, k] in the order of one process, and the product [T, k] @ weight.T.
    Exact: the products of each rank's tokens.
    """
    run = operation(GATHER)
    assert run is not None
    with count_collective("activations", "gather", x, group):
        whole, (product,) = run(x.unflatten(0, (batches, -1)), [weight.t()], 1, group.group_name)
    return whole.flatten(0, 1), product.flatten(0, 1)


def scattered_product(x: Tensor, weight: Tensor, group: Any, batches: int) -> Tensor:
    """Return this rank's tokens of the sum over ranks of x [T, k] @ weight [n, k].T: [T / ranks, n] in x's dtype.

    Bounded: each rank's product is rounded to that dtype before the sum. The path without overlap, `comm.scatter_sums`,
    sums float32 products.
    """
    run = operation(SCATTER)
    assert run is not None
    with count_collective("activations", "scatter", x.new_empty((x.shape[0], weight.shape[0]), device="meta"), group):
        total: Tensor = run(x.unflatten(0, (batches, -1)), weight.t(), "sum", 1, group.group_name)
    return total.flatten(0, 1)
