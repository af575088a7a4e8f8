import zlib

import numpy as np
import pytest

from quaver.train.memory import initial_values, padded, parameters
from quaver.train.model_config import MODELS

#: Inverse softplus of steps from 1e-3 to 1e-1, and logarithms of decays from 1 to 16.
OF_HEADS = {"dt_bias": (-6.91, -2.25), "A_log": (0.0, 2.78)}
TINY = [name for name in MODELS if name.endswith("-tiny")]


@pytest.mark.parametrize("vocab, rows", [(1, 32), (32, 32), (33, 64), (257, 288)])
def test_the_vocabulary_is_padded_to_a_multiple_of_32(vocab: int, rows: int) -> None:
    assert padded(vocab) == rows


@pytest.mark.parametrize("name", TINY)
def test_first_values_depend_on_sizes_and_seed_alone(name: str) -> None:
    one, two, other = (dict(initial_values(MODELS[name], 256, seed)) for seed in (3, 3, 4))
    assert all(np.array_equal(one[key], two[key]) for key in one)
    assert list(one) == list(parameters(MODELS[name], 256))
    assert not np.array_equal(one["embedding.weight"], other["embedding.weight"])


def test_nudged_values_differ_by_their_share() -> None:
    plain, nudged = (dict(initial_values(MODELS["tiny"], 256, 0, nudge)) for nudge in (0.0, 1e-5))
    for name, value in plain.items():
        if value.size > 10_000:
            change = nudged[name].astype(np.float64) / value - 1
            assert change.std() == pytest.approx(1e-5, rel=0.03), name
        assert np.allclose(nudged[name], value, rtol=1e-4, atol=0), name


def test_first_values_are_the_ones_they_always_were() -> None:
    """Losses of earlier runs are compared with, so the draws may not change."""
    crc = 0
    for _, value in initial_values(MODELS["tiny"], 256, 0):
        crc = zlib.crc32(value.tobytes(), crc)
    assert f"{crc:08x}" == "8f43be48"


@pytest.mark.parametrize("name", TINY)
def test_norms_do_nothing_and_matrices_have_their_deviation(name: str) -> None:
    config = MODELS[name]
    for key, value in initial_values(config, 256, 0):
        if key.endswith(("dt_bias", "A_log")):
            low, high = OF_HEADS[key.rpartition(".")[2]]
            assert (value >= low).all() and (value <= high).all() and len(set(value.tolist())) > 1, key
        elif value.ndim == 1:
            nothing = 0.0 if config.zero_centered or key.endswith(".bias") else 1.0
            assert (value == nothing).all(), key
        else:
            expected = 1.0 if key == "embedding.weight" and not config.tied else config.dim**-0.5
            if key.endswith(("q_up_proj.weight", "kv_up_proj.weight", "conv1d.weight")):
                expected = value.shape[-1] ** -0.5
            if key.endswith((".o_proj.weight", ".down_proj.weight", ".out_proj.weight")):
                expected /= config.parts**0.5
            assert value.std() == pytest.approx(expected, rel=0.05), key
