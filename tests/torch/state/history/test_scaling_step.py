"""Histories roll with the step that their layers ran in: several models in one loop train as each does alone."""

import copy
import gc
import itertools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quaver.torch as qt
from quaver import recipes
from quaver.torch.state.history import roll
from tests.close import assert_bitwise
from tests.pairs import case_name, pairs

#: With a history of one amax, an extra or a missing roll changes the next factors.
RECIPE = recipes.delayed(history=3, algorithm="most_recent")


def net() -> nn.Sequential:
    first, second = qt.Linear(16, 16), qt.Linear(16, 16)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), second)


def with_torchs_checkpoint(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(model, x, use_reentrant=False)
    return y


class Player:
    """Record the calls of a model in a loop with others, to repeat them later without the others."""

    def __init__(
        self, model: nn.Module, call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x)
    ) -> None:
        self.model, self.before, self.call = model, copy.deepcopy(model), call
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.events: list[tuple[str, Any]] = []
        self.outputs: list[Tensor] = []

    def __call__(self, x: Tensor, entry: int) -> Tensor:
        """Run forward in the autocast of this number."""
        number = len(self.outputs)
        self.events.append(("forward", (x.detach().clone(), entry, torch.is_grad_enabled())))
        y = self.call(self.model, x)
        self.outputs.append(y.detach().clone())
        if y.requires_grad:
            y.register_hook(lambda g: self.events.append(("backward", (number, g.clone()))))
        return y

    def step(self) -> None:
        self.events.append(("step", None))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forget(self) -> None:
        """Drop gradients that flowed through this model to another one."""
        self.events.append(("forget", None))
        self.optimizer.zero_grad()

    def assert_as_alone(self) -> None:
        """Check that a copy with the same calls has the same outputs, weights and histories."""
        model, outputs = self.before, list[Tensor]()
        with ExitStack() as stack:
            self._repeat(model, outputs, stack)
        outputs.clear()
        gc.collect()
        roll.roll_all()
        for name, value in self.model.state_dict().items():
            assert_bitwise(model.state_dict()[name], value, name)

    def _repeat(self, model: nn.Module, outputs: list[Tensor], stack: ExitStack) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        now = None
        for kind, group in itertools.groupby(self.events, lambda event: event[0]):
            events = [details for _, details in group]
            if kind == "forward":
                for x, entry, training in events:
                    if entry != now:
                        stack.close()
                        stack.enter_context(torch.set_grad_enabled(training))
                        stack.enter_context(qt.autocast(RECIPE))
                        now = entry
                    outputs.append(self.call(model, x.requires_grad_(training)))
                    assert_bitwise(outputs[-1], self.outputs[len(outputs) - 1], f"output {len(outputs)}")
                continue
            stack.close()
            now = None
            if kind == "backward":
                torch.autograd.backward([outputs[number] for number, _ in events], [g for _, g in events], True)
            else:
                if kind == "step":
                    optimizer.step()
                optimizer.zero_grad()


CALLS = pytest.mark.parametrize(
    "call", [lambda model, x: model(x), with_torchs_checkpoint], ids=["plain", "checkpoint"]
)


def data(i: int, wild: float = 1.0) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) * (1 + i % 3) * wild


