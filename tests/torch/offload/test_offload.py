"""Activations that are on the host between forward and backward: the same losses and gradients, and less memory."""

import contextlib
import copy
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import quaver.torch as qt
from quaver.torch.backends.gpu import capture
from quaver.torch.backends.gpu.host_memory import HostPool, Transfers
from tests.torch.offload.simulated import Counted, Simulated

RECIPES = ("bf16", "tensorwise", "delayed(history=4)", "mxfp8", "nvfp4")
DIM, TOKENS, VOCAB = 64, 64, 128


class Decoder(nn.Module):
    """Embedding, layers, norm and head; `around` runs a layer."""

    def __init__(self, layers: int = 3, dim: int = DIM, hidden: int = 176, heads: int = 4, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(
            qt.TransformerLayer(dim, heads, hidden, activation="swiglu", **options) for _ in range(layers)
        )
        self.norm, self.head = qt.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        self.around: Callable[..., Tensor] = lambda layer, x: layer(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = self.around(layer, x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**options).bfloat16()


def ids(seed: int = 0, tokens: int = TOKENS, batch: int = 2) -> Tensor:
    return torch.randint(0, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


def step(model: Decoder, recipe: str = "tensorwise", seed: int = 0) -> Tensor:
    with qt.autocast(recipe):
        loss = loss_of(model(ids(seed)), ids(seed))
    loss.backward()
    return loss.detach()


def compare(
    model: Decoder, run: Callable[[Decoder], Any], *, moves: bool = True, **options: Any
) -> tuple[qt.offload, Simulated]:
    """Check that offload changes no bit of losses and gradients; `moves` is whether it should move anything."""
    model.zero_grad()
    other, simulated = copy.deepcopy(model), Simulated()
    expected = run(model)
    context = qt.offload(other, _transfers=simulated, **options)
    with context:
        result = run(other)
    assert torch.equal(torch.as_tensor(result), torch.as_tensor(expected))
    assert_same(gradients(other), gradients(model))
    assert bool(simulated.log) == moves
    return context, simulated


# ---- bits and bytes ----


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_and_gradients_have_the_same_bits(recipe: str) -> None:
    def train(model: Decoder) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for number in range(3):
            losses.append(step(model, recipe, number))
            optimizer.step()
            if number < 2:
                optimizer.zero_grad()
        return torch.stack(losses)

    _, simulated = compare(decoder(), train)
    # Each layer is copied to the host and back once per step.
    assert [way for way, _ in simulated.log] == (["out"] * 3 + ["back"] * 3) * 3


def measured(model: Decoder, recipe: str, offloads: bool, tokens: Tensor) -> tuple[int, int, dict[str, Tensor]]:
    """Return bytes between forward and backward, the most bytes in backward, and gradients."""
    counted = Counted()
    context = qt.offload(model, _transfers=Simulated(counted)) if offloads else contextlib.nullcontext()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with context, qt.autocast(recipe):
        # Cached quantized weights stay until an optimizer step.
        model(tokens)
    with counted, context:
        with qt.autocast(recipe):
            logits = model(tokens)
        counted.ignore(logits)
        between, counted.measures_peak = counted.bytes(), True
        loss_of(logits, tokens).backward()
    return between, counted.peak, gradients(model)


def test_device_memory_of_a_llama_of_four_layers() -> None:
    model, tokens = decoder(layers=4, dim=512, hidden=1408, heads=8), ids(0, 512, 4)
    full, full_peak, _ = measured(copy.deepcopy(model), "bf16", False, tokens)
    _, _, expected = measured(copy.deepcopy(model), "tensorwise", False, tokens)
    between, peak, grads = measured(model, "tensorwise", True, tokens)
    assert_same(grads, expected)
    print(f"between: {100 * between / full:.1f} % of {full / 1e6:.0f} MB, peak {100 * peak / full_peak:.1f} %")
    assert between <= 0.05 * full
    assert peak <= 0.56 * full_peak


def test_a_storage_is_moved_once_and_weights_never() -> None:
    model, sizes = decoder(layers=2), {}
    weights = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}

    def count(x: Tensor) -> Tensor:
        if type(x) is Tensor and x.untyped_storage().nbytes() >= 4096:
            sizes[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    # Tensors saved by autograd in the layers, each storage once; kept alive so that no address is reused.
    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda x: x)
    model.around = lambda layer, x: under(hooks, layer, x)
    with qt.autocast("tensorwise"):
        model(ids())
    model.around = lambda layer, x: layer(x)
    saved = sum(storage.nbytes() for place, storage in sizes.items() if place not in weights)
    _, simulated = compare(model, step)
    assert sum(size for way, size in simulated.log if way == "out") == saved


def under(context: Any, layer: Callable[..., Tensor], x: Tensor) -> Tensor:
    with context:
        return layer(x)


@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4"])
def test_codes_of_stored_weights_stay(recipe: str) -> None:
    model = decoder(layers=2, recompute="mlp")
    qt.quantize_weights(model, "mxfp8")
    codes = {x.codes.untyped_storage()._cdata for x in model.parameters() if isinstance(x, qt.QuantizedTensor)}
    assert codes
    context, simulated = qt.offload(model, _transfers=Simulated()), None
    with context, qt.autocast(recipe):
        y = model(ids())
        assert not codes & set(context._offloader.slots)
    y.sum().backward()
    assert simulated is None


class Scaled(nn.Module):
    """A module that passes its own buffer to its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Bilinear(64, 64, 64) for _ in range(2))
        self.register_buffer("table", torch.randn(4096, 64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.table[: len(x)])
        return x


def test_buffers_of_the_model_stay() -> None:
    torch.manual_seed(0)
    model, simulated = Scaled(), Simulated()
    with qt.offload(model, _transfers=simulated):
        model(torch.randn(32, 64)).sum().backward()
    # The input of each layer.
    assert simulated.log == [("out", 32 * 64 * 4)] * 2 + [("back", 32 * 64 * 4)] * 2


def test_casts_of_weights_under_torch_autocast_stay() -> None:
    torch.manual_seed(0)
    model, simulated = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 256)]), Simulated()
    x = torch.randn(32, 256, requires_grad=True)
    with qt.offload(model, layers="1", _transfers=simulated), torch.autocast("cpu", torch.bfloat16):
        model[1](model[0](x)).float().sum().backward()
    # The input of the layer, and no weight.
    assert [size for way, size in simulated.log if way == "out"] == [32 * 256 * 2]


@pytest.mark.parametrize("saves_nothing", [False, True])
def test_a_layer_comes_back_during_the_backward_of_the_next_one(saves_nothing: bool) -> None:
    """Also if layers in between save nothing."""
    model, simulated = decoder(), Simulated()

    def logged(layer: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        if not isinstance(layer, nn.Identity):
            y.register_hook(lambda _: simulated.log.append(("gradient", 0)))
        return y

    model.around = logged
    if saves_nothing:
        model.layers = nn.ModuleList(each for layer in model.layers for each in (nn.Identity(), layer))
    with qt.offload(model, _transfers=simulated):
        step(model)
    # The last layer during the backward of the loss.
    assert [way for way, _ in simulated.log] == ["out"] * 3 + ["back", "gradient"] * 3


def test_devices_share_the_budget_and_no_buffers() -> None:
    """Each device has its own copy stream, for which no other device waits."""
    pool, (first, second) = HostPool(Simulated(), 3 * 8192), (torch.device("cuda", i) for i in range(2))
    (buffer,) = pool.take([5000], first)
    pool.give(buffer, first)
    (other,) = pool.take([5000], second)
    assert other is not buffer and other.numel() == 8192
    assert pool.take([5000], first) == [buffer]
    assert pool.take([8192, 8192], second) == []
    assert len(pool.take([8192], second)) == 1


def test_a_copy_of_the_model_after_the_exit() -> None:
    model = decoder()
    with qt.offload(model, _transfers=Simulated()):
        other = copy.deepcopy(model)
        step(model)
    with capture.rehearsing(torch.device("cpu")):
        step(other)
    assert_same(gradients(other), gradients(model))


def test_what_is_saved_after_a_backward_outside_of_layers_stays() -> None:
    """Its memory may reuse that of the last layer's input."""
    model, simulated = nn.ModuleList([nn.Linear(64, 64)]), Simulated()
    with qt.offload(model, layers="0", _transfers=simulated):
        for _ in range(20):
            model[0](torch.randn(64, 64)).sum().backward()
            xs = [torch.randn(64, 64, requires_grad=True) for _ in range(8)]
            sum(x.exp().sum() for x in xs).backward()
            del xs
    assert simulated.log == [("out", 64 * 64 * 4)] * 20


class Stream:
    """A stand-in for a CUDA stream that logs its calls."""

    def __init__(self, name: str, log: list[tuple[str, ...]]) -> None:
        self.name, self.log, self.device = name, log, torch.device("cpu")

    def wait_event(self, event: str) -> None:
        self.log.append((self.name, "waits", event))

    def record_event(self) -> str:
        event = f"{self.name} {len(self.log)}"
        self.log.append((self.name, "records", event))
        return event


class OnCpu(Transfers):
    """CUDA's transfers of tensors on a CPU, whose memory cannot be pinned."""

    device_type = "cpu"

    def allocate_host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)


def test_calls_to_cuda_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, ...]] = []
    compute, side, entered = Stream("compute", log), Stream("side", log), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)

    @contextlib.contextmanager
    def stream(entering: Stream) -> Iterator[None]:
        log.append((entering.name, "copies"))
        yield
        entered.append(entering)

    monkeypatch.setattr(torch.cuda, "stream", stream)
    model, other = decoder(layers=1), decoder(layers=1)
    with qt.offload(other, _transfers=OnCpu()):
        assert step(other) == step(model)
    assert_same(gradients(other), gradients(model))
    assert entered == [side, side]
    one_way = [("compute", "records"), ("side", "waits"), ("side", "copies"), ("side", "records"), ("compute", "waits")]
    assert [entry[:2] for entry in log[:10]] == one_way * 2
    for n in (0, 5):
        # The side stream waits for the compute stream, and the compute stream for the copies.
        assert log[n][2] == log[n + 1][2] and log[n + 3][2] == log[n + 4][2]


