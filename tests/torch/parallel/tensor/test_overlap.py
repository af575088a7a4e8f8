"""Two and four processes on gloo: communication that overlaps GEMMs, in chunks or inside a fused operation."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.tensor.parallel import parallelize_module
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.parallel import ColwiseParallel, CommCounter, HeadParallel, RowwiseParallel, comm
from quaver.torch.parallel.tensor import symmetric_memory
from tests import two_ranks
from tests.close import assert_bitwise, assert_close
from tests.torch.parallel.tensor.split import tokens
from tests.two_ranks import RANKS


def mesh() -> Any:
    return two_ranks.mesh(two_ranks.world())


def block_of(recipe: Recipe) -> int:
    """The largest finite block side."""
    specs = [spec for spec in recipe.operands().values() if spec is not None]
    return max([1, *(side for spec in specs for side in spec.block if side is not None)])


def model_of(recipe: str, dtype: torch.dtype, overlap: bool | int, width: int = 64) -> Any:
    torch.manual_seed(0)
    ranks = two_ranks.world()
    model = nn.Sequential(nn.Linear(width, ranks * width), nn.GELU(), nn.Linear(ranks * width, width)).to(dtype)
    qt.convert(model, recipe)
    plan = {"0": ColwiseParallel(sequence=True, overlap=overlap), "2": RowwiseParallel(sequence=True, overlap=overlap)}
    return parallelize_module(model, mesh(), plan)  # type: ignore[arg-type]


def trained(model: Any, shape: Sequence[int], dtype: torch.dtype, steps: int = 1) -> tuple[list[Tensor], CommCounter]:
    """Outputs, gradients and histories of some forwards and backwards on this rank's tokens, and their traffic."""
    results: list[Any] = []
    with CommCounter() as traffic:
        for step in range(steps):
            x = torch.randn(*shape, generator=torch.Generator().manual_seed(step)).to(dtype) * (1 + step)
            x = tokens(x, dist.get_rank(), two_ranks.world()).clone().requires_grad_()
            y = model(x)
            y.float().square().sum().backward()
            results += [y.detach(), x.grad]
    results += [p.grad.to_local() for p in model.parameters()]
    return [*results, *(buffer.clone() for buffer in model.buffers())], traffic


# ---- chunks ----


