"""Equal learners of both frameworks, and a text for both."""

from dataclasses import replace

import numpy as np

from quaver.train import config as recipe_name
from quaver.train import frameworks
from quaver.train.config import TrainConfig
from quaver.train.jax.learner import JaxLearner
from quaver.train.torch.learner import TorchLearner

TEXT = " ".join(f"{n} times {m} is {n * m}." for n in range(60) for m in range(40))
TOKENS = np.frombuffer(TEXT.encode(), np.uint8)


def pair(config: TrainConfig, vocab: int = 256) -> tuple[TorchLearner, JaxLearner]:
    recipe = recipe_name.find_recipe(config.recipe)
    left = frameworks.make_learner(replace(config, framework="torch"), recipe, vocab)
    right = frameworks.make_learner(replace(config, framework="jax"), recipe, vocab)
    assert isinstance(left, TorchLearner) and isinstance(right, JaxLearner)
    return left, right