# ---- which layers, and how much memory ----


def test_layers_are_chosen_by_pattern_and_by_module() -> None:
    model = decoder(layers=4)
    for layers in ("layers.[01]", ["layers.0", "layers.1"], list(model.layers)[:2], (model.layers[0], "layers.1")):
        context = qt.offload(model, layers=layers, _transfers=Simulated())
        assert list(context.layers) == ["layers.0", "layers.1"]
    assert list(qt.offload(model).layers) == [f"layers.{i}" for i in range(4)]
    _, simulated = compare(model, step, layers="layers.[01]")
    assert [way for way, _ in simulated.log] == ["out"] * 2 + ["back"] * 2


def test_default_layers_are_those_of_the_outermost_lists() -> None:
    model = nn.ModuleDict({"a": nn.ModuleList([nn.ModuleList([nn.Linear(4, 4)])]), "b": nn.ModuleList([nn.ReLU()])})
    assert list(qt.offload(model).layers) == ["a.0", "b.0"]


def test_of_layers_inside_each_other_the_outermost_are_moved() -> None:
    context, simulated = compare(decoder(layers=2), step, layers=["layers.*", "*.0.mlp"])
    assert list(context.layers) == ["layers.0", "layers.1"]
    assert [way for way, _ in simulated.log] == ["out"] * 2 + ["back"] * 2


