"""The frameworks by name: each is imported when a run asks for it, so that the other need not be installed."""

import importlib.util

from quaver.core.spec import Recipe
from quaver.train.config import TrainConfig
from quaver.train.learner import Learner

#: What to install for each.
EXTRAS = {"torch": "train", "jax": "train-jax"}


def make(config: TrainConfig, recipe: Recipe, vocab: int) -> Learner:
    """A run's model at its first step. Raises: ValueError without the framework or the device."""
    installed(config.framework)
    if config.framework == "jax":
        from quaver.train.jax.learner import JaxLearner

        return JaxLearner(config, recipe, vocab)
    from quaver.train.torch.learner import TorchLearner

    return TorchLearner(config, recipe, vocab)


def on_cpu(config: TrainConfig) -> bool:
    """Whether the run's device is a CPU. Raises: ValueError without the framework or the device."""
    installed(config.framework)
    if config.framework == "jax":
        from quaver.train.jax.device import find

        return find(config.device, config.threads).platform == "cpu"
    from quaver.train.torch.device import device_of

    return device_of(config.device).type == "cpu"


def installed(framework: str) -> None:
    """Raise a ValueError that says what to install if a framework is missing."""
    if importlib.util.find_spec(framework) is None:
        install = f"pip install 'quaver[{EXTRAS[framework]}]'"
        raise ValueError(f"--framework {framework} needs {framework}, which is not installed: {install}")
