"""Layers use a weight as it was last written: results equal those of a copy of the layer with an empty cache."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import quaver.torch as qt
from quaver import recipes
from quaver.torch.quantized_tensor import memory_of
from quaver.torch.state.layer_state import state_of
from tests.close import assert_bitwise
from tests.pairs import alternating

QUANTIZING = [name for name in recipes.RECIPES if name != "bf16"]
N, K, T = 48, 32, 5

Writer = Callable[[qt.Linear], None]


# Writes that cannot be detected.


def through_data(layer: qt.Linear) -> None:
    layer.weight.data.mul_(-1.5)


def fused_sgd(layer: qt.Linear) -> None:
    w = layer.weight.detach()
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.5, "dampening": 0.0, "nesterov": False, "maximize": False}
    torch._fused_sgd_([w], [torch.ones_like(w)], [], is_first_step=True, **options)


def fused_adamw(layer: qt.Linear) -> None:
    w = layer.weight.detach()
    state = [[torch.zeros_like(w)] for _ in range(2)]
    options = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
    torch._fused_adamw_([w], [torch.ones_like(w)], *state, [], [torch.ones(())], lr=0.5, **options)


def another_parameter(layer: qt.Linear) -> None:
    other = nn.Parameter(layer.weight.data)
    with torch.no_grad():
        other.mul_(-1.5)


def storage_copy(layer: qt.Linear) -> None:
    layer.weight.untyped_storage().copy_((layer.weight.detach() * -1.5).untyped_storage())


def storage_resized(layer: qt.Linear) -> None:
    # As libraries do that free and refill a weight; malloc may return the same address.
    value, storage = layer.weight.detach() * -1.5, layer.weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    storage.copy_(value.untyped_storage())


def numpy_view(layer: qt.Linear) -> None:
    view = layer.weight.detach().numpy()
    view *= -1.5


def dlpack(layer: qt.Linear) -> None:
    torch.from_dlpack(layer.weight.detach()).mul_(-1.5)


def flat_buffer(layer: qt.Linear) -> None:
    """Write to a flat buffer of which the weight is a view; see `viewed_in_a_flat_buffer`."""
    layer.flat.mul_(-1.5)  # type: ignore[operator, union-attr]


# Writes that can be detected.


def in_place(layer: qt.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(-1.5)


def new_data(layer: qt.Linear) -> None:
    layer.weight.data = layer.weight.data * -1.5


def new_parameter(layer: qt.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * -1.5, requires_grad=layer.weight.requires_grad)


def parameter_exchanged(layer: qt.Linear) -> None:
    # As offloading libraries do, without __setattr__.
    layer._parameters["weight"] = nn.Parameter(layer.weight.detach() * -1.5)


def loaded(layer: qt.Linear) -> None:
    layer.load_state_dict({name: t * -1.5 if name == "weight" else t for name, t in layer.state_dict().items()})


def assigned(layer: qt.Linear) -> None:
    state = {name: t * -1.5 if name == "weight" else t for name, t in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def data_replaced_twice(layer: qt.Linear) -> None:
    # The second tensor may get the address of the first.
    layer.weight.data = layer.weight.data * 3
    layer.weight.data = layer.weight.data + 1


def same_memory(layer: qt.Linear) -> None:
    # Another parameter on the same memory whose separate version happens to be equal.
    weight, other = layer.weight, nn.Parameter(layer.weight.data)
    with torch.no_grad():
        while other._version < weight._version:
            other.add_(0)
        weight.mul_(3)
    layer.weight = other


def storage_set(layer: qt.Linear) -> None:
    with torch.no_grad():
        layer.weight.set_(layer.weight * 3)


BARE: list[Writer] = [
    through_data,
    fused_sgd,
    fused_adamw,
    another_parameter,
    storage_copy,
    storage_resized,
    numpy_view,
    dlpack,
    flat_buffer,
]
SEEN: list[Writer] = [in_place, new_data, new_parameter, parameter_exchanged, loaded, assigned, data_replaced_twice]
SEEN += [same_memory, storage_set]


def viewed_in_a_flat_buffer(layer: qt.Linear) -> qt.Linear:
    flat = layer.weight.detach().clone().flatten()
    layer.weight.data = flat.view(N, K)
    layer.__dict__["flat"] = flat
    return layer


def linear(recipe: str) -> qt.Linear:
    layer = qt.Linear(K, N, recipe=recipe)
    layer.qualified_name = "layer"  # type: ignore[assignment]
    return viewed_in_a_flat_buffer(layer)


def fresh(layer: nn.Module) -> nn.Module:
    """A copy with an empty cache."""
    copied = copy.deepcopy(layer)
    assert not any(state_of(m).weights is not None for m in copied.modules() if isinstance(m, qt.Linear))
    return copied


def evaluated(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = layer(x)
    return y  # type: ignore[no-any-return]


def trained(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """The output and the input's gradient, from both GEMMs that read the weight."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def without_gradients(layer: nn.Module) -> None:
    for p in layer.parameters():
        p.grad = None


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], what: str) -> None:
    for a, b in zip(got, expected, strict=True):
        assert_bitwise(a, b, what)