class Calls(nn.Module):
    """Has two layers; the first calls the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        self.layers[0].forward = self.call

    def call(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.layers[0].weight).tanh() + self.layers[1](x.exp()).sin()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x)
        return y


def test_a_layer_that_calls_another_one() -> None:
    grads, simulated = [], Simulated()
    for offloads in (False, True):
        torch.manual_seed(0)
        model, x = Calls(), torch.randn(64, 64, requires_grad=True)
        with qt.offload(model, _transfers=simulated) if offloads else contextlib.nullcontext():
            model(x).sum().backward()
        grads.append({**gradients(model), "input": x.grad})
    assert_same(*grads)
    # The outer layer also saves all that the inner one saves.
    assert [way for way, _ in simulated.log] == ["out", "out", "back"]


def test_first_layers_are_moved_up_to_the_budget() -> None:
    model = decoder(layers=4)
    _, simulated = compare(model, step)
    one = sum(x.numel() for x in simulated.host) // 4
    _, simulated = compare(model, lambda model: (step(model), step(model, seed=1))[1], budget_gb=2.5 * one / 1e9)
    assert [way for way, _ in simulated.log] == ["out", "out", "back", "back"] * 2
    # The second step has the buffers of the first.
    assert sum(x.numel() for x in simulated.host) == 2 * one


def test_a_budget_smaller_than_a_layer_names_both() -> None:
    model = decoder()
    with (
        qt.offload(model, budget_gb=1e-4, _transfers=Simulated()),
        pytest.raises(ValueError, match=r"budget_gb is 0\.0001, and layer 'layers\.0' alone saves 0\.000\d+ GB"),
    ):
        step(model)


def test_exhausted_host_memory_keeps_layers_on_the_device_with_one_warning() -> None:
    model, other = decoder(), decoder()
    expected = [step(model), step(model)]
    with (
        pytest.warns(UserWarning, match="no more pinned memory than .* allow more locked memory") as caught,
        qt.offload(other, _transfers=Simulated(pinned=3e5)),
    ):
        assert [step(other), step(other)] == expected
    assert len(caught) == 1
    assert_same(gradients(other), gradients(model))


def test_a_model_on_a_cpu_moves_nothing() -> None:
    model = decoder()
    expected = step(model)
    model.zero_grad()
    with qt.offload(model):
        assert step(model) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "layer.*"}, r"no layer is named 'layer\.\*'; did you mean 'layers"),
        ({"layers": []}, "layers is empty"),
        ({"layers": [nn.Linear(2, 2)]}, "a Linear in layers is not a module of the model"),
        ({"budget_gb": 0}, "budget_gb is 0; pass the pinned memory"),
        ({"budget_gb": float("nan")}, "budget_gb is nan; pass the pinned memory"),
    ],
)
def test_wrong_arguments_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qt.offload(decoder(), **options)


def test_a_single_module_asks_for_a_list() -> None:
    with pytest.raises(TypeError, match="layers is a TransformerLayer; pass a list"):
        qt.offload(decoder(), layers=decoder().layers[0])


def test_a_model_without_repeated_layers_asks_for_layers() -> None:
    with pytest.raises(ValueError, match=r"Sequential has no nn\.ModuleList of layers; pass layers="):
        qt.offload(nn.Sequential(nn.Linear(2, 2)))


# ---- autograd ----


def test_backward_after_the_exit_and_entering_for_every_step() -> None:
    model, other, simulated = decoder(), decoder(), Simulated()
    context = qt.offload(other, _transfers=simulated)
    for seed in range(2):
        step(model, seed=seed)
        with context, qt.autocast("tensorwise"):
            loss = loss_of(other(ids(seed)), ids(seed))
        loss.backward()
    assert_same(gradients(other), gradients(model))
    assert sum(size for way, size in simulated.log if way == "out") > 1.3 * sum(x.numel() for x in simulated.host)


def test_only_layers_are_called() -> None:
    """The model itself is not called, so copies of the last layers are in flight when backward begins."""

    def run(model: Decoder) -> Tensor:
        with qt.autocast("mxfp8"):
            x = model.embedding(ids())
            for layer in model.layers:
                x = layer(x)
        x.float().square().mean().backward()
        return x.detach()

    _, simulated = compare(decoder(layers=4), run)
    assert [way for way, _ in simulated.log] == ["out"] * 4 + ["back"] * 2


@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4"])
def test_two_backwards_of_one_graph(recipe: str) -> None:
    def run(model: Decoder) -> Tensor:
        with qt.autocast(recipe):
            loss = loss_of(model(ids()), ids())
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach()

    _, simulated = compare(decoder(), run)
    assert [way for way, _ in simulated.log] == ["out"] * 3 + ["back"] * 6


def test_a_model_that_returns_a_parameter() -> None:
    """Hooks do not accumulate on the model."""
    model = decoder()
    model.register_forward_hook(lambda module, args, logits: (module.head.weight, logits))
    with qt.offload(model, _transfers=Simulated()):
        for _ in range(2):
            model(ids())[1].sum().backward()
    assert not model.head.weight._backward_hooks


def test_microbatches_whose_backwards_come_later_in_either_order() -> None:
    for order in (1, -1):

        def run(model: Decoder, order: int = order) -> Tensor:
            with qt.autocast("delayed(history=4)"):
                losses = [loss_of(model(ids(seed)), ids(seed)) for seed in range(3)]
            for loss in losses[::order]:
                loss.backward()
            return torch.stack(losses).detach()

        compare(decoder(layers=2), run)


def test_a_layer_that_runs_twice_in_a_forward() -> None:
    model = decoder(layers=1)
    model.around = lambda layer, x: layer(layer(x))
    _, simulated = compare(model, step)
    assert [way for way, _ in simulated.log] == ["out"] * 2 + ["back"] * 2


def test_buffers_of_graphs_without_backward_are_used_again() -> None:
    model, simulated = decoder(), Simulated()
    with qt.offload(model, _transfers=simulated), qt.autocast("tensorwise"):
        for seed in range(4):
            model(ids(seed))
            if not seed:
                first = len(simulated.host)
        with torch.no_grad():
            model(ids())
    assert len(simulated.host) == first
    assert len(simulated.log) == 4 * 3


def test_a_shorter_batch_in_between() -> None:
    def run(model: Decoder) -> Tensor:
        for tokens in (64, 16, 48, 64):
            with qt.autocast("tensorwise"):
                loss = loss_of(model(ids(0, tokens)), ids(0, tokens))
            loss.backward()
        return loss.detach()

    compare(decoder(), run)


def test_second_derivatives_of_layers_in_high_precision() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(2)).double()
    x = torch.randn(32, 64, dtype=torch.float64)
    results = []
    for context in (contextlib.nullcontext(), qt.offload(model, _transfers=Simulated())):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        with context:
            y = model[1](model[0](leaf)).square().sum()
            (grad,) = torch.autograd.grad(y, leaf, create_graph=True)
            grad.square().sum().backward()
        results.append({**gradients(model), "input": leaf.grad})
    assert_same(*results)


def through(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


class Graph(nn.Module):
    """Has a sparse buffer."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(64).to_sparse())
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.edges, self.linear(x)).tanh()


