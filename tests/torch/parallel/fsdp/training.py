"""A model trained twice under torch's fully_shard: gathered in high precision, and as codes; and what went between."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.parallel import gather_quantized, precompute_scales
from tests import two_ranks

Case = Callable[[int], None]
RECIPES: dict[str, Callable[[], Recipe]] = {
    **{name: function for name, function in recipes.RECIPES.items() if name != "bf16"},
    "mxfp8 with 2-D weights": lambda: recipes.mxfp8(weight_2d=True),
    "nvfp4 with 1-D weights": lambda: recipes.nvfp4(weight_2d=False),
    "nvfp4 with a float32 factor": lambda: recipes.nvfp4(power_of_two=False),
    "tensorwise with float32 scales": lambda: recipes.tensorwise(power_of_two=False),
    "rowwise with float32 scales": lambda: recipes.rowwise(power_of_two=False),
}
#: Feature counts; each of two ranks has whole blocks of 32 rows of both weights.
SIZES = (32, 64, 64)


@dataclass
class Traffic:
    """Counts of collectives since its creation."""

    #: Result bytes and number of all-gathers.
    gathered: int = 0
    gathers: int = 0
    #: Number of amax all-reduces, the only ones in int32.
    agreements: int = 0


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count collectives and their bytes."""
    traffic = Traffic()
    gather, reduce = dist.all_gather_single, dist.all_reduce
    into = dist.all_gather_into_tensor

    def counting_gather(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        traffic.gathered += output.nbytes
        traffic.gathers += 1
        return gather(output, input, *args, **kwargs)

    def counting_reduce(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        traffic.agreements += t.dtype is torch.int32
        return reduce(t, *args, **kwargs)

    dist.all_gather_single, dist.all_reduce = counting_gather, counting_reduce
    dist.all_gather_into_tensor = counting_gather
    try:
        yield traffic
    finally:
        dist.all_gather_single, dist.all_reduce, dist.all_gather_into_tensor = gather, reduce, into


def network(sizes: tuple[int, int, int], bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    a, b, c = sizes
    return nn.Sequential(nn.Linear(a, b, bias), nn.GELU(), nn.Linear(b, c, bias))


def converted(recipe: str | Recipe, net: nn.Module | None = None) -> nn.Module:
    net = network(SIZES) if net is None else net
    qt.convert(net, recipe)
    return net


def sharded(net: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """Shard each Linear as one FSDP unit, and the root as another."""
    mesh = mesh or two_ranks.mesh(dist.get_world_size())
    for part in net.children():
        if isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


@dataclass
class Run:
    losses: list[float]
    traffic: Traffic
    net: nn.Module


def step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0, clip: float | None = None) -> float:
    """Train one step on this rank's data [32, 32]; return the loss."""
    x = torch.randn(dist.get_world_size(), 32, 32, generator=torch.Generator().manual_seed(seed))[dist.get_rank()]
    loss = net(x).square().mean()
    loss.backward()
    norm = 0.0
    if clip is not None:
        norm = nn.utils.clip_grad_norm_(net.parameters(), clip).full_tensor().item()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item() + norm


def adam(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, **options)


def compare(
    make: Callable[[], nn.Module], use: Callable[[nn.Module], list[float]], where: str, **options: Any
) -> Traffic:
    """Check that a model gives the same results gathered in high precision and as codes."""
    plain, net = make(), make()
    gather_quantized(net, **options)
    expected = use(plain)
    with counted() as traffic:
        values = use(net)
    assert values == expected, f"{where}: {first_difference(values, expected)}"
    return traffic


def train(
    recipe: str | Recipe,
    sizes: tuple[int, int, int] = SIZES,
    *,
    as_codes: bool,
    steps: int = 20,
    micro: int = 1,
    keep: bool = False,
    in_bf16: bool = False,
    bias: bool = True,
    hsdp: bool = False,
    tokens: int = 32,
    after_forward: bool = True,
    policy: MixedPrecisionPolicy | None = None,
) -> Run:
    """Train by AdamW; rank r has its own data.

    Args:
        micro: micro-batches per step.
        keep: gather once per step, not once per micro-batch.
        in_bf16: whether a `MixedPrecisionPolicy` computes in bf16.
        policy: another `MixedPrecisionPolicy`.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    net = converted(recipe, network(sizes, bias))
    if as_codes:
        gather_quantized(net)
    mesh = two_ranks.mesh(2, world // 2, names=("replicas", "shards")) if hsdp else None
    if in_bf16:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {} if policy is None else {"mp_policy": policy}
    given = torch.float32 if policy is None or policy.cast_forward_inputs else policy.param_dtype
    wrapped: Any = sharded(net, mesh, reshard_after_forward=after_forward, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(1), []
    with counted() as traffic:
        for _ in range(steps):
            batch = torch.randn(micro, world, tokens, sizes[0], generator=generator)
            total = torch.zeros(())
            precompute_scales(wrapped)
            for i in range(micro):
                last = i == micro - 1
                if keep:
                    wrapped.set_requires_gradient_sync(last)
                    wrapped.set_reshard_after_backward(last)
                x = batch[i, rank]
                loss = wrapped(x.to(given)).float().square().mean() / micro
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
    return Run(losses, traffic, net)


def assert_same(recipe: str | Recipe, sizes: tuple[int, int, int] = SIZES, **options: Any) -> tuple[Run, Run]:
    """Check that all losses and final weights are equal bit for bit."""
    plain, codes = (train(recipe, sizes, as_codes=each, **options) for each in (False, True))
    where = f"{recipe}, {sizes}, {options}"
    assert codes.losses == plain.losses, f"{where}: {first_difference(codes.losses, plain.losses)}"
    for (name, p), q in zip(codes.net.named_parameters(), plain.net.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local()), f"{where}: {name}"
    return plain, codes


def first_difference(these: list[float], those: list[float]) -> str:
    step = next(i for i, (a, b) in enumerate(zip(these, those, strict=True)) if a != b)
    return f"step {step}: {these[step]!r} and {those[step]!r}"
