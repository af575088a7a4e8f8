"""torchtitan's seam: a model converter that the configuration of a job names.

    [job]
    custom_config_module = "quaver.integrations.torchtitan"
    [model]
    converters = ["quaver"]
    [quaver]
    recipe = "delayed"

torchtitan imports that module for its `JobConfig` before it makes the model, and the module registers the converter.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from torch import nn

if find_spec("torchtitan") is None:
    raise ModuleNotFoundError(
        f"{__name__} needs torchtitan, which is not installed: pip install torchtitan==0.2.2", name="torchtitan"
    )

try:
    from torchtitan.protocols.model_converter import register_model_converter
except ImportError as error:
    raise ImportError(
        f"{__name__} needs the model converters of torchtitan 0.2, which this version has not: "
        "pip install torchtitan==0.2.2, or call quaver.torch.convert where the model is made on meta"
    ) from error
from torchtitan.tools.logging import logger

from quaver import recipes
from quaver.torch.model.conversion import convert

__all__ = ["JobConfig", "Quaver", "QuaverConverter"]

#: The converter's, in a job's configuration.
NAME = "quaver"


@dataclass
class Quaver:
    """The section [quaver] of a job's configuration: options of `quaver.torch.convert`."""

    #: A recipe's name.
    recipe: str = "tensorwise"
    #: Patterns of names to leave alone.
    skip: list[str] = field(default_factory=list)
    #: Whether the output head is converted.
    head: bool = False
    #: Whether norms, MLPs and attention are computed by blocks.
    blocks: bool = False
    #: Of stochastic rounding.
    seed: int = 0


@dataclass
class JobConfig:
    """What torchtitan adds to its own configuration."""

    quaver: Quaver = field(default_factory=Quaver)


class QuaverConverter:
    """Converts a model that torchtitan has made on meta, before it is sharded, given memory and initialized.

    Args:
        job_config: torchtitan's, with the section [quaver].
        parallel_dims: torchtitan's. Data parallelism, replicated and sharded, is for every recipe.
    Raises:
        ValueError: an unknown recipe; no section [quaver]; tensor or expert parallelism; another converter that
            quantizes.
    """

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        options: Quaver | None = getattr(job_config, NAME, None)
        if options is None:
            raise ValueError(
                f'model.converters has "{NAME}" and the configuration no section [{NAME}]: set '
                f'job.custom_config_module = "{__name__}"'
            )
        others = [name for name in job_config.model.converters if name.startswith("quantize.")]
        if others:
            raise ValueError(f'model.converters has "{NAME}" and {others}, which would take its layers for their own')
        for kind, degree in (("tensor", parallel_dims.tp), ("expert", parallel_dims.ep)):
            if degree > 1:
                raise ValueError(
                    f"{kind} parallelism of degree {degree} splits weights within a layer, which no recipe supports "
                    "yet: use data parallelism (parallelism.data_parallel_shard_degree)"
                )
        self.recipe, self.options = recipes.get(options.recipe), options

    def convert(self, model: nn.Module) -> None:
        """Convert it in place, and log the report."""
        given = self.options
        report = convert(model, self.recipe, skip=given.skip, head=given.head, blocks=given.blocks, seed=given.seed)
        logger.info(f"quaver: {report}")

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: layers see by themselves that a weight was written."""


register_model_converter(QuaverConverter, NAME)