class Modulated(nn.Module):
    """Makes complex, conjugated, expanded and strided tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        expanded = (x[:, :1] * x).sum(0, keepdim=True).expand(64, 64)
        z = torch.complex(x, expanded) @ self.weight
        spectrum = torch.fft.fft(z.conj() * z.imag)
        empty = (x[:0] * x[:0]).sum()
        return (spectrum.real * x.t() * x.neg()).tanh() * (x[::2, 1::3].exp().mean() + empty)


@pytest.mark.parametrize("kind", ["sparse", "lazy", "complex"])
def test_tensors_of_other_kinds(kind: str) -> None:
    make: dict[str, Callable[[], nn.Module]] = {
        "sparse": lambda: Graph(nn.Linear(64, 64)),
        "lazy": lambda: nn.Sequential(nn.LazyLinear(64), nn.Tanh()),
        "complex": Modulated,
    }
    grads, simulated = [], Simulated()
    for offloads in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList(make[kind]() for _ in range(3))
        x = torch.randn(64, 64, requires_grad=True)
        with qt.offload(model, layers="*[0-9]", _transfers=simulated) if offloads else contextlib.nullcontext():
            through(model, x).square().sum().backward()
        assert x.grad is not None
        grads.append({**gradients(model), "input": x.grad})
    assert_same(*grads)
    assert simulated.log


class OutOfMemory(Simulated):
    """Runs out of device memory once, after some allocations."""

    left = -1

    def allocate(self, *args: Any) -> Tensor:
        self.left -= 1
        if self.left == -1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().allocate(*args)


@pytest.mark.parametrize("left", range(9))
def test_backward_again_after_it_ran_out_of_device_memory(left: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3)))
    x, simulated = torch.randn(32, 64, requires_grad=True), OutOfMemory()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    with qt.offload(model, layers=list(model), _transfers=simulated):
        y = model(x).sum()
        torch.autograd.grad(y, x, retain_graph=True)
        simulated.left = left
        with pytest.raises(torch.OutOfMemoryError):
            torch.autograd.grad(y, x, retain_graph=True)
        assert torch.equal(torch.autograd.grad(y, x)[0], expected)


class Slow(Simulated):
    """Lets other threads run during each call."""

    def allocate(self, *args: Any) -> Tensor:
        time.sleep(1e-3)
        return super().allocate(*args)

    def copy(self, *args: Any) -> int:
        time.sleep(1e-3)
        return super().copy(*args)


def test_threads_that_run_backward_of_one_graph() -> None:
    """As the autograd threads of several devices do."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))
    x = torch.randn(32, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(through(layers, x).sum(), x)
    with qt.offload(layers, layers="[0-9]", _transfers=Slow()):
        y = through(layers, x).sum()
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(torch.autograd.grad, y, x, retain_graph=True) for _ in range(4)]
    assert all(torch.equal(future.result()[0], expected) for future in futures)


