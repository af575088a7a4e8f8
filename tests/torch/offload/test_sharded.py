"""Offload of layers that fully_shard gathers, in high precision and as codes: the same bits, and no weight moves."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import quaver.torch as qt
from quaver.torch.parallel import ColwiseParallel, RowwiseParallel, gather_quantized
from tests import two_ranks
from tests.torch.offload.simulated import Simulated

DIM, TOKENS = 64, 32


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(qt.TransformerLayer(DIM, 4, 128, activation="swiglu") for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def trained(
    recipe: str, offloads: bool, as_codes: bool, inside: bool, reshards: bool
) -> tuple[list[Tensor], Simulated]:
    """Train two steps of two micro-batches; return losses and parameters, and what was moved."""
    torch.manual_seed(0)
    model, simulated = Layers(), Simulated()
    qt.convert(model, recipe)
    if as_codes:
        gather_quantized(model)
    mesh = two_ranks.mesh(2)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshards}
    if not as_codes:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        if inside:
            fully_shard(layer.mlp, **options)
        fully_shard(layer, **options)
    fully_shard(model, **options)
    context = qt.offload(model, _transfers=simulated) if offloads else torch.enable_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results = []
    with context:
        for number in range(2):
            for micro in range(2):
                generator = torch.Generator().manual_seed(10 * number + 2 * micro + dist.get_rank())
                loss = model(torch.randn(2, TOKENS, DIM, generator=generator)).float().square().mean()
                loss.backward()
                results.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    return [*results, *(p.to_local().detach() for p in model.parameters())], simulated  # type: ignore[attr-defined]


def sharded_layers_train_to_the_same_bits(rank: int) -> None:
    for recipe, as_codes, inside, reshards in (
        ("tensorwise", True, False, True),
        ("delayed(history=4)", True, True, True),
        ("mxfp8", False, True, True),
        ("nvfp4", True, False, False),
    ):
        expected, _ = trained(recipe, False, as_codes, inside, reshards)
        results, simulated = trained(recipe, True, as_codes, inside, reshards)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)), (recipe, as_codes, inside)
        ways = [way for way, _ in simulated.log]
        assert ways == (["out"] * 3 + ["back"] * 3) * 4, (recipe, ways)
        # A layer's largest weight would be 128 * 64 * 2 bytes beyond this, and would be in the log twice.
        # Gathered weights would be at least 2 / 5 more.
        whole = moved(recipe, torch.float32 if as_codes else torch.bfloat16)
        assert max(size for _, size in simulated.log) <= 1.2 * whole, (recipe, simulated.log, whole)


def moved(recipe: str, dtype: torch.dtype) -> int:
    """Return the bytes that one layer moves without sharding."""
    model, simulated = Layers().to(dtype), Simulated()
    with qt.offload(model, _transfers=simulated), qt.autocast(recipe):
        model(torch.randn(2, TOKENS, DIM, dtype=dtype))
    return max(size for _, size in simulated.log)


def tensor_parallel_layers_keep_their_weights(rank: int) -> None:
    results, sizes = [], []
    for offloads in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 256), nn.Linear(256, DIM)) for _ in range(2))
        simulated = Simulated()
        qt.convert(model, "tensorwise")
        for layer in model:
            parallelize_module(layer, two_ranks.mesh(2), {"0": ColwiseParallel(), "1": RowwiseParallel()})
        x = torch.randn(64, DIM, generator=torch.Generator().manual_seed(1))
        with qt.offload(model, layers=["[01]"], _transfers=simulated) if offloads else torch.enable_grad():
            y = model[1](model[0](x))
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad.to_local() for p in model.parameters() if p.grad is not None)])
        sizes = [size for way, size in simulated.log if way == "out"]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    # Codes of the input, and of the hidden features of this rank.
    assert sizes == [64 * DIM + 64 * 128] * 2, sizes


CASES = (sharded_layers_train_to_the_same_bits, tensor_parallel_layers_keep_their_weights)


@pytest.mark.ranks
def test_two_ranks(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, 2)


if __name__ == "__main__":
    two_ranks.main(CASES)
