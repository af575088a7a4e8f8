"""A learner of each framework, which begin alike, and a text for both."""

from dataclasses import replace

import numpy as np

from quaver.train.configuration import recipe_name
from quaver.train.configuration.config import TrainConfig
from quaver.train.learning import frameworks
from quaver.train.learning.jax.learner import JaxLearner
from quaver.train.learning.torch.learner import TorchLearner

TEXT = " ".join(f"{n} times {m} is {n * m}." for n in range(60) for m in range(40))
TOKENS = np.frombuffer(TEXT.encode(), np.uint8)


def pair(config: TrainConfig, vocab: int = 256) -> tuple[TorchLearner, JaxLearner]:
    recipe = recipe_name.find(config.recipe)
    left = frameworks.make(replace(config, framework="torch"), recipe, vocab)
    right = frameworks.make(replace(config, framework="jax"), recipe, vocab)
    assert isinstance(left, TorchLearner) and isinstance(right, JaxLearner)
    return left, right
