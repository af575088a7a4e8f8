"""On a card: a captured training step is the eager one, step by step and bit by bit."""

import copy
import os
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quaver.torch as qt
from quaver.recipes import RECIPES, get
from quaver.torch import optim
from quaver.torch.backends.gpu import launch
from quaver.torch.quantized_tensor import memory_of
from quaver.train.config import TrainConfig
from quaver.train.torch.learner import TorchLearner

pytestmark = pytest.mark.gpu
#: A walk over the launches takes fewer (`benchmarks.gpu.ahead.walk`).
STEPS = int(os.environ.get("QUAVER_TEST_STEPS", "8"))


def batches(count: int = STEPS, accumulate: int = 2) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, accumulate, 2, 65))


def learner(recipe: str, capture: str) -> TorchLearner:
    config = TrainConfig(recipe=recipe, model="tiny", device="cuda", accumulate=2, capture=capture)
    return TorchLearner(config, get(recipe), 256)


def rate(step: int) -> float:
    return 1e-3 / (step + 1)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.filterwarnings("ignore:.*decoded operands:UserWarning")
def test_captured_steps_equal_the_eager_ones(recipe: str) -> None:
    """Losses, norms, parameters, histories and counts; and a validation after them sees the weights as they are."""
    eager, captured = learner(recipe, "none"), learner(recipe, "step")
    for step, batch in enumerate(batches()):
        assert captured.step(batch, rate(step)) == eager.step(batch, rate(step)), f"step {step}"
    for name, value in eager.model.state_dict().items():
        assert torch.equal(captured.model.state_dict()[name], value), name
    assert captured.loss(batches(1)[0]) == eager.loss(batches(1)[0])


def test_a_nonfinite_loss_skips_the_update_and_training_continues() -> None:
    captured = learner("tensorwise", "step")
    for step, batch in enumerate(batches(5)):
        captured.step(batch, rate(step))
    before = {name: value.clone() for name, value in captured.model.state_dict().items()}
    weight = captured.model.get_parameter("embedding.weight")
    saved = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    loss, _ = captured.step(batches(1)[0], 1e-3)
    assert np.isnan(loss)
    with torch.no_grad():
        weight.copy_(saved)
    for name, value in captured.model.state_dict().items():
        assert torch.equal(before[name], value), name
    loss, norm = captured.step(batches(1)[0], 1e-3)
    assert np.isfinite(loss) and np.isfinite(norm)


def test_later_steps_continue_from_a_loaded_checkpoint() -> None:
    captured, eager = learner("delayed", "step"), learner("delayed", "none")
    for step, batch in enumerate(batches(5)):
        captured.step(batch, rate(step))
    eager.load(*captured.tensors())
    captured.load(*captured.tensors())
    for step, batch in enumerate(batches(6)):
        assert captured.step(batch, rate(step)) == eager.step(batch, rate(step)), f"step {step}"


def test_other_shapes_and_device_reads_give_clear_errors() -> None:
    doubled = qt.CapturedStep(lambda x: x * 2, warm_up=1)
    x = torch.ones(3, device="cuda")
    assert [doubled(x * n).tolist() for n in (1, 2, 3)] == [[2.0] * 3, [4.0] * 3, [6.0] * 3]
    with pytest.raises(ValueError, match=r"takes torch.float32 \[3\] and got torch.float32 \[4\]"):
        doubled(torch.ones(4, device="cuda"))
    reading = qt.CapturedStep(lambda x: x * x.sum().item(), warm_up=1)
    reading(x)
    with pytest.raises(RuntimeError, match="read the device on the host"):
        reading(x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [64, 37])
