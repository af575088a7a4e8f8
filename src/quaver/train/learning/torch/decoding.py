"""A trained decoder that is given a few tokens at a time and remembers those before."""

import os
import warnings
from collections.abc import Sequence

import numpy as np
import torch

from quaver.core.spec import Recipe
from quaver.torch.linear.stored.stored import SCALES
from quaver.torch.model.weights.freezing import frozen
from quaver.train.configuration import recipe_name
from quaver.train.configuration.config import TrainConfig
from quaver.train.configuration.sizes import MODELS
from quaver.train.learning.torch.device import device_of
from quaver.train.learning.torch.learner import in_short, tensors_of
from quaver.train.learning.torch.model.caches import Caches
from quaver.train.learning.torch.model.decoder import build, prepare, quantize_layers
from quaver.train.records.checkpoint import CheckpointError, Saved


class Decoding:
    """Called with the tokens that come next, gives the logits float32 [vocab] of the one after them.

    Args:
        config: of the run; its model, dtype, device and threads, no more than there are cores, are used.
        recipe: of the layers.
        vocab: tokens that there are.
        saved: the weights.
        cache: "plain", "paged", or "none", which computes every token again each time.
        capacity: tokens in all.
    Raises: CheckpointError if the weights are not this model's, ValueError without the device.
    """

    def __init__(
        self, config: TrainConfig, recipe: Recipe, vocab: int, saved: Saved, cache: str, capacity: int
    ) -> None:
        self.device = device_of(config.device)
        if config.threads or self.device.type == "cpu":
            torch.set_num_threads(min(config.threads, os.cpu_count() or 1) or 1)
        self.autocast = config.dtype == "bfloat16"
        self.vocab = vocab
        sizes = MODELS[config.model]
        self.model = build(sizes, vocab, config.seed, self.device).eval()
        own = recipe_name.parts(config.recipe)[-1].recipe
        # Tensor parallelism, and a schedule of recipes, keep weights as floats where another run keeps codes.
        codes = any(name.endswith(SCALES[0]) for name in saved.model)
        prepare(self.model, own, config, codes)
        if recipe != own:
            quantize_layers(self.model, recipe, config.seed)
        try:
            with warnings.catch_warnings():
                # Histories and counters that another recipe's run lacks start fresh: nothing is trained here.
                warnings.simplefilter("ignore", UserWarning)
                self.model.load_state_dict(tensors_of(saved.model))
        except RuntimeError as error:
            raise CheckpointError(f"the checkpoint of step {saved.step} does not fit: {in_short(error)}") from error
        self.cache = None if cache == "none" else Caches(sizes, cache, capacity)
        self.seen: list[int] = []

    def held(self) -> frozen:
        """A context in which the weights are quantized once for all tokens."""
        return frozen(self.model)

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int]) -> np.ndarray:
        self.seen += tokens
        given = self.seen if self.cache is None else list(tokens)
        ids = torch.tensor([given], dtype=torch.int64, device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.model(ids, self.cache)
        last: np.ndarray = logits[0, -1, : self.vocab].float().cpu().numpy()
        return last
