"""torch's pipeline schedules, unmodified: stages train as one process does that takes the same micro-batches."""

import copy
import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import quaver.torch as qt
from quaver import recipes
from quaver.torch import parallel
from tests import two_ranks
from tests.close import assert_bitwise
from tests.pairs import alternating
from tests.torch.parallel.flops import Flops
from tests.two_ranks import RANKS

MICRO, STEPS, WIDTH = 4, 3, 64
#: Steps with a backward split in two; more for recipes with state. Unsplit backwards have 20 steps for every kind of
#: scale in test_pipeline_mesh.py.
SPLIT = dict.fromkeys(recipes.RECIPES, STEPS) | {"delayed": 8}
#: Steps of the slow tests.
LONG = dict.fromkeys(recipes.RECIPES, 20)
#: Sequences and tokens of a micro-batch.
TOKENS = 2, 16
LR = 0.1
NOTHING = nullcontext()


#: Builds a model from its number of stages and a recipe.
Build = Callable[[int, str], nn.Sequential]


@dataclass(frozen=True)
class Kind:
    """A schedule, and the stages of each rank."""

    schedule: Callable[..., Any]
    stages: tuple[tuple[int, ...], ...]


KINDS = {
    "GPipe": Kind(ScheduleGPipe, ((0,), (1,))),
    "1F1B": Kind(Schedule1F1B, ((0,), (1,))),
    "Interleaved1F1B": Kind(ScheduleInterleaved1F1B, ((0, 2), (1, 3))),
    "InterleavedZeroBubble": Kind(ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
    "ZBVZeroBubble": Kind(ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
    "DualPipeV": Kind(ScheduleDualPipeV, ((0, 3), (1, 2))),
}
#: Schedules that split a backward into input and weight gradients.
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def plain_stage(layers: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*parts)


def converted(stages: int, recipe: str) -> nn.Sequential:
    """Stages with unequal numbers of layers."""
    torch.manual_seed(0)
    net = nn.Sequential(*[plain_stage(1 + stage % 3) for stage in range(stages)])
    qt.convert(net, recipe)
    return net


def even(stages: int, recipe: str) -> nn.Sequential:
    """One layer per stage."""
    torch.manual_seed(0)
    net = nn.Sequential(*[plain_stage(1) for _ in range(stages)])
    qt.convert(net, recipe)
    return net


def blocks(stages: int, recipe: str) -> nn.Sequential:
    """Stages of Quaver blocks, which fuse norms with matrices in one graph node."""
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            nn.Sequential(qt.LayerNormLinear(WIDTH, WIDTH), qt.LayerNormMLP(WIDTH, 2 * WIDTH))
            if stage % 2
            else qt.LayerNormMLP(WIDTH, 2 * WIDTH, activation="swiglu", bias=False)
            for stage in range(stages)
        ]
    )


