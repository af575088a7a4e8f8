"""Codes of weights that tensor parallelism has divided before fully_shard does give what high precision gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import quaver.torch as qt
from quaver import recipes
from quaver.torch.parallel import ColwiseParallel, gather_quantized
from tests import two_ranks
from tests.torch.parallel.fsdp import crossed
from tests.torch.parallel.fsdp.test_gather import MOST, MOST_OF_MX_AND_ROWS
from tests.torch.parallel.fsdp.training import RECIPES, Case, adam

#: Steps for every recipe; `tensor/test_mesh.py` compares 20 losses with one process.
STEPS = dict.fromkeys(RECIPES, 2) | {"delayed": 3}
#: Steps of the slow tests.
LONG = 20
_OWN = [name for name in recipes.RECIPES if name != "bf16"]


def crossed_of(name: str, steps: int, **options: Any) -> Case:
    """Weights sharded by tensor parallelism and then by fully_shard."""

    def case(rank: int) -> None:
        crossed.assert_same(RECIPES[name](), steps, **options)

    case.__name__ = f"{name} by fully_shard and tensor parallelism, {options}"
    return case


def crossed_bytes(rank: int) -> None:
    """One recipe of each kind of scale and of each code width."""
    for name in ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"):
        options: dict[str, Any] = {"steps": 1, "in_bf16": True, "bias": False, "sizes": (256, 512, 256)}
        plain, codes = (crossed.train(recipes.get(name), as_codes=each, **options)[0].traffic for each in (False, True))
        share = codes.gathered / plain.gathered
        assert codes.gathers == plain.gathers, name
        assert share <= MOST.get(name, MOST_OF_MX_AND_ROWS), f"{name}: {share:.4f} of bf16's bytes"


def crossed_checkpoints(rank: int) -> None:
    """Checkpoints contain no class of ours, and load into models gathered in either mode, also from meta."""
    folder = str(two_ranks.folder() / "crossed")
    mesh = two_ranks.mesh(crossed.RANKS, crossed.RANKS, names=("dp", "tp"))
    recipe = recipes.get("mxfp8")
    sizes = crossed.sizes_of(crossed.block_of(recipe))
    losses = []
    for as_codes, on in ((True, "cpu"), (True, "cpu"), (False, "cpu"), (True, "meta"), (False, "meta")):
        with torch.device(on):
            net = crossed.model(recipe, mesh, as_codes, sizes)[0]
        crossed.shard(net, mesh["dp"]).to_empty(device="cpu")
        optimizer = adam(net, foreach=False)
        if losses:
            state = {"model": net.state_dict()}
            torch.distributed.checkpoint.load(state, checkpoint_id=folder)
            net.load_state_dict(state["model"])
        else:
            with torch.no_grad():
                for p in net.parameters():
                    p.to_local().copy_(torch.linspace(-1, 1, p.to_local().numel()).view(p.to_local().shape))
            state = {"model": net.state_dict()}
            for key, value in state["model"].items():
                assert type(value.to_local()) is torch.Tensor, key
            torch.distributed.checkpoint.save(state, checkpoint_id=folder)
        own = []
        for seed in range(2):
            x = torch.randn(4, sizes[0], generator=torch.Generator().manual_seed(seed + rank // 2))
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.item())
        losses.append(own)
    assert all(own == losses[0] for own in losses), losses


def crossed_refusals(rank: int) -> None:
    mesh = two_ranks.mesh(crossed.RANKS, crossed.RANKS, names=("dp", "tp"))
    recipe = recipes.get("mxfp8")
    net, _ = crossed.model(recipe, mesh, True, (64, 128, 64))
    with pytest.raises(ValueError, match="up was prepared by gather_quantized but is not managed by fully_shard"):
        net(torch.ones(4, 64))
    crossed.shard(net, mesh["dp"])
    with qt.autocast(enabled=False), pytest.raises(ValueError, match="up runs under no recipe, and its weight was ga"):
        net(torch.ones(4, 64))
    net, gathers = crossed.model(recipe, mesh, True, (64, 96, 64))
    why = "ranks of tensor parallelism have 48 features each, which is no multiple of 32"
    assert gathers.in_high_precision == {"up": why, "down": why}


def written_on_one_rank_of_tensor_parallelism(rank: int) -> None:
    """The other ranks agree with it, also if the first weight of the model is not sharded by tensor parallelism."""
    mesh = two_ranks.mesh(crossed.RANKS, crossed.RANKS, names=("dp", "tp"))
    outputs = []
    for as_codes in (False, True):
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64))
        qt.convert(net, "tensorwise")
        parallelize_module(net, mesh["tp"], {"1": ColwiseParallel()})
        if as_codes:
            gather_quantized(net)
        fully_shard(net, mesh=mesh["dp"], reshard_after_forward=True)
        x = torch.randn(8, 32)
        net(x)
        if mesh["tp"].get_local_rank():
            with torch.no_grad():
                net[1].weight.to_local().mul_(9)
        outputs.append(net(x))
    assert torch.equal(*outputs)


CASES: list[Case] = [
    *(crossed_of(name, STEPS[name]) for name in _OWN),
    *(crossed_of(name, 5, before=crossed.hostile) for name in ("tensorwise", "rowwise", "nvfp4")),
    *(crossed_of("mxfp8", 2, **{name: True}) for name in ("sequence", "in_bf16", "replicas")),
    crossed_of("mxfp8", 2, after_forward=False),
    *(crossed_of(name, 2, micro=2) for name in ("tensorwise", "delayed")),
    *(crossed_bytes, crossed_checkpoints, crossed_refusals, written_on_one_rank_of_tensor_parallelism),
]


SLOW: list[Case] = [
    *(crossed_of(name, LONG) for name in RECIPES),
    *(crossed_of(name, LONG, **{option: True}) for name in _OWN for option in ("sequence", "in_bf16", "replicas")),
    *(crossed_of(name, LONG, **option) for name in _OWN for option in ({"after_forward": False}, {"micro": 2})),
]


@pytest.mark.ranks
def test_gathered_codes_equal_gathered_high_precision(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, crossed.RANKS**2)


@pytest.mark.ranks
@pytest.mark.slow
def test_twenty_losses(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, crossed.RANKS**2, slow=True)


if __name__ == "__main__":
    two_ranks.main(CASES, slow=SLOW)
