"""A layer's maxima are reduced over its own process group, whatever else a rank runs, in whichever thread."""

import copy
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from tests import two_ranks
from tests.close import assert_bitwise
from tests.two_ranks import RANKS, gathered

#: With a history of one amax, an amax of one rank shows in the next factors.
RECIPE = recipes.delayed(history=3, algorithm="most_recent")
#: Seconds after which a rank that waits for the other fails.
SECONDS = 8
STEPS = 4


def converted() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    qt.convert(model, RECIPE)
    return model


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(qt.Linear(16, 16), nn.Tanh(), qt.Linear(16, 16))


def data(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 16, generator=generator) * (1 + 9 * rank) * (1 + step)


def group(*ranks: int) -> Any:
    return dist.new_group(ranks or range(RANKS), timeout=timedelta(seconds=SECONDS))


def under_autocast(model: nn.Module, x: Tensor, over: Any) -> Tensor:
    with qt.autocast(RECIPE, group=over):
        y: Tensor = model(x)
    return y


def bypassed(model: nn.Module, x: Tensor, over: Any) -> Tensor:
    """The first forward determines the group; later the root is not called, as in PEFT."""
    if model[0]._state.step is None:  # type: ignore[index, union-attr]
        return under_autocast(model, x, over)
    y: Tensor = model.forward(x)
    return y


def by_root(model: nn.Module, x: Tensor, over: Any) -> Tensor:
    """The first forward determines the group; later the root ends steps."""
    if model[0]._state.step is None:  # type: ignore[index, union-attr]
        return under_autocast(model, x, over)
    y: Tensor = model(x)
    return y


def step_of(
    model: nn.Module, rank: int, step: int, over: Any, call: Callable[[nn.Module, Tensor, Any], Tensor]
) -> Tensor:
    y = call(model, data(rank, step), over)
    y.square().mean().backward()
    return y.detach()


CALLS = (under_autocast, bypassed, by_root)


def alone(
    rank: int,
    over: Any,
    call: Callable[[nn.Module, Tensor, Any], Tensor],
    make: Callable[[], nn.Module] = converted,
    first: int = 0,
) -> tuple[list[Tensor], Tensor]:
    """Outputs and final factors of a model that trains alone."""
    model = make()
    outputs = [step_of(model, rank, step, over, call) for step in range(first, first + STEPS)]
    return outputs, factors(model)


def factors(model: Any) -> Tensor:
    return torch.stack([model[0].factor, model[2].factor])


def two_models_of_two_groups_in_turns(rank: int) -> None:
    """Each model's amaxes are reduced over its group when it rolls, also if the other's step begins before."""
    groups = [group() for _ in range(2)]
    for call in CALLS:
        expected = [alone(rank, groups[number], call, first=10 * number) for number in range(2)]
        models = [converted() for _ in range(2)]
        got: list[list[Tensor]] = [[], []]
        for step in range(STEPS):
            outputs = [call(models[n], data(rank, 10 * n + step), groups[n]) for n in range(2)]
            # Alternate whether a backward runs before or after the other model's next forward.
            for number in (0, 1) if step % 2 else (1, 0):
                outputs[number].square().mean().backward()
                got[number].append(outputs[number].detach())
        for number, (wanted, factor) in enumerate(expected):
            assert_bitwise(torch.stack(got[number]), torch.stack(wanted), call.__name__)
            assert_bitwise(factors(models[number]), factor, call.__name__)


def a_model_that_one_rank_trains(rank: int) -> None:
    """Its group has only that rank; the model of both ranks trains as without it."""
    own = [group(r) for r in range(RANKS)]
    for call in CALLS:
        for of_other in (under_autocast, bypassed):
            expected, factor = alone(rank, None, call)
            model, private, got = converted(), converted(), []
            for step in range(STEPS):
                y = call(model, data(rank, step), None)
                if rank == 0:
                    z = of_other(private, data(rank, step + 7), own[0])
                    if step % 2:
                        z.square().mean().backward()
                y.square().mean().backward()
                if rank == 0 and not step % 2:
                    z.square().mean().backward()
                got.append(y.detach())
            assert_bitwise(torch.stack(got), torch.stack(expected), f"{call.__name__} beside {of_other.__name__}")
            assert_bitwise(factors(model), factor)


def models_that_one_rank_holds_and_does_not_train(rank: int) -> None:
    held = []
    for call in CALLS:
        expected, factor = alone(rank, None, call)
        if rank == 0:
            # A converted model, a copy, one after an evaluation, and one with a plain checkpoint.
            held += [converted() for _ in range(3)]
            held.append(copy.deepcopy(held[0]))
            held[1].load_state_dict(qt.plain_state_dict(held[0]))
            with torch.no_grad():
                held[2](data(0, 0))
        model = converted()
        got = [step_of(model, rank, step, None, call) for step in range(STEPS)]
        assert_bitwise(torch.stack(got), torch.stack(expected), call.__name__)
        assert_bitwise(factors(model), factor)


