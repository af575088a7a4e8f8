"""Two ranks that train a sharded model and save it; `tests.two_ranks.run` starts this module."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import quaver.torch as qt
from quaver.torch import optim
from tests import two_ranks
from tests.golden.checkpoints.cases import DELAYED, STEPS, net
from tests.golden.inputs import values


def sharded() -> nn.Module:
    model = net()
    qt.parallel.gather_quantized(model)
    for part in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(part, mesh=two_ranks.mesh(two_ranks.world()))
    return model


def save(rank: int) -> None:
    model = sharded()
    optimizer = optim.AdamW(model.parameters(), lr=2.0**-8, preset="exact")
    for number in range(STEPS):
        x = torch.from_numpy(values(16, 32, seed=2 * number + rank))
        with qt.autocast(DELAYED):
            y = model(x)
        y.backward(torch.from_numpy(values(16, 32, seed=50 + 2 * number + rank)))
        optimizer.step()
        optimizer.zero_grad()
    qt.parallel.Checkpoint(model, optimizer).save(two_ranks.folder() / "saved")


if __name__ == "__main__":
    two_ranks.main([save])