class Again(nn.Module):
    """A layer that is recomputed in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = qt.checkpoint(self.layer, x)
        return y


def transformer(stages: int, recipe: str) -> nn.Sequential:
    """Stages of transformer layers: fused, unfused, and recomputed in backward in two ways."""
    torch.manual_seed(0)
    kinds = (
        {"fused": True},
        {"fused": False, "activation": "swiglu", "normalization": "RMSNorm"},
        {"recompute": "mlp"},
        {"parallel": True},
    )
    layers = [qt.TransformerLayer(WIDTH, 2, 2 * WIDTH, **kinds[stage % 4]) for stage in range(stages)]
    net = nn.Sequential(*[Again(layer) if stage == 1 else layer for stage, layer in enumerate(layers)])
    qt.convert(net, recipe)
    return net


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = MICRO * TOKENS[0], TOKENS[1], WIDTH
    return [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(steps)]


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def in_one_process(net: nn.Module, recipe: str, group: Any, steps: int) -> list[list[float]]:
    """Train on the same micro-batches, with one autocast per step so that histories also roll once per step.

    Args:
        group: a group of only this rank, since the other rank trains the same model at the same time.
    """
    optimizer, losses = torch.optim.SGD(net.parameters(), LR), []
    for x, target in batches(steps):
        of_step = []
        with qt.autocast(recipe, group=group):
            for part, wanted in zip(x.chunk(MICRO), target.chunk(MICRO), strict=True):
                loss = loss_of(net(part), wanted)
                loss.backward()
                of_step.append(loss.item())
        for p in net.parameters():
            assert p.grad is not None
            p.grad /= MICRO
        optimizer.step()
        optimizer.zero_grad()
        losses.append(of_step)
    return losses


def on_stages(
    net: nn.Sequential,
    kind: Kind,
    recipe: str,
    rank: int,
    steps: int,
    group: Any = None,
    counting: AbstractContextManager[Any] = NOTHING,
) -> list[list[float]]:
    """Run steps of the schedule, each within one autocast; return losses on the rank of the last stage.

    Args:
        counting: a context entered around each step of the schedule.
    """
    has, last = kind.stages[rank], len(net) - 1
    stages = [parallel.pipeline_stage(net[i], i, len(net), torch.empty(*TOKENS, WIDTH, device="meta")) for i in has]
    schedule = kind.schedule(stages if len(stages) > 1 else stages[0], n_microbatches=MICRO, loss_fn=loss_of)
    optimizer, losses = torch.optim.SGD([p for i in has for p in net[i].parameters()], LR), []
    for x, target in batches(steps):
        of_step: list[Tensor] = []
        given: dict[str, Any] = {"target": target, "losses": of_step} if last in has else {}
        with qt.autocast(recipe, group=group), counting:
            schedule.step(*((x,) if 0 in has else ()), **given)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in of_step])
    return losses


class Expected(NamedTuple):
    """Results of training in one process."""

    losses: list[list[float]]
    states: list[dict[str, Tensor]]


@cache
def expected(build: Build, count: int, recipe: str, steps: int) -> Expected:
    """Train a model with this number of stages on this rank alone."""
    net = build(count, recipe)
    losses = in_one_process(net, recipe, alone(), steps)
    return Expected(losses, [copy.deepcopy(part.state_dict()) for part in net])


@cache
def alone() -> Any:
    """The process group of only this rank."""
    return [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]


def compare(build: Build, name: str, recipe: str, rank: int, steps: int, own: bool = False) -> None:
    """Check that losses, weights and histories of a rank's stages equal those of one process.

    Args:
        own: whether stages are given a group of one rank each.
    """
    kind = KINDS[name]
    count = sum(map(len, kind.stages))
    reference = expected(build, count, recipe, steps)
    # Free earlier layers, so that their histories do not roll here.
    gc.collect()
    net = build(count, recipe)
    losses = on_stages(net, kind, recipe, rank, steps, alone() if own else None)
    label = f"{build.__name__}, {name}, {recipe}"
    if count - 1 in kind.stages[rank]:
        assert losses == reference.losses, f"{label}: losses {losses} and {reference.losses}"
    for i in kind.stages[rank]:
        state, wanted = net[i].state_dict(), reference.states[i]
        assert list(state) == list(wanted), label
        for key, value in state.items():
            assert_bitwise(value, wanted[key], f"{label}: stage {i}: {key}")


def each_gradient_is_computed_once(rank: int) -> None:
    """All ranks together compute the FLOPs of one process, under every schedule."""
    for build, names in ((blocks, ("Interleaved1F1B", *ZERO_BUBBLE)), (transformer, ("InterleavedZeroBubble",))):
        with Flops() as reference:
            in_one_process(build(4, "rowwise"), "rowwise", alone(), 1)
        for name in names:
            kind = KINDS[name]
            net = build(4, "rowwise")
            flops = Flops()
            on_stages(net, kind, "rowwise", rank, 1, counting=flops)
            total = torch.tensor(flops.total)
            dist.all_reduce(total)
            assert total == reference.total, f"{build.__name__}, {name}: {total / reference.total} of the FLOPs"


def case(build: Build, name: str, recipe: str, steps: int = STEPS, own: bool = False) -> two_ranks.Case:
    def run(rank: int) -> None:
        compare(build, name, recipe, rank, steps, own)

    run.__name__ = f"{build.__name__}_{name}_{recipe}"
    return run


def shapes_are_known_beforehand(rank: int) -> None:
    """Only real micro-batches are recorded and draw noise in a first step, unless torch runs one with other values."""
    for recipe in ("delayed", "nvfp4"):
        net = converted(2, recipe)
        part = parallel.pipeline_stage(net[rank], rank, 2, torch.empty(*TOKENS, WIDTH, device="meta"))
        layers = [layer for layer in net[rank] if isinstance(layer, qt.Linear)]
        assert not any(buffer.any() for layer in layers for name, buffer in layer.named_buffers() if name == "history")
        schedule = ScheduleGPipe(part, n_microbatches=MICRO, loss_fn=loss_of)
        x, target = batches(1)[0]
        with qt.autocast(recipe):
            schedule.step(*((x,) if rank == 0 else ()), **({"target": target} if rank == 1 else {}))
        if recipe == "nvfp4":
            assert layers[0].count[1] == MICRO, f"{layers[0].count} for {MICRO} micro-batches"
        elif rank == 0:
            assert_bitwise(layers[0].history[0, 0], x.abs().max())


def statistics_are_not_of_shapes(rank: int) -> None:
    norm = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    norm[1].running_mean.fill_(3)  # type: ignore[operator, union-attr]
    before = copy.deepcopy(norm.state_dict())
    parallel.pipeline_stage(norm, rank, 2, torch.empty(TOKENS[0], WIDTH))
    for name, value in norm.state_dict().items():
        assert_bitwise(value, before[name], name)


def a_stage_outside_of_autocast_is_refused(rank: int) -> None:
    net = converted(2, "delayed")
    part = parallel.pipeline_stage(net[rank], rank, 2, torch.empty(*TOKENS, WIDTH))
    with pytest.raises(ValueError, match=f"stage {rank} of a pipeline ran under delayed scaling outside of autocast"):
        part.submod(torch.randn(*TOKENS, WIDTH))
    with pytest.raises(ValueError, match="from 0 to 1"):
        parallel.pipeline_stage(net[rank], 2, 2, torch.empty(*TOKENS, WIDTH))
    with pytest.raises(ValueError, match="give device="):
        parallel.pipeline_stage(nn.GELU(), 0, 2, torch.empty(*TOKENS, WIDTH))


def cases() -> Sequence[two_ranks.Case]:
    return [
        shapes_are_known_beforehand,
        statistics_are_not_of_shapes,
        a_stage_outside_of_autocast_is_refused,
        each_gradient_is_computed_once,
        # Split backwards are tested with every recipe below.
        *(case(converted, "1F1B", recipe) for recipe in ("delayed", "rowwise_bf16_wgrad", "mxfp8", "nvfp4")),
        *(case(even, "InterleavedZeroBubble", recipe, SPLIT[recipe]) for recipe in recipes.RECIPES),
        *(case(converted, name, recipe) for name, recipe in alternating(KINDS, ("delayed", "nvfp4"), ZERO_BUBBLE)),
        *(case(blocks, name, "tensorwise") for name in ("Interleaved1F1B", *ZERO_BUBBLE)),
        *(case(blocks, "InterleavedZeroBubble", recipe) for recipe in ("mxfp8", "rowwise_bf16_wgrad")),
        case(transformer, "InterleavedZeroBubble", "delayed", 2),
        case(transformer, "ZBVZeroBubble", "nvfp4", 2),
    ]


def slow() -> Sequence[two_ranks.Case]:
    return [
        *(case(even, "InterleavedZeroBubble", recipe, steps) for recipe, steps in LONG.items()),
        *(case(converted, name, recipe, 20) for name in KINDS for recipe in recipes.RECIPES),
        *(case(build, name, "mxfp8", 20) for build in (blocks, transformer) for name in KINDS),
    ]


@pytest.mark.ranks
def test_stages_train_as_one_process(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
def test_twenty_losses(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, slow=True)


if __name__ == "__main__":
    two_ranks.main(cases(), slow=slow())