class Branches(nn.Module):
    """A layer with two branches, of which a rank may run either or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branches = nn.Linear(16, 16), nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

    def forward(self, x: Tensor, runs: tuple[bool, ...]) -> Tensor:
        y: Tensor = self.first(x)
        for run, branch in zip(runs, self.branches, strict=True):
            y = branch(y) if run else y
        return y


def branches_that_run_on_one_rank(rank: int) -> None:
    """Ranks reduce the layers that either has run, in a converted model or in a copy."""
    for over in (None, group()):
        for kind in ("autocast", "root", "bypassed"):
            _train_branches(rank, over, kind, copied=False)
            _train_branches(rank, over, kind, copied=True)


def _train_branches(rank: int, over: Any, kind: str, copied: bool) -> None:
    torch.manual_seed(0)
    model = Branches()
    qt.convert(model, RECIPE)
    if copied:
        with qt.autocast(RECIPE, group=over):
            model(data(rank, 0), (True, True)).square().mean().backward()
        model = copy.deepcopy(model)
    for step in range(STEPS):
        runs = (rank == 0, step > 1)
        if kind == "autocast" or step == 0:
            with qt.autocast(RECIPE, group=over):
                y = model(data(rank, step), runs)
        else:
            y = (model if kind == "root" else model.forward)(data(rank, step), runs)
        y.square().mean().backward()
    with qt.autocast(RECIPE, group=over):
        pass
    for layer in (model.first, *model.branches):
        assert layer.factor.all(), kind
        assert_bitwise(*gathered(layer.factor), kind)


def copies_that_train_on(rank: int) -> None:
    """A copy has each rank's amaxes of the previous step, which are reduced when the copy first runs."""
    for call in CALLS[:2]:
        for duplicate in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
            model = converted()
            for step in range(2):
                step_of(model, rank, step, None, call)
            copied = duplicate(model)
            assert not torch.equal(*gathered(copied[0].history[0]))
            # A model that only one rank evaluates, such as averaged weights.
            average = duplicate(model)
            before = average[0].history.clone()
            for _ in range(2):
                if rank == 0:
                    with torch.no_grad():
                        average(data(0, 0))
                        under_autocast(average, data(0, 0), None)
                with qt.autocast(RECIPE), torch.no_grad():
                    if rank == 0:
                        average(data(0, 0))
            for step in range(2, 4):
                y = step_of(copied, rank, step, None, call)
                assert_bitwise(*gathered(factors(copied)), f"{call.__name__}, step {step}")
                assert_bitwise(y, step_of(model, rank, step, None, call), call.__name__)
            assert_bitwise(average[0].history, before, "nothing rolls what is evaluated")
            step_of(average, rank, 4, None, call)
            assert_bitwise(*gathered(factors(average)), call.__name__)


def maxima_that_a_rank_loaded_are_reduced(rank: int) -> None:
    """Each rank resumes from its own file with its own newest amaxes."""
    for call in CALLS[:2]:
        model, resumed = converted(), converted()
        for step in range(2):
            step_of(model, rank, step, None, call)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        assert not torch.equal(*gathered(state["0.history"][0]))
        resumed.load_state_dict(state)
        for step in range(2, 4):
            outputs = [step_of(each, rank, step, None, call) for each in (model, resumed)]
            assert_bitwise(outputs[1], outputs[0], f"{call.__name__}, step {step}")
        assert_bitwise(factors(resumed), factors(model))


def the_first_step_of_a_rank_without_layers(rank: int) -> None:
    """One stage has no layer; the other has one with a recipe, and so a history before any step."""
    stage = qt.Linear(16, 16, recipe=RECIPE) if rank == 0 else nn.LayerNorm(16)
    for step in range(2):
        with qt.autocast(RECIPE):
            stage(data(rank, step)).sum().backward()


CASES = [
    # Runs first, since it depends on whether ranks have begun a step before.
    the_first_step_of_a_rank_without_layers,
    two_models_of_two_groups_in_turns,
    a_model_that_one_rank_trains,
    models_that_one_rank_holds_and_does_not_train,
    branches_that_run_on_one_rank,
    copies_that_train_on,
    maxima_that_a_rank_loaded_are_reduced,
]


@pytest.mark.ranks
def test_maxima_are_reduced_over_the_layers_own_group(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


if __name__ == "__main__":
    two_ranks.main(CASES, SECONDS)
