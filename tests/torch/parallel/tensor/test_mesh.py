"""Four processes on gloo: tensors in parts on one dimension of a mesh, and torch's fully_shard on the other."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import quaver.torch as qt
from quaver import recipes
from quaver.torch.parallel import Column, Heads, Row
from tests import two_ranks
from tests.close import assert_bitwise, assert_close
from tests.torch.parallel.tensor.split import tokens
from tests.torch.parallel.tensor.test_styles import batch, block_of, net, split
from tests.two_ranks import RANKS

STEPS = 2
#: One of each kind of scale; the others differ in nothing that a second dimension knows.
NAMES = ("none", "delayed", "rowwise", "mxfp8", "nvfp4")


def as_one_process(rank: int) -> None:
    """Every rank's loss is that of its batch and its tokens in one process that has both batches, step by step."""
    mesh = init_device_mesh("cpu", (RANKS, RANKS), mesh_dim_names=("dp", "tp"))
    across, along = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    for name in NAMES:
        recipe = None if name == "none" else recipes.get(name)
        parallel: Any = net(recipe)
        parallelize_module(parallel, mesh["tp"], {"up": Column(sequence=True), "down": Row(sequence=True)})
        for part in (parallel.up, parallel.down, parallel):
            fully_shard(part, mesh=mesh["dp"])
        # Each batch has the noise of its own ranks; the weights are one.
        wholes: list[Any] = [split(net(recipe), recipe, True) for _ in range(RANKS)]
        for each, one in zip(wholes[1].modules(), wholes[0].modules(), strict=True):
            for key in [*each._parameters]:
                each.register_parameter(key, one._parameters[key])
        optimizers = [torch.optim.AdamW(each.parameters(), 1e-2, foreach=False) for each in (parallel, wholes[0])]
        for step in range(STEPS):
            batches = [batch(RANKS * step + i, block_of(recipe)) for i in range(RANKS)]
            y = parallel(tokens(batches[across], along, RANKS))
            loss = y.square().sum() / y.numel()
            loss.backward()
            for i, (whole, x) in enumerate(zip(wholes, batches, strict=True)):
                z = whole(x)
                of_ranks = [tokens(z, r, RANKS).square().sum() / y.numel() for r in range(RANKS)]
                # fully_shard gives the mean over its ranks.
                (sum(of_ranks) / RANKS).backward()
                if i == across:
                    assert_bitwise(loss.detach(), of_ranks[along].detach(), f"{name}: loss {step}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            roll(wholes)
        for (key, p), q in zip(parallel.named_parameters(), wholes[0].parameters(), strict=True):
            assert_bitwise(p.full_tensor().detach(), q.detach(), f"{name}: {key}")


def several_matrices_in_one_weight(rank: int) -> None:
    """Blocks with q, k and v in one weight under fully_shard: the loss and the next one of one process."""
    mesh = init_device_mesh("cpu", (RANKS, RANKS), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole: Any = qt.TransformerLayer(64, 4, hidden=64, activation="swiglu", recipe="mxfp8")
    layer: Any = copy.deepcopy(whole)
    plan = {"attention": Heads(), "mlp.gate_up_proj": Column(), "mlp.down_proj": Row()}
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
    """A step of delayed scaling is over, whose maxima are those of all batches."""
    for layers in zip(*([whole.up, whole.down] for whole in wholes), strict=True):
        for name in layers[0].windows:
            newest = np.maximum.reduce([layer.windows[name][0] for layer in layers])
            for layer in layers:
                layer.windows[name][0] = newest
        for layer in layers:
            layer.roll()


def test_two_dimensions_are_one_process(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, RANKS * RANKS)


if __name__ == "__main__":
    two_ranks.main([several_matrices_in_one_weight, as_one_process])
