"""Optimizer states in host memory: the bits of states on the device, at the memory that they promise."""

import copy
import itertools
import os
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import quaver.torch as qt
from quaver.torch import optim
from quaver.torch.backends.gpu import device
from quaver.torch.optim import host, layout
from quaver.torch.optim.step import step_parameter
from tests.close import assert_bitwise
from tests.torch.offload.simulated import Counted, Simulated

OFFLOAD = ("cpu", "stream")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of several pieces."""
    monkeypatch.setattr(host, "PIECE_BYTES", {"cpu": 60_000, "stream": 60_000})


class Every(nn.Module):
    """Weights of all kinds: matrices, a stack, a convolution in another memory format, a column and small tensors."""

    def __init__(self, recipe: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 128), nn.LayerNorm(128))
        if recipe is not None:
            qt.quantize_weights(self.layers, recipe)
        self.stack = nn.Parameter(torch.randn(3, 64, 64) / 8)
        self.conv = nn.Conv2d(8, 64, 3, padding=1).to(memory_format=torch.channels_last)
        self.column = nn.Parameter(torch.randn(5000, 1) / 8)
        self.narrow = nn.Parameter((torch.randn(64, 96) / 8).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        image = self.conv(x.view(-1, 8, 4, 4)).square().mean()
        others = (x[:, :64] @ self.stack).square().mean() + (
            x @ self.layers[0].bias[:128] * self.column[:, 0, None]
        ).var()
        loss: Tensor = (
            self.layers(x).square().mean() + image + others + (x[:, :64].bfloat16() @ self.narrow).float().var()
        )
        return loss


def batch(seed: int) -> Tensor:
    return torch.randn(16, 128, generator=torch.Generator().manual_seed(seed))


def trained(offload: str | None, recipe: str | None, preset: str, rule: Any = optim.AdamW, **options: Any) -> Any:
    """Three clipped steps, with a write to a stored weight between two of them."""
    model = Every(recipe)
    parameters: Any = model.parameters()
    if rule is optim.Muon:
        parameters = [{"params": [p for p in model.parameters() if p.dim() == 2 and p.shape[1] > 1]}]
        parameters += [{"params": [p for p in model.parameters() if p.dim() != 2], "rule": "adamw"}]
    optimizer = rule(parameters, lr=1e-2, preset=preset, offload=offload, _transfers=Simulated(), **options)
    saved = copy.deepcopy(model.layers.state_dict())
    for step in range(3):
        model(batch(step)).backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(optimizer, optim.ScheduleFreeAdamW):
            optimizer.eval()
            optimizer.train()
        if step == 1:
            model.layers.load_state_dict(saved)
    return model, optimizer


def assert_equal(ours: Any, theirs: Any) -> None:
    """Equal weights, codes, scales and states of two pairs (model, optimizer)."""
    for (name, value), other in zip(ours[0].state_dict().items(), theirs[0].state_dict().values(), strict=True):
        if isinstance(value, Tensor):
            assert_bitwise(value, other, name)
    states, others = (optimizer.state_dict()["state"] for _, optimizer in (ours, theirs))
    for key, state in states.items():
        assert state.keys() == others[key].keys()
        for name, value in state.items():
            assert_bitwise(value, others[key][name], f"{key} {name}")


@pytest.mark.parametrize("offload", OFFLOAD)
@pytest.mark.parametrize(
    ("recipe", "preset", "rule"),
    [
        (None, "float32", optim.AdamW),
        (None, "lean", optim.Adam),
        ("tensorwise", "lean", optim.AdamW),
        ("tensorwise", "balanced", optim.SGD),
        ("rowwise", "balanced", optim.Lion),
        ("blockwise", "lean", optim.Lion),
        ("blockwise", "float32", optim.AdamW),
        ("mxfp8", "lean", optim.AdamW),
        ("mxfp8", "exact", optim.Muon),
        ("tensorwise", "msamp", optim.AdamW),
        ("nvfp4", "torchao8", optim.AdamW),
        ("tensorwise", "lean", optim.ScheduleFreeAdamW),
    ],
)
def test_bits_equal_those_of_states_on_the_device(offload: str, recipe: str | None, preset: str, rule: Any) -> None:
    options = {"momentum": 0.9} if rule is optim.SGD else {}
    ours, theirs = (trained(where, recipe, preset, rule, **options) for where in (offload, None))
    assert_equal(ours, theirs)


@pytest.mark.parametrize("offload", OFFLOAD)
def test_kernels_step_streamed_states(offload: str) -> None:
    """A kernel gets tensors of one device only; with offload="cpu" only small parameters have one."""
    ends = []
    for where in (offload, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 128, bias=False))
        qt.quantize_weights(model, "blockwise")
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, preset="lean", offload=where, _transfers=Simulated())
        for step in range(2):
            model(batch(step)).square().mean().backward()
            with device.asking("triton"):
                optimizer.step()
            optimizer.zero_grad()
        ends.append((model, optimizer))
    assert_equal(*ends)


@pytest.mark.parametrize("offload", OFFLOAD)
def test_steps_in_backward_equal_those_after_it(offload: str) -> None:
    ends = []
    for where in (offload, None):
        model = Every("tensorwise")
        optimizer = optim.AdamW(model.parameters(), preset="lean", offload=where, _transfers=Simulated())
        optimizer.step_in_backward(outstanding_bytes=20_000, max_norm=0.1)
        for step in range(3):
            with optimizer.accumulating():
                model(batch(step)).backward()
            model(batch(10 + step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append((model, optimizer))
    assert_equal(*ends)


class Slow(Simulated):
    """Copies that take long, so that a thread which waits for them is late."""

    def synchronize(self, event: int, device: torch.device) -> None:
        time.sleep(0.002)
        super().synchronize(event, device)


@pytest.mark.parametrize("outstanding_bytes", [1, 30_000, 120_000])
def test_a_thread_steps_only_while_backward_runs(outstanding_bytes: int) -> None:
    """After backward, gradients and weights are those of steps without a thread, whatever happens then."""
    ends, seen = [], []
    for where in ("cpu", None):
        model = Every("tensorwise")
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, preset="lean", offload=where, _transfers=Slow())
        optimizer.step_in_backward(outstanding_bytes, max_norm=0.1)
        own = list[Any]()
        for step in range(4):
            model(batch(step)).backward()
            own.append([p.grad is None for p in model.parameters()])
            own.append(copy.deepcopy(optimizer.state_dict()["state"]) if step == 1 else model(batch(9)).item())
            if step != 2:
                optimizer.step()
            optimizer.zero_grad()
        ends.append((model, optimizer))
        seen.append(own)
    assert_equal(*ends)
    states = [own.pop(3) for own in seen]
    assert seen[0] == seen[1]
    for key, state in states[0].items():
        for name, value in state.items():
            assert_bitwise(value, states[1][key][name], f"{key} {name}")


def test_an_error_in_the_thread_is_raised_by_backward_or_step() -> None:
    """Nothing is stepped then, and steps go on when there is memory, with the norm of the gradients as it was."""
    ends = []
    for where, outstanding_bytes in (("cpu", 1 << 25), (None, 1 << 25), ("cpu", 1)):
        model, simulated = Every("tensorwise"), Simulated(pinned=0)
        optimizer = optim.AdamW(model.parameters(), preset="lean", offload=where, _transfers=simulated)
        optimizer.step_in_backward(outstanding_bytes, max_norm=0.1)
        before = copy.deepcopy(model.layers.state_dict())
        if where is not None:
            with pytest.raises(ValueError, match=r"no .* GB of pinned memory .*: allow more locked memory"):
                model(batch(0)).backward()
                assert outstanding_bytes > 1
                optimizer.step()
            for name, value in model.layers.state_dict().items():
                assert_bitwise(value, before[name], name)
            simulated.pinned = float("inf")
        else:
            model(batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model(batch(1)).backward()
        optimizer.step()
        ends.append((model, optimizer))
    assert_equal(*ends[:2])


@pytest.mark.parametrize("offload", OFFLOAD)
def test_no_copy_is_pending_after_an_error_in_a_step(offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces before the error are stepped as without offload, and the optimizer can step again."""
    ends = []
    for where in (offload, None):
        torch.manual_seed(0)
        model, simulated = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4))), Simulated()
        optimizer = optim.AdamW(model.parameters(), preset="lean", offload=where, _transfers=simulated)
        numbers = itertools.count()

        def failing(*arguments: Any, numbers: Any = numbers) -> Any:
            if next(numbers) == 2:
                raise RuntimeError("out of memory")
            return step_parameter(*arguments)

        model(batch(0)).square().mean().backward()
        with monkeypatch.context() as patch:
            patch.setattr("quaver.torch.optim.optimizer.step_parameter", failing)
            with pytest.raises(RuntimeError, match="out of memory"):
                optimizer.step()
        assert not any(simulated.queue)
        ends.append([layer.weight.detach().clone() for layer in model])
        optimizer.step()
    for ours, theirs in zip(*ends, strict=True):
        assert_bitwise(ours, theirs)


