"""accelerate's seam: an `Accelerator` whose `mixed_precision="fp8"` is a recipe of ours.

accelerate knows three libraries for eight bits by name, and prepares a model by one method each. The one of torchao is
left empty here, and the public `prepare` converts before anything is wrapped or sharded. All private names of
accelerate are in this file.
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

#: What accelerate 1.15 calls to have torchao convert models: `prepare` gives it all that was to be prepared.
SEAM = "_prepare_ao"
INSTEAD = (
    "call quaver.torch.convert(model, recipe) and prepare it with an accelerate.Accelerator(mixed_precision='bf16')"
)


class QuaverAccelerator(accelerate.Accelerator):
    """accelerate's `Accelerator`, whose `mixed_precision="fp8"` converts each model that it prepares by `convert`.

    It needs torchao to be installed, since accelerate asks for it before it takes "fp8"; nothing of it runs. What is
    not a linear layer runs in bfloat16 by torch.autocast, as accelerate has it. With another `mixed_precision` nothing
    is converted.

    Args:
        *args, **kwargs: accelerate's.
        recipe: as of `quaver.torch.convert`. A model of which a layer is converted already is left as it is.
        skip, head, seed, blocks: as of `quaver.torch.convert`.
    Raises:
        ValueError: an unknown recipe; another library's recipe among kwargs_handlers; a version of accelerate that has
            no such seam, before a step is spent, with what to do instead.
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
        check_seam(accelerate.Accelerator)
        self.recipe = recipe if isinstance(recipe, Rules | Mapping) else recipes.get(recipe)
        self.convert_options: dict[str, Any] = {"skip": skip, "head": head, "seed": seed, "blocks": blocks}
        super().__init__(*args, **kwargs)
        backend = getattr(self.fp8_backend, "value", self.fp8_backend)
        if self._is_fp8 and backend != "AO":
            raise ValueError(
                f"accelerate would have {backend} run in eight bits; leave its recipe out of kwargs_handlers and "
                f"ACCELERATE_FP8_BACKEND unset, with torchao installed (pip install torchao), or {INSTEAD}"
            )

    @property
    def _is_fp8(self) -> bool:
        return bool(self.mixed_precision == "fp8")

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """accelerate's, after the models among `args` were converted."""
        models = [arg for arg in args if isinstance(arg, nn.Module)]
        for model in models:
            self._convert(model)
        before = [_converted(model) for model in models]
        prepared = super().prepare(*args, **kwargs)
        self._check(models, before)
        return prepared

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """accelerate's, after the model was converted."""
        self._convert(model)
        prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        return prepared

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """accelerate's, after ranks have agreed on what delayed scaling has recorded: one of them writes it for all."""
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
        """accelerate may have another way to torchao by now."""
        for model, count in zip(models, before, strict=True):
            if _converted(model) != count:
                kind = type(model).__name__
                raise ValueError(f"accelerate {accelerate.__version__} replaced converted layers of {kind}: {INSTEAD}")


def check_seam(kind: type) -> None:
    """Refuse a class of accelerate that has no seam of the known form.

    Raises:
        ValueError: with what to do.
    """
    seam = getattr(kind, SEAM, None)
    kinds = [] if seam is None else [p.kind for p in inspect.signature(seam).parameters.values()]
    if kinds != [inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL]:
        raise ValueError(
            f"accelerate {accelerate.__version__} has no {SEAM}(*args), by which it hands models to torchao (1.15 "
            f"has): {INSTEAD}"
        )


def _converted(model: nn.Module) -> int:
    return sum(isinstance(part, Quantizable) for part in model.modules())
