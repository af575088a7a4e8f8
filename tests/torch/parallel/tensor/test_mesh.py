"""Four processes on gloo: tensors in parts on one dimension of a mesh, and torch's fully_shard on the other."""

import copy
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import quaver.torch as qt
from quaver import recipes
from quaver.torch.parallel import ColwiseParallel, HeadParallel, RowwiseParallel, gather_quantized
from tests import two_ranks
from tests.close import assert_bitwise, assert_close
from tests.torch.parallel.fsdp.training import first_difference
from tests.torch.parallel.tensor.split import tokens
from tests.torch.parallel.tensor.test_styles import batch, block_of, net, split
from tests.two_ranks import RANKS

#: Steps by recipe or without one, more with histories, in the quick and in the slow tests.
STEPS, LONG = (dict.fromkeys(("none", *recipes.RECIPES), steps) for steps in (2, 20))
STEPS["delayed"] = 4


def ranks_equal_one_process(rank: int) -> None:
    """Losses of every rank and final weights equal those of one process with all batches.

    Tokens are sharded, and weights that a recipe quantizes are gathered as codes.
    """
    assert_equal_to_one_process(rank, STEPS)


def twenty_losses(rank: int) -> None:
    assert_equal_to_one_process(rank, LONG)


def assert_equal_to_one_process(rank: int, steps_of: Mapping[str, int]) -> None:
    mesh = two_ranks.mesh(RANKS, RANKS, names=("dp", "tp"))
    # The single-process references are distributed over the ranks.
    own = {name: in_one_process(name, steps_of[name]) for name in [*steps_of][rank :: RANKS * RANKS]}
    gc.collect()
    for number, name in enumerate(steps_of):
        shared = [own.get(name)]
        dist.broadcast_object_list(shared, number % (RANKS * RANKS))
        assert shared[0] is not None
        losses, weights = shared[0]
        values, net = on_ranks(name, mesh, steps_of[name])
        expected = [step[mesh["dp"].get_local_rank()][mesh["tp"].get_local_rank()] for step in losses]
        assert values == expected, f"{name}: {first_difference(values, expected)}"
        for (key, p), q in zip(net.named_parameters(), weights, strict=True):
            assert_bitwise(p.full_tensor().detach(), q, f"{name}: {key}")


def on_ranks(name: str, mesh: DeviceMesh, steps: int) -> tuple[list[float], Any]:
    """Train on both dimensions of a mesh; return this rank's losses and the model."""
    recipe = None if name == "none" else recipes.get(name)
    model: Any = net(recipe)
    parallelize_module(
        model, mesh["tp"], {"up": ColwiseParallel(sequence=True), "down": RowwiseParallel(sequence=True)}
    )
    if recipe is not None and recipe.quantizes:
        assert [*gather_quantized(model).quantized] == ["up", "down"]
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh["dp"])
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False), []
    for step in range(steps):
        x = batch(RANKS * step + mesh["dp"].get_local_rank(), block_of(recipe))
        y = model(tokens(x, mesh["tp"].get_local_rank(), RANKS))
        loss = y.square().sum() / y.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def in_one_process(name: str, steps: int) -> tuple[list[list[list[float]]], list[Tensor]]:
    """Losses of each step by batch and by shard of tokens, and the final weights."""
    recipe = None if name == "none" else recipes.get(name)
    # Each batch has the noise of its ranks; weights are shared.
    wholes: list[Any] = [split(net(recipe), recipe, True) for _ in range(RANKS)]
    for each, one in zip(wholes[1].modules(), wholes[0].modules(), strict=True):
        for key in [*each._parameters]:
            each.register_parameter(key, one._parameters[key])
    optimizer, losses = torch.optim.AdamW(wholes[0].parameters(), 1e-2, foreach=False), []
    for step in range(steps):
        of_step = []
        for i, whole in enumerate(wholes):
            # Do not call `whole(...)`: a forward of a converted root would reduce histories over all ranks.
            z = whole.forward(batch(RANKS * step + i, block_of(recipe)))
            parts = [tokens(z, r, RANKS) for r in range(RANKS)]
            of_ranks = [part.square().sum() / part.numel() for part in parts]
            # fully_shard averages over its ranks.
            (sum(of_ranks) / RANKS).backward()
            of_step.append([loss.item() for loss in of_ranks])
        optimizer.step()
        optimizer.zero_grad()
        roll(wholes)
        losses.append(of_step)
    return losses, [p.detach() for p in wholes[0].parameters()]


def several_matrices_in_one_weight(rank: int) -> None:
    """Blocks with fused q, k and v under fully_shard: two losses equal those of one process."""
    mesh = two_ranks.mesh(RANKS, RANKS, names=("dp", "tp"))
    torch.manual_seed(0)
    whole: Any = qt.TransformerLayer(64, 4, hidden=64, activation="swiglu", recipe="mxfp8")
    layer: Any = copy.deepcopy(whole)
    plan = {"attention": HeadParallel(), "mlp.gate_up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    parallelize_module(layer, mesh["tp"], plan)
    for part in (layer.attention, layer.mlp, layer):
        fully_shard(part, mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (layer, whole)]
    for step in range(3):
        x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(step))
        losses = [each(x).square().mean() for each in (layer, whole)]
        bound = 1e-6 if step == 0 else 1e-3
        assert abs(losses[0].detach() - losses[1].detach()) <= bound * losses[1].detach(), step
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    k = layer.attention.qkv_proj.weight["k_proj"]
    assert isinstance(k, DTensor) and k.device_mesh.ndim == 2
    assert_close("k", k.full_tensor().detach(), whole.attention.qkv_proj.weight.detach()[64:128], 1e-2)


def roll(wholes: list[Any]) -> None:
    """End a step of delayed scaling with the maxima over all batches."""
    for layers in zip(*([whole.up, whole.down] for whole in wholes), strict=True):
        for name in layers[0].windows:
            newest = np.maximum.reduce([layer.windows[name][0] for layer in layers])
            for layer in layers:
                layer.windows[name][0] = newest
        for layer in layers:
            layer.roll()


@pytest.mark.ranks
def test_a_two_dimensional_mesh_equals_one_process(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, RANKS * RANKS)


@pytest.mark.ranks
@pytest.mark.slow
def test_twenty_losses(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, RANKS * RANKS, slow=True)


if __name__ == "__main__":
    two_ranks.main([several_matrices_in_one_weight, ranks_equal_one_process], slow=[twenty_losses])
