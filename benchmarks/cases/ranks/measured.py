"""Measurements of each rank: `python -m benchmarks.cases.ranks.measured CASE RANK RANKS MEETING QUICK`.

The ranks of a case have all of its models, and run a step of each alternately. The first rank prints the results as
JSON: wall-clock and CPU times of each model's steps, and the bytes sent in one.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import quaver.torch as qt
from quaver import recipes
from quaver.torch.parallel import ColwiseParallel, CommCounter, RowwiseParallel, gather_quantized, quantize_gradients


class Size(NamedTuple):
    """Sizes of a model and its batch, and numbers of steps."""

    features: int
    hidden: int
    layers: int
    tokens: int
    rounds: int


FULL, QUICK = Size(512, 1408, 2, 256, 9), Size(64, 128, 1, 32, 1)
#: Recipes that are timed when it is quick.
FEW = ("tensorwise", "mxfp8")
#: Takes a step and gives its loss.
Step = Callable[[], Tensor]


def blocks(size: Size, recipe: str) -> nn.Sequential:
    """Return transformer layers with the same weights on every rank."""
    torch.manual_seed(0)
    layer = {"groups": size.features // 128 or 1, "mask_type": "causal", "normalization": "RMSNorm", "bias": False}
    heads, gated = size.features // 64, {"activation": "swiglu"}
    net = nn.Sequential(
        *(qt.TransformerLayer(size.features, heads, size.hidden, **layer, **gated) for _ in range(size.layers))
    )
    if recipe != "bf16":
        qt.convert(net, recipe)
    return net


def batch(size: Size) -> Tensor:
    """Return the batch of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(1, size.tokens, size.features, generator=generator, dtype=torch.bfloat16)


def training(net: nn.Module, x: Tensor) -> Step:
    """Return a step of AdamW."""
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)

    def step() -> Tensor:
        loss = net(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def sharded(net: Any, narrow: bool, reduced: torch.dtype = torch.float32) -> nn.Module:
    """Apply fully_shard to every layer, with weights gathered in bf16 or as codes."""
    if narrow:
        gather_quantized(net)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    sharded: nn.Module = fully_shard(net, mesh=mesh, mp_policy=policy)
    return sharded


def names(quick: bool) -> Iterator[str]:
    for name in recipes.RECIPES:
        if name != "bf16" and (not quick or name in FEW):
            yield name


def fsdp(size: Size, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield results of each recipe with weights gathered in bf16 and as codes, and of bf16 itself."""
    x = batch(size)
    for name in names(quick):
        nets = {
            "bf16": sharded(blocks(size, "bf16"), False),
            "wide": sharded(blocks(size, name), False),
            "narrow": sharded(blocks(size, name), True),
        }
        yield {"recipe": name, **timed({key: (net, training(net, x)) for key, net in nets.items()}, size)}


def gradients(size: Size, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield results of gradients reduced by fully_shard in bf16 and in eight bits."""
    x = batch(size)
    for name in ("bf16", *FEW):
        nets = {
            "wide": sharded(blocks(size, name), name != "bf16", torch.bfloat16),
            "narrow": quantize_gradients(sharded(blocks(size, name), name != "bf16", torch.bfloat16)),
        }
        yield {"recipe": name, **timed({key: (net, training(net, x)) for key, net in nets.items()}, size)}


def tensor(size: Size, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield results of a tensor-parallel MLP with replicated tokens, in bf16 and under each recipe."""
    x = batch(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in names(quick):
        nets = {key: tensor_parallel_mlp(size, recipe, mesh) for key, recipe in (("wide", "bf16"), ("narrow", name))}
        yield {"recipe": name, **timed({key: (net, training(net, x)) for key, net in nets.items()}, size)}


def tensor_parallel_mlp(size: Size, recipe: str, mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    hidden = 2 * size.hidden
    net = nn.Sequential(
        nn.Linear(size.features, hidden, bias=False), nn.GELU(), nn.Linear(hidden, size.features, bias=False)
    ).bfloat16()
    qt.convert(net, recipe)
    return parallelize_module(net, mesh, {"0": ColwiseParallel(sequence=True), "2": RowwiseParallel(sequence=True)})


CASES: dict[str, Callable[[Size, bool], Iterator[dict[str, Any]]]] = {
    "fsdp": fsdp,
    "gradients": gradients,
    "tensor": tensor,
}


def timed(steps: dict[str, tuple[nn.Module, Step]], size: Size) -> dict[str, Any]:
    """Return each model's median time per step, of the slowest rank; ratios of the last two models; and bytes sent.

    Times are wall-clock times, since ranks wait for one another, and CPU times of all threads of a rank.
    """
    seen: dict[str, dict[str, Any]] = {}
    for key, (net, step) in steps.items():
        step()
        with CommCounter(net) as traffic:
            step()
        seen[key] = {"bytes": dict(traffic.bytes)}
    spent: dict[str, list[tuple[float, float]]] = {key: [] for key in steps}
    gc.collect()
    gc.disable()
    for number in range(size.rounds):
        order = list(steps.items())
        for key, (_, step) in order if number % 2 else reversed(order):
            dist.barrier()
            begun = time.perf_counter(), time.process_time()
            step()
            dist.barrier()
            spent[key].append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
        gc.collect()
    gc.enable()
    longest = {key: longest_of(values) for key, values in spent.items()}
    for key, values in longest.items():
        seen[key] |= {"seconds": statistics.median(wall for wall, _ in values)}
    pairs = list(zip(longest["narrow"], longest["wide"], strict=True))
    ratios = [statistics.median(a[which] / b[which] for a, b in pairs) for which in (0, 1)]
    return {**seen, "clock": ratios[0], "processor": ratios[1]}


def longest_of(values: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the maximum over ranks, by round."""
    own = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return [(wall, processor) for wall, processor in own.tolist()]


def main() -> None:
    case, rank, ranks, meeting, quick = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", meeting, rank=int(rank), world_size=int(ranks))
    try:
        rows = list(CASES[case](QUICK if quick == "quick" else FULL, quick == "quick"))
        if rank == "0":
            print(json.dumps(rows))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