class Writes(nn.Module):
    """A function that saves its input and its result, and is written to at the time `when`."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.linear, self.when = nn.Linear(64, 64), when

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).exp()
        z: Tensor = y * 2
        if self.when == "inside":
            y.add_(1)
        if self.when == "after":
            self.result = y
        return z


@pytest.mark.parametrize("layers", [1, 5])
@pytest.mark.parametrize("when", ["inside", "after", "weight"])
def test_a_write_between_save_and_copy_raises_as_autograd_does(when: str, layers: int) -> None:
    """Also if the layer has been copied to the host before backward begins."""
    torch.manual_seed(0)
    model = nn.ModuleList([Writes(when), *(nn.Linear(64, 64) for _ in range(layers - 1))])
    x = torch.randn(32, 64, requires_grad=True)
    for context in (contextlib.nullcontext(), qt.offload(model, layers="*[0-9]", _transfers=Simulated())):
        with context, pytest.raises(RuntimeError, match=r"modified by an inplace operation.*expected version"):
            y = model[0](x)
            if when != "inside":
                with torch.no_grad():
                    (model[0].result if when == "after" else model[0].linear.weight).add_(1)
            for layer in model[1:]:
                y = layer(y)
            y.sum().backward()


def test_a_tensor_that_is_written_between_two_layers_is_saved_twice() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    grads = []
    for context in (contextlib.nullcontext(), qt.offload(model, layers="*", _transfers=Simulated())):
        model.zero_grad()
        x = torch.arange(64.0 * 64).view(64, 64)
        with context:
            first = model[0](x)
            x.add_(1)
            model[1](x).sum().backward()
        grads.append(gradients(model))
        del first
    assert_same(*grads)


def test_a_graph_that_dies_while_a_layer_comes_back() -> None:
    """The layer's memory is reused only after its copy has finished."""
    model, other, simulated = decoder(layers=4), decoder(layers=4), Simulated()
    with qt.offload(other, _transfers=simulated):
        with qt.autocast("tensorwise"):
            xs = [other.embedding(ids())]
            for layer in other.layers:
                xs.append(layer(xs[-1]))
        torch.autograd.grad(xs[4].sum(), xs[2])
        assert simulated.log[-1][0] == "back"
        del xs
        assert step(other) == step(model)
    assert_same(gradients(other), gradients(model))