@CALLS
def test_a_model_between_its_forward_and_its_backward_is_left_unchanged(
    call: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    one, other = Player(net(), call), Player(net())
    for i in range(4):
        with qt.autocast(RECIPE):
            y = one(data(i), 2 * i)
        recorded = one.model[0].history.clone()
        with qt.autocast(RECIPE):
            z = other(data(i + 7), 2 * i + 1)
        assert_bitwise(one.model[0].history, recorded, "the other's autocast rolled it")
        y.square().sum().backward()
        z.square().sum().backward()
        one.step()
        other.step()
    for player in (one, other):
        player.assert_as_alone()


@CALLS
@pytest.mark.parametrize("inside", [True, False])
def test_a_student_with_a_teacher_trains_as_it_does_alone(
    inside: bool, call: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    teacher, student = Player(net()), Player(net(), call)
    for i in range(4):
        if inside:
            with qt.autocast(RECIPE):
                y = student(data(i), 2 * i)
                with torch.no_grad():
                    target = teacher(data(i), 2 * i)
        else:
            with qt.autocast(RECIPE):
                y = student(data(i), 2 * i)
            with torch.no_grad(), qt.autocast(RECIPE):
                target = teacher(data(i), 2 * i + 1)
        (y - target).square().mean().backward()
        student.step()
    student.assert_as_alone()
    assert not any("history" in name for name, _ in teacher.model.named_buffers())


@CALLS
def test_two_models_teach_each_other(call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Each has forwards with a pending backward when the other enters its autocast."""
    players = [Player(net(), call), Player(net(), call)]
    for i in range(4):
        outputs = []
        for number, player in enumerate(players):
            with qt.autocast(RECIPE):
                outputs.append(player(data(i), 2 * i + number))
        for number, player in enumerate(players):
            (outputs[number] - outputs[1 - number].detach()).square().mean().backward(retain_graph=number == 0)
            player.step()
    for player in players:
        player.assert_as_alone()


@CALLS
@pytest.mark.parametrize("again", [True, False], ids=["a second forward", "the first graph"])
def test_a_generator_and_a_discriminator(again: bool, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    generator, discriminator = Player(net(), call), Player(net(), call)
    for i in range(4):
        entry = 3 * i
        with qt.autocast(RECIPE):
            generated = generator(data(i), entry)
        with qt.autocast(RECIPE):
            loss = discriminator(data(i + 9), entry + 1).mean() - discriminator(generated.detach(), entry + 1).mean()
        loss.backward()
        discriminator.step()
        with qt.autocast(RECIPE):
            if again:
                generated = generator(data(i + 5), entry + 2)
            judged = discriminator(generated, entry + 2)
        judged.square().mean().backward()
        generator.step()
        discriminator.forget()
    for player in (generator, discriminator):
        player.assert_as_alone()


class WaitingLayer(nn.Module):
    """Block a forward until the other thread has run."""

    wait: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, x: Tensor) -> Tensor:
        self.wait()
        return x


def train(model: nn.Module, count: int, enter: Callable[[], Any], wait: Callable[[], None] = lambda: None) -> Tensor:
    """Train a few steps with two forwards before their backwards; return the outputs."""
    optimizer, every_output = torch.optim.SGD(model.parameters(), lr=0.1), []
    for i in range(count):
        outputs = []
        for part in range(2):
            with enter():
                outputs.append(model(data(2 * i + part)))
            wait()
        for y in outputs:
            y.square().sum().backward()
            wait()
        every_output += [y.detach() for y in outputs]
        optimizer.step()
        optimizer.zero_grad()
        wait()
    return torch.stack(every_output)


@pytest.mark.parametrize("converted", [False, True], ids=["autocast", "converted"])
def test_two_threads_in_lockstep_train_as_each_alone(converted: bool) -> None:
    models = [net().insert(3, WaitingLayer()) for _ in range(2)]
    if converted:
        for model in models:
            qt.convert(model, RECIPE)
    alone = [copy.deepcopy(model) for model in models]
    # One of the threads stays under autocast.
    enter = [ExitStack if converted else lambda: qt.autocast(RECIPE), lambda: qt.autocast(RECIPE)]
    expected = [train(model, 4, each) for model, each in zip(alone, enter, strict=True)]
    turns, got = threading.Barrier(2, timeout=60), dict[int, Tensor]()

    def wait_for_the_other() -> None:
        turns.wait()
        turns.wait()

    def work(number: int) -> None:
        # The threads alternate at each forward, half forward and backward.
        models[number][3].wait = wait_for_the_other
        if number == 1:
            turns.wait()
        got[number] = train(models[number], 4, enter[number], wait_for_the_other)
        if number == 0:
            turns.wait()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert_bitwise(got[number], expected[number])


def test_two_models_called_alternately_roll_only_their_own_histories() -> None:
    models = [net(), net()]
    for model in models:
        qt.convert(model, RECIPE)
    alone = [copy.deepcopy(model) for model in models]
    expected = [train(model, 3, ExitStack) for model in alone]
    got: list[list[Tensor]] = [[], []]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for i in range(3):
        outputs: list[list[Tensor]] = [[], []]
        for part in range(2):
            for number, model in enumerate(models):
                outputs[number].append(model(data(2 * i + part)))
        for number, optimizer in enumerate(optimizers):
            for y in outputs[number]:
                y.square().sum().backward()
            got[number] += [y.detach() for y in outputs[number]]
            optimizer.step()
            optimizer.zero_grad()
    for one, want in zip(got, expected, strict=True):
        assert_bitwise(torch.stack(one), want)


@pytest.mark.parametrize("validates", ["eval", "with gradients"])
def test_validation_between_micro_batches_changes_nothing(validates: str) -> None:
    """A freed graph leaves no pending backward, but its amaxes count as a forward with gradients."""
    models = [net(), net()]
    models[1].load_state_dict(models[0].state_dict())
    other = net()
    got = []
    for model, watched in zip(models, (False, True), strict=True):

        def validate(model: nn.Module = model, watched: bool = watched) -> None:
            if watched and validates == "eval":
                with torch.no_grad(), qt.autocast(RECIPE):
                    model.eval()(data(99, 100.0))
                model.train()
            elif watched:
                with qt.autocast(RECIPE):
                    other(data(99, 100.0))

        got.append(train(model, 3, lambda: qt.autocast(RECIPE), validate))
    assert_bitwise(got[1], got[0])


def bypassed(model: nn.Module, x: Tensor) -> Tensor:
    """Call `forward` directly as PEFT does, so that hooks do not run."""
    y: Tensor = model.forward(x)
    return y


def call_layers_one_by_one(model: Any, x: Tensor) -> Tensor:
    """Call submodules directly as a LightningModule's training_step does."""
    for part in model:
        x = part(x)
    return x


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(call_layers_one_by_one, model, x, use_reentrant=False)
    return y


def scaled(model: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], micro: int) -> list[Tensor]:
    """Losses of a loop with a GradScaler whose third step overflows, and with validation between steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for i in range(6):
        for part in range(micro):
            loss = call(model, data(i * micro + part, float("inf") if i == 2 else 1.0)).square().mean()
            losses.append(loss.detach())
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(call(model, data(99, 100.0)).square().mean())
    return losses


@pytest.mark.parametrize(
    ("wrapped", "micro", "call"),
    pairs((False, True), (1, 2), (bypassed, call_layers_one_by_one, checkpointed)),
    ids=case_name,
)
def test_a_model_trains_the_same_when_its_root_is_not_called(
    call: Callable[[nn.Module, Tensor], Tensor], micro: int, wrapped: bool
) -> None:
    models = [net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        qt.convert(nn.ModuleDict({"m": model}) if wrapped and model is models[1] else model, RECIPE)
    expected = scaled(models[0], lambda model, x: model(x), micro)
    got = scaled(models[1], call, micro)
    assert_bitwise(torch.stack(got), torch.stack(expected))
    roll.roll_all()
    for name, value in models[0].state_dict().items():
        assert_bitwise(models[1].state_dict()[name], value, name)


@pytest.mark.parametrize("keeps", ["its graphs", "a retained graph"])
def test_a_loop_that_keeps_graphs_alive_rolls_nevertheless(keeps: str) -> None:
    model, other = net(), net()
    other.load_state_dict(model.state_dict())
    qt.convert(model, RECIPE)
    qt.convert(other, RECIPE)
    held: list[Tensor] = []
    for i in range(4):
        for each, call in ((model, bypassed), (other, lambda model, x: model(x))):
            loss = call(each, data(i)).square().sum()
            loss.backward(retain_graph=keeps == "a retained graph")
            if keeps == "its graphs":
                held.append(call(each, data(i + 1)))
            else:
                held.append(loss)
            for p in each.parameters():
                p.grad = None
    assert model[0].history[1:].any()
    # A forward without backward belongs to the next step or is a step of its own; factors are updated in both cases.
    assert_bitwise(model[0].factor != 0, other[0].factor != 0)


def test_a_layer_with_its_own_recipe_rolls_without_autocast() -> None:
    layer, other = (qt.Linear(16, 16, recipe=RECIPE) for _ in range(2))
    other.load_state_dict(layer.state_dict())
    for i in range(4):
        y = layer(data(i))
        with qt.autocast(RECIPE):
            z = other(data(i))
        assert_bitwise(y, z)
        y.square().sum().backward()
        z.square().sum().backward()
    assert layer.history[1:].all() and layer.factor.all()
