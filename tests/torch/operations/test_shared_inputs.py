"""Layers with the same input tensor quantize it once; outputs, gradients and state equal separate quantization."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import quaver.torch as qt
from quaver import E5M2, recipes
from quaver.torch.operations import functional, ops
from tests.close import assert_bitwise
from tests.pairs import alternating

ALL = [name for name, build in recipes.RECIPES.items() if build().fprop.a is not None]
EACH = pytest.mark.parametrize("name", ALL)
#: Per-tensor scales, a history, blocks, two-level scales, and an input that wgrad reads in high precision.
KINDS = pytest.mark.parametrize("name", ["tensorwise", "delayed", "mxfp8", "nvfp4", "rowwise_bf16_wgrad"])
#: Counts of inputs taken from another layer ("taken") and of inputs quantized anew ("quantized").
Counts = dict[str, int]


class Attention(nn.Module):
    """q, k and v share the output of one norm, gate and up that of another: three of the inputs can be shared."""

    def __init__(self, dim: int = 32, groups: int = 16, dtype: torch.dtype = torch.float32, bias: bool = True) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": dtype, "bias": bias}
        self.norms = nn.ModuleList(nn.LayerNorm(dim, dtype=dtype) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(dim, n, **options) for n in (dim, groups, groups))
        self.out = nn.Linear(dim, dim, **options)
        self.gate, self.up = (nn.Linear(dim, 48, **options) for _ in range(2))
        self.down = nn.Linear(48, dim, **options)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        mixed = self.q(h) * torch.cat([self.k(h), self.v(h)], -1)
        x = x + self.out(mixed)
        h = self.norms[1](x)
        y: Tensor = x + self.down(torch.sigmoid(self.gate(h)) * self.up(h))
        return y


def model(name: str, blocks: int = 2, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(*(Attention(**options) for _ in range(blocks)))
    qt.convert(net, name)
    return net


def inputs(dtype: torch.dtype = torch.float32, *shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*(shape or (2, 8, 32))).to(dtype)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counts:
    counts = {"taken": 0, "quantized": 0}
    lookup = functional.lookup

    def seen(*args: Any) -> Any:
        known = lookup(*args)
        counts["quantized" if known is None else "taken"] += 1
        return known

    monkeypatch.setattr(functional, "lookup", seen)
    return counts


class NoSharing:
    """Replaces the per-thread cache so that each layer quantizes its own input."""

    last = property(lambda _: None, lambda _, __: None)


def state(net: nn.Module) -> list[Tensor]:
    """Gradients and buffers."""
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return [*grads, *(b.clone() for b in net.buffers())]


def assert_same_with_sharing(
    scenario: Callable[[], list[Tensor]], counts: Counts, taken: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a scenario gives the same bits without sharing, and that `taken` inputs were shared."""
    shared = scenario()
    seen = counts["taken"]
    with monkeypatch.context() as patched:
        patched.setattr(functional, "thread", NoSharing())
        counts["taken"] = 0
        separate = scenario()
    assert counts["taken"] == 0
    assert len(shared) == len(separate) > 0
    for i, (one, other) in enumerate(zip(shared, separate, strict=True)):
        assert_bitwise(one, other, f"tensor {i}")
    assert taken is None or seen == taken, seen


def step(net: nn.Module, x: Tensor) -> list[Tensor]:
    y = net(x)
    y.float().square().sum().backward()
    return [y.detach().clone()]


# Bits.


