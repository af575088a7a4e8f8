"""Weights stored only as codes train under fully_shard as in one process, bit for bit."""

import copy
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.reference.optimizer_state import PRESETS
from quaver.torch import optim
from quaver.torch.linear import stored_weight
from quaver.torch.optim import layout
from quaver.torch.parallel import Checkpoint, gather_quantized, sync_amax_histories
from tests import two_ranks
from tests.close import assert_bitwise
from tests.torch.parallel.fsdp.training import Case, counted

#: Recipes with eight-bit weight codes, by name. With 2-D blocks the same codes serve fprop and dgrad.
RECIPES: dict[str, str | Recipe] = dict.fromkeys(recipes.RECIPES)  # type: ignore[arg-type]
RECIPES = {name: name for name in RECIPES if name not in ("bf16", "mxfp6", "mxfp4", "nvfp4")}
RECIPES["mxfp8, 2-D"] = recipes.mxfp8(weight_2d=True)
#: Steps of the quick and of the slow tests.
STEPS, ALL_STEPS = 3, 20
#: Input, hidden and output features: rows that no number of ranks divides, so that shards cut through blocks.
SIZES = (96, 300, 131)
#: A layer with fewer rows than ranks, and rows that end within a block of gradients.
SHORT_ROWS = (160, 2, 290)