def chunked(names: Sequence[str], chunks: Sequence[int], dtype: torch.dtype, of_blocks: int) -> two_ranks.Case:
    """Every bit and every byte is that of layers without overlap, whether or not chunks divide the tokens.

    Args:
        of_blocks: tokens of a rank and sequence; rounded up to whole blocks.
    """

    def case(rank: int) -> None:
        for name in names:
            block = block_of(recipes.get(name))
            width, own = max(32, block), -(-of_blocks // block) * block
            shape = 2, two_ranks.world() * own, width
            expected, before = trained(model_of(name, dtype, False, width), shape, dtype, 2)
            for overlap in chunks:
                label = f"{name}, {dtype}, {overlap} chunks of {own} tokens"
                results, traffic = trained(model_of(name, dtype, overlap, width), shape, dtype, 2)
                for number, (one, other) in enumerate(zip(results, expected, strict=True)):
                    assert_bitwise(one, other, f"{label}: {number}")
                assert traffic.bytes == before.bytes, f"{label}: {traffic.bytes}, {before.bytes}"
                assert traffic.calls["amaxes"] == before.calls["amaxes"], label
                if dtype is torch.float32 and overlap > 1:
                    assert traffic.calls["activations"] > before.calls["activations"], f"{label}: not in chunks"

    case.__name__ = f"chunked {dtype}, {of_blocks} tokens"
    return case


def hard_values(rank: int) -> None:
    """Values that only one rank has, recomputed activations, and no tokens.

    A CPU multiplies by other code where scales differ so much, also the rows of other tokens.
    """
    shape = 2, 64 * two_ranks.world(), 64
    for name in ("tensorwise", "mxfp8", "nvfp4"):
        plain, other = (model_of(name, torch.float32, overlap) for overlap in (False, 2))
        for value in (0.0, 1e-40, 3e38, torch.inf, torch.nan):
            x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
            x[1, 70, 5] = value
            inputs = [tokens(x, rank, two_ranks.world()).clone().requires_grad_() for _ in range(2)]
            outputs = [plain(inputs[0]), checkpoint(other, inputs[1], use_reentrant=False)]
            for y in outputs:
                y.sum().backward()
            assert_bitwise(outputs[1].detach(), outputs[0].detach(), f"{name}: output for {value}")
            assert_bitwise(inputs[1].grad, inputs[0].grad, f"{name}: gradient for {value}")
        empty = torch.zeros(2, 0, 64, requires_grad=True)
        other(empty).sum().backward()
        assert empty.grad is not None and empty.grad.shape == empty.shape


def heads(rank: int) -> None:
    """Attention whose queries, keys and values are one matrix."""
    results = []
    for overlap in (False, 2):
        torch.manual_seed(0)
        attention = qt.MultiheadAttention(64, 4, fused=True)
        qt.convert(attention, "mxfp8")
        parallelize_module(attention, mesh(), HeadParallel(sequence=True, overlap=overlap))
        results.append(trained(attention, (2, 128, 64), torch.float32)[0])
    for number, (one, other) in enumerate(zip(*results, strict=True)):
        assert_bitwise(other, one, f"result {number}")


class Calls(TorchDispatchMode):
    """Names and dtypes of dispatched collectives, messages and GEMMs, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name.startswith("c10d."):
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
            self.seen.append(f"{name.split('.')[1]} {tensors[0].dtype}".replace("torch.", ""))
        elif name.startswith(("aten.mm", "aten.addmm")):
            self.seen.append("gemm")
        return function(*args, **(kwargs or {}))


def order_of_messages_and_gemms(rank: int) -> None:
    """Amaxes are agreed on before the first chunk; all chunks are on their way before the first GEMM of a gather, and
    those for another rank before the next GEMM of a sum.
    """
    model = model_of("tensorwise", torch.float32, 2)
    x = torch.randn(1, 64, 64)
    model(x)
    others = two_ranks.world() - 1
    hidden = torch.randn(1, 64 * two_ranks.world(), 64)
    for layer, given, start in ((model[0], x, "uint8"), (model[2], hidden, "float32")):
        with Calls() as calls:
            layer(given)
        seen = [call for call in calls.seen if not call.startswith("allreduce_ int64")]
        assert seen[0] == "allreduce_ int32", seen
        chunk = [f"send {start}", f"recv_ {start}"]
        if start == "uint8":
            assert seen[1:] == [*(chunk * 2 * others), "gemm", *(["gemm"] * 2 * others)], seen
        else:
            assert seen[1:] == [*(["gemm", *chunk] * 2 * others), "gemm"], seen


def transfers_beside_gemms(rank: int) -> None:
    """In a profile, messages begin before a GEMM and are waited for after it, in forward and backward."""
    model = model_of("mxfp8", torch.float32, 2, 256)
    x = torch.randn(1, 256, 256).requires_grad_()
    model(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        model(x).sum().backward()
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in ("gloo:send", "gloo:recv", "gemm")}
    for event in trace.events():
        name = "gemm" if event.name in ("aten::mm", "aten::addmm") else event.name
        if name in spans:
            spans[name].append((event.time_range.start, event.time_range.end))
    products = spans["gemm"]
    assert products and spans["gloo:recv"], {name: len(each) for name, each in spans.items()}
    for kind in ("gloo:send", "gloo:recv"):
        beside = [any(begin <= start and end <= stop for begin, stop in spans[kind]) for start, end in products]
        # fprop and dgrad of two layers: every GEMM of a chunk but the last of each.
        assert sum(beside) >= 4 * 2, f"{kind}: {beside}"


def bad_input(rank: int) -> None:
    """Every rank raises, also for what only one of them has."""
    for value in (0, -1, 2.0, "2"):
        with pytest.raises(ValueError, match=r"overlap is .*: give True, or the number of chunks"):
            ColwiseParallel(sequence=True, overlap=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="overlap applies to sharded tokens: give sequence=True"):
        RowwiseParallel(overlap=True)

    def layer() -> nn.Module:
        return qt.Linear(64, 64)

    for own in (3, False):
        with pytest.raises(ValueError, match="ranks differ at ColwiseParallel: rank 0: chunks of overlap"):
            parallelize_module(layer(), mesh(), ColwiseParallel(sequence=True, overlap=2 if rank == 0 else own))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", unable)
        with pytest.raises(ValueError, match=r"with overlap sends tokens from rank to rank, which backend gloo cannot"):
            parallelize_module(layer(), mesh(), RowwiseParallel(sequence=True, overlap=2))


def unable(*_: object) -> None:
    raise NotImplementedError("no messages here")


# ---- symmetric memory ----


@contextmanager
def torch_fallbacks() -> Iterator[None]:
    """On CPUs, run torch's symmetric-memory operations by the decompositions that torch 2.13 uses for fake tensors."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl(symmetric_memory.GATHER, symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl(symmetric_memory.SCATTER, symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
    try:
        yield
    finally:
        library._destroy()


def whole(x: Tensor, batches: int) -> Tensor:
    gathered: Tensor = comm.gather(x, 0, None, batches)()
    return gathered


def fused_products_equal_separate_operations(rank: int) -> None:
    """Equal a gather followed by a GEMM, and a GEMM that is rounded before its reduce-scatter, bit for bit."""
    group = dist.group.WORLD
    with torch_fallbacks():
        for dtype in (torch.float32, torch.bfloat16):
            for batches in (1, 3):
                generator = torch.Generator().manual_seed(rank)
                x = torch.randn(batches * 4, 16, generator=generator).to(dtype)
                weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(7)).to(dtype)
                gathered, product = symmetric_memory.gathered_product(x, weight, group, batches)
                label = f"{dtype}, {batches} sequences"
                assert_bitwise(gathered, whole(x, batches), label)
                assert_bitwise(product, whole(x, batches) @ weight.t(), label)
                for value in (0.0, torch.nan, torch.inf, 1e-40, 3e38):
                    y = torch.randn(batches * 8, 16, generator=generator).to(dtype)
                    y[5, 3] = value
                    total = symmetric_memory.scattered_product(y, weight, group, batches)
                    parts = comm.scatter_sums((y @ weight.t()).float(), group, batches)()
                    assert_bitwise(total, parts.to(dtype), f"{label}, {value}")