def test_a_write_after_the_copy_changes_nothing() -> None:
    torch.manual_seed(0)
    layer = Writes("after")
    model = nn.ModuleDict({"layers": nn.ModuleList([layer, nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)])})
    x, grads = torch.randn(32, 64), []
    for writes in (False, True):
        model.zero_grad()
        with qt.offload(model, _transfers=Simulated()):
            y = x
            for each in model["layers"]:
                y = each(y)
            if writes:
                with torch.no_grad():
                    layer.result.add_(1)
            y.sum().backward()
        grads.append(gradients(model))
    assert_same(*grads)


def test_a_forward_that_raises_leaves_the_next_one_alone() -> None:
    model = decoder()

    def raises_once(layer: nn.Module, x: Tensor) -> Tensor:
        if layer is model.layers[1] and not failed:
            failed.append(True)
            x = x[..., 1:]
        y: Tensor = layer(x)
        return y

    failed: list[bool] = []
    simulated = Simulated()
    with qt.offload(model, layers=["layers.*"], _transfers=simulated):
        model.around = raises_once
        with pytest.raises(ValueError, match="got an input of shape"):
            step(model)
        loss = step(model)
    other = decoder()
    assert loss == step(other)
    assert_same(gradients(model), gradients(other))


# ---- recomputation ----

CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "quaver": qt.checkpoint,
    "not reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "selective": lambda layer, x: checkpoint(
        layer,
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default]),
    ),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_around_a_layer_moves_its_input_and_recomputes_the_rest(kind: str) -> None:
    model = decoder(layers=4)
    model.around = CHECKPOINTS[kind]
    size = 2 * TOKENS * DIM * 2
    _, simulated = compare(model, step)
    assert simulated.log == [("out", size)] * 4 + [("back", size)] * 4


@pytest.mark.parametrize("recompute", ["full", "mlp"])
@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4"])
def test_a_checkpoint_inside_a_layer(recompute: Any, recipe: str) -> None:
    _, simulated = compare(decoder(layers=2, recompute=recompute), lambda model: step(model, recipe))
    if recompute == "full":
        assert simulated.log == [("out", 2 * TOKENS * DIM * 2)] * 2 + [("back", 2 * TOKENS * DIM * 2)] * 2


# ---- errors ----


def test_inside_a_cuda_graph_it_is_refused_by_name() -> None:
    model = decoder()
    with (
        qt.offload(model, _transfers=Simulated()),
        capture.rehearsing(torch.device("cpu")),
        pytest.raises(RuntimeError, match=r"'layers\.0' runs inside a CUDA graph .*CapturedStep"),
    ):
        model(ids())


def test_entering_twice_raises() -> None:
    model = decoder()
    with qt.offload(model, _transfers=Simulated()) as context, pytest.raises(RuntimeError, match="already entered"):
        context.__enter__()


def test_entering_where_torch_refuses_hooks_leaves_none_behind() -> None:
    model, other, simulated = decoder(), decoder(), Simulated()
    context = qt.offload(other, _transfers=simulated)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        context.__enter__()
    assert step(other) == step(model)
    assert not simulated.log
    with context:
        assert step(other) == step(model)
    assert simulated.log


#: Dynamo reads the gradient of every tensor, which warns for non-leaf tensors.
GRAD = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="aot_eager")


@GRAD
def test_a_compiled_layer_is_moved() -> None:
    """The layer itself is eager, so tensors saved by its compiled function are moved."""

    def run(model: Decoder) -> Tensor:
        for number, layer in enumerate(model.layers):
            model.layers[number] = compiled(layer)
        return step(model, "mxfp8")

    model, other, simulated = decoder(layers=2), decoder(layers=2), Simulated()
    expected = run(model)
    for number, layer in enumerate(other.layers):
        other.layers[number] = compiled(layer)
    with qt.offload(other, _transfers=simulated):
        assert step(other, "mxfp8") == expected
    assert [way for way, _ in simulated.log] == ["out"] * 2 + ["back"] * 2
    assert_same(gradients(other), gradients(model))


@GRAD
def test_compiled_modules_inside_a_layer() -> None:
    def prepared() -> Decoder:
        model = decoder(layers=2)
        for layer in model.layers:
            layer.mlp = compiled(layer.mlp)
        return model

    model, other, simulated = prepared(), prepared(), Simulated()
    expected = step(model, "mxfp8")
    with qt.offload(other, _transfers=simulated):
        assert step(other, "mxfp8") == expected
    assert [way for way, _ in simulated.log] == ["out"] * 2 + ["back"] * 2
    assert_same(gradients(other), gradients(model))


