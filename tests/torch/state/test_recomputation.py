"""quaver.torch.checkpoint changes no bit of outputs, gradients and state, whatever happens before the recomputation."""

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from tests.close import assert_bitwise
from tests.pairs import alternating

NAMES = [n for n, r in recipes.RECIPES.items() if r().quantizes]
QUANTIZED = pytest.mark.parametrize("name", ["delayed", "nvfp4", "mxfp8"])
#: Recipes with state between steps, which a recomputed forward could record twice.
STATEFUL = ("delayed", "nvfp4")
Run = Callable[..., Tensor]


def model() -> nn.Sequential:
    blocks = [nn.Sequential(qt.Linear(48, 64), nn.GELU(), qt.Linear(64, 48), nn.Dropout(0.1)) for _ in range(2)]
    return nn.Sequential(*blocks, qt.Linear(48, 16))


def plain(function: Run, *args: Tensor) -> Tensor:
    return function(*args)


def twins(net: nn.Module) -> list[nn.Module]:
    """Two copies of a model with the same noise streams."""
    other = copy.deepcopy(net)
    return [net, other]


def state(net: nn.Module) -> dict[str, Tensor]:
    """Gradients and buffers."""
    grads = {f"grad of {n}": p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    return grads | {n: b.clone() for n, b in net.named_buffers()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other) and any("grad of" in key for key in one)
    for key, value in one.items():
        assert_bitwise(other[key], value, key)


def compare(scenario: Callable[[nn.Module, Callable[..., Tensor]], dict[str, Tensor]]) -> None:
    """Check that a scenario gives the same with and without checkpointing."""
    runs = []
    for net, run in zip(twins(model()), (plain, qt.checkpoint), strict=True):
        torch.manual_seed(1)
        runs.append(scenario(net, run) | state(net))
    assert_same(*runs)


def through(net: nn.Module, run: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Run each block in its own checkpoint."""
    for block in net.children():
        x = run(block, x)
    return x


@pytest.mark.parametrize(("name", "where"), alternating(recipes.RECIPES, ["outside", "inside"], STATEFUL))
def test_training_steps_equal_those_without_it(name: str, where: str) -> None:
    def scenario(net: nn.Module, run: Callable[..., Tensor]) -> dict[str, Tensor]:
        optimizer, tensors = torch.optim.SGD(net.parameters(), lr=0.05), {}
        for i in range(2):
            optimizer.zero_grad()
            x = (torch.randn(2, 9, 48) * (i + 1)).requires_grad_()
            if where == "outside":
                with qt.autocast(name):
                    y = through(net, run, x)
            else:
                y = run(qt.autocast(name)(net.forward), x)
            y.square().sum().backward()
            assert x.grad is not None
            tensors |= {f"output {i}": y.detach(), f"grad_input {i}": x.grad}
            optimizer.step()
        return tensors

    compare(scenario)


@pytest.mark.parametrize(("name", "order"), alternating(NAMES, [(0, 1), (1, 0)], STATEFUL))
def test_all_forwards_may_precede_all_backwards(name: str, order: tuple[int, int]) -> None:
    """Each forward is a separate step: histories roll between a forward and its recomputation."""

    def scenario(net: nn.Module, run: Callable[..., Tensor]) -> dict[str, Tensor]:
        grads: dict[str, Tensor] = {}
        for step in range(2):
            inputs = [(torch.randn(9, 48) * 10.0**i * 3**step).requires_grad_() for i in range(2)]
            outputs = []
            for x in inputs:
                with qt.autocast(name):
                    outputs.append(through(net, run, x))
            for i in order:
                outputs[i].square().sum().backward()
                grad = inputs[i].grad
                assert grad is not None
                grads[f"grad_input {step} {i}"] = grad
        return grads

    compare(scenario)


@QUANTIZED
def test_it_nests(name: str) -> None:
    def scenario(net: nn.Module, run: Callable[..., Tensor]) -> dict[str, Tensor]:
        first, second, last = net.children()

        def outer(x: Tensor) -> Tensor:
            return run(second, run(first, x))

        losses = []
        for i in range(2):
            with qt.autocast(name):
                losses.append(last(run(outer, torch.randn(9, 48) * 5**i)).square().sum())
        for loss in losses:
            loss.backward()
        return {}

    compare(scenario)


@QUANTIZED
def test_a_layer_called_twice_gets_each_calls_factors(name: str) -> None:
    def scenario(net: nn.Module, run: Callable[..., Tensor]) -> dict[str, Tensor]:
        block = next(net.children())
        for i in range(2):
            with qt.autocast(name):
                loss = run(lambda x: block(block(x)), torch.randn(9, 48) * 4**i).square().sum()
            loss.backward()
        return {}

    compare(scenario)


def test_the_recipe_of_a_layer_may_have_changed_since() -> None:
    def scenario(net: nn.Module, run: Callable[..., Tensor]) -> dict[str, Tensor]:
        with qt.autocast("mxfp8"):
            loss = through(net, run, torch.randn(9, 48)).square().sum()
        with qt.autocast("tensorwise"), torch.no_grad():
            net(torch.randn(9, 48))
        with qt.autocast("delayed"):
            net(torch.randn(9, 48))
        loss.backward()
        return {}

    compare(scenario)


@pytest.mark.parametrize(("name", "outside"), alternating(NAMES, [True, False], STATEFUL, 1))
def test_under_torch_autocast(name: str, outside: bool) -> None:
    def scenario(net: nn.Module, run: Callable[..., Tensor]) -> dict[str, Tensor]:
        def inner(x: Tensor) -> Tensor:
            with contextlib.nullcontext() if outside else torch.autocast("cpu", torch.bfloat16):
                return net(x)

        with qt.autocast(name), torch.autocast("cpu", torch.bfloat16, enabled=outside):
            loss = run(inner, torch.randn(9, 48)).float().square().sum()
        loss.backward()
        return {}

    compare(scenario)


@pytest.mark.parametrize("name", ["delayed", "mxfp8", "nvfp4"])
def test_converted_models_roll_once_a_step(name: str) -> None:
    def scenario(net: nn.Module, run: Callable[..., Tensor]) -> dict[str, Tensor]:
        qt.convert(net, name)
        forwards, net.forward = net.forward, lambda x: run(forwards, x)  # type: ignore[method-assign]
        for i in range(3):
            net(torch.randn(9, 48) * (i + 1)).square().sum().backward()
        return {}

    compare(scenario)


@pytest.mark.parametrize("name", ["nvfp4"])
def test_inside_a_compiled_function_it_equals_torch(name: str) -> None:
    torch.compiler.reset()
    net = nn.Sequential(nn.Sequential(qt.Linear(32, 32), nn.GELU(), qt.Linear(32, 32)))
    runs = []
    for one, run in zip(twins(net), (plain, qt.checkpoint), strict=True):
        # The compiler cannot give a layer its buffers inside a checkpoint.
        qt.convert(one, name)
        compiled = lambda x, one=one, run=run: run(one[0], x)  # noqa: E731
        if run is not plain:
            compiled = torch.compile(compiled, backend="aot_eager", fullgraph=True)
        torch.manual_seed(0)
        for _ in range(2):
            with qt.autocast(name):
                y = compiled(torch.randn(8, 32))
            y.square().sum().backward()
        runs.append(state(one))
    assert_same(*runs)


def test_a_compiled_block_inside_finds_the_recipe_of_its_first_run() -> None:
    def scenario(net: nn.Module, run: Callable[..., Tensor]) -> dict[str, Tensor]:
        block = torch.compile(net, backend="aot_eager")
        with qt.autocast("mxfp8"):
            loss = run(block, torch.randn(9, 48)).square().sum()
        loss.backward()
        return {}

    torch.compiler.reset()
    net = nn.Sequential(qt.Linear(48, 48), nn.GELU(), qt.Linear(48, 48))
    runs = []
    for one, run in zip(twins(net), (plain, qt.checkpoint), strict=True):
        torch.manual_seed(1)
        runs.append(scenario(one, run) | state(one))
    assert_same(*runs)


def test_only_arguments_are_saved() -> None:
    net, saved = model(), []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), qt.autocast("mxfp8"):
        qt.checkpoint(net, torch.randn(9, 48, requires_grad=True))
    assert sum(t.numel() for t in saved) <= 9 * 48


def test_torch_still_checks_that_recomputation_matches() -> None:
    turns: list[int] = []

    def changing(x: Tensor) -> Tensor:
        turns.append(0)
        return layer(x).exp() if len(turns) == 1 else layer(x[:2]).exp()

    layer = qt.Linear(8, 8)
    with qt.autocast("mxfp8"):
        y = qt.checkpoint(changing, torch.randn(4, 8, requires_grad=True))
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
        y.sum().backward()


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"context_fn": lambda: None}])
def test_unsupported_options_give_a_clear_message(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"torch\.utils\.checkpoint"):
        qt.checkpoint(qt.Linear(2, 2), torch.randn(2, 2), **options)