def two_evaluations(layer: nn.Module, x: Tensor, write: Callable[[], None], what: str) -> None:
    evaluated(layer, x)
    write()
    assert_bitwise(evaluated(layer, x), evaluated(fresh(layer), x), what)


def training_then_evaluation(layer: nn.Module, x: Tensor, write: Callable[[], None], what: str) -> None:
    trained(layer, x)
    write()
    assert_bitwise(evaluated(layer, x), evaluated(fresh(layer), x), what)


def two_steps(layer: nn.Module, x: Tensor, write: Callable[[], None], what: str) -> None:
    for _ in range(2):
        trained(layer, x)
        trained(layer, x)
        write()
        without_gradients(layer)
        assert_same(trained(fresh(layer), x), trained(layer, x), what)


def two_steps_with_an_evaluation_between(layer: nn.Module, x: Tensor, write: Callable[[], None], what: str) -> None:
    trained(layer, x)
    without_gradients(layer)
    evaluated(layer, x)
    write()
    evaluated(layer, x)
    assert_same(trained(fresh(layer), x), trained(layer, x), what)


WRITERS = [*BARE, *SEEN]
SITUATIONS = [two_evaluations, training_then_evaluation, two_steps, two_steps_with_an_evaluation_between]


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("recipe", QUANTIZING)
def test_every_writer_is_seen(recipe: str, situation: Callable[..., None]) -> None:
    """All writers in all situations with three recipes and with delayed scaling; other recipes in some of them."""
    turn = QUANTIZING.index(recipe) + SITUATIONS.index(situation)
    for write in WRITERS if recipe == "delayed" else WRITERS[-turn % 3 :: 3]:
        layer = linear(recipe)
        if recipe == "delayed":
            # Set factors, as after some steps.
            for _ in range(2):
                with qt.autocast(recipe):
                    trained(layer, torch.randn(T, K))
            without_gradients(layer)
        before = layer.weight.detach().clone()
        situation(layer, torch.randn(T, K), lambda write=write, layer=layer: write(layer), write.__name__)
        assert not torch.equal(layer.weight, before), f"{write.__name__} writes nothing"


FUSED: dict[str, Callable[[str], nn.Module]] = {
    "LayerNormLinear": lambda recipe: qt.LayerNormLinear(K, N, recipe=recipe),
    "MLP": lambda recipe: qt.MLP(K, N, "swiglu", recipe=recipe),
    "LayerNormMLP": lambda recipe: qt.LayerNormMLP(K, N, fused=False, activation="swiglu", recipe=recipe),
    "MLP that recomputes": lambda recipe: qt.MLP(K, N, recompute=True, recipe=recipe),
    "MultiheadAttention": lambda recipe: qt.MultiheadAttention(K, 2, recipe=recipe),
    "TransformerLayer": lambda recipe: qt.TransformerLayer(K, 2, N, recipe=recipe),
}


