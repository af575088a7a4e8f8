"""Four processes on gloo: stages of a pipeline on one dimension of a mesh, and torch's fully_shard on the other."""

import gc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import quaver.torch as qt
from quaver import recipes
from quaver.torch import parallel
from tests import two_ranks
from tests.close import assert_bitwise
from tests.torch.parallel.fsdp.training import first_difference
from tests.torch.parallel.test_pipeline import KINDS, LR, WIDTH, converted, loss_of
from tests.two_ranks import RANKS

#: Recipes with each kind of scale, with histories, and with noise.
SCALES = ("delayed", "mxfp8", "nvfp4")
#: Steps of 1F1B by recipe, in the quick and in the slow tests.
STEPS, LONG = dict.fromkeys(recipes.RECIPES, 2) | dict.fromkeys(SCALES, 3), dict.fromkeys(recipes.RECIPES, 20)
#: Sequences and tokens of a micro-batch.
TOKENS = 2, 8
#: Steps of the other schedules, whose bugs show in the first or second step.
OTHERS = {name: 2 for name in KINDS if name != "1F1B"}


def micro(name: str) -> int:
    """Micro-batches per step: as many as stages, of which some schedules have two per rank."""
    return of_stages(name)


def of_stages(name: str) -> int:
    return sum(map(len, KINDS[name].stages))


