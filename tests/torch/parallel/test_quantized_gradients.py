"""Gradients in eight bits on the wire: the float32 sum of what each rank quantized, bit for bit, on every rank."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.formats import E4M3, E5M2
from quaver.recipes.spec import QuantSpec
from quaver.torch.parallel import comm, quantized_gradients
from tests import two_ranks
from tests.close import assert_bitwise
from tests.two_ranks import RANKS

SPECS = [quantized_gradients.BLOCKS, QuantSpec(E5M2, (1, 128)), QuantSpec(E4M3, (1, 32), "e8m0")]


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that a rank passes to all-to-alls and all-gathers, with its own shard."""
    sent, exchange, gather = [0], dist.all_to_all_single, comm.all_gather

    def counting_exchange(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += input.nbytes
        return exchange(output, input, *args, **kwargs)

    def counting_gather(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += output.nbytes
        return gather(output, input, *args, **kwargs)

    dist.all_to_all_single, comm.all_gather = counting_exchange, counting_gather
    try:
        yield sent
    finally:
        dist.all_to_all_single, comm.all_gather = exchange, gather


def part_of(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values with a different magnitude on each rank, zeros, subnormals and an outlier."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(size + rank)) * 10.0 ** (3 * rank)
    x[: size // 8] = 0.0
    x[size // 8 : size // 4] *= 1e-40
    if size > 4:
        x[-3] = 1e6
    return x.to(dtype)


def rounded(x: Tensor, spec: QuantSpec) -> Tensor:
    """Quantize and dequantize each row of x [rows, n] in blocks: the plain reference."""
    block = spec.block[1]
    assert block is not None
    rows = [torch.cat([qt.quantize(b.view(1, -1), spec).dequantize()[0] for b in row.split(block)]) for row in x]
    return torch.stack(rows) if x.numel() else x.float()


def summed(parts: list[Tensor], spec: QuantSpec) -> Tensor:
    """Sum quantized parts [ranks, n] in the order of ranks."""
    total = rounded(parts[0].view(RANKS, -1), spec)
    for part in parts[1:]:
        total = total + rounded(part.view(RANKS, -1), spec)
    return total


def sums_are_those_of_what_was_quantized(rank: int) -> None:
    for spec in SPECS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for size in (2, 254, 256, 2 * 1000):
                parts = [part_of(r, size, dtype) for r in range(RANKS)]
                got = comm.scatter_quantized_sums(parts[rank], spec)
                assert_bitwise(got, summed(parts, spec)[rank], f"{spec}, {dtype}, {size}")
    assert comm.scatter_quantized_sums(torch.empty(0), SPECS[0]).shape == (0,)


def what_is_not_finite_reaches_the_sum(rank: int) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        for sender in range(RANKS):
            x = torch.ones(512)
            if rank == sender:
                x[300] = value
            got = comm.scatter_quantized_sums(x, SPECS[0])
            assert got.isnan().any() == (rank == 1), f"{value} of rank {sender} is in the part of rank 1"
            whole = comm.all_gather_quantized(got, SPECS[0])
            assert whole[256:384].isnan().all() and (whole[:256] == 2).all() and (whole[384:] == 2).all()


def other_specs_are_refused(rank: int) -> None:
    for spec in (QuantSpec(E4M3), QuantSpec(E4M3, (128, 128)), replace(SPECS[0], rounding="stochastic")):
        with pytest.raises(ValueError, match="blocks of one row and rounded to nearest"):
            comm.scatter_quantized_sums(torch.ones(256), spec)
    model = DistributedDataParallel(nn.Linear(2, 2))
    for wrong in (QuantSpec(E4M3), "mxfp8", recipes.get("mxfp8"), None):
        with pytest.raises(ValueError, match="blocks of one row and rounded to nearest"):
            quantized_gradients.quantize_gradients(model, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pad it"):
        comm.scatter_quantized_sums(torch.ones(3), SPECS[0])
    with pytest.raises(ValueError, match="neither wrapped by DistributedDataParallel nor sharded"):
        quantized_gradients.quantize_gradients(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"module\.weight is torch\.float64"):
        quantized_gradients.quantize_gradients(DistributedDataParallel(nn.Linear(2, 2).double()))


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 33)).to(dtype)


def gradients_of(model: nn.Module, rank: int, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(rank)
    model(torch.randn(32, 96, generator=generator).to(dtype)).float().square().mean().backward()


def data_parallel(rank: int) -> None:
    """All ranks get the same bits: the mean of the quantized parts, quantized again."""
    for dtype in (torch.float32, torch.bfloat16):
        model = quantized_gradients.quantize_gradients(DistributedDataParallel(net(dtype)))
        alone = [net(dtype) for _ in range(RANKS)]
        with counted() as sent:
            gradients_of(model, rank, dtype)
        size = sum(p.numel() for p in model.parameters())
        # An all-reduce in bfloat16 sends and gathers two bytes per element.
        assert sent[0] > 0.5 * 2 * 2 * size, "both ways are counted"
        assert sent[0] <= 0.52 * 2 * 2 * size + 2 * RANKS * 132, f"{sent[0] / (4 * size):.4f} of bfloat16's"
        for r, each in enumerate(alone):
            gradients_of(each, r, dtype)
        for (name, p), *owns in zip(model.named_parameters(), *(each.parameters() for each in alone), strict=True):
            assert p.grad is not None
            assert_bitwise(*two_ranks.gathered(p.grad.float()), f"{dtype} {name}")
            mean = torch.stack([own.grad.float() for own in owns]).mean(0)
            assert (p.grad - mean).norm() <= 0.05 * mean.norm(), f"{dtype} {name}"


class Noting(quantized_gradients.QuantizedReduceScatter):
    """Record inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        given = input_tensor.clone()
        super().__call__(output_tensor, input_tensor, *args, **kwargs)
        self.seen.append((given, output_tensor.clone()))


def sharded(rank: int) -> None:
    """fully_shard's reduce-scatter gives the mean of the quantized parts bit for bit, also for uneven shards."""
    for dtype in (torch.float32, torch.bfloat16):
        model = fully_shard(net(dtype))
        quantized_gradients.quantize_gradients(model)
        noting = Noting()
        model.set_custom_reduce_scatter(noting)
        with counted() as sent:
            gradients_of(model, rank, dtype)
        ((given, got),) = noting.seen
        assert sent[0] <= 0.52 * 2 * given.numel() + 2 * RANKS * 132, f"{sent[0] / (2 * given.numel()):.4f}"
        parts = two_ranks.gathered(given)
        assert_bitwise(got, (summed(parts, quantized_gradients.BLOCKS)[rank] / RANKS).to(dtype), f"{dtype}")


def divide_factors(rank: int) -> None:
    """`set_gradient_divide_factor(f)` divides the sum by f, for any reduce dtype and both kinds of torch's sums."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for factor, forced in ((1.0, False), (2.0, False), (8.0, False), (8.0, True)):
            grads = []
            for each in (None, factor):
                model = quantized_gradients.quantize_gradients(fully_shard(net(dtype)))
                assert isinstance(model, FSDPModule)
                if each is not None:
                    model.set_gradient_divide_factor(each)
                    model.set_force_sum_reduction_for_comms(forced)
                gradients_of(model, rank, dtype)
                grads.append([p.grad.to_local().float() for p in model.parameters()])
            for mean, got in zip(*grads, strict=True):
                # Powers of two are exact, except for subnormal numbers of float16.
                torch.testing.assert_close(got, mean * (RANKS / factor), rtol=0, atol=1e-5 * (dtype is torch.float16))


#: Steps of a converted model under each recipe, in the quick and in the slow tests.
TRAINED, LONG = dict.fromkeys(recipes.RECIPES, 10), dict.fromkeys(recipes.RECIPES, 20)


def trains_with_both(rank: int) -> None:
    train_with_both(rank, TRAINED)


def trains_for_long_with_both(rank: int) -> None:
    train_with_both(rank, LONG)


def train_with_both(rank: int, of_steps: Mapping[str, int]) -> None:
    """Train a converted model; losses fall as with high-precision gradients."""
    for recipe, steps in of_steps.items():
        ends = [end_of(recipe, quantized, rank, steps) for quantized in (False, True)]
        assert ends[1] == pytest.approx(ends[0], rel=0.02), f"{recipe}: {ends}"


def end_of(recipe: str, quantized: bool, rank: int, steps: int) -> float:
    """The loss after this many steps."""
    model = net()
    qt.convert(model, recipe)
    wrapped = DistributedDataParallel(model)
    if quantized:
        quantized_gradients.quantize_gradients(wrapped)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    x, target = torch.randn(32, 96, generator=torch.Generator().manual_seed(rank)), torch.zeros(32, 33)
    for _ in range(steps):
        loss = (wrapped(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def ranks_with_fewer_batches(rank: int) -> None:
    """DistributedDataParallel.join fills in gradients of finished ranks, but not amaxes, and warns about it."""
    for recipe in ("mxfp8", "delayed"):
        for around in (False, True):
            model = net()
            qt.convert(model, recipe)
            wrapped = DistributedDataParallel(model)
            quantized_gradients.quantize_gradients(wrapped)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with wrapped.join():
                for step in range(1 + rank):
                    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(10 * step + rank))
                    if recipe == "delayed":
                        within = qt.autocast("delayed") if around else nullcontext()
                        with pytest.raises(ValueError, match=r"within DistributedDataParallel.join\(\)"), within:
                            wrapped(x)
                        break
                    optimizer.zero_grad()
                    wrapped(x).square().mean().backward()
                    optimizer.step()
            if recipe == "mxfp8":
                for p in model.parameters():
                    assert_bitwise(*two_ranks.gathered(p.detach()))


CASES = [
    sums_are_those_of_what_was_quantized,
    what_is_not_finite_reaches_the_sum,
    other_specs_are_refused,
    data_parallel,
    sharded,
    divide_factors,
    trains_with_both,
    ranks_with_fewer_batches,
]


@pytest.mark.ranks
def test_ranks_sum_gradients_quantized_once_each(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
def test_twenty_steps(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, slow=True)


if __name__ == "__main__":
    two_ranks.main(CASES, slow=[trains_for_long_with_both])