@pytest.mark.parametrize(("kind", "recipe"), alternating(FUSED, ["tensorwise", "rowwise", "mxfp8"], []))
def test_every_layer_that_reads_weights_sees_a_direct_write(kind: str, recipe: str) -> None:
    for situation in SITUATIONS:
        layer = FUSED[kind](recipe)
        linears = [m for m in layer.modules() if isinstance(m, qt.Linear)]
        assert linears

        def write(linears: list[qt.Linear] = linears) -> None:
            for linear in linears:
                numpy_view(linear)

        situation(layer, torch.randn(2, T, K), write, situation.__name__)


def test_a_frozen_base_is_cached_over_micro_batches_and_quantized_after_a_step() -> None:
    """LoRA: the base requires no gradient and never has one."""
    for recipe in ("tensorwise", "rowwise"):
        layer, adapter = linear(recipe), nn.Linear(K, K)
        layer.requires_grad_(False)
        optimizer = torch.optim.SGD(adapter.parameters(), 0.1)
        entries = []
        for _ in range(3):
            layer(adapter(torch.randn(T, K))).sum().backward()
            entries.append(state_of(layer).weights.entries["fprop"])
        assert entries[0] is entries[1] is entries[2]
        optimizer.step()
        through_data(layer)
        x = torch.randn(T, K)
        assert_same(trained(fresh(layer), x), trained(layer, x), recipe)