def layers_with_fused_communication(rank: int) -> None:
    """Equal layers without `overlap`: bit for bit with quantized GEMMs or in float32, else up to rounding.

    In bfloat16 the fused operation rounds before it sums over ranks.
    """
    with torch_fallbacks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "is_supported", lambda mesh: True)
        for recipe, dtype, bound in (
            ("bf16", torch.bfloat16, 2e-2),
            ("bf16", torch.float32, 0.0),
            ("mxfp8", torch.bfloat16, 0.0),
            ("rowwise_bf16_wgrad", torch.bfloat16, 0.0),
        ):
            ran: list[str] = []
            patch.setattr(symmetric_memory, "operation", functools.partial(run_with, ran))
            results = [trained(model_of(recipe, dtype, overlap), (2, 64, 64), dtype)[0] for overlap in (False, True)]
            fused = [symmetric_memory.GATHER, symmetric_memory.SCATTER] * 2
            assert ran == (fused if bound else []), ran
            for number, (one, other) in enumerate(zip(*results, strict=True)):
                label = f"{recipe}, {dtype}: {number}"
                if bound:
                    assert_close(label, other.float(), one.float(), bound)
                else:
                    assert_bitwise(other, one, label)


#: The original function, before it is patched.
OPERATION = symmetric_memory.operation


def run_with(ran: list[str], name: str) -> Any:
    ran.append(name)
    return OPERATION(name)


NAMES = [*recipes.RECIPES]
CASES = [
    chunked(NAMES, (3,), torch.float32, 100),
    chunked(["bf16", "mxfp8"], (1, 1000), torch.float32, 100),
    chunked(["bf16", "delayed", "rowwise_bf16_wgrad"], (2,), torch.bfloat16, 64),
    order_of_messages_and_gemms,
    transfers_beside_gemms,
    bad_input,
]
SLOW = [
    chunked(NAMES, (1, 2, 3, 5, 7, 1000), dtype, own) for dtype in (torch.float32, torch.bfloat16) for own in (33, 256)
]
OF_TWO = [hard_values, heads, fused_products_equal_separate_operations, layers_with_fused_communication]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [RANKS, 2 * RANKS])
def test_layers_with_overlap_equal_layers_without(tmp_path: Path, ranks: int) -> None:
    two_ranks.run(__name__, tmp_path, ranks)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [RANKS, 2 * RANKS])
def test_every_number_of_chunks(tmp_path: Path, ranks: int) -> None:
    two_ranks.run(__name__, tmp_path, ranks, slow=True)


if __name__ == "__main__":
    two_ranks.main([*CASES, *(OF_TWO if two_ranks.world() == RANKS else [])], slow=SLOW)
