"""Loops as users write them, on two gloo ranks: copies, two models, exceptions, skipped steps, evaluation between."""

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import quaver.torch as qt
from quaver.torch.parallel import gather_quantized, sync_amax_histories
from tests import two_ranks
from tests.close import assert_bitwise
from tests.two_ranks import gathered

WIDE = 64


class Net(nn.Module):
    """Two layers, recomputed by torch's checkpoint (reentrant or not) or not at all.

    Args:
        saved: operations whose outputs a selective checkpoint saves.
    """

    def __init__(self, recipe: str | None, reentrant: bool | None = None, saved: Sequence[Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.reentrant = qt.Linear(WIDE, 96), qt.Linear(96, WIDE), reentrant
        self.options: dict[str, Any] = {"use_reentrant": reentrant}
        if saved is not None:
            self.options["context_fn"] = partial(create_selective_checkpoint_contexts, list(saved))
        if recipe is not None:
            qt.convert(self, recipe)

    def body(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(torch.relu(self.a(x)))
        return y

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.body(x)
        y: Tensor = checkpoint(self.body, x.requires_grad_(self.reentrant), **self.options)  # type: ignore[assignment]
        return y


def data(rank: int, number: int) -> Tensor:
    x = torch.randn(8, WIDE, generator=torch.Generator().manual_seed(2 * number + rank))
    return x * (1 + 5 * rank) * (1 + number)


def by_copies(net: Net) -> nn.Module:
    return DistributedDataParallel(net)


def in_parts(net: Net, codes: bool = True) -> nn.Module:
    if codes:
        gather_quantized(net)
    for part in (net.a, net.b, net):
        fully_shard(part)
    return net


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, to_none: bool = True) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=to_none)


def assert_scales(net: Any, label: str, agreed: bool = False) -> None:
    for layer in (net.a, net.b):
        assert_bitwise(*gathered(layer.factor), label)
        if agreed:
            assert_bitwise(*gathered(layer.history.contiguous()), label)


def copies_in_checkpoints(rank: int) -> None:
    """Extra copies or evaluations on one rank do not change which amaxes are reduced, nor when."""
    for reentrant in (True, False):
        base = Net("delayed", reentrant)
        spare = [copy.deepcopy(base) for _ in range(rank)]
        nets = [copy.deepcopy(base), base]
        wrapped = [by_copies(net) for net in nets]
        optimizers = [torch.optim.SGD(net.parameters(), 1e-3) for net in nets]
        for number in range(3):
            # The original runs later than its copy, and not as often.
            for i in (0, 1) if number else (0,):
                step(wrapped[i], optimizers[i], data(rank, number))
                assert_scales(nets[i], f"{reentrant}, step {number} of {i}")
        late = copy.deepcopy(nets[0])
        spare += [copy.deepcopy(nets[0]) for _ in range(rank)]
        with torch.no_grad():
            for net in spare:
                net(data(rank, 1))
        optimizer, of_late = torch.optim.SGD(late.parameters(), 1e-3), by_copies(late)
        for number in range(3):
            step(of_late, optimizer, data(rank, number))
            step(wrapped[0], optimizers[0], data(rank, number))
            if rank == 0:
                with torch.no_grad():
                    late.eval()(data(rank, 5))
                late.train()
        whole = nn.ModuleList([late, *nets])
        sync_amax_histories(whole)
        for net in (late, *nets):
            assert_scales(net, f"{reentrant}, at the end", agreed=True)


def exceptions_in_a_step(rank: int) -> None:
    """A forward that fails on all ranks, and one without a backward, do not change the next step."""
    for recipe in ("delayed", "tensorwise"):
        for wrap in (by_copies, in_parts):
            net = Net(recipe)
            model = wrap(net)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            for number in range(4):
                if number == 1:
                    hook = net.b.register_forward_pre_hook(lambda *_: {}["a bug of this test"])
                    with suppress(KeyError):
                        model(data(rank, number))
                    hook.remove()
                if number == 2:
                    model(data(rank, number))
                step(model, optimizer, data(rank, number))
                if recipe == "delayed":
                    assert_scales(net, f"{wrap.__name__}, step {number}")


def accumulation(rank: int) -> None:
    """With micro-batches, skipped steps, evaluation and a state dict in between, results equal plain fully_shard."""
    for recipe in ("delayed", "mxfp8", "tensorwise"):
        for to_none in (True, False):
            losses: list[list[float]] = []
            for codes in (True, False):
                model = in_parts(Net(recipe), codes)
                optimizer, seen = torch.optim.AdamW(model.parameters(), 1e-3), []
                for number in range(4):
                    for micro in range(2):
                        loss = model(data(rank, 2 * number + micro)).square().mean()
                        loss.backward()
                        seen.append(loss.item())
                        if not micro:
                            with torch.no_grad():
                                model.eval()(data(rank, 9))
                            model.train()
                    sync_amax_histories(model)
                    model.state_dict()
                    if number % 2 == 0:
                        optimizer.step()
                    if number != 1:
                        optimizer.zero_grad(set_to_none=to_none)
                losses.append(seen)
            assert losses[0] == losses[1], f"{recipe}, to none {to_none}: {losses}"


def recipes_by_turns(rank: int) -> None:
    """Alternate steps of `delayed` with steps of a recipe without history, and evaluate on one rank only."""
    for wrap in (by_copies, partial(in_parts, codes=False)):
        net = Net(None)
        model = wrap(net)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for number, recipe in enumerate(("delayed", "delayed", "mxfp8", "mxfp8", "delayed", "mxfp8", "mxfp8")):
            with qt.autocast(recipe):
                step(model, optimizer, data(rank, number))
            if rank == 0 and wrap is by_copies:
                with torch.no_grad(), qt.autocast("mxfp8"):
                    net(data(rank, number))
            for p in net.parameters() if wrap is by_copies else ():
                assert_bitwise(*gathered(p.detach()), f"step {number}, {recipe}")
            if recipe == "delayed":
                assert_scales(net, f"step {number}")
        sync_amax_histories(net)
        assert_scales(net, "at the end", agreed=True)


CASES: list[Callable[[int], None]] = [
    copies_in_checkpoints,
    exceptions_in_a_step,
    accumulation,
    recipes_by_turns,
]


@pytest.mark.ranks
def test_odd_loops_keep_ranks_together(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


if __name__ == "__main__":
    two_ranks.main(CASES)
