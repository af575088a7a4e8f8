"""accelerate integration: an `Accelerator` whose `mixed_precision="fp8"` converts models with a Quaver recipe.

accelerate supports three FP8 libraries by name and prepares a model with one private method for each. Here torchao's
method is overridden to do nothing, and the public `prepare` converts models before they are wrapped or sharded. All
private names of accelerate are in this file.
"""

import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from torch import nn

if find_spec("accelerate") is None:
    raise ModuleNotFoundError(
        f"{__name__} needs accelerate, which is not installed: pip install accelerate", name="accelerate"
    )

import accelerate

from quaver import recipes
from quaver.recipes.conversion import Rules, Skip
from quaver.recipes.spec import Recipe
from quaver.torch.conversion.convert import convert
from quaver.torch.conversion.replace.blocks import Blocks
from quaver.torch.linear.linear import Quantizable
from quaver.torch.parallel import sync_amax_histories

__all__ = ["QuaverAccelerator"]

#: Method that accelerate 1.15 calls to convert models with torchao; `prepare` passes it everything to prepare.
HOOK = "_prepare_ao"
ALTERNATIVE = (
    "call quaver.torch.convert(model, recipe) and prepare it with an accelerate.Accelerator(mixed_precision='bf16')"
)


class QuaverAccelerator(accelerate.Accelerator):
    """accelerate's `Accelerator`, whose `mixed_precision="fp8"` converts each model that it prepares with `convert`.

    torchao must be installed, since accelerate requires it for "fp8", but it is not used. Everything except linear
    layers runs in bfloat16 under torch.autocast, as usual in accelerate. With another `mixed_precision` nothing is
    converted.

    Args:
        *args, **kwargs: as for accelerate's `Accelerator`.
        recipe: as for `quaver.torch.convert`. A model with an already converted layer is left as it is.
        skip, head, seed, blocks: as for `quaver.torch.convert`.
    Raises:
        ValueError: an unknown recipe; another library's recipe in kwargs_handlers; or a version of accelerate without
            the overridden method. The message says what to do instead.
    """

    def __init__(
        self,
        *args: Any,
        recipe: str | Recipe | Rules | Mapping[str, Recipe | str | None] = "tensorwise",
        skip: Skip = (),
        head: bool = False,
        seed: int = 0,
        blocks: bool | Blocks = False,
        **kwargs: Any,
    ) -> None:
        check_hook(accelerate.Accelerator)
        self.recipe = recipe if isinstance(recipe, Rules | Mapping) else recipes.get(recipe)
        self.convert_options: dict[str, Any] = {"skip": skip, "head": head, "seed": seed, "blocks": blocks}
        super().__init__(*args, **kwargs)
        backend = getattr(self.fp8_backend, "value", self.fp8_backend)
        if self._is_fp8 and backend != "AO":
            raise ValueError(
                f"accelerate would use {backend} for FP8; leave its recipe out of kwargs_handlers and "
                f"ACCELERATE_FP8_BACKEND unset, with torchao installed (pip install torchao), or {ALTERNATIVE}"
            )

    @property
    def _is_fp8(self) -> bool:
        return bool(self.mixed_precision == "fp8")

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Convert the models among `args`, then call accelerate's `prepare`."""
        models = [arg for arg in args if isinstance(arg, nn.Module)]
        for model in models:
            self._convert(model)
        before = [_converted(model) for model in models]
        prepared = super().prepare(*args, **kwargs)
        self._check(models, before)
        return prepared

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Convert the model, then call accelerate's `prepare_model`."""
        self._convert(model)
        prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        return prepared

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Synchronize amax histories across ranks, then call accelerate's `save_state`: one rank writes for all."""
        for model in self._models:
            sync_amax_histories(model)
        return super().save_state(*args, **kwargs)

    def _convert(self, model: nn.Module) -> None:
        if self._is_fp8 and not _converted(model):
            convert(model, self.recipe, **self.convert_options)

    def _prepare_ao(self, *args: Any) -> Any:
        return args

    @staticmethod
    def _check(models: list[nn.Module], before: list[int]) -> None:
        """Raise if accelerate has replaced converted layers, as a version with another hook for torchao might."""
        for model, count in zip(models, before, strict=True):
            if _converted(model) != count:
                kind = type(model).__name__
                raise ValueError(
                    f"accelerate {accelerate.__version__} replaced converted layers of {kind}: {ALTERNATIVE}"
                )


def check_hook(kind: type) -> None:
    """Raise if a class of accelerate lacks the overridden method or its known signature.

    Raises:
        ValueError: the message says what to do.
    """
    seam = getattr(kind, HOOK, None)
    kinds = [] if seam is None else [p.kind for p in inspect.signature(seam).parameters.values()]
    if kinds != [inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL]:
        raise ValueError(
            f"accelerate {accelerate.__version__} has no {HOOK}(*args), which it calls to convert models with "
            f"torchao (1.15 has): {ALTERNATIVE}"
        )


def _converted(model: nn.Module) -> int:
    return sum(isinstance(part, Quantizable) for part in model.modules())
