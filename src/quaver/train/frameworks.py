"""Selection of the framework by name; each is imported when a run uses it, so that the other need not be installed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from quaver.recipes.spec import Recipe
from quaver.train import config as optimizer_name
from quaver.train import config as recipe_name
from quaver.train import mesh
from quaver.train.config import TrainConfig
from quaver.train.learner import Learner
from quaver.train.memory import projections
from quaver.train.mesh import ProcessGroup, SingleProcess
from quaver.train.model_config import MODELS

#: Extra that installs each framework, and the library of `quaver inspect`.
EXTRAS = {"torch": "train", "jax": "train-jax", "bokeh": "inspect"}


@contextmanager
def join_ranks(config: TrainConfig, recipe: Recipe) -> Iterator[ProcessGroup]:
    """Join the process group of the run for the duration of the block; see `check_options`."""
    if mesh.world() == 1:
        yield SingleProcess()
        return
    from quaver.train.torch import process_group

    with process_group.joined(config, mesh.sizes_of(config, recipe)) as members:
        yield members


def make_learner(config: TrainConfig, recipe: Recipe, vocab: int, members: Any = None, codes: bool = True) -> Learner:
    """Create the learner of a run before its first step.

    Args:
        config: options of the run.
        recipe: first recipe of the run.
        vocab: size of the vocabulary.
        members: ranks that train together, as `join_ranks` yields them; None or `SingleProcess` is this process only.
        codes: the optimizer may store matrices as codes; False to resume a run that stored floats.
    Raises: ValueError if the framework or the device is missing.
    """
    check_installed(config.framework, f"--framework {config.framework}")
    if config.framework == "jax":
        from quaver.train.jax.learner import JaxLearner

        return JaxLearner(config, recipe, vocab)
    from quaver.train.torch.learner import TorchLearner

    return TorchLearner(config, recipe, vocab, None if members is None or members.number == 1 else members, codes)


def check_options(config: TrainConfig, recipe: Recipe) -> None:
    """Raise a ValueError if the framework, the device or the number of ranks does not support the options."""
    runs_on_cpu(config)
    mesh.sizes_of(config, recipe)
    check_optimizer(config, recipe)
    if mesh.world() > 1:
        check_for_ranks(config)
    if config.inspect_every and config.capture != "none":
        raise ValueError(
            f"capture {config.capture} replays steps, which cannot be inspected; leave out --capture or --inspect-every"
        )
    cores = os.cpu_count() or 1
    if config.threads > cores:  # OpenMP aborts the process if it cannot create a thread
        raise ValueError(f"threads is {config.threads}, and this machine has {cores} cores; give {cores} or fewer")
    if config.framework != "jax":
        return
    if config.loss_chunk:
        raise ValueError("JAX cannot take the loss in chunks yet; leave out --loss-chunk, or take --framework torch")
    kinds = MODELS[config.model].unusual
    if kinds:
        raise ValueError(f"JAX cannot train {kinds[0]} yet, as {config.model} has; take --framework torch")
    if MODELS[config.model].scaling:
        raise ValueError(f"JAX cannot stretch rotary positions yet, as {config.model} asks; take --framework torch")


def check_optimizer(config: TrainConfig, recipe: Recipe) -> None:
    """Raise a ValueError for options that do not work with the chosen optimizer."""
    check_optimizer_offload(config)
    if config.optimizer == optimizer_name.TORCH_ADAMW:
        return
    instead = f"take --optimizer {optimizer_name.TORCH_ADAMW}"
    if config.framework == "jax":
        raise ValueError(f"JAX has no optimizer {config.optimizer} yet; {instead}, or --framework torch")
    kinds = [kind for kind in MODELS[config.model].unusual if kind != "latent attention"]
    if kinds and optimizer_name.find_optimizer(config.optimizer).rule == "muon":
        raise ValueError(
            f"optimizer {config.optimizer} orthogonalizes matrices, and {config.model} has {kinds[0]}, whose weights "
            f"have three axes; {instead}, lean or lion-lean"
        )
    if config.capture != "none":
        raise ValueError(f"optimizer {config.optimizer} cannot be recorded yet; {instead}, or leave --capture out")
    if mesh.world() > 1:
        sizes = mesh.sizes_of(config, recipe)
        shapes = projections(MODELS[config.model])
        optimizer_name.check_sharded_optimizer(config.optimizer, shapes, sizes.fsdp * sizes.cp * sizes.tp, sizes.tp)
    elif len(recipe_name.parse_phases(config.recipe)) == 1:
        optimizer_name.check_optimizer(config.optimizer, recipe)


def check_optimizer_offload(config: TrainConfig) -> None:
    """Raise a ValueError for options that do not work with optimizer states in host memory."""
    chosen = config.optimizer_offload
    if chosen == "none":
        return
    if config.framework == "jax":
        raise ValueError(
            f"JAX cannot store optimizer states in host memory yet, as optimizer_offload {chosen} asks; leave out "
            "--optimizer-offload, or take --framework torch"
        )
    if config.optimizer == optimizer_name.TORCH_ADAMW:
        raise ValueError(
            f"optimizer {config.optimizer} is torch's, which has no states in host memory, as optimizer_offload "
            f"{chosen} asks; take --optimizer lean, balanced, exact or float32, or leave out --optimizer-offload"
        )
    if config.capture != "none":
        raise ValueError(
            f"optimizer_offload {chosen} copies between host and GPU, which capture {config.capture} cannot record; "
            "leave out --capture or --optimizer-offload"
        )


def check_for_ranks(config: TrainConfig) -> None:
    """Raise a ValueError for options that do not work with several ranks."""
    if config.framework == "jax":
        raise ValueError("JAX trains in a single process here; take --framework torch, or leave torchrun out")
    if config.capture != "none":
        raise ValueError(f"capture {config.capture} records one process's step; leave it out with several ranks")
    if ":" in config.device:
        kind = config.device.partition(":")[0]
        raise ValueError(f"device is {config.device}, and every rank takes its own; give --device {kind}")


def runs_on_cpu(config: TrainConfig) -> bool:
    """Return True if the run's device is a CPU. Raises: ValueError if the framework or the device is missing."""
    check_installed(config.framework, f"--framework {config.framework}")
    if config.framework == "jax":
        from quaver.train.jax.learner import find_device

        return find_device(config.device, config.threads).platform == "cpu"
    from quaver.train.torch.process_group import device_of

    return device_of(config.device).type == "cpu"


def check_installed(framework: str, what: str) -> None:
    """Raise a ValueError with the install command if a framework or library is not installed."""
    if find_spec(framework) is None:
        install = f"pip install 'quaver[{EXTRAS[framework]}]'"
        raise ValueError(f"{what} needs {framework}, which is not installed: {install}")
