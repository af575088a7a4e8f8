"""`qt.inspect` on two ranks: one table of all ranks, under DistributedDataParallel, fully_shard and tensor
parallelism."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import quaver.torch as qt
from quaver.torch.parallel import ColwiseParallel, RowwiseParallel, gather_quantized
from tests import two_ranks


def model_of(recipe: str, features: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features, 64), nn.GELU(), nn.Linear(64, features))
    qt.convert(model, recipe)
    return model


def one_step(model: Any, inspector: qt.Inspector, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    inspector.step()


def elements_and_values_of_all_ranks_are_pooled(rank: int) -> None:
    model = DistributedDataParallel(model_of("mxfp8"))
    with qt.inspect(model, every=1) as inspector:
        one_step(model, inspector, torch.full((4 + rank, 32), 1.0 + rank))
    row = next(r for r in inspector.rows if r["tensor"] == "input" and r["layer"] == "0")
    assert (row["elements"], row["amax"]) == (9 * 32, 2.0)


def the_rank_of_a_nan_is_named(rank: int) -> None:
    model = DistributedDataParallel(model_of("tensorwise"))
    x = torch.randn(8, 32)
    x[3, 5] = torch.nan if rank else 0.0
    with qt.inspect(model, every=1) as inspector:
        one_step(model, inspector, x)
    worst = inspector.worst()[0]
    assert (worst["layer"], worst["tensor"], worst["nonfinite_ranks"]) == ("0", "input", [1])
    assert "on ranks [1]" in str(inspector)


def weights_are_seen_as_gathered(rank: int) -> None:
    for recipe in ("tensorwise", "mxfp8", "delayed"):
        for gathers in (False, True):
            plain, model = model_of(recipe), model_of(recipe)
            mesh = two_ranks.mesh(2)
            if gathers:
                gather_quantized(model, mesh=mesh)
            fully_shard(model, mesh=mesh)
            rows = []
            for one in (model, plain):
                with qt.inspect(one, every=1) as inspector:
                    one_step(one, inspector, torch.ones(4, 32) * torch.arange(1, 5).view(4, 1))
                rows.append({(r["layer"], r["gemm"], r["tensor"]): r for r in inspector.rows})
            sharded, whole = rows
            outputs = [key for key in whole if key[2] in ("output", "grad_input", "grad_weight")]
            assert set(outputs) <= set(sharded)
            for key in outputs if not gathers else ():
                assert sharded[key]["error"] == pytest.approx(whole[key]["error"], rel=1e-5), (recipe, key)
            assert not inspector.flagged()


def all_ranks_fall_back_together(rank: int) -> None:
    mesh = two_ranks.mesh(2)
    for kind in ("ddp", "fsdp"):
        model: Any = model_of("tensorwise")
        with torch.no_grad():
            model[0].weight[:, 3] = 0
        if kind == "ddp":
            model = DistributedDataParallel(model)
        else:
            fully_shard(model, mesh=mesh)
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))
        x[:, 3] *= 1e6 * rank
        with qt.inspect(model, every=1, fallback=qt.Fallback(recipes=["blockwise"], steps=1)) as inspector:
            one_step(model, inspector, x)
            one_step(model, inspector, x)
        assert [(s["step"], s["layer"]) for s in inspector.switches] == [(0, "0")], kind
        layer = model.module[0] if kind == "ddp" else model[0]
        assert str(layer.recipe) == "blockwise"
    # Recipes without state take the last buffers away.
    parallel = DistributedDataParallel(model_of("nvfp4"))
    with qt.inspect(parallel, every=1, fallback=qt.Fallback(steps=1, error=0.001)) as inspector:
        for _ in range(4):
            one_step(parallel, inspector, torch.randn(8, 32))
    assert inspector.switches
    model = model_of("tensorwise")
    gather_quantized(model, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="leave out fallback="):
        qt.inspect(model, fallback=qt.Fallback()).start()


def gemms_of_tensor_parallel_layers_have_the_errors_of_whole_ones(rank: int) -> None:
    mesh = two_ranks.mesh(2)
    for recipe, sequence in (("tensorwise", False), ("mxfp8", True), ("nvfp4", False), ("rowwise_bf16_wgrad", True)):
        whole, model = model_of(recipe, 64), model_of(recipe, 64)
        plan: dict[str, Any] = {"0": ColwiseParallel(sequence=sequence), "2": RowwiseParallel(sequence=sequence)}
        parallelize_module(model, mesh, plan)
        x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
        shard = x.chunk(2, 1)[rank] if sequence else x
        rows = []
        for one, part in ((whole, x), (model, shard)):
            with qt.inspect(one, every=1) as inspector:
                one_step(one, inspector, part.clone().requires_grad_())
            rows.append({(r["layer"], r["gemm"], r["tensor"]): r for r in inspector.rows if "format" not in r})
        assert rows[0].keys() == rows[1].keys() and len(rows[0]) == 6
        for key, expected in rows[0].items():
            # Parts of a sum have other errors than the sum, but not by much.
            summed = key[1:] == (("dgrad", "grad_input") if key[0] == "0" else ("fprop", "output"))
            # Both ranks run the whole layers.
            assert rows[1][key]["elements"] == expected["elements"] // (1 if summed else 2), (recipe, key)
            assert rows[1][key]["snr"] == pytest.approx(expected["snr"], abs=2 if summed else 0.01), (recipe, key)


def counts_on_one_rank_wait_for_no_other(rank: int) -> None:
    model = model_of("mxfp8", 64)
    parallelize_module(model, two_ranks.mesh(2), {"0": ColwiseParallel(sequence=True)})
    with qt.count(model) if rank else nullcontext():
        model[0](torch.randn(1, 32, 64)).sum().backward()


def only_the_first_rank_writes(rank: int) -> None:
    model = DistributedDataParallel(model_of("mxfp8"))
    folder = two_ranks.folder() / "out"
    with qt.inspect(model, every=1, out=folder) as inspector:
        one_step(model, inspector, torch.randn(4, 32))
    torch.distributed.barrier()
    assert len((folder / "inspect.jsonl").read_text().splitlines()) == len(inspector.rows)


def other_steps_on_one_rank_are_an_error_on_all(rank: int) -> None:
    model = copy.deepcopy(model_of("mxfp8"))
    with pytest.raises(ValueError, match="give all ranks the same"), qt.inspect(model, every=1 + rank):
        pass


def a_file_of_another_run_is_an_error_on_all(rank: int) -> None:
    folder = two_ranks.folder() / "used"
    model = model_of("mxfp8")
    for words in ("", "statistics of another run"):
        with pytest.raises(ValueError, match=words) if words else nullcontext(), qt.inspect(model, out=folder):
            pass


CASES = [
    elements_and_values_of_all_ranks_are_pooled,
    the_rank_of_a_nan_is_named,
    weights_are_seen_as_gathered,
    all_ranks_fall_back_together,
    gemms_of_tensor_parallel_layers_have_the_errors_of_whole_ones,
    counts_on_one_rank_wait_for_no_other,
    only_the_first_rank_writes,
    other_steps_on_one_rank_are_an_error_on_all,
    a_file_of_another_run_is_an_error_on_all,
]


@pytest.mark.ranks
def test_ranks_share_one_table(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


if __name__ == "__main__":
    two_ranks.main(CASES)
