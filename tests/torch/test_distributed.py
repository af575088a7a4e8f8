"""Two processes on gloo: delayed scaling's maxima are those of all ranks, and DDP sees one model."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import quaver.torch as qt
from quaver import recipes
from quaver.torch.parallel import sync_amax_histories
from quaver.torch.state.history import roll as rolling
from tests import two_ranks
from tests.close import assert_bitwise, assert_close
from tests.two_ranks import RANKS, gathered


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(qt.Linear(32, 48), nn.ReLU(), qt.Linear(48, 16))


def data(rank: int, step: int) -> Tensor:
    """Magnitudes differ by rank, so that a merely local amax is detected."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(64, 32, generator=generator) * (1 + 9 * rank) * (1 + step)


def assert_equal_on_ranks(net: nn.Module, what: str) -> None:
    for name, value in (*net.named_parameters(), *net.named_buffers()):
        one, other = gathered(value.detach())
        assert_bitwise(one, other, f"{what}: {name}")
        if value.grad is not None:
            assert_bitwise(*gathered(value.grad), f"{what}: gradient of {name}")


def train(net: nn.Module, wrapped: nn.Module, rank: int, recipe: str | None, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(steps):
        x = data(rank, step)
        if recipe is None:
            y = wrapped(x)
        else:
            with qt.autocast(recipe):
                y = wrapped(x)
        y.square().mean().backward()
        for name, p in net.named_parameters():
            assert p.grad is not None
            assert_bitwise(*gathered(p.grad), f"gradient of {name} in step {step}")
        optimizer.step()
        optimizer.zero_grad()


def recorded(net: nn.Module) -> Tensor:
    return torch.stack([layer.history[0] for layer in net.modules() if isinstance(layer, qt.Linear)])


def check_factors(net: nn.Module, roll: Callable[[], None]) -> None:
    local = gathered(recorded(net))
    assert not torch.equal(*local), "the ranks saw different data"
    wanted = torch.stack(local).amax(0)
    roll()
    layers = [layer for layer in net.modules() if isinstance(layer, qt.Linear)]
    assert_bitwise(torch.stack([layer.history[-1] for layer in layers]), wanted)
    assert_equal_on_ranks(net, "after a roll")
    assert all(layer.factor.all() for layer in layers)


def converted_delayed(rank: int) -> None:
    net = model()
    qt.convert(net, recipes.delayed(history=4))
    wrapped = DistributedDataParallel(net)
    train(net, wrapped, rank, None)

    def roll() -> None:
        wrapped(data(rank, 7))
        for layer in (net[0], net[2]):
            layer.history[0] = 0

    check_factors(net, roll)


def autocast_around_ddp(rank: int) -> None:
    net = model()
    wrapped = DistributedDataParallel(net)
    train(net, wrapped, rank, "delayed")
    # A copy on one rank does not take part, nor does a model that the rank only evaluates.
    copies = []
    if rank == 0:
        copies.append(copy.deepcopy(net))
        with torch.no_grad(), qt.autocast("delayed"):
            copies[0](data(0, 0))
            copies.append(model())
            copies[1](data(0, 0))

    def roll() -> None:
        with qt.autocast("delayed"):
            pass

    check_factors(net, roll)


def a_group_of_ones_own(rank: int) -> None:
    groups = [dist.new_group([r]) for r in range(RANKS)]
    net = model()
    for step in range(2):
        with qt.autocast("delayed", group=groups[rank]):
            net(data(rank, step)).square().mean().backward()
    assert not torch.equal(*gathered(net[0].factor)), "each rank keeps its own"


def groups_that_are_the_layers_own(rank: int) -> None:
    """Another model's autocast does not reduce a model over a group that is not its own."""
    groups = [dist.new_group([r]) for r in range(RANKS)]
    one, other = model(), model()
    with qt.autocast("delayed", group=groups[rank]):
        one(data(rank, 0)).square().mean().backward()
    for step in range(2):
        with qt.autocast("delayed"):
            other(data(rank, step)).square().mean().backward()
    assert one[0].history[0].all(), "it rolls when it runs, and not with another group's layers"
    with qt.autocast("delayed", group=groups[rank]):
        pass
    assert one[0].factor.all() and not torch.equal(*gathered(one[0].history[-1])), "each rank keeps its own"
    assert_bitwise(*gathered(other[0].history[-1]), "the default group's")


def ranks_with_other_layers(rank: int) -> None:
    """Without a group, ranks reduce layers of equal class and sizes, and each keeps its own layers local."""
    widths = ([32], [32, 32], []), ([16], [48], [32])
    # Layers of earlier cases have been freed on both ranks.
    gc.collect()
    for own, other in zip(widths[rank], widths[1 - rank], strict=True):
        net = nn.Sequential(*(qt.Linear(32, width) for width in own))
        for step in range(3):
            with qt.autocast("delayed"):
                y = net(data(rank, step))
                if own:
                    y.square().mean().backward()
        local = net[0].history if own else torch.zeros(1024, 3)
        del net
        parts = gathered(local)
        if own and other:
            assert not torch.equal(*parts), f"layers {own} and {other} share nothing"
        if own:
            expected = data(rank, 1).abs().max()
            assert_bitwise(local[-1, 0], expected, f"layers {own}, beside {other}")


def unequal_garbage_collection(rank: int) -> None:
    """If only one rank has freed a model, later steps do not hang and amaxes still agree."""

    def dropped(recipe: Any, steps: int) -> None:
        net: Any = nn.Sequential(qt.Linear(32, 48, recipe=recipe), nn.ReLU(), qt.Linear(48, 16, recipe=recipe))
        # A reference cycle, which only the garbage collector frees.
        net.own = [net]
        for step in range(steps):
            with qt.autocast("delayed"):
                net(data(rank, step)).square().mean().backward()

    gc.collect()
    gc.disable()
    try:
        for collects in (0, 1):
            for steps, recipe in ((2, None), (0, recipes.delayed()), (2, recipes.delayed())):
                dropped(recipe, steps)
                if rank == collects:
                    gc.collect()
                net = model()
                for step in range(4):
                    with qt.autocast("mxfp8" if step == 2 else "delayed"):
                        net(data(rank, step)).square().mean().backward()
                    if step == 1:
                        dropped(recipe, steps)
                    if step == 1 and rank != collects:
                        gc.collect()
                for layer in (net[0], net[2]):
                    assert_bitwise(*gathered(layer.history[1:].contiguous()), f"{collects}, {steps}, {recipe}")
    finally:
        gc.enable()


def a_model_that_one_rank_keeps(rank: int) -> None:
    """A model was trained on both ranks and freed on one; a second model with the same layers is still reduced."""
    alive = []
    for number in range(2):
        net = model()
        alive += [net] * (rank == 0)
        for step in range(3):
            with qt.autocast("delayed"):
                net(data(rank, 10 * number + step)).square().mean().backward()
        for layer in (net[0], net[2]):
            assert_bitwise(*gathered(layer.history[1:].contiguous()), f"model {number}")
        del net, layer
        gc.collect()


def ranks_equal_one_process(rank: int) -> None:
    """Blocks of 32 tokens are within a rank, so the ranks' gradients average to those of the whole batch."""
    net, whole = model(), model()
    for each in (net, whole):
        qt.convert(each, "mxfp8")
    wrapped = DistributedDataParallel(net)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (net, whole)]
    for step in range(2):
        batch = torch.cat([data(r, step) for r in range(RANKS)])
        wrapped(data(rank, step)).square().mean().backward()
        whole(batch).square().mean().backward()
        for (name, p), q in zip(net.named_parameters(), whole.parameters(), strict=True):
            # The mean's factor 1/ranks is a power of two, so no code differs.
            assert_close(f"gradient of {name}", p.grad, q.grad, 1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        net.load_state_dict(whole.state_dict())


def every_recipe(rank: int) -> None:
    for name in recipes.RECIPES:
        net = model()
        qt.convert(net, name)
        train(net, DistributedDataParallel(net), rank, None, 2)
        rolling.roll_all()
        assert_equal_on_ranks(net, name)


def kept_weights_follow_collectives(rank: int) -> None:
    """A broadcast and an all-reduce write to a weight without changing its version."""
    for recipe in ("tensorwise", "rowwise", "mxfp8"):
        for collective in (lambda p: dist.broadcast(p, 1), dist.all_reduce):
            for before, after in ((False, False), (True, False), (True, True)):
                layer = qt.Linear(32, 48, bias=False, recipe=recipe)
                with torch.no_grad():
                    layer.weight.mul_(1 + 3 * rank)
                x = data(rank, 0)
                for training, write in ((before, True), (after, False)):
                    fresh = copy.deepcopy(layer)
                    with torch.set_grad_enabled(training):
                        y, expected = layer(x), fresh(x)
                    assert_bitwise(y.detach(), expected.detach(), f"{recipe}, training: {before}, {after}")
                    if training:
                        y.sum().backward()
                    if write:
                        collective(layer.weight.detach())
                        layer.weight.grad = None


def a_root_that_is_not_called(rank: int) -> None:
    """The amaxes of its layers are still reduced when a step begins."""
    nets = [model(), model()]
    for net in nets:
        qt.convert(net, recipes.delayed(history=3, algorithm="most_recent"))
    for step in range(3):
        x = data(rank, step)
        outputs = [nets[0](x), nets[1].forward(x)]
        assert_bitwise(outputs[1], outputs[0], f"step {step}")
        for y in outputs:
            y.square().mean().backward()
    rolling.roll_all()
    assert_bitwise(nets[1][0].factor, nets[0][0].factor)
    assert_bitwise(*gathered(nets[1][0].factor))


def made_on_meta_and_sharded(rank: int) -> None:
    """In torchtitan's order: created and converted on meta, sharded, materialized, initialized, trained."""
    for name in ("delayed", "mxfp8", "nvfp4"):
        with torch.device("meta"):
            net: Any = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
        qt.convert(net, name)
        for part in (net[0], net[2], net):
            fully_shard(part)
        net.to_empty(device="cpu")
        assert not any(b.is_meta or (b.any() and not n.endswith("count")) for n, b in net.named_buffers())
        for layer in (net[0], net[2]):
            layer.reset_parameters()
            # Each rank has half of a layer's rows.
            assert layer.weight.to_local().shape[0] * RANKS == layer.out_features
            assert layer.weight.to_local().abs().max() <= layer.in_features**-0.5
        whole = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
        torch.manual_seed(0)
        for p in whole.parameters():
            nn.init.normal_(p, std=0.1)
        qt.convert(whole, name)
        full = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(net, qt.plain_state_dict(whole), options=full)
        other = DistributedDataParallel(whole)
        optimizers = [torch.optim.AdamW(each.parameters(), 1e-2) for each in (net, whole)]
        for step in range(4):
            outputs = [each(data(rank, step)) for each in (net, other)]
            assert_bitwise(outputs[0], outputs[1], f"{name}, step {step}")
            for y, optimizer in zip(outputs, optimizers, strict=True):
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for (what, p), q in zip(net.named_parameters(), whole.parameters(), strict=True):
            assert_bitwise(p.full_tensor().detach(), q.detach(), f"{name}: {what}")


def models_created_in_another_order(rank: int) -> None:
    """Ranks that made the same models in another order have the same histories, with and without given groups."""
    groups: list[Any] = [dist.new_group(list(range(RANKS))) for _ in range(3)]
    for explicit in (True, False):
        models: dict[str, nn.Sequential] = {}
        names = ["a", "b", "c"]
        for name in names if rank == 0 else names[::-1]:
            models[name] = model()
        whole = nn.ModuleDict(models)
        if not explicit:
            # `convert` gives layers the names by which ranks match them.
            qt.convert(whole, "delayed")
        for step in range(3):
            for i, name in enumerate(names):
                with qt.autocast("delayed", group=groups[i] if explicit else None):
                    models[name](data(rank, step) * (i + 1)).square().mean().backward()
            sync_amax_histories(whole)
            for name in names:
                for layer in (models[name][0], models[name][2]):
                    what = f"{name} in step {step}, explicit groups {explicit}"
                    assert layer.history.any(), what
                    assert_bitwise(*gathered(layer.history.contiguous()), what)
                    assert_bitwise(*gathered(layer.factor), what)
            amax_values = [models[name][0].history[:, 0].max() for name in names]
            assert amax_values[0] < amax_values[1] < amax_values[2], "each layer has its own maxima"


class Experts(nn.Module):
    """On one rank half of the tokens go to no expert, on the other to the last expert."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.up, self.down = qt.GroupedLinear(4, 32, 48), qt.GroupedLinear(4, 48, 16, layout="kn")
        self.ends = torch.tensor([[32, 32, 64, 64], [0, 32, 32, 32]][rank], dtype=torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x, self.ends)), self.ends)
        return y


def grouped_layers_under_ddp(rank: int) -> None:
    """Each group's history covers all ranks, also if a rank has no token for that group."""
    for name in ("delayed", "nvfp4"):
        torch.manual_seed(0)
        net = Experts(rank)
        whole = copy.deepcopy(net)
        qt.convert(net, name)
        train(net, DistributedDataParallel(net), rank, None)
        local = torch.stack([net.up.history[:, 0], net.up.history[:, 0]]) if name == "delayed" else None
        rolling.roll_all()
        if name == "nvfp4":
            # Groups with tokens have drawn noise for gradients in each of three steps.
            ones, others = gathered(net.up.count)
            assert ones[:, 1].tolist() == [3, 0, 3, 0] and others[:, 1].tolist() == [0, 3, 0, 0]
        if local is not None:
            assert_equal_on_ranks(net, name)
            one, other = gathered(local)
            assert not torch.equal(one, other)
            assert_bitwise(net.up.history[:, -1], torch.maximum(one, other)[0])
            assert (net.up.factor[:3] > 0).all() and not net.up.factor[3].any()
        # The same with half of the groups on each rank.
        qt.convert(whole, name)
        for part in (whole.up, whole.down, whole):
            fully_shard(part)
        optimizer = torch.optim.SGD(whole.parameters(), lr=1e-3)
        for step in range(3):
            whole(data(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for (what, p), q in zip(whole.named_parameters(), net.parameters(), strict=True):
            assert p.to_local().shape[0] * RANKS == 4
            assert_bitwise(p.full_tensor().detach(), q.detach(), f"{name}: {what}")


def stored_weights_under_ddp(rank: int) -> None:
    """They start with rank 0's values and train as one model."""
    for recipe in ("delayed", "mxfp8", "blockwise", "nvfp4"):
        torch.manual_seed(rank)
        with qt.quantized_init(recipe):
            net = nn.Sequential(qt.Linear(32, 48), qt.Linear(48, 16))
        torch.manual_seed(0)
        with qt.quantized_init(recipe):
            first = qt.Linear(32, 48)
        wrapped = DistributedDataParallel(net)
        assert torch.equal(net[0].weight, first.weight), recipe
        optimizer = qt.optim.AdamW(net.parameters(), lr=1e-2)
        for step in range(2):
            with qt.autocast(recipe):
                wrapped(data(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, p in net.named_parameters():
            value = p.dequantize() if isinstance(p, qt.QuantizedTensor) else p
            assert_bitwise(*gathered(value.detach()), f"{recipe}: {name}")


CASES = [
    stored_weights_under_ddp,
    grouped_layers_under_ddp,
    models_created_in_another_order,
    a_root_that_is_not_called,
    made_on_meta_and_sharded,
    kept_weights_follow_collectives,
    converted_delayed,
    autocast_around_ddp,
    a_group_of_ones_own,
    groups_that_are_the_layers_own,
    ranks_with_other_layers,
    unequal_garbage_collection,
    a_model_that_one_rank_keeps,
    ranks_equal_one_process,
    every_recipe,
]


@pytest.mark.ranks
def test_two_ranks_are_one_model(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


if __name__ == "__main__":
    two_ranks.main(CASES)
