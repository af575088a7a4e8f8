"""`CommCounter` counts what torch is seen to send, by kind, and nothing is another number for it."""

import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    Schedule1F1B,
)
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import quaver.torch as qt
from quaver.torch import parallel
from quaver.torch.parallel import ColwiseParallel, CommCounter, RowwiseParallel, comm_counter
from quaver.torch.parallel.fsdp.torch_internals import get_collectives, groups_with_collectives
from tests import two_ranks
from tests.torch.parallel.fsdp.training import adam, converted, sharded, step
from tests.torch.parallel.traffic import Seen


def counted(use: Any, model: nn.Module | None = None, waits: bool = True) -> tuple[CommCounter, Counter[str]]:
    """Run a call under both counters, check that their totals are equal, and return them."""
    with CommCounter(model) as ours, Seen() as torchs:
        use()
    assert sum(ours.bytes.values()) == sum(torchs.bytes.values()) > 0, f"{dict(ours.bytes)} {dict(torchs.bytes)}"
    assert (ours.seconds > 0) == waits and set(ours.bytes) <= set(comm_counter.KINDS)
    return ours, torchs.bytes


def fsdp(rank: int) -> None:
    """Counts weights, gradients and amaxes, changes no loss, and restores torch's collectives afterwards."""
    for name in ("bf16", *RECIPES):

        def start(name: str = name) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
            net = converted(name)
            if name != "bf16":
                parallel.gather_quantized(net)
            optimizer = adam(sharded(net))
            return net, optimizer, [step(net, optimizer, 0)]

        net, optimizer, expected = start()
        expected.append(step(net, optimizer, 1))
        net, optimizer, values = start()
        before = [get_collectives(unit) for unit in groups_with_collectives(net)]
        ours, torchs = counted(partial(append, values, net, optimizer), net)
        assert values == expected, name
        assert ours.bytes["weights"] == torchs["gather"] and ours.bytes["gradients"] == torchs["scatter"], name
        assert ours.bytes["amaxes"] + ours.bytes["control"] == torchs["reduce"] and ours.calls["gradients"] == 2, name
        assert len(before) == 2 and [get_collectives(unit) for unit in groups_with_collectives(net)] == before