def network(recipe: str | Recipe, sizes: tuple[int, int, int] = SIZES, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    a, b, c = sizes
    with qt.quantized_init(recipe, keep_initial="cpu"):
        net = nn.Sequential(qt.Linear(a, b), nn.GELU(), qt.Linear(b, c))
    qt.convert(net, recipe)
    return net.to(dtype)


def on_ranks(net: Any, hsdp: bool = False, **options: Any) -> Any:
    """Train under fully_shard with summed gradients."""
    gather_quantized(net)
    world = dist.get_world_size()
    mesh = two_ranks.mesh(2, world // 2, names=("replicas", "shards")) if hsdp else two_ranks.mesh(world)
    for part in (*net.children(), net):
        if next(part.parameters(recurse=part is not net), None) is not None or part is net:
            fully_shard(part, mesh=mesh, **options)
    for part in net.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return net


def losses_of(net: Any, optimizer: Any, steps: range, single_process: bool, micro: int = 1) -> list[float]:
    """Train. All ranks see the same batches, and each step's gradient comes from one rank, so that sums are exact.

    Args:
        single_process: whether there are no other ranks.
        micro: micro-batches per step.
    """
    world, rank = (1, 0) if single_process else (dist.get_world_size(), dist.get_rank())
    losses = []
    for step in steps:
        total = 0.0
        for i in range(micro):
            draw = torch.Generator().manual_seed(10 * step + i)
            x = torch.randn(16, net[0].in_features, generator=draw).to(net[0].weight_dtype)
            y = net(x).float()
            loss = (y.square().mean() + y[:, ::2].sum() / 50) / micro
            weighted = loss * float((step + i) % world == rank)
            if i < micro - 1:
                with optimizer.accumulating():
                    weighted.backward()
            else:
                weighted.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def everything(net: Any, optimizer: Any) -> dict[str, Tensor]:
    """Codes, scales, buffers and optimizer states of this rank."""
    sync_amax_histories(net)
    every = dict(net.named_buffers())
    for name, p in net.named_parameters():
        every[name] = layout.local(p).detach()
        if isinstance(p, qt.QuantizedTensor):
            every[f"{name}_scale"] = p.scale
        every |= {f"{name}.{key}": value for key, value in optimizer.state[p].items()}
    return every


def assert_parts(net: Any, ours: dict[str, Tensor], whole: dict[str, Tensor], label: str) -> None:
    """Check that a rank's tensors are its rows of the tensors of a single process."""
    assert ours.keys() == whole.keys(), f"{label}: {ours.keys() ^ whole.keys()}"
    parameters = dict(net.named_parameters())
    for name, value in ours.items():
        p, wanted = parameters.get(name), whole[name]
        if isinstance(value, DTensor):
            p, value = parameters[name.rpartition(".")[0]], value.to_local()
        if p is not None:
            place = layout.place(p)
            wanted = wanted[place.global_offset[0] :][: place.local_shape[0]]
        assert_bitwise(value, wanted, f"{label}: {name}")


def trains_as_one_process(
    name: str,
    preset: str,
    rule: Any = optim.AdamW,
    *,
    steps: int = STEPS,
    sizes: tuple[int, int, int] = SIZES,
    micro: int = 1,
    hsdp: bool = False,
    **options: Any,
) -> Case:
    """Compares losses, codes, scales and states after every step with one process."""

    def case(rank: int) -> None:
        # fully_shard leaves gradients in the dtype of the values that the codes represent.
        dtype = torch.bfloat16 if PRESETS[preset].gradient == "bfloat16" else torch.float32
        results = []
        for single_process in (True, False):
            net = network(RECIPES[name], sizes, dtype)
            net = net if single_process else on_ranks(net, hsdp, **options)
            optimizer = rule(net.parameters(), lr=1e-2, preset=preset, seed=5)
            losses = losses_of(net, optimizer, range(steps), single_process, micro)
            if rule is optim.ScheduleFreeAdamW:
                optimizer.eval()
                optimizer.train()
                losses += losses_of(net, optimizer, range(steps, steps + 1), single_process, micro)
                optimizer.eval()
            results.append((net, losses, everything(net, optimizer)))
        label = f"{name}, {preset}, {rule.__name__}, {sizes}"
        assert results[1][1] == results[0][1], label
        assert_parts(results[1][0], results[1][2], results[0][2], label)

    case.__name__ = f"{name}, {preset}, {rule.__name__}, {steps} steps, {sizes}, {micro}, {hsdp}, {options}"
    return case


def sharded_like(whole: Tensor, p: Any) -> Tensor:
    """Shard a tensor as a parameter is sharded."""
    if not isinstance(p, DTensor):
        return whole
    place = layout.place(p)
    own = whole[place.global_offset[0] :][: place.local_shape[0]].clone()
    return DTensor.from_local(
        own, p.device_mesh, p.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def bytes_and_collectives(rank: int) -> None:
    """One byte per element is sent; ranks agree at most once per step, and never where blocks are on one rank."""
    for name, crosses_shards in (("tensorwise", False), ("mxfp8", False), ("rowwise", False), ("blockwise", True)):
        for sizes in (SIZES, (128, 256, 512)):
            net = on_ranks(network(RECIPES[name], sizes))
            optimizer = optim.AdamW(net.parameters(), lr=1e-2, preset="lean")
            losses_of(net, optimizer, range(1), single_process=False)
            with counted() as traffic:
                losses_of(net, optimizer, range(1, 3), single_process=False)
            expected = 2 if crosses_shards and sizes == SIZES else 0
            assert traffic.agreements == expected, f"{name}, {sizes}: {traffic.agreements}"
            a, b, c = sizes
            # Per step: two all-gathers of each layer with bias and padding, and one of the scales.
            codes = a * b + b * c
            most = 2 * (2 * (codes + 4 * (b + c)) + 0.04 * codes) * 1.05
            assert traffic.gathered <= most, f"{name}, {sizes}: {traffic.gathered} bytes of {most}"


def short_rows_of_floats(rank: int) -> None:
    """A convolution's weight, one with fewer rows than ranks, and columns that shards cut at blocks and within them."""
    shapes = (64, 64, 3, 3), (1, 512, 3, 3), (8192, 1), (4100, 1)

    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            drawn = torch.Generator().manual_seed(0)
            self.all = nn.ParameterList(torch.randn(shape, generator=drawn) for shape in shapes)

        def forward(self, step: int) -> Tensor:
            drawn = torch.Generator().manual_seed(step)
            return sum((p * torch.randn(p.shape, generator=drawn)).sum() for p in self.all)  # type: ignore[return-value]

    results = []
    for single_process in (True, False):
        net = Weights()
        if not single_process:
            fully_shard(net, mesh=two_ranks.mesh(2))
        optimizer = optim.AdamW(net.parameters(), lr=1e-2, preset="lean")
        for step in range(3):
            net(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach() if single_process else p.full_tensor().detach() for p in net.all])  # type: ignore[attr-defined]
    for shape, one, two in zip(shapes, *results, strict=True):
        if shape == (4100, 1):
            torch.testing.assert_close(one, two, rtol=0, atol=5e-3)
        else:
            assert torch.equal(one, two), shape


def a_rank_holds_its_rows(rank: int) -> None:
    """Weights, residuals and moments take one byte per element each; gradients are sent as codes."""
    net = on_ranks(network("tensorwise", (256, 512, 256)))
    optimizer = optim.AdamW(net.parameters(), preset="lean")
    losses_of(net, optimizer, range(1), single_process=False)
    for p in (net[0].weight, net[2].weight):
        tensors = [layout.local(p), *map(layout.local, optimizer.state[p].values())]
        own = sum(t.untyped_storage().nbytes() for t in tensors)
        assert own <= 4.07 * p.numel() / 2 + 64, f"{own} bytes for {p.numel() / 2} elements"
        assert p.grad is None
    y = net(torch.ones(4, 256))
    (y.sum() * 1.0).backward()
    assert sum(t.nbytes for t in layout.local(net[0].weight.grad).tensors()) <= 1.02 * net[0].weight.numel() / 2
    assert layout.local(net[0].weight).dtype is torch.float8_e4m3fn


def resumes_from_a_checkpoint(name: str, preset: str, rule: Any = optim.AdamW) -> Case:
    """Resume on as many ranks, bit for bit; one process loads checkpoints of ranks and vice versa.

    Schedule-Free AdamW saves averaged weights.
    """
    averages = rule is optim.ScheduleFreeAdamW

    def case(rank: int) -> None:
        folder = two_ranks.folder() / f"{name} {preset} {rule.__name__}"
        label = f"{name}, {preset}, {rule.__name__}"

        def fresh(single_process: bool) -> tuple[Any, Any]:
            net = network(RECIPES[name])
            with torch.no_grad():
                # Start from other values, and so from other codes.
                net[0].set_weight(torch.ones(net[0].out_features, net[0].in_features))
            net = net if single_process else on_ranks(net)
            return net, rule(net.parameters(), lr=1e-3, preset=preset, seed=9)

        def on(net: Any, optimizer: Any) -> list[float]:
            if averages:
                optimizer.train()
            return losses_of(net, optimizer, range(2, 4), single_process=False)

        net = on_ranks(network(RECIPES[name]))
        optimizer = rule(net.parameters(), lr=1e-2, preset=preset, seed=3)
        losses_of(net, optimizer, range(2), single_process=False)
        if averages:
            optimizer.eval()
        Checkpoint(net, optimizer).save(folder)
        saved = everything(net, optimizer)
        saved = {name: value.clone() for name, value in saved.items()}
        expected = on(net, optimizer)
        other, again = fresh(single_process=False)
        Checkpoint(other, again).load(folder)
        for key, value in everything(other, again).items():
            # With one scale per tensor, a rank's amax covers only its own rows until the next step.
            if not key.endswith("amax"):
                assert_bitwise(layout.local(value), layout.local(saved[key]), f"{label}, {key}")
        assert on(other, again) == expected, label
        lone, whole = fresh(single_process=True)
        Checkpoint(lone, whole).load(folder)
        assert_parts(net, saved, everything(lone, whole), f"{label}, whole")
        Checkpoint(lone, whole).save(folder / "whole")
        third, parts = fresh(single_process=False)
        Checkpoint(third, parts).load(folder / "whole")
        assert on(third, parts) == expected, f"{label}, divided again"

    case.__name__ = f"{name}, {preset}, {rule.__name__} goes on from a checkpoint"
    return case


def torchs_own_state_dicts(rank: int) -> None:
    """torch's state dicts hold codes as bytes, sharded by rows, and scales unsharded."""
    net = on_ranks(network("blockwise"))
    optimizer = optim.AdamW(net.parameters(), lr=1e-2, preset="lean")
    losses_of(net, optimizer, range(2), single_process=False)
    state: Any = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
    codes = state["model"]["0.weight"]
    assert codes.dtype is torch.uint8 and codes.shape == (300, 96, 1), (codes.dtype, codes.shape)
    assert type(codes.to_local()) is Tensor
    folder = two_ranks.folder() / "by hand"
    dcp.save(state, checkpoint_id=folder)
    other = on_ranks(network("blockwise"))
    fresh = optim.AdamW(other.parameters(), lr=1e-2, preset="lean")
    loaded: Any = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, fresh)}
    dcp.load(loaded, checkpoint_id=folder)
    set_model_state_dict(other, loaded["model"])
    set_optimizer_state_dict(other, fresh, loaded["optimizer"])
    ours = everything(net, optimizer)
    for key, value in everything(other, fresh).items():
        assert_bitwise(layout.local(value), layout.local(ours[key]), key)
    expected = losses_of(net, optimizer, range(2, 4), single_process=False)
    assert losses_of(other, fresh, range(2, 4), single_process=False) == expected