@pytest.mark.parametrize("recipe", [name for name, build in RECIPES.items() if build().quantizes])
@pytest.mark.filterwarnings("ignore:.*decoded operands:UserWarning")
def test_a_capture_loads_no_kernel_and_gives_the_gradients_of_eager_steps(
    recipe: str, tokens: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = launch._load

    def checked(one: launch.KernelLaunch) -> object:
        assert not torch.cuda.is_current_stream_capturing(), f"{one.fn} is loaded inside a capture"
        return load(one)

    monkeypatch.setattr(launch, "_load", checked)
    layer = qt.Linear(128, 64, bias=bias, dtype=torch.bfloat16, device="cuda", recipe=recipe)
    twin = copy.deepcopy(layer)

    def step(layer: qt.Linear, x: torch.Tensor) -> list[torch.Tensor]:
        layer.zero_grad()
        leaf = x.detach().requires_grad_()
        with qt.autocast(recipe):
            y = layer(leaf)
        y.float().square().sum().backward()
        return [y.detach(), leaf.grad, layer.weight.grad]  # type: ignore[list-item]

    captured = qt.CapturedStep(lambda x: step(layer, x))
    for number in range(6):
        torch.manual_seed(number)
        x = torch.randn(tokens, 128, device="cuda").bfloat16()
        replayed = [t.clone() for t in captured(x)]
        for gradient, expected in zip(replayed, step(twin, x), strict=True):
            assert torch.equal(gradient, expected), number


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "mxfp8", "nvfp4"])
@pytest.mark.filterwarnings("ignore:.*decoded operands:UserWarning")
def test_steps_compiled_to_cuda_graphs_equal_the_eager_ones(recipe: str) -> None:
    """torch.compile(mode="reduce-overhead") warms up, records and replays; other work fills the memory that it frees,
    and an eager layer reads the output, which is the same tensor in each step."""
    torch.compiler.reset()
    # Of their own, so that histories and counts are there before the first graph, which would hold them.
    placed: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "recipe": recipe, "bias": False}
    trunk = nn.Sequential(qt.Linear(128, 256, **placed), nn.ReLU(), qt.Linear(256, 128, **placed))
    model = nn.ModuleDict({"trunk": trunk, "head": qt.Linear(128, 64, **placed)})
    twin = copy.deepcopy(model)
    compiled = torch.compile(model["trunk"], mode="reduce-overhead")

    def step(model: nn.ModuleDict, trunk: Any, x: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        with qt.autocast(recipe):
            y = model["head"](trunk(leaf))
        y.float().square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results = [t.detach().clone() for t in (y, leaf.grad, *gradients, *model.buffers()) if t is not None]
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p -= 1e-3 * gradient
        return results

    for number in range(5):
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(number)).to("cuda", torch.bfloat16)
        torch.compiler.cudagraph_mark_step_begin()
        results = step(model, compiled, x)  # type: ignore[arg-type]
        fillings = [torch.full((1 << size,), torch.nan, device="cuda") for size in range(4, 22)]
        expected = step(twin, twin["trunk"], x)  # type: ignore[arg-type]
        del fillings
        for i, (one, other) in enumerate(zip(results, expected, strict=True)):
            assert torch.equal(one, other), f"step {number}, tensor {i}"


@pytest.mark.parametrize("preset", ["lean", "balanced", "exact", "float32"])
@pytest.mark.parametrize("rule", [optim.AdamW, optim.Lion])
@pytest.mark.filterwarnings("ignore:.*stepped by plain torch operations:UserWarning")
def test_captured_steps_of_an_optimizer_equal_the_eager_ones(preset: str, rule: Any) -> None:
    """A learning rate that changes, clipping, noise by the step's count, and a gradient of NaN that is skipped."""

    def pair() -> tuple[nn.Module, optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(qt.Linear(256, 128), nn.GELU(), qt.Linear(128, 96)).cuda()
        qt.quantize_weights(model, "tensorwise")
        rate = torch.tensor(1e-2, device="cuda")
        return model, rule(model.parameters(), lr=rate, preset=preset, nonfinite="skip")

    def step(model: nn.Module, optimizer: optim.Optimizer, x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"].copy_(rate)
        with qt.autocast("tensorwise"):
            loss: torch.Tensor = model(x).float().square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        return loss.detach()

    twins = pair(), pair()
    captured = qt.CapturedStep(lambda x, rate: step(*twins[0], x, rate))
    for number in range(STEPS):
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(number)).cuda()
        x = x * (torch.nan if number == STEPS - 2 else 1.0)
        now = torch.tensor(rate(number), device="cuda")
        first, second = captured(x, now).clone(), step(*twins[1], x, now)
        assert torch.equal(first.nan_to_num(-1.0), second.nan_to_num(-1.0)), number
    assert int(twins[0][1].skipped) == int(twins[1][1].skipped) == 1
    pairs = zip(twins[0][0].named_parameters(), twins[1][0].parameters(), strict=True)
    for (name, p), q in pairs:
        assert torch.equal(memory_of(p).view(torch.uint8), memory_of(q).view(torch.uint8)), name
        ours, theirs = twins[0][1].state[p], twins[1][1].state[q]
        for key, value in theirs.items():
            assert torch.equal(ours[key], value), f"{name}: {key}"


def test_threads_that_load_kernels_at_once_get_the_results_of_one() -> None:
    """A Linear of shapes that nothing before has launched, in four threads, each on a stream of its own."""
    layers = [qt.Linear(16 * n, 48, dtype=torch.bfloat16, device="cuda", recipe="tensorwise") for n in (5, 7, 9, 11)]
    xs = [torch.randn(80, layer.in_features, device="cuda").bfloat16() for layer in layers]
    torch.cuda.synchronize()
    launch._kernels.clear()
    launch._forget()
    start, outputs = threading.Barrier(len(layers)), {}

    def run(number: int) -> None:
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            outputs[number] = layers[number](xs[number]).detach()
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(layers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (layer, x) in enumerate(zip(layers, xs, strict=True)):
        assert torch.equal(outputs[number], layer(x).detach()), number


def test_a_tensor_on_another_device_gives_a_clear_error() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with pytest.raises(ValueError, match=r"captures on cuda:0, and got a tensor on cuda:1"):
        qt.CapturedStep(lambda x: x * 2)(torch.ones(3, device="cuda:1"))
