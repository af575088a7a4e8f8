"""Quantization's state is ordinary state: saved, loaded, copied or pickled, training goes on as if nothing was."""

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.state.history import roll
from tests.close import assert_bitwise
from tests.pairs import pairs

ALL = pytest.mark.parametrize("name", recipes.RECIPES)
STATEFUL = pytest.mark.parametrize("name", ["delayed", "nvfp4"])


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(qt.Linear(32, 48, dtype=dtype), nn.ReLU(), qt.Linear(48, 16, bias=False, dtype=dtype))


class Run:
    """A model with optimizer and data; `name` is the recipe of its autocast, or None for a converted model."""

    def __init__(self, name: str | None, net: nn.Module | None = None) -> None:
        self.net = model() if net is None else net
        self.name = name
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def step(self, i: int) -> Tensor:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(i)) * (1 + i)
        with qt.autocast(enabled=False) if self.name is None else qt.autocast(self.name):
            loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def steps(self, start: int, end: int) -> list[Tensor]:
        return [self.step(i) for i in range(start, end)]


class Converted(Run):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        qt.convert(self.net, name)

    def step(self, i: int) -> Tensor:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(i)) * (1 + i)
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    a, b = one.state_dict(), other.state_dict()
    assert sorted(a) == sorted(b)
    for key in a:
        assert_bitwise(a[key], b[key], key)


def through_a_file(value: object) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(("name", "kind", "assign"), pairs(recipes.RECIPES, [Run, Converted], [False, True]))
def test_training_resumes_bit_for_bit(name: str, kind: type[Run], assign: bool) -> None:
    first, second = kind(name), kind(name)
    first.steps(0, 3)
    # Earlier steps of the second model, and views of its buffers, must not matter.
    second.steps(7, 8)
    saved = through_a_file({"net": first.net.state_dict(), "optimizer": first.optimizer.state_dict()})
    second.net.load_state_dict(saved["net"], assign=assign)  # type: ignore[index]
    second.optimizer = torch.optim.AdamW(second.net.parameters(), lr=1e-2)
    second.optimizer.load_state_dict(saved["optimizer"])  # type: ignore[index]
    assert_same_state(first.net, second.net)
    # Run them one after the other, since an autocast rolls all layers that this thread has run.
    for a, b in zip(first.steps(3, 7), second.steps(3, 7), strict=True):
        assert_bitwise(b, a)
    roll.roll_all()
    for net in (first.net, second.net):
        roll.roll(layer for layer in net.modules() if isinstance(layer, qt.Linear) and "history" in layer._buffers)
    assert_same_state(first.net, second.net)


@STATEFUL
def test_a_fresh_model_under_autocast_adopts_the_state(name: str) -> None:
    first, second = Run(name), Run(name)
    first.steps(0, 3)
    state = first.net.state_dict()
    assert any(key.endswith(("history", "count")) for key in state)
    second.net.load_state_dict(state)
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for a, b in zip(first.steps(3, 6), second.steps(3, 6), strict=True):
        assert_bitwise(b, a)


# Across recipes.