def loads_weights_of_another_run(name: str, preset: str, sizes: tuple[int, int, int] = SIZES) -> Case:
    """Load larger weights of another run while the optimizer keeps its state."""

    def case(rank: int) -> None:
        dtype = torch.bfloat16 if PRESETS[preset].gradient == "bfloat16" else torch.float32
        results = []
        for single_process in (True, False):
            net, other = network(name, sizes, dtype), network(name, sizes, dtype)
            for layer in (other[0], other[2]):
                layer.set_weight(8 * layer.weight.unwrap().dequantize())
            net, other = (net, other) if single_process else (on_ranks(net), on_ranks(other))
            optimizer = optim.AdamW(net.parameters(), lr=1e-3, preset=preset)
            losses = losses_of(net, optimizer, range(2), single_process)
            set_model_state_dict(net, get_model_state_dict(other))
            losses += losses_of(net, optimizer, range(2, 4), single_process)
            results.append((net, losses, everything(net, optimizer)))
        label = f"{name}, {preset}, {sizes}"
        assert results[1][1] == results[0][1], label
        # The weights are eight times as large, and two steps change them little.
        assert results[0][2]["0.weight"].float().mul(results[0][2]["0.weight_scale"].max()).abs().max() > 0.5, label
        assert_parts(results[1][0], results[1][2], results[0][2], label)

    return case


