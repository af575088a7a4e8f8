"""GEMMs with an all-gather or a reduce-scatter inside, by torch's operations on symmetric memory.

They need bfloat16 or float16 operands, and GPUs of one machine behind an NVLink switch. Not tested on GPUs: tests run
the fallbacks that torch provides on CPUs. Source: torch.distributed._symmetric_memory.
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


def is_supported(mesh: Any) -> bool:
    """Return True, on all ranks of a mesh, if they are GPUs of one machine with peer access over an NVLink switch."""
    if mesh.device_type != "cuda":
        return False
    answers: list[Any] = [None] * mesh.size()
    dist.all_gather_object(answers, (socket.gethostname(), _is_supported_here()), mesh.get_group())
    return len({host for host, _ in answers}) == 1 and all(supported for _, supported in answers)


def _is_supported_here() -> bool:
    if any(operation(name) is None for name in (GATHER, SCATTER)):
        return False
    here, count = torch.cuda.current_device(), torch.cuda.device_count()
    if not all(torch.cuda.can_device_access_peer(here, other) for other in range(count) if other != here):
        return False
    memory: Any = getattr(symmetric_memory(), "_SymmetricMemory", None)
    return memory is not None and bool(memory.has_multicast_support(torch.autograd.DeviceType.CUDA, here))  # type: ignore[attr-defined]


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
