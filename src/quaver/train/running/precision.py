"""Which recipe a run's steps are under: the schedule of its parts, through its steps, records and checkpoints."""

import copy
from collections.abc import Mapping
from typing import Any

from quaver.core.converting.schedule import Part, Schedule
from quaver.core.spec import Recipe
from quaver.train.configuration import recipe_name
from quaver.train.configuration.config import TrainConfig
from quaver.train.configuration.schedule import lr_at
from quaver.train.learning.learner import Learner
from quaver.train.learning.ranks import Ranks
from quaver.train.records.checkpoint import CheckpointError
from quaver.train.records.metrics import Record

#: The entry of a checkpoint's state.
STATE = "schedule"


class Precision:
    """The recipes of a run; every rank calls every method.

    Args:
        recipe: a Recipe in place of the schedule that `config.recipe` spells.
    Raises: ValueError if that cannot be read, or a part of it would have no step.
    """

    def __init__(self, config: TrainConfig, recipe: Recipe | None = None) -> None:
        self.config = config
        whole = None if recipe is None else Schedule([Part(recipe, recipe.name)])
        self.schedule = whole or recipe_name.schedule_of(config)

    @property
    def recipes(self) -> list[Recipe]:
        """Of all parts."""
        return list(dict.fromkeys(part.recipe for part in self.schedule.parts))

    @property
    def recipe(self) -> Recipe:
        """The one in force."""
        return self.schedule.recipe

    def take_up(self, saved: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state: in the part that it was saved in, or where the run has other parts since, in
        the one of its next step.

        Raises: CheckpointError if the state is none.
        """
        config, step, state = saved.get("config"), saved["step"], saved.get(STATE)
        if state is not None and isinstance(config, Mapping) and config.get("recipe") == self.config.recipe:
            try:
                self.schedule.load_state_dict(state if isinstance(state, Mapping) else {})
            except ValueError as error:
                raise CheckpointError(f"the checkpoint of step {step} does not fit: {error}") from error
            return
        risen = {min(step, self.config.warmup), min(step, self.config.warmup + 1)}  # where the learning rate is highest
        reached = [lr_at(each, self.config) for each in risen]
        fresh = {"part": 0, "step": step, "highest_lr": max(reached), "losses": []}
        self.schedule.load_state_dict(fresh)
        ahead = copy.deepcopy(self.schedule)
        ahead.at(step + 1, lr=lr_at(step + 1, self.config))
        self.schedule.part = ahead.part

    def begin(self, step: int, trained: Learner) -> None:
        """Give the model the recipe of a step, where that is another part's."""
        before = self.schedule.part
        recipe = self.schedule.at(step, lr=lr_at(step, self.config))
        if self.schedule.part != before:
            trained.take(recipe)

    def saw(self, record: Record, ranks: Ranks) -> Record:
        """A step's record with the part that was in force, counted from 1, if there are several.

        Ranks sum in other orders, and decide by the first one's loss.
        """
        self.schedule.saw(ranks.given(record["loss"]) if self.schedule.by_loss else record["loss"])
        return record if len(self.schedule.parts) == 1 else {**record, "part": self.schedule.part + 1}

    def state(self) -> dict[str, Any]:
        """An entry of a checkpoint's state."""
        return {STATE: self.schedule.state_dict()}