def test_a_model_on_the_cpu_is_stepped_without_a_thread() -> None:
    model = Every("tensorwise")
    optimizer = optim.AdamW(model.parameters(), preset="lean", offload="cpu")
    optimizer.step_in_backward(1)
    threads, before = [], threading.active_count()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: threads.append(threading.active_count()))
    model(batch(0)).backward()
    assert set(threads) == {before}


@pytest.mark.parametrize("offload", OFFLOAD)
def test_gradients_that_are_not_finite_are_skipped(offload: str) -> None:
    """By `nonfinite`, and by a GradScaler, whose flag and factor are on the device."""
    ends = []
    for where in (offload, None):
        model = Every("tensorwise")
        optimizer = optim.AdamW(
            model.parameters(), preset="lean", nonfinite="skip", offload=where, _transfers=Simulated()
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for factor in (1.0, float("inf"), 3.0):
            scaler.scale(model(batch(0)) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append((model, optimizer))
    assert_equal(*ends)
    assert all(int(optimizer.state[p]["step"]) == 2 for _, optimizer in ends for p in optimizer.state)


def test_programs_step_states_in_host_memory() -> None:
    ends = []
    for where in ("cpu", None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 512, bias=False))
        optimizer = optim.AdamW(model.parameters(), preset="lean", compile=True, offload=where, _transfers=Simulated())
        for step in range(2):
            model(torch.randn(4, 512, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append((model, optimizer))
    assert_equal(*ends)


# ---- memory ----


def device_bytes(offload: str | None, layers: int, width: int) -> tuple[float, float]:
    """Device bytes a parameter before a step and at its peak: weights, gradients, states and buffers."""
    with Counted() as counted:
        simulated = Simulated(counted)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        qt.convert(model, "tensorwise")
        qt.quantize_weights(model, "tensorwise")
        optimizer = optim.AdamW(model.parameters(), preset="lean", offload=offload, _transfers=simulated)
        for _ in range(2):
            optimizer.zero_grad()
            with qt.autocast("tensorwise"):
                model(torch.randn(8, width)).square().mean().backward()
            if offload is not None:
                states = [layout.local(t) for state in optimizer.state.values() for t in state.values()]
                counted.ignore(*states)
            before, counted.peak, counted.measures_peak = counted.bytes(), 0, True
            if not len(optimizer.state):
                counted.measures_peak = False
            optimizer.step()
            counted.measures_peak = False
    number = layers * width * width
    return before / number, counted.peak / number


def test_device_bytes_a_parameter() -> None:
    """Weights and gradients in codes take 2.1 bytes; a step adds two buffers of one parameter's states each."""
    layers = 16
    every, most = device_bytes(None, layers, 256)
    assert every > 5
    before, _ = device_bytes("cpu", layers, 256)
    assert before <= 2.1
    before, peak = device_bytes("stream", layers, 256)
    assert before <= 2.1 and peak <= most - 3.06 * (1 - 2 / layers) + 0.01


# ---- checkpoints ----


@pytest.mark.parametrize("offload", OFFLOAD)
def test_states_move_between_placements(offload: str) -> None:
    """A state dict does not depend on where states are."""
    for source, target in ((offload, None), (None, offload)):
        model, optimizer = trained(source, "blockwise", "lean")
        again = copy.deepcopy(model)
        other = optim.AdamW(again.parameters(), lr=1e-2, preset="lean", offload=target, _transfers=Simulated())
        other.load_state_dict(optimizer.state_dict())
        for net, each in ((model, optimizer), (again, other)):
            net(batch(7)).backward()
            each.step()
        assert_equal((model, optimizer), (again, other))


def test_a_state_dict_of_an_optimizer_without_steps() -> None:
    model = Every("tensorwise")
    optimizer = optim.AdamW(model.parameters(), preset="lean", offload="cpu", _transfers=Simulated())
    assert optimizer.state_dict()["state"]
    twin = copy.deepcopy(optimizer)
    assert twin.offload == "cpu"


def test_streamed_states_of_a_copied_optimizer_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = trained("stream", "tensorwise", "lean")
    simulated, pinned = Simulated(), list[Tensor]()
    monkeypatch.setattr(host, "Transfers", lambda: simulated)
    monkeypatch.setattr(simulated, "pin", lambda x: pinned.append(x) or x)
    twin = copy.deepcopy(optimizer)
    states = [t for p, state in twin.state.items() if p.numel() >= 4096 for t in state.values() if t.dim()]
    assert {id(t) for t in pinned} == {id(t) for t in states}


def test_sharded_states_of_a_gpu_are_wrapped_in_host_memory() -> None:
    """DTensor.from_local would move them to the mesh's device."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cuda", [0, 1])
        p = DTensor.from_local(
            torch.empty(4, 8, device="meta"), mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 8)), stride=(8, 1)
        )
        state = layout.like(p, torch.ones(4, 2, dtype=torch.uint8), (8, 2))
        assert isinstance(state, DTensor) and state.shape == (8, 2) and state.placements == p.placements
        assert state.to_local().is_cpu and int(state.to_local().sum()) == 8
        moved = layout.like(p, torch.ones(4, 8), (8, 8))
        assert isinstance(moved, DTensor)
        with pytest.raises(ValueError, match="already in host memory, where another tool put it"):
            optim.AdamW([nn.Parameter(moved)], offload="cpu")
    finally:
        dist.destroy_process_group()


# ---- bad input ----


def test_unknown_placements_raise() -> None:
    with pytest.raises(ValueError, match=r"offload is 'host'; give 'cpu' .* 'stream' .* or None"):
        optim.AdamW(nn.Linear(64, 64).parameters(), offload="host")


@pytest.mark.parametrize("call", ["step", "state_dict", "load_state_dict"])
def test_states_that_host_memory_cannot_store_raise(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything changes, and the optimizer goes on when there is memory."""
    model = Every("tensorwise")
    optimizer = optim.AdamW(model.parameters(), preset="lean", offload="cpu", _transfers=Simulated())
    twin = copy.deepcopy(model)
    other = optim.AdamW(twin.parameters(), preset="lean")
    model(batch(0)).backward()
    before, saved = copy.deepcopy(model.state_dict()), other.state_dict()
    arguments = (saved,) if call == "load_state_dict" else ()
    if call == "state_dict":
        optimizer.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(host, "available_memory", lambda: 100_000)
        with pytest.raises(ValueError, match=r"states need .* GB of host memory, and 0.0001 GB are available: use a"):
            getattr(optimizer, call)(*arguments)
    assert not len(optimizer.state)
    for name, value in model.state_dict().items():
        assert_bitwise(value, before[name], name)
    getattr(optimizer, call)(*arguments)


def test_frozen_parameters_need_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Every("tensorwise").requires_grad_(False)
    model.narrow.requires_grad_(True)
    optimizer = optim.AdamW(model.parameters(), preset="lean", offload="cpu", _transfers=Simulated())
    monkeypatch.setattr(host, "available_memory", lambda: 6 * model.narrow.numel())
    optimizer.load_state_dict(optimizer.state_dict())
    assert [*optimizer.state] == [model.narrow]


def test_available_memory_is_that_of_this_machine() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 1 << 20 < host.available_memory() <= total


def test_two_optimizers_with_states_in_host_memory_raise() -> None:
    model = Every(None)
    first = optim.AdamW(model.parameters(), offload="cpu", _transfers=Simulated())
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(first, lambda _: 1.0)
    model(batch(0)).backward()
    first.step()
    second = optim.AdamW(model.parameters(), offload="stream", _transfers=Simulated())
    with pytest.raises(
        ValueError, match="another optimizer already stores states of the same parameters in host memory"
    ):
        second.step()
    gone = weakref.ref(first)
    del first, scheduler
    # A scheduler makes a reference cycle with its optimizer, which the second one collects.
    second.step()
    assert gone() is None


def test_states_that_a_trainer_moved_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning moves all states to the device of the model when it resumes."""
    model = Every("tensorwise")
    optimizer = optim.AdamW(model.parameters(), preset="lean", offload="cpu", _transfers=Simulated())
    model(batch(0)).backward()
    optimizer.step()
    p = next(p for p in optimizer.state if p.numel() >= 4096)
    before = {name: value.clone() for name, value in optimizer.state[p].items()}
    monkeypatch.setattr(type(optimizer), "device_of_states", lambda *_: torch.device("meta"))
    config = optimizer.config(p, optimizer.param_groups[0])
    optimizer._return_states(p, config)
    assert all(value.is_meta for value in optimizer.state[p].values())
    monkeypatch.undo()
    optimizer.state[p] = before
    optimizer._return_states(p, config)
    assert all(optimizer.state[p][name] is value for name, value in before.items())
