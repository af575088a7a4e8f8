"""Lightning integration: a `Precision` plugin that converts the LightningModule and ends steps of delayed scaling.

Lightning calls `training_step` instead of the module's forward, and loads a checkpoint before plugins convert. So the
plugin ends a step of delayed scaling when a training step begins. It saves the recipes' state in its own part of the
checkpoint, and the module's part has the names of the unconverted module.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

if find_spec("lightning") is None:
    raise ModuleNotFoundError(
        f"{__name__} needs lightning, which is not installed: pip install lightning", name="lightning"
    )

from lightning.pytorch.plugins.precision import MixedPrecision

from quaver import recipes
from quaver.recipes.conversion import Rules, Skip
from quaver.recipes.spec import Recipe
from quaver.torch.conversion.convert import convert, one_step
from quaver.torch.conversion.quantized_weights import load_scaling_state_dict
from quaver.torch.conversion.replace.blocks import Blocks
from quaver.torch.linear.linear import Quantizable
from quaver.torch.parallel import sync_amax_histories
from quaver.torch.state.buffers import STATE

__all__ = ["QuaverPrecision"]

#: Supported precisions of everything that is not quantized.
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


class QuaverPrecision(MixedPrecision):
    """Precision plugin that trains a LightningModule under a recipe.

    Args:
        recipe: as for `quaver.torch.convert`. A module with an already converted layer is left as it is.
        precision: "32-true"; or "bf16-mixed" or "16-mixed", which use torch.autocast, "16-mixed" with a GradScaler.
        device: device type for torch.autocast; None is "cuda" if available, else "cpu".
        skip, head, seed, blocks: as for `quaver.torch.convert`.
    Raises:
        ValueError: an unknown recipe or precision.

    Losses equal, bit for bit, those of a plain loop that converts the LightningModule and calls it once per batch. A
    resumed run gives those of an uninterrupted one. A training step that runs the module several times is one step of
    delayed scaling, until a backward has run in it.
    """

    def __init__(
        self,
        recipe: str | Recipe | Rules | Mapping[str, Recipe | str | None],
        precision: str = "bf16-mixed",
        device: str | None = None,
        *,
        skip: Skip = (),
        head: bool = False,
        seed: int = 0,
        blocks: bool | Blocks = False,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(
                f"precision is {precision!r}; QuaverPrecision has {', '.join(PRECISIONS)}. To keep weights in "
                "bfloat16, cast the module in configure_model and give '32-true', which leaves dtypes alone"
            )
        if not isinstance(recipe, Rules | Mapping):
            recipe = recipes.get(recipe)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        # MixedPrecision only knows two modes; apart from autocast, its bfloat16 mode does what float32 needs.
        super().__init__("16-mixed" if precision == "16-mixed" else "bf16-mixed", device)
        self.precision: Any = precision
        self.recipe = recipe
        self.options: dict[str, Any] = {"skip": skip, "head": head, "seed": seed, "blocks": blocks}
        self._module: weakref.ref[nn.Module] | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the LightningModule, once."""
        if not any(isinstance(part, Quantizable) for part in module.modules()):
            convert(module, self.recipe, **self.options)
        module.register_state_dict_post_hook(_remove_recipe_state)
        self._module = weakref.ref(module)
        return module

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Enter torch.autocast, except for "32-true"."""
        if self.precision == "32-true":
            yield
            return
        with self.autocast_context_manager():
            yield

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """End the previous step of delayed scaling when a training step begins, but not when it calls the module's
        forward.
        """
        module = None if self._module is None else self._module()
        with nullcontext() if module is None else one_step(module), self.forward_context():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the GradScaler's state and the recipes' state; all ranks must call it."""
        state: dict[str, Any] = super().state_dict()
        module = None if self._module is None else self._module()
        if module is not None:
            # One rank writes the file, so synchronize the maxima of all ranks.
            sync_amax_histories(module)
            state[SCALING] = {name: value.detach().contiguous().clone() for name, value in _state(module)}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` into a module converted with the same recipe."""
        state = dict(state_dict)
        scaling = state.pop(SCALING, None)
        super().load_state_dict(state)
        module = None if self._module is None else self._module()
        if scaling and module is not None:
            load_scaling_state_dict(module, scaling)


#: Key of the recipes' state in a checkpoint.
SCALING = "quaver_scaling"


def _state(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the recipes' state with its state-dict keys."""
    for name, part in module.named_modules(prefix=prefix, remove_duplicate=False):
        if isinstance(part, Quantizable):
            for buffer in STATE:
                value = part._buffers.get(buffer)
                if value is not None:
                    yield f"{name}.{buffer}".lstrip("."), value


def _remove_recipe_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """State-dict hook that removes the recipes' state, which the plugin saves."""
    for name, _ in _state(module, prefix.removesuffix(".")):
        state.pop(name, None)