def a_model_from_meta_loads_a_checkpoint(rank: int) -> None:
    """Each rank loads its shard of the checkpoint."""
    folder = two_ranks.folder() / "for meta"
    net = on_ranks(network("tensorwise"))
    dcp.save({"model": net.state_dict()}, checkpoint_id=folder)
    with torch.device("meta"):
        other = network("tensorwise")
    on_ranks(other).to_empty(device="cpu")
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    for model in (net, other):
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, preset="lean")
        # The saved initial values of a layer are not part of a checkpoint.
        qt.drop_initial_value(model)
        model.losses = losses_of(model, optimizer, range(2), single_process=False)
    assert net.losses == other.losses


def policies(rank: int) -> None:
    """Outputs and gradients equal one process in that dtype; codes and their values are unchanged."""
    low, full = torch.bfloat16, torch.float32
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(1))
    for computed, reduced in ((low, full), (low, None), (None, low)):
        whole = network("mxfp8", dtype=computed or full)
        net = on_ranks(network("mxfp8"), mp_policy=MixedPrecisionPolicy(computed, reduced))
        optimizer = optim.AdamW(net.parameters(), lr=1e-2, preset="balanced")
        y, expected = net(x), whole(x.to(computed or full))
        assert_bitwise(y, expected, f"{computed}, {reduced}")
        (y.float().square().sum() * float(rank == 0)).backward()
        expected.float().square().sum().backward()
        for (name, p), q in zip(net.named_parameters(), whole.parameters(), strict=True):
            place = layout.place(p)
            wanted = q.grad[place.global_offset[0] :][: place.local_shape[0]].to(low).to(p.dtype)
            assert_bitwise(p.grad.to_local(), wanted, f"{name}, {computed}, {reduced}")
        optimizer.step()
        assert net[0].weight.dtype is full and layout.local(net[0].weight).dtype is torch.float8_e4m3fn


