"""Run cases on several ranks with gloo: the ranks start once for all cases, and an error names its case."""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests import forked
from tests.conftest import ROOT

#: Ranks of most tests.
RANKS = 2
Case = Callable[[int], None]
#: Seconds that a rank waits for the others before it fails. A busy machine may give one of them next to no time, or
#: let it import a library of a hundred files or wait for a disk, while another one has arrived.
PATIENT = 240.0


def run(module: str, folder: Path, ranks: int = RANKS, *, slow: bool = False) -> None:
    """Run a module of tests as a program on each rank: it calls `main` with its cases.

    Args:
        folder: of this test alone.
        ranks: how many.
        slow: whether the slow cases are run, not the others.
    """
    # The ranks connect through a port of this process: with a file they would poll for one another.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(ranks):
        command = [sys.executable, "-m", module, str(rank), str(store.port), str(ranks), str(folder), "slow" * slow]
        processes.append(forked.quick.Popen(command, cwd=ROOT, stderr=forked.quick.PIPE))
    try:
        while any(each.poll() is None for each in processes) and not any(each.poll() for each in processes):
            time.sleep(0.02)
    finally:
        for each in processes:
            each.terminate()
    errors = b"".join(each.communicate()[1] for each in processes).decode()
    assert [each.returncode for each in processes] == [0] * ranks, errors


def world() -> int:
    """How many ranks this process was started among."""
    return int(sys.argv[3])


def folder() -> Path:
    """The test's own."""
    return Path(sys.argv[4])


@cache
def mesh(*sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """The mesh of all ranks with these sizes and names, shared by all cases.

    Each group of gloo has threads that wake up until the process ends: with a mesh for each case, four ranks spent a
    third of their time on that and on connecting.
    """
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def main(cases: Sequence[Case], seconds: float = PATIENT, slow: Sequence[Case] = ()) -> None:
    """Call each case with this process's rank.

    Args:
        seconds: how long a rank waits for the others, where a case is about that.
        slow: the cases of a run with `slow`.
    """
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    # Imported objects stay alive, and garbage collection would spend time on them.
    gc.freeze()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world(), timeout=limit)
    try:
        for case in slow if sys.argv[5] else cases:
            # A model that one rank has dropped and another one not would differ in the histories that they reduce.
            gc.collect()
            dist.barrier()
            try:
                case(rank)
            except Exception as error:
                raise AssertionError(f"{case.__name__} on rank {rank}: {error}") from error
    finally:
        dist.destroy_process_group()


def gathered(t: Tensor) -> list[Tensor]:
    """A tensor as each rank has it."""
    parts = [torch.empty_like(t.contiguous()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return parts
