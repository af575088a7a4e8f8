"""Optimizers of parameters that ranks have parts of: what one process does, joined from the ranks' parts."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import quaver.torch as qt
from quaver.torch import optim
from quaver.torch.optim import host, layout
from quaver.torch.parallel import Checkpoint, gather_quantized
from tests import two_ranks
from tests.close import assert_bitwise
from tests.torch.offload.simulated import Simulated

PRESETS = ("float32", "exact", "balanced", "lean", "torchao8")
#: Row counts that neither 2 nor 4 divides, and a matrix with fewer rows than ranks.
SHAPES = {"wide": (37, 160), "tall": (131, 96), "low": (2, 4096), "cube": (5, 31, 64), "bias": (129,)}


class Tensors(nn.Module):
    """Parameters of all shapes, with given gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=draw).to(dtype)))


def gradients(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step + 1)
    numbers = {name: torch.randn(shape, generator=draw) * 10.0**-step for name, shape in SHAPES.items()}
    # Rounded to bfloat16, in which some presets hold unsharded gradients.
    return {name: number.bfloat16().to(dtype) for name, number in numbers.items()}


def set_gradients(model: nn.Module, step: int, dtype: torch.dtype) -> None:
    """Set gradients as a backward does: sharded, then hooks run."""
    for name, gradient in gradients(step, dtype).items():
        p: Any = getattr(model, name)
        sharded = isinstance(p, DTensor)
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if sharded else gradient.to(p.grad_dtype)
        for hook in (p._post_accumulate_grad_hooks or {}).values():
            hook(p)