def frozen_and_trainable_weights(rank: int) -> None:
    """Weights of one FSDP unit, frozen from the start or later."""
    results = []
    for single_process in (True, False):
        net = network("mxfp8")
        net[0].weight.requires_grad_(False)
        if not single_process:
            gather_quantized(net)
            fully_shard(net)
            net.set_gradient_divide_factor(1.0)
            net.set_force_sum_reduction_for_comms(True)
        optimizer = optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, preset="lean")
        losses = losses_of(net, optimizer, range(2), single_process)
        net[2].weight.requires_grad_(False)
        losses += losses_of(net, optimizer, range(2, 4), single_process)
        net[2].weight.requires_grad_(True)
        losses += losses_of(net, optimizer, range(4, 6), single_process)
        # It was frozen when gather_quantized prepared it.
        net[0].weight.requires_grad_(True)
        net(torch.ones(4, 96)).sum().backward()
        gradient = net[0].weight.grad
        assert gradient is not None
        results.append((losses, gradient))
    assert results[1][0] == results[0][0]
    assert_bitwise(
        layout.local(results[1][1]), layout.local(sharded_like(results[0][1] * two_ranks.world(), net[0].weight))
    )


def not_finite(rank: int) -> None:
    """NaN in one rank's rows reaches all ranks through a per-tensor scale, as in one process; steps can be skipped."""
    for name in ("tensorwise", "blockwise", "rowwise"):
        for preset, dtype in (("balanced", torch.bfloat16), ("float32", torch.float32)):
            scales = []
            for single_process in (True, False):
                net = network(RECIPES[name], dtype=dtype)
                net = net if single_process else on_ranks(net)
                optimizer = optim.AdamW(net.parameters(), lr=1e-2, preset=preset)
                losses_of(net, optimizer, range(1), single_process)
                p = net[0].weight
                p.grad = sharded_like(torch.zeros(p.shape, dtype=p.grad_dtype), p)
                place = layout.place(p)
                if place.global_offset[0] <= 299 < place.global_offset[0] + place.local_shape[0]:
                    # A row of the last rank.
                    layout.local(p.grad)[299 - place.global_offset[0], 3] = float("nan")
                optimizer.step()
                optimizer.zero_grad()
                scales.append(stored_weight.scales_of(net[0])["weight_scale"])
            assert scales[0].isnan().any(), name
            assert_bitwise(scales[1], scales[0], f"{name}, {preset}")
    net = on_ranks(network("tensorwise"))
    optimizer = optim.AdamW(net.parameters(), lr=1e-2, preset="lean", nonfinite="skip")
    before = layout.local(net[0].weight).clone()
    loss = net(torch.ones(4, 96)).sum() * (float("nan") if rank == 0 else 1.0)
    loss.backward()
    optimizer.step()
    assert int(optimizer.skipped) == 1
    assert_bitwise(layout.local(net[0].weight), before, "skipped")


def other_readers(rank: int) -> None:
    """Layers read the codes under every recipe, and without quantization."""
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(1))
    for name in ("mxfp8", "tensorwise"):
        whole, net = network(RECIPES[name]), on_ranks(network(RECIPES[name]))
        with qt.autocast(enabled=False):
            assert_bitwise(net(x), whole(x), name)
        for each in (whole, net):
            for i in (0, 2):
                each[i].recipe = None
        for recipe in (None, "rowwise", "blockwise"):
            grads = []
            for each in (whole, net):
                with qt.autocast(recipe, enabled=recipe is not None) if recipe else qt.autocast(enabled=False):
                    y = each(x)
                (y.square().sum() * float(each is whole or rank == 0)).backward()
                grads.append((y, each[0].weight.grad, each[0].bias.grad))
                each.zero_grad()
            (y, g, b), (ours, dg, db) = grads
            place = layout.place(net[0].weight)
            assert_bitwise(ours, y, f"{name} under {recipe}")
            assert_bitwise(dg.to_local(), g[place.global_offset[0] :][: place.local_shape[0]], f"{name} under {recipe}")
            assert_bitwise(db.to_local(), b[place.global_offset[0] :][: place.local_shape[0]], f"{name} under {recipe}")


