"""torch's pipeline schedules, unmodified: stages train as one process does that takes the same micro-batches."""

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
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
from tests.two_ranks import RANKS

MICRO, STEPS, WIDTH, TOKENS = 4, 4, 64, 32
LR = 0.1


@dataclass(frozen=True)
class Kind:
    """A schedule, and which of the model's stages each rank has."""

    schedule: Callable[..., Any]
    stages: tuple[tuple[int, ...], ...]


KINDS = {
    "GPipe": Kind(ScheduleGPipe, ((0,), (1,))),
    "1F1B": Kind(Schedule1F1B, ((0,), (1,))),
    "Interleaved1F1B": Kind(ScheduleInterleaved1F1B, ((0, 2), (1, 3))),
    "InterleavedZeroBubble": Kind(ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
    "ZBVZeroBubble": Kind(ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
}


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


def blocks(stages: int, recipe: str) -> nn.Sequential:
    """Stages of our own blocks, whose norms come before matrices in the same graph node."""
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            nn.Sequential(qt.LayerNormLinear(WIDTH, WIDTH), qt.LayerNormMLP(WIDTH, 2 * WIDTH))
            if stage % 2
            else qt.LayerNormMLP(WIDTH, 2 * WIDTH, activation="swiglu", bias=False)
            for stage in range(stages)
        ]
    )


def batches(steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = MICRO * TOKENS, WIDTH
    return [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(steps)]


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def in_one_process(net: nn.Module, recipe: str, group: Any) -> list[list[float]]:
    """The same micro-batches, and one autocast around those of a step: so its histories roll once a step too.

    Args:
        group: of this rank alone, since the other one trains the same model beside it.
    """
    optimizer, losses = torch.optim.SGD(net.parameters(), LR), []
    for x, target in batches():
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


def in_stages(net: nn.Sequential, kind: Kind, recipe: str, rank: int, group: Any = None) -> list[list[float]]:
    """A step of the schedule within one autocast; losses on the rank that has the last stage."""
    has, last = kind.stages[rank], len(net) - 1
    stages = [parallel.stage(net[i], i, len(net), torch.empty(TOKENS, WIDTH, device="meta")) for i in has]
    schedule = kind.schedule(stages if len(stages) > 1 else stages[0], n_microbatches=MICRO, loss_fn=loss_of)
    optimizer, losses = torch.optim.SGD([p for i in has for p in net[i].parameters()], LR), []
    for x, target in batches():
        of_step: list[Tensor] = []
        given: dict[str, Any] = {"target": target, "losses": of_step} if last in has else {}
        with qt.autocast(recipe, group=group):
            schedule.step(*((x,) if 0 in has else ()), **given)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in of_step])
    return losses


def compare(build: Callable[[int, str], nn.Sequential], name: str, recipe: str, rank: int, own: bool = False) -> None:
    """All losses, weights and histories of a rank's stages are those of one process.

    Args:
        own: whether stages are told a group of one rank each.
    """
    kind = KINDS[name]
    count = sum(map(len, kind.stages))
    solo = [dist.new_group([r]) for r in range(RANKS)][rank]
    alone = build(count, recipe)
    expected = in_one_process(alone, recipe, solo)
    states = [copy.deepcopy(part.state_dict()) for part in alone]
    net = build(count, recipe)
    losses = in_stages(net, kind, recipe, rank, solo if own else None)
    says = f"{build.__name__}, {name}, {recipe}"
    if count - 1 in kind.stages[rank]:
        assert losses == expected, f"{says}: losses {losses} and {expected}"
    for i in kind.stages[rank]:
        state, wanted = net[i].state_dict(), states[i]
        assert list(state) == list(wanted), says
        for key, value in state.items():
            assert_bitwise(value, wanted[key], f"{says}: stage {i}: {key}")
    del net, alone
    # Layers that are gone roll with no other case's.
    gc.collect()
    dist.destroy_process_group(solo)


def case(build: Callable[[int, str], nn.Sequential], name: str, recipe: str, own: bool = False) -> two_ranks.Case:
    def of_rank(rank: int) -> None:
        compare(build, name, recipe, rank, own)

    of_rank.__name__ = f"{build.__name__}_{name}_{recipe}"
    return of_rank


def shapes_are_known_beforehand(rank: int) -> None:
    """A first step records and draws for its micro-batches alone; where torch rehearses, for other values too."""
    for recipe in ("delayed", "nvfp4"):
        net = converted(2, recipe)
        part = parallel.stage(net[rank], rank, 2, torch.empty(TOKENS, WIDTH, device="meta"))
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
    parallel.stage(norm, rank, 2, torch.empty(TOKENS, WIDTH))
    for name, value in norm.state_dict().items():
        assert_bitwise(value, before[name], name)


def a_stage_outside_of_autocast_is_refused(rank: int) -> None:
    net = converted(2, "delayed")
    part = parallel.stage(net[rank], rank, 2, torch.empty(TOKENS, WIDTH))
    with pytest.raises(ValueError, match=f"stage {rank} of a pipeline ran under delayed scaling outside of autocast"):
        part.submod(torch.randn(TOKENS, WIDTH))
    with pytest.raises(ValueError, match="from 0 to 1"):
        parallel.stage(net[rank], 2, 2, torch.empty(TOKENS, WIDTH))
    with pytest.raises(ValueError, match="give device="):
        parallel.stage(nn.GELU(), 0, 2, torch.empty(TOKENS, WIDTH))


def cases() -> Sequence[two_ranks.Case]:
    quantizing = [name for name in recipes.RECIPES if name != "bf16"]
    return [
        shapes_are_known_beforehand,
        statistics_are_not_of_shapes,
        a_stage_outside_of_autocast_is_refused,
        *(case(converted, "1F1B", recipe) for recipe in quantizing),
        *(
            case(converted, name, recipe)
            for name in KINDS
            for recipe in ("tensorwise", "delayed", "nvfp4")
            if recipe != "nvfp4" or "Zero" not in name
        ),
        *(case(blocks, name, "tensorwise") for name in KINDS),
        case(blocks, "InterleavedZeroBubble", "mxfp8"),
    ]


def test_stages_train_as_one_process(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


if __name__ == "__main__":
    two_ranks.main(cases(), 20)
