import numpy as np
import pytest

from quaver.train.generate import Sampling, sample

LOGITS = np.log([0.1, 0.4, 0.2, 0.3])


def drawn(how: Sampling, logits: np.ndarray = LOGITS, times: int = 4000) -> np.ndarray:
    """How often each token comes."""
    random = np.random.default_rng(0)
    tokens = [sample(logits, how, random) for _ in range(times)]
    return np.bincount(tokens, minlength=len(logits)) / times


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"temperature": 1.0}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, np.square([0.1, 0.4, 0.2, 0.3]) / 0.3),
        ({"temperature": 1.0, "top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"temperature": 1.0, "top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 1.0, "top_p": 0.8}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"temperature": 1.0, "top_p": 1e-9}, [0, 1, 0, 0]),
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.5}, [0, 1, 0, 0]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
        ({"temperature": 1e-300}, [0, 1, 0, 0]),
    ],
)
def test_tokens_come_as_often_as_they_should(options: dict[str, float], expected: list[float]) -> None:
    shares = drawn(Sampling(**({"top_k": 0} | options)))  # type: ignore[arg-type]
    np.testing.assert_allclose(shares, expected, atol=0.03)
    assert (shares[np.equal(expected, 0)] == 0).all()


def test_equal_logits_choose_the_earlier_token() -> None:
    assert drawn(Sampling(temperature=0, top_k=0), np.zeros(4), 3).tolist() == [1, 0, 0, 0]
    assert drawn(Sampling(temperature=1, top_k=2), np.zeros(4), 400)[2:].max() == 0


def test_hidden_tokens_never_come_and_one_may_be_all_there_is() -> None:
    logits = np.array([-np.inf, 2.0, -np.inf])
    assert drawn(Sampling(temperature=2.0, top_k=0), logits, 100).tolist() == [0, 1, 0]


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [-np.inf, -np.inf], [np.inf, 0.0]])
def test_logits_that_are_not_finite_stop_with_a_clear_error(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="logits are not finite"):
        sample(np.array(bad), Sampling(), np.random.default_rng(0))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -1.0}, "temperature is -1.0; give 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": -5}, "top_k is -5"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_invalid_sampling_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)  # type: ignore[arg-type]