def trains_through(use: Callable[..., Any]) -> Case:
    """Call the layers through a checkpoint that recomputes them, or a compiler that leaves them to eager mode."""

    def case(rank: int) -> None:
        x, results = torch.randn(8, 96, generator=torch.Generator().manual_seed(1)), []
        for single_process in (True, False):
            net = network("mxfp8") if single_process else on_ranks(network("mxfp8"))
            inner = nn.Sequential(net)
            optimizer = optim.AdamW(net.parameters(), lr=1e-2, preset="lean")
            for _ in range(2):
                loss = use(inner, x).square().mean()
                (loss * float(single_process or rank == 0)).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(loss.item())
        assert results[0] == results[1]

    case.__name__ = f"called by {use.__name__}"
    return case


def compiled(net: nn.Module, x: Tensor) -> Any:
    return torch.compile(net, backend="eager")(x)


class OneLayerPerRank(nn.Module):
    """Two layers, of which each rank uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        with qt.quantized_init("tensorwise"):
            self.layers = nn.ModuleList(qt.Linear(96, 130, recipe="tensorwise") for _ in range(2))

    def forward(self, x: Tensor, number: int) -> Tensor:
        y: Tensor = self.layers[number](x)
        return y


def layers_unused_by_a_rank(rank: int) -> None:
    """fully_shard may use zeros for their gradients."""
    x, results = torch.ones(4, 96), []
    for single_process in (True, False):
        net: Any = OneLayerPerRank()
        if not single_process:
            gather_quantized(net)
            fully_shard(net)
            net.set_reduce_scatter_unused_params(True)
            net.set_gradient_divide_factor(1.0)
            net.set_force_sum_reduction_for_comms(True)
        optimizer = optim.AdamW(net.parameters(), lr=1e-2, preset="lean")
        for _ in range(2):
            for number in (0, 1) if single_process else (rank,):
                net(x, number).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((net, everything(net, optimizer)))
    assert_parts(results[1][0], results[1][1], results[0][1], "unused")


def operations_on_codes_raise(rank: int) -> None:
    """Operations that would read codes as numbers raise an error."""
    net = on_ranks(network("tensorwise"))
    weight: Any = net[0].weight
    with pytest.raises(ValueError, match="reads the weight of 0 as numbers, and it is stored only as codes"):
        weight.to_local().norm()
    with pytest.raises(ValueError, match="reads the weight of 0 as numbers"), torch.no_grad():
        weight.copy_(sharded_like(torch.ones(weight.shape), weight))
    with pytest.raises(ValueError, match="reads the weight of 0 as numbers"):
        nn.init.zeros_(weight)
    torch_sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(4, 96)).sum().backward()
    with pytest.raises(ValueError, match="SGD got a weight that is stored as codes"):
        torch_sgd.step()
    with pytest.raises(ValueError, match="Muon needs whole matrices"):
        optim.Muon([weight])
    with pytest.raises(ValueError, match="'msamp' has one scale for the whole parameter"):
        optim.AdamW([weight], preset="msamp")
    with pytest.raises(ValueError, match="stored as codes sharded over"):
        stored_weight.decode(net[0], {}, "0.", {})
    plain = network("tensorwise")
    fully_shard(plain)
    with pytest.raises(ValueError, match="was passed directly to fully_shard, which shards its values"):
        optim.AdamW(plain.parameters())
    with pytest.raises(ValueError, match=r"without scales.*gather_quantized\(model\)"):
        plain(torch.ones(4, 96))


def two_models(rank: int) -> None:
    """Train two models alternately, and with one optimizer."""
    results = []
    for single_process in (True, False):
        nets = [network("tensorwise"), network("blockwise", SHORT_ROWS)]
        if not single_process:
            nets = [on_ranks(net) for net in nets]
        parameters = [p for net in nets for p in net.parameters()]
        optimizer = optim.AdamW(parameters, lr=1e-2, preset="lean")
        losses = []
        for step in range(3):
            for net in nets[: 1 + step % 2]:
                x = torch.randn(8, net[0].in_features, generator=torch.Generator().manual_seed(step))
                loss = net(x).square().mean()
                (loss * float(single_process or rank == 0)).backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        results.append(losses)
    assert results[0] == results[1]


def a_backward_that_fails(rank: int) -> None:
    """After a failed backward the model continues to train."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise RuntimeError("meant")

    net = on_ranks(network("tensorwise"))
    optimizer = optim.AdamW(net.parameters(), lr=1e-2, preset="lean")
    first = losses_of(net, optimizer, range(1), single_process=False)
    with pytest.raises(RuntimeError, match="meant"):
        Fails.apply(net(torch.ones(4, 96))).sum().backward()  # type: ignore[no-untyped-call]
    net.reshard()
    optimizer.zero_grad()
    net2 = on_ranks(network("tensorwise"))
    optimizer2 = optim.AdamW(net2.parameters(), lr=1e-2, preset="lean")
    assert losses_of(net2, optimizer2, range(1), single_process=False) == first
    again = losses_of(net, optimizer, range(1, 3), single_process=False)
    assert again == losses_of(net2, optimizer2, range(1, 3), single_process=False)