@pytest.mark.parametrize("writer", ["bf16", "mxfp8", "delayed", "nvfp4"])
@pytest.mark.parametrize("reader", ["bf16", "delayed", "nvfp4"])
def test_a_checkpoint_loads_across_recipes(writer: str, reader: str) -> None:
    first, second = Converted(writer), Converted(reader)
    first.steps(0, 2)
    missing = {key for key in second.net.state_dict() if key not in first.net.state_dict()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second.net.load_state_dict(first.net.state_dict())
    # One warning per load, not per layer; none if the saved model has no state, as without conversion.
    stateful = any(name.endswith((".history", ".count")) for name in first.net.state_dict())
    assert len(caught) == (bool(missing) and stateful)
    for warning in caught:
        assert str(warning.message).startswith(("0.history is not in the", "0.count is not in the"))
    assert_bitwise(second.net[0].weight, first.net[0].weight)
    second.steps(2, 4)


def test_missing_histories_start_fresh() -> None:
    second = Converted("delayed")
    second.steps(0, 2)
    second.net.load_state_dict(model().state_dict())
    for layer in (second.net[0], second.net[2]):
        assert not layer.history.any() and not layer.factor.any()


def test_another_history_length_restarts_with_a_warning() -> None:
    first = Run(None, model())
    qt.convert(first.net, recipes.delayed(history=8))
    first.name = "delayed"
    first.steps(0, 2)
    net = model()
    qt.convert(net, recipes.delayed(history=4))
    with pytest.warns(UserWarning, match=r"0.history has shape \(8, 3\) in the checkpoint and \(4, 3\) here") as caught:
        net.load_state_dict(first.net.state_dict())
    assert len(caught) == 1
    assert not net[0].history.any() and not net[0].factor.any()
    assert net[0].history.shape == (4, 3)


def test_checkpoints_of_nn_linear_load_strictly_and_back() -> None:
    ours, theirs = qt.Linear(8, 16), nn.Linear(8, 16)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert_same_state(ours, theirs)
    again = nn.Linear(8, 16)
    again.load_state_dict(ours.state_dict(), strict=True)
    assert_same_state(again, theirs)


def test_a_wrong_checkpoint_is_still_an_error() -> None:
    net = Converted("delayed").net
    state = Converted("delayed").net.state_dict()
    del state["0.weight"]
    state["0.wieght"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r'(?s)Missing.*"0.weight".*Unexpected.*"0.wieght"'):
        net.load_state_dict(state)


@STATEFUL
def test_the_callers_state_dict_is_not_changed(name: str) -> None:
    first = Converted(name)
    first.steps(0, 2)
    state = first.net.state_dict()
    before = {key: value.clone() for key, value in state.items()}
    Converted("tensorwise").net.load_state_dict(state)
    model().load_state_dict(state)
    assert list(state) == list(before)
    for key in before:
        assert_bitwise(state[key], before[key], key)


def test_a_checkpoint_that_was_cast_gives_float32_histories() -> None:
    first = Converted("delayed")
    first.steps(0, 2)
    state = {k: v.bfloat16() for k, v in first.net.state_dict().items()}
    net = Converted("delayed").net
    net.load_state_dict(state, assign=True)
    assert net[0].weight.dtype is torch.bfloat16
    assert net[0].history.dtype is net[0].factor.dtype is torch.float32


# Moves and copies.

MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "float": lambda m: m.bfloat16().float(),
    "cpu": lambda m: m.cpu(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": lambda m: _saved_whole(m),
    "to_empty": lambda m: m.to_empty(device="cpu"),
}


COPIES = ("deepcopy", "pickle", "torch.save")


def _saved_whole(m: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(("key", "kind", "name"), pairs(MOVES, [Run, Converted], ["delayed", "nvfp4"]))
def test_state_survives_moves_and_copies(key: str, kind: type[Run], name: str) -> None:
    move = MOVES[key]
    run = kind(name)
    run.steps(0, 3)
    before = {key: value.clone() for key, value in run.net.named_buffers()}
    assert before
    moved = move(run.net)
    after = dict(moved.named_buffers())
    assert list(after) == list(before)
    for key, value in before.items():
        assert_bitwise(after[key], value, key)


@pytest.mark.parametrize(("key", "kind", "name"), pairs(COPIES, [Run, Converted], recipes.RECIPES))
def test_copies_train_on_bit_for_bit(key: str, kind: type[Run], name: str) -> None:
    move = MOVES[key]
    run = kind(name)
    run.steps(0, 3)
    run.optimizer = torch.optim.SGD(run.net.parameters(), lr=1e-2)
    other = kind(name)
    other.net = move(run.net)
    other.optimizer = torch.optim.SGD(other.net.parameters(), lr=1e-2)
    assert_same_state(run.net, other.net)
    for a, b in zip(run.steps(3, 6), other.steps(3, 6), strict=True):
        assert_bitwise(b, a)


@STATEFUL
def test_a_trip_over_meta_keeps_the_dtype_and_starts_fresh(name: str) -> None:
    run = Converted(name)
    run.steps(0, 2)
    net = run.net.to("meta").bfloat16()
    assert all(buffer.is_meta for buffer in net.buffers())
    net = net.to_empty(device="cpu")
    for key, buffer in net.named_buffers():
        wanted = torch.int64 if key.endswith("count") else torch.float32
        assert buffer.dtype is wanted and not buffer.is_meta, key
        assert not (buffer[:2] if key.endswith("count") else buffer).any(), key
    net(torch.randn(4, 32, dtype=torch.bfloat16)).sum().backward()


def _refused(t: Tensor) -> Tensor:
    raise MemoryError


@STATEFUL
@pytest.mark.parametrize("stored", [False, True])
def test_a_move_that_fails_leaves_the_state(name: str, stored: bool) -> None:
    run = Run(name)
    run.steps(0, 2)
    if stored:
        # The layer's own recipe drops amaxes recorded under an autocast.
        warning = pytest.warns(UserWarning, match="start fresh") if name == "delayed" else contextlib.nullcontext()
        with warning:
            qt.quantize_weights(run.net, name)
        run.net.requires_grad_(False)
    before = {key: value.clone() for key, value in run.net.state_dict().items()}
    with pytest.raises(MemoryError):
        run.net._apply(_refused)
    after = run.net.state_dict()
    assert list(after) == list(before)
    for key, value in before.items():
        assert_bitwise(after[key], value, key)
    x = torch.ones(8, 32)
    with torch.no_grad(), qt.autocast(name):
        assert run.net(x).isfinite().all()


def _copied(net: nn.Module, other: nn.Module) -> nn.Module:
    return copy.deepcopy(net)


def _loaded(net: nn.Module, other: nn.Module) -> nn.Module:
    other.load_state_dict(net.state_dict())
    return other


def _assigned(net: nn.Module, other: nn.Module) -> nn.Module:
    state = {
        key: value if "weight" in key or "bias" in key else value.clone() for key, value in net.state_dict().items()
    }
    other.load_state_dict(state, assign=True)
    return other


@STATEFUL
@pytest.mark.parametrize("make", [_copied, _loaded, _assigned])
def test_copies_and_loads_in_inference_mode_do_not_break_later_steps(
    name: str, make: Callable[[nn.Module, nn.Module], nn.Module]
) -> None:
    run = Run(name)
    run.steps(0, 2)
    expected, fresh = copy.deepcopy(run.net), model()
    Run(name, fresh).steps(0, 1)
    with torch.inference_mode():
        other = make(run.net, fresh)
    # Weights of such a copy cannot be trained, and its histories roll with the next step of any model.
    taught = Run(name, run.net if make is _copied else other)
    for one, two in zip(taught.steps(2, 5), Run(name, expected).steps(2, 5), strict=True):
        assert_bitwise(one, two)


@ALL
def test_a_cached_weight_does_not_outlive_a_cast(name: str) -> None:
    """Casting back and forth may leave other values at the same address, in the same parameter and version."""
    for _ in range(8):
        layer = qt.Linear(64, 64, bias=False, recipe=name)
        x = torch.randn(4, 64)
        layer(x)
        layer.bfloat16().float()
        fresh = qt.Linear(64, 64, bias=False, recipe=name)
        fresh.load_state_dict(layer.state_dict())
        assert_bitwise(layer(x), fresh(x))


def test_buffers_are_all_there_is() -> None:
    """No pickles and no extra state: a state dict holds tensors only and loads with weights_only."""
    for name in recipes.RECIPES:
        run = Converted(name)
        run.steps(0, 1)
        state = run.net.state_dict()
        assert all(isinstance(value, Tensor) for value in state.values())
        assert not any("extra_state" in key for key in state)
        through_a_file(state)
