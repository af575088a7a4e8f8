"""Automatic fallback: move layers that lose precision to safer recipes while a model trains."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.conversion.convert import set_recipe
from quaver.torch.linear.linear import Quantizable
from quaver.torch.state.buffers import STATE
from quaver.torch.state.weight_cache import refresh

logger = logging.getLogger("quaver")


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """When `inspect` gives a layer a safer recipe, and which one."""

    #: Recipes from the least to the most safe. A layer moves to the one after its own, or to the first.
    recipes: Sequence[str | Recipe] = ("rowwise", "blockwise", "bf16")
    #: A layer fails a sampled step if one of its operands or results has a larger error, or if a larger share of an
    #: operand's nonzero values is flushed to zero.
    error: float = 0.25
    flushed: float = 0.5
    #: Number of successive sampled steps that a layer must fail.
    steps: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.recipes, list | tuple) or not self.recipes:
            raise ValueError(f"Fallback.recipes is {self.recipes!r}; give a list, such as ['rowwise', 'bf16']")
        ladder = [recipes.get(recipe) for recipe in self.recipes]
        if len(set(ladder)) < len(ladder):
            raise ValueError(f"Fallback.recipes is {self.recipes!r}; give each recipe once")
        for name in ("error", "flushed"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value <= 1:
                raise ValueError(f"Fallback.{name} is {getattr(self, name)!r}; give a share, above 0 and at most 1")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"Fallback.steps is {self.steps!r}; give a whole number, 1 or more")

    def next(self, recipe: Recipe) -> Recipe | None:
        """Return the recipe after this one, None after the last."""
        ladder = [recipes.get(each) for each in self.recipes]
        place = ladder.index(recipe) + 1 if recipe in ladder else 0
        return ladder[place] if place < len(ladder) else None

    def fails(self, row: Mapping[str, Any]) -> bool:
        """Return True if a tensor of a layer, as a row of `inspect`, is beyond a threshold."""
        return row["error"] > self.error or row.get("flushed", 0.0) > self.flushed


class FallbackState:
    """Failures and switches of the layers of one model."""

    def __init__(self, fallback: Fallback, model: nn.Module, parallel: Sequence[DistributedDataParallel]) -> None:
        #: `parallel`: modules that wrap the model and broadcast its buffers.
        self._fallback, self._model, self._parallel = fallback, model, parallel
        self._failures: Counter[str] = Counter()
        #: One dict per switch: step, layer, the recipes before and after, and the tensor that failed.
        self.switches: list[dict[str, Any]] = []

    def check(self) -> None:
        """Raise a ValueError if a weight exists only as codes, or FSDP gathers it as codes."""
        for name, module in self._model.named_modules():
            if not isinstance(module, Quantizable):
                continue
            shards = [getattr(p, "_local_tensor", p) for p in module.parameters(recurse=False)]
            if any(hasattr(type(shard), "fsdp_pre_all_gather") for shard in shards):
                raise ValueError(
                    f"inspect: FSDP gathers the weight of {name or 'the model'} in the codes of its recipe; leave out "
                    "fallback=, or gather_quantized"
                )
            if module.weight_spec is not None:
                raise ValueError(
                    f"inspect: the weight of {name or 'the model'} is stored quantized, so a fallback would not make "
                    "it safer; leave out fallback=, or store weights in high precision (no qt.quantize_weights, no "
                    "optimizer preset such as 'lean')"
                )

    def update(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count the failures of a sampled step, and switch the layers that have failed often enough.

        Args:
            rows: rows of the step, which are the same on all ranks.
        """
        failed: dict[str, Mapping[str, Any]] = {}
        for row in filter(self._fallback.fails, rows):
            name = self._module_of(row["layer"])
            if name is not None:
                failed.setdefault(name, row)
        self._failures = Counter({name: self._failures[name] + 1 for name in failed})
        for name, row in failed.items():
            if self._failures[name] >= self._fallback.steps:
                self._switch(step, name, f"{row['gemm']}, {row['tensor']}")

    def _module_of(self, layer: str) -> str | None:
        """Return the name of a layer's module, which may have several weights; None if another rank has it."""
        name = "" if layer == "(root)" else layer
        while True:
            try:
                module = self._model.get_submodule(name)
            except AttributeError:
                module = None
            if isinstance(module, Quantizable):
                return name
            if not name:
                return None
            name = name.rpartition(".")[0]

    def _switch(self, step: int, name: str, tensor: str) -> None:
        module: Any = self._model.get_submodule(name)
        before = module.recipe
        after = None if before is None else self._fallback.next(before)
        if after is None:
            return
        del self._failures[name]
        set_recipe(self._model, name, after)
        refresh(self._model)
        # DistributedDataParallel fails if all buffers that it broadcasts are removed. Those of recipes are equal on all
        # ranks.
        if all(buffer.rpartition(".")[2] in STATE for buffer, _ in self._model.named_buffers()):
            for module in self._parallel:
                module.broadcast_buffers = False
        switch = {"step": step, "layer": name, "before": str(before), "after": str(after), "tensor": tensor}
        self.switches.append(switch)
        logger.warning("step %d: %s falls back from %s to %s (%s)", step, name or "(root)", before, after, tensor)

    def state_dict(self) -> dict[str, Any]:
        """Return failures and switches as built-in types."""
        return {"failures": dict(self._failures), "switches": [dict(switch) for switch in self.switches]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Repeat the switches of a saved state, on a model that was converted as that one was at its start."""
        recipe_of: dict[str, Recipe | None] = {}
        for switch in state["switches"]:
            layer: Any = self._model.get_submodule(switch["layer"])
            before = recipe_of.get(switch["layer"], layer.recipe)
            after = None if before is None else self._fallback.next(before)
            if after is None or (str(before), str(after)) != (switch["before"], switch["after"]):
                raise ValueError(
                    f"inspect: the saved state has {switch['layer'] or '(root)'} fall back from {switch['before']} to "
                    f"{switch['after']}, and here it has {before}, then {after}; convert the model as before, and give "
                    "the same Fallback"
                )
            recipe_of[switch["layer"]] = after
        for name, recipe in recipe_of.items():
            assert recipe is not None
            set_recipe(self._model, name, recipe)
        refresh(self._model)
        self._failures = Counter(state["failures"])
        self.switches = [dict(switch) for switch in state["switches"]]
