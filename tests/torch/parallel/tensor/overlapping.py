"""Cases for two processes: communication that overlaps GEMMs, on another stream or inside a fused operation."""

import copy
import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.tensor.parallel import parallelize_module

import quaver.torch as qt
from quaver.torch.parallel import ColwiseParallel, CommCounter, RowwiseParallel, comm
from quaver.torch.parallel.tensor import overlap as overlap_module
from tests import two_ranks
from tests.close import assert_bitwise, assert_close
from tests.torch.parallel.tensor.split import tokens
from tests.two_ranks import RANKS


def mesh() -> Any:
    return two_ranks.mesh(RANKS)


@contextmanager
def torch_fallbacks() -> Iterator[None]:
    """On CPUs, run torch's symmetric-memory operations by the decompositions that torch 2.13 uses for fake tensors."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl(overlap_module.GATHER, symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl(overlap_module.SCATTER, symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
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
                gathered, product = overlap_module.gathered_product(x, weight, group, batches)
                label = f"{dtype}, {batches} sequences"
                assert_bitwise(gathered, whole(x, batches), label)
                assert_bitwise(product, whole(x, batches) @ weight.t(), label)
                for value in (0.0, torch.nan, torch.inf, 1e-40, 3e38):
                    y = torch.randn(batches * 8, 16, generator=generator).to(dtype)
                    y[5, 3] = value
                    total = overlap_module.scattered_product(y, weight, group, batches)
                    parts = comm.scatter_sums((y @ weight.t()).float(), group, batches)()
                    assert_bitwise(total, parts.to(dtype), f"{label}, {value}")


def model_of(recipe: str, dtype: torch.dtype, overlap: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(dtype)
    qt.convert(model, recipe)
    plan = {"0": ColwiseParallel(sequence=True, overlap=overlap), "2": RowwiseParallel(sequence=True, overlap=overlap)}
    return parallelize_module(model, mesh(), plan)  # type: ignore[arg-type]


def layers_with_fused_communication(rank: int) -> None:
    """Equal layers without `overlap`: bit for bit with quantized GEMMs or in float32, else up to rounding.

    In bfloat16 the fused operation rounds before it sums over ranks.
    """
    with torch_fallbacks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap_module, "reason_unsupported", lambda mesh: "")
        for recipe, dtype, bound in (
            ("bf16", torch.bfloat16, 2e-2),
            ("bf16", torch.float32, 0.0),
            ("mxfp8", torch.bfloat16, 0.0),
            ("rowwise_bf16_wgrad", torch.bfloat16, 0.0),
        ):
            results, ran = [], []
            for overlap in (False, True):
                model = model_of(recipe, dtype, overlap)
                counted = functools.partial(run_with, ran)
                patch.setattr(overlap_module, "operation", counted)
                x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
                x = tokens(x, rank, RANKS).clone().requires_grad_()
                with CommCounter() as traffic:
                    y = model(x)
                    y.float().square().sum().backward()
                results.append((y.detach(), x.grad, *(p.grad.to_local() for p in model.parameters())))
                sent = traffic.bytes["activations"]
            assert sent > 0 and ran == ([overlap_module.GATHER, overlap_module.SCATTER] * 2 if bound else []), ran
            for number, (one, other) in enumerate(zip(*results, strict=True)):
                label = f"{recipe}, {dtype}: {number}"
                if bound:
                    assert_close(label, other.float(), one.float(), bound)
                else:
                    assert_bitwise(other, one, label)


#: The original function, before it is patched.
OPERATION = overlap_module.operation


def run_with(ran: list[str], name: str) -> Any:
    ran.append(name)
    return OPERATION(name)


def without_symmetric_memory(rank: int) -> None:
    """Without symmetric memory the first rank warns once, and layers run as without `overlap`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        style = ColwiseParallel(sequence=True, overlap=True)
        model = nn.ModuleList(nn.Linear(32, 32) for _ in range(2)).bfloat16()
        other = copy.deepcopy(model)
        parallelize_module(model, mesh(), {"*": style})
    messages = [str(one.message) for one in caught if "overlap" in str(one.message)]
    assert len(messages) == (rank == 0) and all("on cpu, and symmetric memory needs GPUs" in one for one in messages), (
        messages
    )
    parallelize_module(other, mesh(), {"*": ColwiseParallel(sequence=True)})
    x = torch.randn(2, 16, 32).bfloat16()
    assert_bitwise(model[0](x).detach(), other[0](x).detach())
    with pytest.raises(ValueError, match="overlap applies to sharded tokens: give sequence=True"):
        RowwiseParallel(overlap=True)


CASES = [
    fused_products_equal_separate_operations,
    layers_with_fused_communication,
    without_symmetric_memory,
]