def quantized_by(layer: qt.Linear) -> object:
    """The cached fprop operand, which is another object after requantization."""
    return state_of(layer).weights.entries.get("fprop")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_recomputation_uses_weights_cached_over_micro_batches(recipe: str, reentrant: bool) -> None:
    layer, other = linear(recipe), linear(recipe)
    other.load_state_dict(layer.state_dict())
    entries = set()
    for x in torch.randn(3, T, K):
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        y = torch.utils.checkpoint.checkpoint(layer, inputs[0], use_reentrant=reentrant)
        y.square().sum().backward()
        entries.add(quantized_by(layer))
        expected = other(inputs[1])
        expected.square().sum().backward()
        assert_bitwise(y.detach(), expected.detach())
        assert_bitwise(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
    assert len(entries) == 1


def test_a_direct_write_with_stale_gradients_is_seen_after_refresh() -> None:
    """Undetected writes of docs/limits.md: gradients are left in place, or zeroed in place."""
    for zero in (lambda layer: None, lambda layer: layer.zero_grad(set_to_none=False)):
        layer, x = linear("mxfp8"), torch.randn(T, K)
        trained(layer, x)
        before = quantized_by(layer)
        zero(layer)
        through_data(layer)
        assert_bitwise(evaluated(layer, x), evaluated(fresh(layer), x))
        trained(layer, x)
        assert quantized_by(layer) is before, "it is seen: docs/limits.md may say so"
        qt.refresh(layer)
        assert_same(trained(fresh(layer), x), trained(layer, x), "after refresh")


# Manual optimizer steps.


def assigned_in_place(layer: qt.Linear) -> None:
    with torch.no_grad():
        for p in layer.parameters():
            p -= 0.1 * p.grad  # type: ignore[operator]
            p.grad = None


def added_through_data(layer: qt.Linear) -> None:
    for p in layer.parameters():
        p.data.add_(p.grad, alpha=-0.1)  # type: ignore[arg-type]
        p.grad = None


def fused_by_hand(layer: qt.Linear) -> None:
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
    given = list(layer.parameters())
    torch._fused_sgd_([p.detach() for p in given], [p.grad for p in given], [], is_first_step=True, **options)  # type: ignore[misc]
    layer.zero_grad()


@pytest.mark.parametrize(
    ("recipe", "step"), alternating(QUANTIZING, [assigned_in_place, added_through_data, fused_by_hand], ["tensorwise"])
)
def test_a_manual_step_trains_the_same_as_without_a_cache(recipe: str, step: Writer) -> None:
    layer = linear(recipe)
    other = fresh(layer)
    for _ in range(3):
        for x in torch.randn(2, T, K):
            got = trained(layer, x)
            qt.refresh(other)
            assert_same(got, trained(other, x), step.__name__)
        step(layer)
        step(other)  # type: ignore[arg-type]
    assert_bitwise(layer.weight, other.weight)  # type: ignore[arg-type]


def step_in_hooks(net: nn.Module, by_optimizer: bool) -> None:
    """Step each parameter inside backward, as soon as it has a gradient."""
    for p in net.parameters():
        optimizer = torch.optim.SGD([p], 0.1) if by_optimizer else None

        def step(p: Tensor, optimizer: torch.optim.Optimizer | None = optimizer) -> None:
            if optimizer is None:
                p.data.add_(p.grad, alpha=-0.1)  # type: ignore[arg-type]
            else:
                optimizer.step()
            p.grad = None

        p.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("by_optimizer", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_steps_inside_backward_train_as_those_that_keep_nothing(recipe: str, by_optimizer: bool) -> None:
    net = nn.Sequential(qt.Linear(K, N, recipe=recipe), nn.ReLU(), qt.Linear(N, K, recipe=recipe))
    other = fresh(net)
    for each in (net, other):
        step_in_hooks(each, by_optimizer)
    for x in torch.randn(4, T, K):
        got = trained(net, x)
        qt.refresh(other)
        assert_same(got, trained(other, x), "a step")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_a_reentrant_recomputation_sees_a_manual_step(recipe: str) -> None:
    """No forward in gradient mode checks the weight between the step and the backward that recomputes."""
    layer, x = linear(recipe), torch.randn(T, K)
    trained(layer, x)
    through_data(layer)
    without_gradients(layer)
    other = fresh(layer)
    got, expected = (
        trained(lambda x, net=net: torch.utils.checkpoint.checkpoint(net, x, use_reentrant=True), x)  # type: ignore[arg-type, misc]
        for net in (layer, other)
    )
    assert_same(got, expected, recipe)


@pytest.mark.parametrize("between", [qt.frozen, lambda _: qt.autocast(enabled=False)])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_a_gradient_that_was_dropped_and_recreated_invalidates_the_cache(
    recipe: str, between: Callable[[nn.Module], Any]
) -> None:
    """A manual step, and a micro-batch that does not use the cache, before one that would."""
    layer, x = linear(recipe), torch.randn(T, K)
    trained(layer, x)
    through_data(layer)
    without_gradients(layer)
    with between(layer):
        trained(layer, x)
    assert layer.weight.grad is not None
    assert_same(trained(layer, x), trained(fresh(layer), x), recipe)


# Shared weights.


@pytest.mark.parametrize("trained_one", [0, 1])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_layer_sees_writes_to_a_weight_it_shares(recipe: str, trained_one: int) -> None:
    layers = linear(recipe), linear(recipe)
    layers[1].weight = layers[0].weight
    x = torch.randn(T, K)
    for _ in range(3):
        # Only one of them has a backward.
        outputs = [layer(x) for layer in layers]
        outputs[trained_one].sum().backward()
        through_data(layers[0])
        layers[0].weight.grad = None
        # Both check the weight, and both have a backward, in either order.
        for layer in layers if trained_one else reversed(layers):
            assert_same(trained(fresh(layer), x), trained(layer, x), "tied")
        without_gradients(layers[0])


def test_copies_made_within_a_step_have_an_empty_cache() -> None:
    for recipe in ("tensorwise", "rowwise"):
        layer = linear(recipe)
        trained(layer, torch.randn(T, K))
        x = torch.randn(T, K)
        for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.copy(layer)):
            through_data(copied)
            copied.weight.grad = None
            assert_bitwise(copied(x), fresh(copied)(x), recipe)
            through_data(copied)


# Weights stored as codes.


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "nvfp4"])
def test_a_direct_write_to_codes_or_scales_is_seen(recipe: str) -> None:
    with qt.quantized_init(recipe):
        layer = qt.Linear(K, N, recipe=recipe)
    layer.weight.requires_grad_(False)
    x = torch.randn(T, K)
    for training in (False, True):
        for name in ("weight_scale", "weight"):
            with torch.set_grad_enabled(training):
                layer(x)
                written = memory_of(layer.weight) if name == "weight" else layer.weight.scale
                view = written.detach().view(torch.uint8).numpy()
                # A sign, a nibble or a power of two.
                view ^= 0x08 if name == "weight" else 0
                if name == "weight_scale":
                    layer.weight.scale.data = layer.weight.scale.clone()
                    if layer.weight.scale.dtype is torch.uint8:
                        layer.weight.scale.numpy()[:] += 1
                    else:
                        layer.weight.scale.numpy()[:] *= 2
                assert_bitwise(layer(x), fresh(layer)(x), f"{name}, {training}")


