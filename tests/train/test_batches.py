import numpy as np

from quaver.train.data import training_batch, validation_batches
from tests.train.conftest import MakeConfig

TOKENS = np.arange(1000, dtype=np.uint32)


def test_a_batch_depends_on_seed_and_step_alone(make_config: MakeConfig) -> None:
    config = make_config(accumulate=3)
    batch = training_batch(TOKENS, config, 7)
    assert batch.shape == (3, 2, 33) and batch.dtype == np.int64
    assert np.array_equal(batch, training_batch(TOKENS, config, 7))
    assert not np.array_equal(batch, training_batch(TOKENS, config, 8))
    assert not np.array_equal(batch, training_batch(TOKENS, make_config(accumulate=3, seed=1), 7))


def test_every_place_is_reached_and_none_beyond(make_config: MakeConfig) -> None:
    config = make_config(batch=2000, sequence=4)
    batch = training_batch(TOKENS[:10], config, 1)
    assert np.array_equal(np.unique(batch), np.arange(10))
    assert np.array_equal(batch[..., 1:], batch[..., :-1] + 1)


def test_validation_covers_the_text_and_does_not_depend_on_the_seed(make_config: MakeConfig) -> None:
    batches = validation_batches(TOKENS, make_config())
    assert np.array_equal(batches, validation_batches(TOKENS, make_config(seed=5)))
    assert batches.shape == (2, 2, 33) and batches.min() == 0 and batches.max() == 999


def test_a_short_text_gives_one_batch(make_config: MakeConfig) -> None:
    assert validation_batches(TOKENS[:33], make_config()).shape == (1, 2, 33)
