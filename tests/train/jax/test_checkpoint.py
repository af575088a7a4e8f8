import numpy as np
import pytest

from quaver import recipes
from quaver.reference import operations
from quaver.train.jax import learner

SHAPES = {"a.weight": (2, 3), "norm.weight": (3,)}
WEIGHTS = {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in SHAPES.items()}


def test_an_unrolled_history_is_rolled_on_import() -> None:
    recipe = recipes.delayed(history=4)
    window = np.array([[3, 0, 5], [1, 1, 9], [2, 2, 2], [7, 3, 1]], np.float32)
    factor = np.array([64, 32, 1024], np.float32)
    fresh = {"a": {"history": np.zeros((4, 3), np.float32), "factor": np.zeros(3, np.float32)}}
    once = learner.read_state({"a.history": window, "a.factor": factor}, fresh, recipe)["a"]
    assert recipe.delayed and recipe.fprop.a and recipe.dgrad.a
    for column, spec in ((0, recipe.fprop.a), (2, recipe.dgrad.a)):
        own, e = operations.roll(window[:, column], factor[column], recipe.delayed, spec.format)
        np.testing.assert_array_equal(once["history"][:, column], own)
        assert once["factor"][column] == e
    np.testing.assert_array_equal(once["history"][:, 1], window[:, 1])
    assert once["factor"][1] == 32
    again = learner.read_state(learner.write_state({"a": once}), fresh, recipe)["a"]
    assert all(np.array_equal(again[key], once[key]) for key in once)


def test_counts_are_integers_in_a_checkpoint() -> None:
    written = learner.write_state({"a": {"count": np.array([5, 6], np.float32)}})
    assert written["a.count"].dtype == np.int64 and written["a.count"].tolist() == [5, 6, -1]
    fresh = {"a": {"count": np.zeros(2, np.float32)}}
    assert learner.read_state(written, fresh, recipes.nvfp4())["a"]["count"].tolist() == [5, 6]


@pytest.mark.parametrize("given", [{}, {"a.history": np.ones((3, 3), np.float32), "a.factor": np.ones(3, np.float32)}])
def test_a_missing_or_shorter_history_starts_fresh_with_one_warning(given: dict[str, np.ndarray]) -> None:
    one = {"history": np.zeros((4, 3), np.float32), "factor": np.zeros(3, np.float32)}
    with pytest.warns(UserWarning, match=r"a\.history is not in the checkpoint, or of another length") as warned:
        state = learner.read_state(given, {"a": one, "b": one}, recipes.delayed(history=4))
    assert len(warned) == 1 and not any(array.any() for own in state.values() for array in own.values())


def test_weights_of_another_model_are_refused_by_name() -> None:
    assert learner.read_weights({**WEIGHTS, "a.history": np.zeros((4, 3))}, SHAPES).keys() == SHAPES.keys()
    for wrong, message in (
        ({"a.weight": WEIGHTS["a.weight"]}, r"norm\.weight has shape None in the checkpoint and \(3,\) in the model"),
        ({**WEIGHTS, "b.weight": np.zeros(1)}, r"b\.weight has shape \(1,\) in the checkpoint and None in the model"),
        ({**WEIGHTS, "a.weight": np.zeros((3, 2))}, r"a\.weight has shape \(3, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            learner.read_weights(wrong, SHAPES)


def test_optimizer_moments_round_trip() -> None:
    second = {name: w * 2 for name, w in WEIGHTS.items()}
    written = learner.write_moments(WEIGHTS, second, 7)
    assert written["a.weight/step"].shape == () and written["a.weight/step"] == 7
    first, squares, updates = learner.read_moments(written, SHAPES)
    assert updates == 7
    assert all(np.array_equal(first[n], WEIGHTS[n]) and np.array_equal(squares[n], second[n]) for n in SHAPES)
    assert learner.read_moments({}, SHAPES)[2] == 0 and learner.write_moments(WEIGHTS, second, 0) == {}
    written["a.weight/step"] = np.array(6, np.float32)
    with pytest.raises(ValueError, match=r"updated \[6, 7\] times, not equally often"):
        learner.read_moments(written, SHAPES)