def test_a_direct_write_to_a_scale_is_seen() -> None:
    """DistributedDataParallel broadcasts buffers by a collective, while the layer caches the scale on the host."""
    with qt.quantized_init("tensorwise"):
        layer = qt.Linear(K, N, bias=False, recipe="tensorwise")
    layer.requires_grad_(False)
    x = torch.randn(T, K)
    y = layer(x)
    layer.weight.scale.numpy()[:] *= 2  # type: ignore[operator]
    assert_bitwise(layer(x), y * 2)


# FSDP2.


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def scaled(layer: nn.Module, step: int) -> None:
    """Write to the shards, in place or by loading."""
    weight: Any = layer.weight
    if step % 2:
        with torch.no_grad():
            weight.mul_(-1.5)
    else:
        layer.load_state_dict({"weight": weight.detach() * 0.5})


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("mode", "recipe"),
    alternating(["evaluation", "gradients left", "gradients set to None", "frozen"], ["tensorwise", "mxfp8"], []),
)
def test_a_sharded_layer_sees_writes_to_its_shards(recipe: str, mode: str, one_rank: None) -> None:
    layer = qt.Linear(K, N, bias=False, recipe=recipe)
    net = nn.Sequential(layer)
    fully_shard(layer)
    fully_shard(net)
    right = 0
    with qt.frozen(net) if mode == "frozen" else nothing():
        for step in range(11):
            x = torch.randn(T, K)
            other = qt.Linear(K, N, bias=False, recipe=recipe)
            other.load_state_dict({"weight": layer.weight.full_tensor().detach()})  # type: ignore[operator]
            if mode in ("evaluation", "frozen"):
                right += torch.equal(evaluated(net, x), evaluated(other, x))
            else:
                right += all(map(torch.equal, trained(net, x), trained(other, x)))
            if mode == "gradients set to None":
                layer.weight.grad = None
            scaled(layer, step)
    assert right == 11, f"{right} of 11 forwards used the weight of that moment"


@contextmanager
def nothing() -> Iterator[None]:
    yield


def codes_alive(side: int) -> int:
    """Bytes of all live square matrices of codes."""
    gc.collect()
    float8 = [t for t in gc.get_objects() if type(t) is Tensor and t.dtype is torch.float8_e4m3fn]
    return sum(t.untyped_storage().nbytes() for t in float8 if t.shape == (side, side))


@pytest.fixture
def few_objects() -> None:
    """Exclude objects of other tests from searches of all objects."""
    gc.collect()
    gc.freeze()


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_rank_holds_codes_of_the_units_in_flight_alone(recipe: str, one_rank: None) -> None:
    side, units = 128, 5
    layers = [qt.Linear(side, side, bias=False, recipe=recipe) for _ in range(units)]
    net = nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer)
    fully_shard(net)
    before, seen = codes_alive(side), []
    for layer in layers:
        layer.register_forward_hook(lambda *_: seen.append(codes_alive(side) - before))
        layer.register_full_backward_hook(lambda *_: seen.append(codes_alive(side) - before))
    x = torch.randn(T, side, requires_grad=True)
    for _ in range(2):
        y = net(x)
        assert codes_alive(side) == before, "codes are held from forward to backward"
        y.square().sum().backward()
        assert codes_alive(side) == before, "codes are held after backward"
    assert max(seen) <= 2 * side * side and len(seen) == 4 * units