def full_tensor(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    # gloo carries no int16.
    short = value.dtype is torch.int16
    return value.int().full_tensor().short() if short else value.full_tensor()


def full_state(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """Unsharded weights and states."""
    every = {name: full_tensor(p.detach()) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        every |= {f"{name}.{key}": full_tensor(value) for key, value in optimizer.state[p].items()}
    return {name: value.clone() for name, value in every.items()}


def local_state(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """Weights and states of this rank: DTensors where sharded."""
    every = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        every |= {f"{name}.{key}": value for key, value in optimizer.state[p].items()}
    return every


def assert_parts(ours: dict[str, Tensor], reference: dict[str, Tensor], label: str) -> None:
    """Check local shards against slices of the unsharded tensors, without communication."""
    assert ours.keys() == reference.keys(), f"{label}: {ours.keys() ^ reference.keys()}"
    for name, value in ours.items():
        wanted = reference[name]
        if isinstance(value, DTensor):
            assert value.shape == wanted.shape, f"{label}: {name}"
            cut = distribute_tensor(wanted, value.device_mesh, value.placements, src_data_rank=None)
            value, wanted = value.to_local(), cut.to_local()
        assert_bitwise(value, wanted, f"{label}: {name}")


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], label: str) -> None:
    assert ours.keys() == theirs.keys(), f"{label}: {ours.keys() ^ theirs.keys()}"
    for name, value in theirs.items():
        assert_bitwise(ours[name], value, f"{label}: {name}")


Parallelism = Callable[[nn.Module], nn.Module]


def single_process(model: nn.Module) -> nn.Module:
    return model


def with_fsdp(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=two_ranks.mesh(dist.get_world_size()))


def with_ddp(model: nn.Module) -> nn.Module:
    mesh = two_ranks.mesh(2, dist.get_world_size() // 2, names=("replicas", "shards"))
    return fully_shard(model, mesh=mesh)


def parallelisms() -> tuple[Parallelism, ...]:
    return (with_fsdp, with_ddp) if dist.get_world_size() == 4 else (with_fsdp,)


def train(preset: Any, config: Parallelism, dtype: torch.dtype, rule: Any = optim.AdamW) -> Any:
    model = config(Tensors(dtype))
    optimizer = rule(model.parameters(), lr=1e-2, preset=preset, seed=7)
    for step in range(3):
        set_gradients(model, step, dtype)
        optimizer.step()
        optimizer.zero_grad()
    if rule is optim.ScheduleFreeAdamW:
        optimizer.eval()
    return model, optimizer


def ranks_step_as_one(rank: int) -> None:
    """Weights, codes and scales of all presets and rules equal one process, also with stochastic rounding."""
    for dtype in (torch.float32, torch.bfloat16):
        # Master weights of bfloat16 parameters have another layout.
        for preset in PRESETS if dtype is torch.float32 else ("exact", "lean"):
            expected = full_state(*train(preset, single_process, dtype))
            for config in parallelisms():
                assert_parts(
                    local_state(*train(preset, config, dtype)), expected, f"{preset}, {dtype}, {config.__name__}"
                )
        for rule in (optim.Lion, optim.SGD, optim.ScheduleFreeAdamW):
            expected = full_state(*train("lean", single_process, dtype, rule=rule))
            assert_parts(local_state(*train("lean", with_fsdp, dtype, rule=rule)), expected, rule.__name__)


def tensor_parallelism_cuts_columns(rank: int) -> None:
    """Meshes of one and two dimensions, also fully_shard over tensor parallelism; noise depends on global positions."""
    world = dist.get_world_size()
    flat = two_ranks.mesh(world, names=("tp",))
    meshes: list[tuple[Any, Any]] = [(flat, None)]
    if world == 4:
        both = two_ranks.mesh(2, 2, names=("dp", "tp"))
        meshes.append((both["tp"], both["dp"]))
    shape = (66, world * 128)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    draws = [torch.randn(shape, generator=torch.Generator().manual_seed(step)).bfloat16() for step in range(3)]

    def stepped(preset: str, p: nn.Parameter, model: nn.Module) -> dict[str, Tensor]:
        optimizer = optim.AdamW([p], lr=1e-2, preset=preset)
        for gradient in draws:
            p.grad = distribute_parts(gradient, p)
            for hook in (p._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
                hook(p)
            optimizer.clip_grad_norm_(1e9)
            optimizer.step()
            optimizer.zero_grad()
        return full_state(model, optimizer)

    for preset in ("exact", "lean"):
        lone = nn.Linear(shape[1], shape[0], bias=False)
        lone.weight = nn.Parameter(start.clone())
        expected = stepped(preset, lone.weight, lone)
        for (tp, dp), dim in itertools.product(meshes, (0, 1)):
            model = nn.Linear(shape[1], shape[0], bias=False)
            model.weight = nn.Parameter(distribute_tensor(start.clone(), tp, [Shard(dim)]))
            if dp is not None:
                fully_shard(model, mesh=dp)
            got = stepped(preset, model.weight, model)
            assert_same(got, expected, f"{preset}, dimension {dim} of {tp}, {dp}")


def distribute_parts(tensor: Tensor, p: Tensor) -> Tensor:
    """Shard a tensor as a parameter is sharded; return it unchanged if the parameter is not."""
    if not isinstance(p, DTensor):
        return tensor
    place = layout.place(p)
    local = tensor[tuple(slice(at, at + size) for at, size in zip(place.global_offset, place.local_shape, strict=True))]
    return DTensor.from_local(
        local.contiguous(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def norms_count_all_parts(rank: int) -> None:
    """Norms of floats and codes, also by torch's function, equal one process up to the order of sums."""
    for preset, order in (("float32", 2.0), ("lean", 2.0), ("lean", 1.0), ("lean", float("inf"))):
        norms = []
        for config, torchs in itertools.product((single_process, *parallelisms()), (False, True)):
            if torchs and order == float("inf"):
                continue  # torch has no largest of a rank without rows.
            model = config(Tensors(torch.float32))
            optimizer = optim.AdamW(model.parameters(), lr=1e-2, preset=preset)
            clip: Any = optimizer.clip_grad_norm_
            if torchs:
                clip = partial(nn.utils.clip_grad_norm_, [*model.parameters()])
            set_gradients(model, 0, torch.float32)
            norms.append(full_tensor(clip(1.0, order)))
            assert full_tensor(clip(1e9, order)).item() == pytest.approx(1.0, rel=1e-5)
            for other in two_ranks.gathered(norms[-1]):
                assert_bitwise(other, norms[-1], f"{preset}, {order}, {config.__name__}")
            optimizer.step()
        for norm in norms[1:]:
            assert norm.item() == pytest.approx(norms[0].item(), rel=1e-6), f"{preset}, {order}"


def replicas_step_with_the_mean_of_their_gradients(rank: int) -> None:
    """DistributedDataParallel reduces after a gradient has been replaced by codes."""
    for preset, accumulate in itertools.product(("balanced", "lean"), (1, 2)):
        torch.manual_seed(0)
        model, twin = (nn.Linear(96, 80) for _ in range(2))
        twin.load_state_dict(model.state_dict())
        optimizer = optim.SGD(model.parameters(), lr=1.0, preset=preset)
        other = torch.optim.SGD(twin.parameters(), lr=1.0)
        replica, plain = nn.parallel.DistributedDataParallel(model), nn.parallel.DistributedDataParallel(twin)
        for step in range(2):
            for micro in range(accumulate):
                draw = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                x = torch.randn(16, 96, generator=draw)
                for net in (replica, plain):
                    with nullcontext() if micro + 1 == accumulate else net.no_sync():
                        net(x).square().mean().backward()
            want = twin.weight.grad
            assert float((model.weight.grad - want).norm() / want.norm()) < 0.04
            for each in two_ranks.gathered(model.weight.grad + 0):
                assert_bitwise(each, model.weight.grad + 0, "gradient")
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
            assert float((model.weight - twin.weight).norm()) < 0.1 * float(want.norm())


def a_nan_on_one_rank_is_seen_by_all(rank: int) -> None:
    model = with_fsdp(Tensors(torch.float32))
    optimizer = optim.AdamW(model.parameters(), preset="lean")
    set_gradients(model, 0, torch.float32)
    if rank == 0:
        layout.local(model.wide.grad).scale.fill_(float("nan"))  # type: ignore
    assert optimizer.clip_grad_norm_(1.0).isnan()


def a_step_is_skipped_by_all_ranks_or_raised_on_all(rank: int) -> None:
    for nonfinite, preset in itertools.product(("skip", "raise"), ("exact", "lean")):
        model = with_fsdp(Tensors(torch.float32))
        optimizer = optim.AdamW(model.parameters(), preset=preset, nonfinite=nonfinite)
        before = {name: p.to_local().clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
        set_gradients(model, 0, torch.float32)
        if rank == 0:
            model.bias.grad.to_local().fill_(float("nan"))  # type: ignore[union-attr]
        if nonfinite == "raise":
            with pytest.raises(ValueError, match="gradients of 1 parameters are not finite"):
                optimizer.step()
        else:
            optimizer.step()
            assert int(optimizer.skipped) == 1
        for name, p in model.named_parameters():
            assert_bitwise(p.to_local(), before[name], f"{nonfinite}, {preset}, {name}")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="parameters are sharded"):
        optimizer.step_in_backward()


def unsupported_sharded_steps_raise(rank: int) -> None:
    world = dist.get_world_size()
    for preset in ("msamp", "te"):
        with pytest.raises(
            ValueError, match=f"'{preset}' has one scale for the whole parameter: use one with block scales"
        ):
            optim.AdamW(with_fsdp(Tensors(torch.float32)).parameters(), preset=preset)
    net = with_fsdp(nn.Linear(64, 128, bias=False))
    with pytest.raises(ValueError, match=r"shape \(128, 64\) is sharded .* and Muon needs whole matrices"):
        optim.Muon(net.parameters())
    mesh = two_ranks.mesh(world)
    p = nn.Parameter(distribute_tensor(torch.zeros(128, 32 * world), mesh, [Shard(1)]))
    with pytest.raises(ValueError, match=r"along its 128 columns, and preset .lean. has a scale for each 64"):
        optim.AdamW([p], preset="lean")
    optim.AdamW([p], preset="exact")


def layers(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(96, 130), nn.GELU(), nn.Linear(130, 97))


def units(model: Any) -> nn.Module:
    for part in (model[0], model[2], model):
        fully_shard(part)
    return model


def train_layers(model: nn.Module, optimizer: Any, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        x, y = torch.randn(2, 12, 128, generator=torch.Generator().manual_seed(step))
        rank = dist.get_rank()
        batch = slice(rank * 12 // dist.get_world_size(), (rank + 1) * 12 // dist.get_world_size())
        loss = nn.functional.mse_loss(model(x[batch, :96].to(next(model.parameters()).dtype)).float(), y[batch, :97])
        loss.backward()
        optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def steps_under_gather_quantized_are_the_same(rank: int) -> None:
    """Steps are the same under gather_quantized, whose shards are a tensor subclass."""
    for preset, dtype in (("float32", torch.float32), ("exact", torch.bfloat16), ("lean", torch.float32)):
        ends = []
        for as_codes in (False, True):
            model = layers().to(dtype)
            qt.convert(model, "mxfp8")
            if as_codes:
                gather_quantized(model)
            optimizer = optim.AdamW(units(model).parameters(), lr=1e-2, preset=preset)
            losses = train_layers(model, optimizer, range(3))
            parts = {name: layout.local(value) for name, value in local_state(model, optimizer).items()}
            # The values of a shard that is gathered as codes.
            parts = {name: getattr(part, "plain", part) for name, part in parts.items()}
            ends.append({f"loss {i}": loss for i, loss in enumerate(losses)} | parts)
        assert_same(ends[1], ends[0], f"{preset}, {dtype}")
        if preset == "lean":
            assert ends[0]["0.weight.exp_avg_codes"].dtype is torch.int8


def states_in_host_memory_step_the_same(rank: int) -> None:
    """Of weights in codes whose blocks cross shards, and checkpoints between both placements."""
    for recipe, offload in itertools.product(("tensorwise", "blockwise"), ("cpu", "stream")):
        ends = []
        for where in (None, offload):
            model = layers()
            qt.quantize_weights(model, recipe)
            gather_quantized(model)
            units(model)
            rule = optim.SGD if recipe == "tensorwise" else optim.AdamW
            optimizer = rule(model.parameters(), lr=1e-2, preset="lean", offload=where, _transfers=Simulated())
            folder = two_ranks.folder() / f"{recipe} {offload} {where}"
            train_layers(model, optimizer, range(2))
            Checkpoint(model, optimizer).save(folder)
            ends.append((model, optimizer, folder))
        for (model, optimizer, _), (*_, folder) in zip(ends, reversed(ends), strict=True):
            Checkpoint(model, optimizer).load(folder)
            train_layers(model, optimizer, range(2, 4))
        states = [
            {name: layout.local(t) for name, t in local_state(*end[:2]).items() if isinstance(t, Tensor)}
            for end in ends
        ]
        assert_same(states[1], states[0], f"{recipe}, {offload}")


def host_memory_of_one_rank_stops_all(rank: int) -> None:
    model = units(layers())
    optimizer = optim.AdamW(model.parameters(), preset="lean", offload="cpu", _transfers=Simulated())
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    memory = mock.patch.object(host, "available_memory", lambda: 100 if rank == 1 else 1 << 40)
    with memory, pytest.raises(ValueError, match=r"rank 1.*states need .* GB of host memory"):
        train_layers(model, optimizer, range(1))
    for name, p in model.named_parameters():
        assert_bitwise(p.to_local(), before[name], name)  # type: ignore[attr-defined]


def runs_resume_from_checkpoints(rank: int) -> None:
    """Saved sharded, then loaded on as many ranks and by one process, into optimizers without steps."""
    for preset in ("exact", "lean"):
        folder = two_ranks.folder() / f"{preset} of {dist.get_world_size()}"
        model = units(layers())
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, preset=preset, seed=3)
        train_layers(model, optimizer, range(2))
        saved = full_state(model, optimizer)
        Checkpoint(model, optimizer).save(folder)
        expected = train_layers(model, optimizer, range(2, 4))
        other = units(layers(5))
        again = optim.AdamW(other.parameters(), lr=1e-3, preset=preset, seed=8)
        Checkpoint(other, again).load(folder)
        assert_same(full_state(other, again), saved, f"{preset}, in parts")
        for loss, value in zip(train_layers(other, again, range(2, 4)), expected, strict=True):
            assert_bitwise(loss, value, preset)
        lone = layers(6)
        whole_one = optim.AdamW(lone.parameters(), preset=preset)
        Checkpoint(lone, whole_one).load(folder)
        assert_same(full_state(lone, whole_one), saved, f"{preset}, whole")
        # And back: saved by one process, loaded sharded.
        Checkpoint(lone, whole_one).save(folder / "whole")
        third = units(layers(7))
        parts = optim.AdamW(third.parameters(), preset=preset)
        Checkpoint(third, parts).load(folder / "whole")
        assert_same(full_state(third, parts), saved, f"{preset}, divided")


def torchs_functions_find_states_that_have_not_begun(rank: int) -> None:
    for preset in ("exact", "lean"):
        model = units(layers())
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, preset=preset)
        train_layers(model, optimizer, range(2))
        saved = full_state(model, optimizer)
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        folder = two_ranks.folder() / f"{preset} by hand"
        dcp.save(state, checkpoint_id=folder)
        other = units(layers(5))
        fresh = optim.AdamW(other.parameters(), preset=preset)
        before = {name: p.to_local().clone() for name, p in other.named_parameters()}  # type: ignore[attr-defined]
        held: Any = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, fresh)}
        for name, p in other.named_parameters():
            assert_bitwise(p.to_local(), before[name], f"{preset}: {name} moved")  # type: ignore[attr-defined]
            assert p.grad is None and not fresh.state[p]["step"].item()
        dcp.load(held, checkpoint_id=folder)
        set_model_state_dict(other, held["model"])
        set_optimizer_state_dict(other, fresh, held["optimizer"])
        assert_same(full_state(other, fresh), saved, preset)


CASES = [
    states_in_host_memory_step_the_same,
    host_memory_of_one_rank_stops_all,
    runs_resume_from_checkpoints,
    torchs_functions_find_states_that_have_not_begun,
    tensor_parallelism_cuts_columns,
    norms_count_all_parts,
    replicas_step_with_the_mean_of_their_gradients,
    a_nan_on_one_rank_is_seen_by_all,
    a_step_is_skipped_by_all_ranks_or_raised_on_all,
    unsupported_sharded_steps_raise,
    steps_under_gather_quantized_are_the_same,
    ranks_step_as_one,
]


@pytest.mark.ranks
def test_ranks(tmp_path: Path) -> None:
    """Four ranks also cover uneven and empty shards, and replicas."""
    two_ranks.run(__name__, tmp_path, 4)


if __name__ == "__main__":
    two_ranks.main(CASES)