def weights_in_another_order(rank: int) -> None:
    """Otherwise ranks would write the scales of one weight to another one of the same shape."""
    net = on_ranks(network("mxfp8", (96, 96, 96)))
    parameters = list(net.parameters())
    optimizer = optim.AdamW(parameters[::-1] if rank else parameters, lr=1e-2, preset="lean")
    net(torch.ones(4, 96)).sum().backward()
    message = (
        r"rank 0: .*weights in codes \['0.weight', '2.weight'\]; rank 1: .*weights in codes \['2.weight', '0.weight'\]"
    )
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    # Also for groups that are added later.
    optimizer = optim.AdamW([net[0].bias], lr=1e-2, preset="lean")
    optimizer.step()
    for layer in (net[2], net[0]) if rank else (net[0], net[2]):
        optimizer.add_param_group({"params": [layer.weight]})
    with pytest.raises(ValueError, match=message):
        optimizer.step()


def a_step_that_one_rank_skips(rank: int) -> None:
    """The other rank names the collective it waited for."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    net = network("blockwise")
    gather_quantized(net)
    fully_shard(net, mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = optim.AdamW(net.parameters(), lr=1e-2, preset="lean")
    net(torch.ones(4, 96)).sum().backward()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"waited at an optimizer's step for the other ranks"):
            optimizer.step()


SPECIAL: list[Case] = [
    *(
        bytes_and_collectives,
        a_rank_holds_its_rows,
        torchs_own_state_dicts,
        a_model_from_meta_loads_a_checkpoint,
        policies,
    ),
    *(frozen_and_trainable_weights, not_finite, other_readers, trains_through(qt.checkpoint), layers_unused_by_a_rank),
    *(operations_on_codes_raise, two_models, a_backward_that_fails, short_rows_of_floats, weights_in_another_order),
]
CASES: dict[int, list[Case]] = {
    2: [
        *(trains_as_one_process(name, "lean") for name in RECIPES),
        *(trains_as_one_process(name, "balanced", steps=2) for name in ("delayed", "blockwise", "mxfp8, 2-D")),
        trains_as_one_process("tensorwise", "lean", micro=2),
        trains_as_one_process("mxfp8", "lean", steps=2, reshard_after_forward=False),
        *(resumes_from_a_checkpoint("tensorwise", "lean"), resumes_from_a_checkpoint("blockwise", "balanced")),
        resumes_from_a_checkpoint("tensorwise", "lean", optim.ScheduleFreeAdamW),
        *(loads_weights_of_another_run("tensorwise", "balanced"), loads_weights_of_another_run("blockwise", "float32")),
        *SPECIAL,
    ],
    3: [
        *(
            trains_as_one_process(name, "lean", sizes=SHORT_ROWS)
            for name in ("tensorwise", "blockwise", "rowwise", "mxfp8, 2-D")
        ),
        trains_as_one_process("tensorwise", "lean", optim.Lion, steps=2),
        trains_as_one_process("blockwise", "lean", optim.SGD, steps=2),
        *(
            trains_as_one_process(name, preset, optim.ScheduleFreeAdamW, steps=2)
            for name, preset in (("tensorwise", "lean"), ("blockwise", "balanced"), ("tensorwise", "float32"))
        ),
        trains_as_one_process("tensorwise", "exact", steps=2),
        trains_as_one_process("blockwise", "coat", optim.Adam, steps=2),
        loads_weights_of_another_run("tensorwise", "lean", SHORT_ROWS),
    ],
    4: [
        *(trains_as_one_process(name, "lean", steps=2) for name in ("tensorwise", "blockwise", "mxfp8, 2-D", "mxfp8")),
        *(trains_as_one_process(name, "lean", steps=2, hsdp=True) for name in ("tensorwise", "mxfp8, 2-D")),
    ],
}
RULES = (optim.AdamW, optim.Adam, optim.Lion, optim.SGD, optim.ScheduleFreeAdamW)
#: Every recipe, preset and rule, in twenty steps.
SLOW: dict[int, list[Case]] = {
    ranks: [
        *(
            trains_as_one_process(n, preset, steps=ALL_STEPS)
            for n in RECIPES
            for preset in ("lean", "balanced", "float32", "exact")
        ),
        *(trains_as_one_process(n, "lean", rule, steps=ALL_STEPS, sizes=SHORT_ROWS) for n in RECIPES for rule in RULES),
        *(resumes_from_a_checkpoint(name, preset) for name in RECIPES for preset in ("lean", "balanced")),
    ]
    for ranks in (2, 3)
}
SLOW[4] = [
    trains_as_one_process(n, "lean", steps=ALL_STEPS, hsdp=replicas) for n in RECIPES for replicas in (False, True)
]
# The last one of two ranks, since no collective follows one that has timed out.
SLOW[2] += [trains_through(compiled), a_step_that_one_rank_skips]


@pytest.mark.parametrize("ranks", CASES)
@pytest.mark.ranks
def test_weights_in_codes_learn_on_ranks(ranks: int, tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, ranks)


@pytest.mark.parametrize("ranks", CASES)
@pytest.mark.ranks
@pytest.mark.slow
def test_twenty_steps(ranks: int, tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, ranks, slow=True)


def test_a_prepared_layer_is_copied_and_moved_as_any_other(tmp_path: Path) -> None:
    plain, net = network("mxfp8"), network("mxfp8")
    gathers = gather_quantized(net)
    assert gathers.stored == ["0", "2"]
    assert net[0].weight.requires_grad and net[0].weight.dtype is torch.float32
    assert stored_weight.owner(net[0].weight) is net[0]
    other = network("mxfp8")
    gather_quantized(other)
    with torch.no_grad(), pytest.raises(ValueError, match="copied from the codes of 0 without their scales"):
        other[0].weight.copy_(net[0].weight)
    copied = copy.deepcopy(net)
    x = torch.ones(4, 96)
    assert_bitwise(copied(x), plain(x), "a copy is not prepared")
    assert isinstance(copied[0].weight, qt.QuantizedTensor) and stored_weight.owner(copied[0].weight) is copied[0]
    torch.save(net, tmp_path / "net.pt")
    assert_bitwise(torch.load(tmp_path / "net.pt", weights_only=False)(x), plain(x), "read again")
    for key, value in plain.state_dict().items():
        assert_bitwise(net.state_dict()[key], value, key)
    assert net.bfloat16()[0].weight.dtype is torch.bfloat16, "what it stands for"
    net.to("meta")
    assert net[0].weight.is_meta and net[0].weight.plain.dtype is torch.float8_e4m3fn
    with pytest.raises(ValueError, match="0 was prepared by gather_quantized but is not managed by fully_shard"):
        net(x)


if __name__ == "__main__":
    two_ranks.main(CASES[two_ranks.world()], slow=SLOW[two_ranks.world()])