def test_a_compiled_module_around_layers_is_refused() -> None:
    model = decoder()
    with pytest.raises(ValueError, match=r"the model is compiled, with layer '_orig_mod\.layers\.0' inside"):
        qt.offload(compiled(model), _transfers=Simulated()).__enter__()
    model.layers[1].compile(backend="aot_eager")
    with pytest.raises(ValueError, match=r"layers\.1 is compiled, with layer 'layers\.1'.*compile the layers"):
        qt.offload(model, _transfers=Simulated()).__enter__()


@GRAD
def test_a_compiled_function_around_layers() -> None:
    """With fullgraph=True compiling raises; else the graph breaks at the layers, whose tensors are moved."""
    model, tokens = decoder(), ids()
    with (
        qt.offload(model, _transfers=Simulated()),
        pytest.raises(Exception, match=r"quaver\.torch\.offload moves saved tensors .*layers\[i\] = torch\.compile"),
    ):
        torch.compile(lambda: model(tokens).sum(), backend="aot_eager", fullgraph=True)()

    expected = step(model, "mxfp8")
    other, simulated = decoder(), Simulated()
    with qt.offload(other, _transfers=simulated), qt.autocast("mxfp8"):
        y = torch.compile(other.forward, backend="aot_eager")(tokens)
        loss = loss_of(y, tokens)
        loss.backward()
    assert loss == expected
    # The model itself was not called, so two layers are still in flight.
    assert [way for way, _ in simulated.log] == ["out"] * 3 + ["back"]
    assert_same(gradients(other), gradients(model))


def test_a_warning_if_no_layer_ran() -> None:
    model, other = decoder(), decoder()
    with pytest.warns(UserWarning, match="none of its 3 layers ran"), qt.offload(other, _transfers=Simulated()):
        step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with qt.offload(other, _transfers=Simulated()), torch.no_grad():
            model(ids())


@pytest.mark.parametrize("inside", [qt.offload, lambda _: torch.autograd.graph.save_on_cpu()])
def test_a_warning_if_other_hooks_are_inside(inside: Callable[[nn.Module], Any]) -> None:
    model, other, simulated = decoder(), decoder(), Simulated()
    with qt.offload(other, _transfers=simulated):
        with inside(other), pytest.warns(UserWarning, match="autograd saved nothing there.* enter .* last"):
            assert step(other) == step(model)
        assert not simulated.log
        assert step(other) == step(model)
    assert simulated.log
    assert_same(gradients(other), gradients(model))


def test_a_warning_if_forward_runs_in_another_thread() -> None:
    model, other = decoder(), decoder()
    expected = step(model)
    with (
        ThreadPoolExecutor(1) as threads,
        qt.offload(other, _transfers=Simulated()),
        pytest.warns(UserWarning, match="in the thread of forward"),
    ):
        assert threads.submit(step, other).result() == expected


def test_what_other_models_save_leaves_nothing_behind() -> None:
    model, other = decoder(), nn.Linear(64, 64)
    context, x = qt.offload(model, _transfers=Simulated()), torch.randn(64, 64)
    with context:
        model(ids()).sum().backward()
        for _ in range(3):
            other(x).exp().sum().backward()
        assert not context._offloader.open.between


def test_a_model_of_transformers_with_gradient_checkpointing() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    qt.convert(model, "tensorwise")
    model.train()

    def run(model: Any) -> Tensor:
        loss: Tensor = model(input_ids=ids(), labels=ids()).loss
        loss.backward()
        return loss.detach()

    _, simulated = compare(model, run)
    whole = sum(size for way, size in simulated.log if way == "out")
    model.zero_grad()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    for reentrant in (False, True):
        enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        _, simulated = compare(model, run)
        model.zero_grad()
        assert sum(size for way, size in simulated.log if way == "out") < whole / 3