def append(values: list[float], net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    values.append(step(net, optimizer, 1))


def gradients_in_eight_bits(rank: int) -> None:
    net = sharded(converted("mxfp8"))
    parallel.quantize_gradients(net)
    ours, torchs = counted(lambda: step(net, adam(net)), net)
    assert ours.bytes["gradients"] == torchs["exchange"] and ours.bytes["weights"] == torchs["gather"]
    wrapped = parallel.quantize_gradients(DistributedDataParallel(nn.Linear(64, 64)))
    ours, _ = counted(lambda: wrapped(torch.ones(2, 64)).sum().backward(), wrapped)
    assert set(ours.bytes) == {"control", "gradients"}


def tensors_in_parts(rank: int) -> None:
    for name in ("tensorwise", "mxfp8"):
        net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        qt.convert(net, name)
        plan = {"0": ColwiseParallel(sequence=True), "2": RowwiseParallel(sequence=True)}
        parallelize_module(net, two_ranks.mesh(dist.get_world_size()), plan)
        x = torch.randn(1, 64, 64, requires_grad=True)
        ours, torchs = counted(lambda net=net, x=x: net(x).sum().backward())
        others = ours.bytes["gradients"] + ours.bytes["control"]
        assert ours.bytes["amaxes"] == torchs["reduce"] - others, "a row's bias is summed, and shapes are compared"
        assert ours.bytes["activations"] == torchs["gather"] + torchs["send"], name


def rows_and_words(rank: int) -> None:
    """Counts tokens sent to experts on other ranks, and a vocabulary-parallel embedding."""
    x, ranks = torch.randn(8, 64, requires_grad=True), dist.get_world_size()
    splits = parallel.AllToAllSplits.even(8 // ranks)
    ours, torchs = counted(lambda: parallel.all_to_all(x, splits).sum().backward())
    # Ranks first compare whether all can continue.
    assert ours.bytes == {"activations": torchs["exchange"], "control": torchs["reduce"]}
    ours, torchs = counted(lambda: parallel.AllToAllSplits.of([8 // ranks] * ranks, 8))
    assert ours.bytes == {"control": torchs["exchange"]}
    # With unequal shards, only what is sent to other ranks.
    uneven = parallel.AllToAllSplits((7, 1), (7, 1)) if rank == 0 else parallel.AllToAllSplits((1, 7), (1, 7))
    with CommCounter() as ours:
        parallel.all_to_all(x, uneven)
    assert ours.bytes["activations"] == 64 * 4
    for sequence in (False, True):
        net = nn.Sequential(nn.Embedding(64, 32))
        plan = {"0": parallel.VocabParallel(sequence=sequence)}
        parallelize_module(net, two_ranks.mesh(ranks), plan)
        ours, torchs = counted(lambda net=net: net(torch.arange(16).view(2, 8)).sum().backward())
        assert ours.bytes["activations"] == sum(torchs.values()) - ours.bytes["control"] > 0


def sequences_in_parts(rank: int) -> None:
    for how, way in (("gather", "gather"), ("ring", "send"), ("all_to_all", "exchange")):
        layer = qt.TransformerLayer(64, 4, 96, mask_type="causal")
        cp = parallel.context_parallel(layer, how=how, quantized="mxfp8")
        x = cp.cut(torch.randn(2, 64, 64), 1)
        with ExitStack() as stack:
            ours, torchs = stack.enter_context(CommCounter()), stack.enter_context(Seen())
            layer(x).sum().backward()
        keys_values = ours.bytes["keys_values"]
        assert keys_values + ours.bytes["control"] == sum(torchs.bytes.values()), how
        assert keys_values >= torchs.bytes[way] > 0, how
        ours, _ = counted(lambda layer=layer, cp=cp: cp.sum_gradients(layer))
        assert set(ours.bytes) == {"control", "gradients"}


def pipelines(rank: int) -> None:
    stage = parallel.pipeline_stage(nn.Linear(64, 64), rank, 2, torch.empty(4, 64, device="meta"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, target: (y - target).square().mean())
    x = torch.randn(16, 64)
    schedule.step(*(x,) if rank == 0 else (), **({} if rank == 0 else {"target": x}))
    ours, _ = counted(lambda: schedule.step(*(x,) if rank == 0 else (), **({} if rank == 0 else {"target": x})))
    assert ours.bytes["activations"] == 4 * 4 * 64 * 4


def who_is_slow_is_waited_for(rank: int) -> None:
    with CommCounter() as outer:
        with CommCounter() as inner:
            time.sleep(0.3 if rank == 1 else 0.0)
            parallel.comm.sum_parts(torch.ones(4))()
        with pytest.raises(ValueError, match="is already counting"), outer:
            pass
        parallel.comm.sum_parts(torch.ones(4))()
    assert outer.calls["activations"] == 2 and inner.calls["activations"] == 1 and not comm_counter.active.all
    assert inner.seconds > 0.2 if rank == 0 else inner.seconds < 0.2


def gradients_that_are_not_finite(rank: int) -> None:
    net: Any = fully_shard(nn.Linear(8, 8))
    with CommCounter(net, look=True) as ours:
        for value in (1.0, torch.nan, 1.0, -torch.inf, 1e38):
            net(torch.full((2, 8), value if rank == 1 else 1.0)).sum().backward()
            bad = rank == 1 and value not in (1.0, 1e38)
            assert bool(ours.nonfinite) == bad, f"{value} on rank {rank}"
            ours.forget()
            assert ours.nonfinite is None


def replicas(rank: int) -> None:
    """HSDP on 4 ranks in two groups: shards are summed over replicas after the reduce-scatter."""
    mesh = two_ranks.mesh(2, 2, names=("replicas", "shards"))
    for name in ("bf16", "mxfp8"):
        net = converted(name)
        if name != "bf16":
            parallel.gather_quantized(net)
        optimizer = adam(sharded(net, mesh))
        # Run once, so that the comparison of prepared models is over.
        step(net, optimizer, 0)
        with CommCounter(net) as ours, Seen(mesh.get_group("shards")) as torchs:
            step(net, optimizer, 1)
        assert ours.bytes["weights"] == torchs.bytes["gather"] > 0, name
        # Every group has two ranks, so all of torch's all-reduces are for gradients, amaxes and headers.
        sums = ours.bytes["gradients"] + ours.bytes["amaxes"] + ours.bytes["control"]
        reduced = sums - torchs.bytes["scatter"]
        assert reduced == torchs.bytes["reduce"] > 0, name


RECIPES = ("tensorwise", "mxfp8", "delayed")
CASES = [
    fsdp,
    gradients_in_eight_bits,
    tensors_in_parts,
    rows_and_words,
    sequences_in_parts,
    pipelines,
    who_is_slow_is_waited_for,
    gradients_that_are_not_finite,
]


@pytest.mark.ranks
def test_counted_bytes_match_what_torch_sends(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


@pytest.mark.ranks
def test_replicas_are_counted(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, 4)


if __name__ == "__main__":
    two_ranks.main(CASES if two_ranks.world() == two_ranks.RANKS else [replicas])