def batches(name: str, steps: int, across: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of one fully_shard rank, with its own magnitude."""
    generator = torch.Generator().manual_seed(across)
    shape = 2, micro(name) * TOKENS[0], TOKENS[1], WIDTH
    pairs = (torch.randn(shape, generator=generator) * (1 + across) for _ in range(steps))
    return [(pair[0], pair[1]) for pair in pairs]


@cache
def alone() -> Any:
    """The process group of only this rank."""
    return [dist.new_group([rank]) for rank in range(RANKS * RANKS)][dist.get_rank()]


def in_one_process(name: str, recipe: str, steps: int) -> tuple[list[list[list[float]]], list[dict[str, Tensor]]]:
    """Losses of each step by batch and micro-batch, and the final state of each stage.

    One model trains on all micro-batches of both batches in a step; gradients are summed batch by batch.
    """
    net = converted(of_stages(name), recipe)
    optimizer, losses = torch.optim.SGD(net.parameters(), LR), []
    counts = [buffer for key, buffer in net.named_buffers() if key.endswith("count")]
    given = [batches(name, steps, across) for across in range(RANKS)]
    for step in range(steps):
        before, gradients, of_step = [each.clone() for each in counts], [], []
        with qt.autocast(recipe, group=alone()):
            for own in given:
                # Each rank draws noise for its own micro-batches.
                for buffer, value in zip(counts, before, strict=True):
                    buffer.copy_(value)
                x, target = own[step]
                parts = zip(x.chunk(micro(name)), target.chunk(micro(name)), strict=True)
                of_batch = [loss_of(net(part), wanted) for part, wanted in parts]
                for loss in of_batch:
                    loss.backward()
                of_step.append([loss.item() for loss in of_batch])
                gradients.append([p.grad for p in net.parameters()])
                optimizer.zero_grad()
        for p, *each in zip(net.parameters(), *gradients, strict=True):
            # Sum over micro-batches first; then fully_shard averages over its ranks.
            p.grad = sum(each) / RANKS / micro(name)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(of_step)
    return losses, [{key: value.clone() for key, value in part.state_dict().items()} for part in net]


def on_ranks(
    name: str, recipe: str, steps: int, mesh: DeviceMesh, after_forward: bool | None = None
) -> tuple[list[list[float]], nn.Sequential]:
    """The losses of this rank's batch, on the rank of the last stage, and the model with this rank's stages."""
    kind, net = KINDS[name], converted(of_stages(name), recipe)
    has, last, across = kind.stages[mesh["pp"].get_local_rank()], len(net) - 1, mesh["dp"].get_local_rank()
    stages = []
    for i in has:
        example = torch.empty(*TOKENS, WIDTH, device="meta")
        stages.append(parallel.pipeline_stage(net[i], i, len(net), example, group=mesh.get_group("pp")))
        if recipes.get(recipe).quantizes:
            parallel.gather_quantized(net[i], mesh=mesh["dp"])
        for layer in net[i]:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=after_forward)
        fully_shard(net[i], mesh=mesh["dp"], reshard_after_forward=after_forward)
    schedule = kind.schedule(stages if len(stages) > 1 else stages[0], n_microbatches=micro(name), loss_fn=loss_of)
    optimizer, losses = torch.optim.SGD([p for i in has for p in net[i].parameters()], LR), []
    for x, target in batches(name, steps, across):
        of_step: list[Tensor] = []
        given: dict[str, Any] = {"target": target, "losses": of_step} if last in has else {}
        with qt.autocast(recipe):
            schedule.step(*((x,) if 0 in has else ()), **given)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in of_step])
    return losses, net


#: A schedule, a recipe, steps, and `reshard_after_forward`.
Run = tuple[str, str, int, bool | None]


def runs() -> list[Run]:
    quick: list[Run] = [("1F1B", *of_recipe, None) for of_recipe in STEPS.items()]
    # Two recipes per schedule; test_pipeline.py combines all schedules and recipes on fewer ranks.
    for number, (name, steps) in enumerate(OTHERS.items()):
        for recipe in (SCALES[number % 3], SCALES[(number + 1) % 3]):
            quick.append((name, recipe, steps, (None, False)[number % 2]))
    return quick


def long_runs() -> list[Run]:
    every: list[Run] = [("1F1B", *of_recipe, None) for of_recipe in LONG.items()]
    for number, name in enumerate(OTHERS):
        every += [(name, *of_recipe, (None, False)[number % 2]) for of_recipe in LONG.items()]
    return every


def ranks_equal_one_process(rank: int) -> None:
    assert_equal_to_one_process(rank, runs())


def ranks_equal_one_process_for_long(rank: int) -> None:
    assert_equal_to_one_process(rank, long_runs())


def assert_equal_to_one_process(rank: int, cases: list[Run]) -> None:
    """Losses, weights, histories and noise counts equal one process that splits the same sums."""
    mesh = two_ranks.mesh(RANKS, RANKS, names=("pp", "dp"))
    alone()
    # The single-process references are distributed over the ranks.
    own = {case: in_one_process(*case[:3]) for case in cases[rank :: RANKS * RANKS]}
    gc.collect()
    for number, case in enumerate(cases):
        shared = [own.get(case)]
        dist.broadcast_object_list(shared, number % (RANKS * RANKS))
        assert shared[0] is not None
        expected, states = shared[0]
        losses, net = on_ranks(*case[:3], mesh, case[3])
        stages = KINDS[case[0]].stages[mesh["pp"].get_local_rank()]
        if len(net) - 1 in stages:
            across = mesh["dp"].get_local_rank()
            wanted = [loss for step in expected for loss in step[across]]
            values = [loss for step in losses for loss in step]
            assert values == wanted, f"{case}: {first_difference(values, wanted)}"
        # Amaxes of the last step are local until they are synchronized.
        parallel.sync_amax_histories(nn.ModuleDict({str(i): net[i] for i in stages}))
        for i in stages:
            state = net[i].state_dict()
            assert list(state) == list(states[i]), case
            for key, value in state.items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                assert_bitwise(whole, states[i][key], f"{case}: stage {i}: {key}")


@pytest.mark.ranks
def test_stages_and_shards_equal_one_process(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, RANKS * RANKS)


@pytest.mark.ranks
@pytest.mark.slow
def test_twenty_losses(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, RANKS * RANKS, slow=True)


if __name__ == "__main__":
    two_ranks.main([ranks_equal_one_process], slow=[ranks_equal_one_process_for_long])
