"""A model in parts by tensor parallelism, which fully_shard divides once more: gathered in high precision, as codes."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import quaver.torch as qt
from quaver.recipes.spec import Recipe
from quaver.torch.parallel import ColwiseParallel, GatherReport, RowwiseParallel, gather_quantized
from quaver.torch.parallel.fsdp import scales
from tests import two_ranks
from tests.torch.parallel.fsdp.training import Run, counted, first_difference

RANKS = 2


def block_of(recipe: Recipe) -> int:
    """The largest finite block side."""
    specs = [spec for spec in recipe.operands().values() if spec is not None]
    return max([1, *(side for spec in specs for side in spec.block if side is not None)])


class Net(nn.Module):
    """Two layers to be sharded by tensor parallelism, and one that is not."""

    def __init__(self, width: int, inner: int, narrow: int, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias)
        self.down = nn.Linear(inner, narrow, bias)
        self.head = nn.Linear(narrow, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.down(nn.functional.gelu(self.up(x))))
        return y


@contextmanager
def agreements() -> Iterator[list[int]]:
    """Count the all-reduces of weight amaxes, without those of activations."""
    count, all_reduce_amax = [0], scales.start_all_reduce_amax

    def counting(bits: Tensor, group: Any = None) -> Tensor:
        count[0] += 1
        return all_reduce_amax(bits, group)

    scales.start_all_reduce_amax = counting
    try:
        yield count
    finally:
        scales.start_all_reduce_amax = all_reduce_amax


def sizes_of(block: int) -> tuple[int, int, int]:
    """Sizes that fully_shard divides into whole blocks, with different numbers of rows on the ranks."""
    width = 2 * max(block, 16)
    return width, 2 * (25 if block == 1 else 4 * block), width - 1


def model(recipe: Recipe, mesh: Any, as_codes: bool, sizes: tuple[int, int, int], **options: bool) -> Any:
    """Shard a network by tensor parallelism; return it with the report of `gather_quantized`."""
    torch.manual_seed(0)
    net = Net(*sizes, bias=options.get("bias", True))
    qt.convert(net, recipe)
    sequence = options.get("sequence", False)
    parallelize_module(
        net, mesh["tp"], {"up": ColwiseParallel(sequence=sequence), "down": RowwiseParallel(sequence=sequence)}
    )
    return net, gather_quantized(net) if as_codes else None


def shard(net: Any, over: Any, **options: Any) -> Any:
    for part in (net.up, net.down, net.head, net):
        fully_shard(part, mesh=over, **options)
    return net


def train(
    recipe: Recipe,
    *,
    as_codes: bool,
    steps: int,
    sequence: bool = False,
    in_bf16: bool = False,
    after_forward: bool = True,
    replicas: bool = False,
    micro: int = 1,
    bias: bool = True,
    sizes: tuple[int, int, int] | None = None,
    before: Callable[[int, nn.Module], None] = lambda step, net: None,
) -> tuple[Run, GatherReport | None]:
    """Train on a mesh of 2 × 2 by AdamW; ranks of tensor parallelism have the same data.

    Args:
        replicas: whether the data-parallel ranks hold full replicas instead of fully_shard's shards.
        micro: micro-batches per step.
        before: called before each step.
    """
    names = ("replicas", "dp", "tp") if replicas else ("dp", "tp")
    mesh = two_ranks.mesh(*((RANKS, 1, RANKS) if replicas else (RANKS, RANKS)), names=names)
    over = mesh["replicas", "dp"] if replicas else mesh["dp"]
    across, along = dist.get_rank() // RANKS, mesh["tp"].get_local_rank()
    sizes = sizes or sizes_of(block_of(recipe))
    width = sizes[0]
    net, gathers = model(recipe, mesh, as_codes, sizes, sequence=sequence, bias=bias)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mp_policy": policy} if in_bf16 else {}
    shard(net, over, reshard_after_forward=after_forward, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    generator, losses = torch.Generator().manual_seed(1), []
    with counted() as traffic:
        for step in range(steps):
            before(step, net)
            for _ in range(micro):
                x = torch.randn(RANKS, 2, width, width, generator=generator)[across]
                x = x.chunk(RANKS, 1)[along] if sequence else x
                loss = net(x.bfloat16() if in_bf16 else x).float().square().mean() / micro
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return Run(losses, traffic, net), gathers


def assert_same(recipe: Recipe, steps: int, **options: Any) -> Run:
    """All losses and all weights after them, bit for bit, and an all-reduce a step and mesh dimension; returns what the
    codes cost."""
    plain, _ = train(recipe, as_codes=False, steps=steps, **options)
    with agreements() as count:
        codes, gathers = train(recipe, as_codes=True, steps=steps, **options)
    where = f"{recipe.name}, {options}"
    assert gathers is not None and [*gathers.quantized] == ["up", "down", "head"], f"{where}: {gathers}"
    same = [a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(codes.losses, plain.losses, strict=True)]
    assert all(same), f"{where}: {first_difference(codes.losses, plain.losses)}"
    for (name, p), q in zip(codes.net.named_parameters(), plain.net.parameters(), strict=True):
        assert torch.equal(p.to_local().nan_to_num(77.0), q.to_local().nan_to_num(77.0)), f"{where}: {name}"
    # One a step over each of fsdp and tp, again where weights are written after it, and one that the last step starts.
    most = (4 if "before" in options else 2) * steps + 1
    assert count[0] <= most, f"{where}: {count[0]} all-reduces of amaxes"
    return codes


def hostile(step: int, net: Any) -> None:
    """Set outliers that determine a scale, on one rank of either mesh dimension or on several."""
    value = [0.0, 3e38, 1e-42, math.inf, math.nan][step]
    with torch.no_grad():
        for p in (net.up.weight, net.down.weight, net.head.weight):
            part = p.to_local()
            if dist.get_rank() == step % 4 and part.numel():
                part[-1, step % part.shape[1]] = value
            if step == 0:
                part.mul_(0.0)