@pytest.mark.parametrize(
    ("name", "dtype"), alternating(ALL, [torch.float32, torch.bfloat16], ["tensorwise", "delayed", "nvfp4"]), ids=str
)
def test_training_matches_layers_that_quantize_separately(
    name: str, dtype: torch.dtype, counted: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scenario() -> list[Tensor]:
        net, results = model(name, 1, dtype=dtype), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for i in range(3):
            x = (inputs(dtype) * (i + 1)).requires_grad_()
            results += [*step(net, x), x.grad, *state(net)]
            optimizer.step()
            optimizer.zero_grad()
        return results

    noisy = any(spec is not None and spec.rounding != "nearest" for spec in input_specs(name))
    assert_same_with_sharing(scenario, counted, 0 if noisy else 3 * 3, monkeypatch)


def input_specs(name: str) -> tuple[Any, Any]:
    recipe = recipes.get(name)
    return recipe.fprop.a, recipe.wgrad.b


def test_wgrad_may_need_an_operand_that_a_layer_did_not_save(counted: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer has a frozen weight and quantizes for fprop only; wgrad needs blocks along the other axis."""
    first, second = (qt.Linear(32, 16, recipe="mxfp8") for _ in range(2))
    first.weight.requires_grad_(False)
    second.bias.requires_grad_(False)

    def scenario() -> list[Tensor]:
        own = copy.deepcopy([first, second])
        h = inputs().requires_grad_() * 1.0
        with torch.autocast("cpu", torch.bfloat16):
            outputs = [layer(h) for layer in own]
        sum(y.float().square().sum() for y in outputs).backward()
        return [*outputs, *(t for layer in own for t in state(layer))]

    assert_same_with_sharing(scenario, counted, 1, monkeypatch)


@KINDS
def test_inputs_cast_by_autocast_are_identified_by_the_original(
    name: str, counted: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scenario() -> list[Tensor]:
        net = model(name)
        with torch.autocast("cpu", torch.bfloat16):
            y = net(inputs().requires_grad_())
        y.float().sum().backward()
        return [y.detach(), *state(net)]

    assert_same_with_sharing(scenario, counted, 6, monkeypatch)


# Writes, views and repeated use.


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("write", ["mul_", "view", "detach", "set_data", "transposed", "copy_"])
def test_a_write_between_siblings_is_seen(
    name: str, write: str, counted: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [qt.Linear(32, 16, recipe=name) for _ in range(2)]

    def scenario() -> list[Tensor]:
        own = copy.deepcopy(layers)
        leaf = inputs(torch.float32, 32, 32).requires_grad_()
        h = leaf * 1.0
        first = own[0](h)
        if write == "mul_":
            h.mul_(3.0)
        elif write == "view":
            h.view(-1)[5:9].zero_()
        elif write == "detach":
            h.detach().add_(1.0)
        elif write == "set_data":
            h.data = h.detach() * 3.0
        elif write == "transposed":
            h.t_()
        else:
            h.copy_(torch.ones(32, 32))
        second = own[1](h)
        (first.square().sum() + second.square().sum()).backward()
        return [first, second, leaf.grad, *(t for layer in own for t in state(layer))]

    assert_same_with_sharing(scenario, counted, 0, monkeypatch)
    assert not torch.equal(*scenario()[:2])


@KINDS
def test_views_are_other_tensors(name: str, counted: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [qt.Linear(32, 16, recipe=name) for _ in range(2)]

    def scenario() -> list[Tensor]:
        own = copy.deepcopy(layers)
        leaf = inputs().requires_grad_()
        h = leaf * 1.0
        outputs = [
            own[0](h),
            own[1](h.view(-1, 32)),
            own[0](h[:1]),
            own[1](h.reshape(4, 4, 32)),
            own[0](h.transpose(0, 1)),
        ]
        sum(y.square().sum() for y in outputs).backward()
        return [*outputs, leaf.grad, *(t for layer in own for t in state(layer))]

    assert_same_with_sharing(scenario, counted, 0, monkeypatch)


@pytest.mark.parametrize(
    "between",
    ["another recipe", "another spec of the input", "alike", "no recipe", "two models", "only"],
)
def test_which_layers_reuse_a_quantized_input(between: str, counted: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [qt.Linear(32, 16) for _ in range(3)]
    e4m3, rowwise = recipes.tensorwise(format="e4m3"), recipes.get("rowwise")
    assert rowwise.fprop.a is not None
    e5m2 = replace(rowwise.fprop, a=replace(rowwise.fprop.a, format=E5M2))
    others = {"another recipe": "rowwise", "another spec of the input": replace(rowwise, name="e5m2", fprop=e5m2)}
    first = "rowwise" if between == "another spec of the input" else "tensorwise"

    def scenario() -> list[Tensor]:
        own = copy.deepcopy(layers)
        leaf = inputs().requires_grad_()
        h = leaf * 1.0
        with qt.autocast(first):
            outputs = [own[0](h)]
        if between in others:
            with qt.autocast(others[between]):
                outputs += [own[1](h)]
            with qt.autocast(first):
                outputs += [own[2](h)]
        elif between == "alike":
            with qt.autocast(e4m3):
                outputs += [own[1](h), own[2](h)]
        elif between == "no recipe":
            outputs += [own[1](h)]
            with qt.autocast("tensorwise"):
                outputs += [own[2](h)]
        elif between == "two models":
            with qt.autocast("tensorwise"):
                outputs += [own[1](h).detach(), own[2](h)]
        else:
            with qt.autocast("tensorwise"), ops.only("reference"):
                outputs += [own[1](h), own[2](h)]
        sum(y.square().sum() for y in outputs if y.requires_grad).backward()
        return [*outputs, leaf.grad, *(t for layer in own for t in state(layer))]

    taken = {
        "another recipe": 0,
        "another spec of the input": 0,
        "alike": 2,
        "no recipe": 1,
        "two models": 2,
        "only": 0,
    }[between]
    assert_same_with_sharing(scenario, counted, taken, monkeypatch)


@EACH
@pytest.mark.parametrize("requires", [True, False])
def test_a_tensor_that_a_program_holds_is_quantized_at_each_layer(
    name: str, requires: bool, counted: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory may be written without a version change; here by numpy."""
    layers = [qt.Linear(32, 16, recipe=name) for _ in range(2)]

    def scenario() -> list[Tensor]:
        own = copy.deepcopy(layers)
        memory = inputs(torch.float32, 16, 32).numpy().copy()
        x = torch.from_numpy(memory)
        results = []
        for _ in range(2):
            outputs = [layer(x.requires_grad_(requires)) for layer in own]
            memory *= 2.0
            outputs.append(own[0](x))
            sum(y.square().sum() for y in outputs).backward()
            results += [y.detach() for y in outputs]
        return [*results, *(t for layer in own for t in state(layer))]

    assert_same_with_sharing(scenario, counted, 0, monkeypatch)


@KINDS
def test_an_output_that_is_the_same_object_in_each_step_is_requantized(
    name: str, counted: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch.compile(mode="reduce-overhead") returns it: a graph replay fills it without a version change."""
    layers = [qt.Linear(32, 16, recipe=name) for _ in range(2)]

    def scenario() -> list[Tensor]:
        own, output, results = copy.deepcopy(layers), torch.zeros(16, 32), []

        class Replayed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                output.detach().numpy()[...] = x.detach().numpy()
                return output

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                return gradients[0]

        for scale in (1.0, 2.0, 3.0):
            h = Replayed.apply(inputs(torch.float32, 16, 32).mul_(scale).requires_grad_())
            assert h is output and h._version == 0
            outputs = [layer(h) for layer in own]
            sum(y.square().sum() for y in outputs).backward()
            results += [y.detach() for y in outputs]
        return [*results, *(t for layer in own for t in state(layer))]

    assert_same_with_sharing(scenario, counted, None, monkeypatch)


# Modes.


# All kinds of checkpointing for recipes with state; one kind each, alternately, for the others.
@pytest.mark.parametrize(
    ("name", "how"), alternating(ALL, ["ours", "reentrant", "not reentrant", "nested"], ["delayed", "nvfp4"])
)
def test_checkpointing(name: str, how: str, counted: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario() -> list[Tensor]:
        net, results = model(name), []

        def run(x: Tensor) -> Tensor:
            for part in net:
                if how == "ours":
                    x = qt.checkpoint(part, x)
                elif how == "nested":
                    x = qt.checkpoint(lambda h, part=part: qt.checkpoint(part, h), x)
                else:
                    x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=how == "reentrant")
            return x

        for i in range(2):
            x = (inputs() * (i + 1)).requires_grad_()
            with qt.autocast(name):
                y = run(x)
            y.square().sum().backward()
            results += [y.detach(), x.grad, *state(net)]
        return results

    assert_same_with_sharing(scenario, counted, None, monkeypatch)
    assert counted["taken"] == 0


def test_layers_with_different_histories_quantize_separately(counted: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model("delayed")
    for _ in range(2):
        step(net, inputs().requires_grad_())
    with torch.no_grad():
        net[0].k.factor[0] *= 0.5
    counted["taken"] = 0

    def scenario() -> list[Tensor]:
        other = copy.deepcopy(net)
        return [*step(other, inputs().requires_grad_()), *state(other)]

    # k's factor differs until its history rolls, which the root's forward does at once.
    assert_same_with_sharing(scenario, counted, None, monkeypatch)


@KINDS
def test_threads_with_the_same_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    h = inputs().requires_grad_() * 1.0
    nets = [[qt.Linear(32, 16, recipe=name) for _ in range(3)] for _ in range(3)]
    expected = [[copy.deepcopy(layer) for layer in net] for net in nets]
    ready, results = threading.Barrier(len(nets)), {}

    def run(i: int) -> None:
        ready.wait()
        for _ in range(5):
            outputs = [layer(h) for layer in nets[i]]
        results[i] = [y.detach() for y in outputs]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(nets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.setattr(functional, "thread", NoSharing())
    for i, net in enumerate(expected):
        for _ in range(5):
            alone = [layer(h) for layer in net]
        for one, other in zip(results[i], alone, strict=True):
            assert_bitwise(one, other.detach())


# Memory.


@KINDS
def test_a_shared_input_is_freed_with_its_last_reference(name: str) -> None:
    layer = qt.Linear(32, 16, recipe=name)
    gc.disable()
    try:
        h = inputs().requires_grad_() * 1.0
        tensor, y = weakref.ref(h), layer(h)
        del h, y
        assert tensor() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", [name for name in ALL if recipes.get(name).wgrad.b is not None])
def test_backward_keeps_one_quantization_of_an_input(name: str) -> None:
    """q, k and v together save as many bytes as one of them."""
    layers = [qt.Linear(256, 256, bias=False, recipe=name) for _ in range(3)]
    x = inputs(torch.float32, 128, 256).requires_grad_()

    def saved_bytes(layers: list[qt.Linear]) -> int:
        seen: dict[int, Tensor] = {}
        weights = {layer.weight.untyped_storage().data_ptr() for layer in layers}

        def pack(t: Tensor) -> Tensor:
            if t.untyped_storage().data_ptr() not in weights:
                seen[t.untyped_storage().data_ptr()] = t
            return t

        h = x * 1.0
        with saved_tensors_hooks(pack, lambda t: t):
            outputs = [layer(h) for layer in layers]
        total = sum(t.untyped_storage().nbytes() for t in seen.values())
        del outputs
        return total

    noisy = any(spec is not None and spec.rounding != "nearest" for spec in input_specs(name))
    assert not noisy
    one = saved_bytes(layers[:1])
    # A scale on the host is a tensor of eight bytes for each layer.
    assert one <= saved_bytes(layers) <= one + 2 * 8
