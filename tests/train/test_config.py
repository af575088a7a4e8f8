from pathlib import Path

import pytest

from quaver.train.config import TrainConfig, read_toml, to_toml


def test_toml_gives_the_same_options_back(tmp_path: Path) -> None:
    config = TrainConfig(
        text=("a b.txt", 'quo"te\\', "ü\n"),
        lr=1e-5,
        clip=float("inf"),
        recipe='delayed(history=4, format="e4m3")',
    )
    (tmp_path / "c.toml").write_text(to_toml(config), encoding="utf-8")
    assert TrainConfig(**read_toml(tmp_path / "c.toml")) == config


def test_toml_takes_the_command_lines_spelling_and_integers_for_floats(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("checkpoint-every = 7\nclip = 2\n", encoding="utf-8")
    assert read_toml(tmp_path / "c.toml") == {"checkpoint_every": 7, "clip": 2.0}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stepz = 3", "no option 'stepz'; did you mean 'steps'?"),
        ('steps = "3"', "steps = '3' should be a whole number"),
        ("steps = 3.5", "steps = 3.5 should be a whole number"),
        ("steps = true", "steps = True should be a whole number"),
        ('text = "a"', "text = 'a' should be a list of strings"),
        ("steps = = 3", "is not valid TOML"),
    ],
)
def test_a_bad_toml_gives_one_clear_error(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=str(path)) as error:
        read_toml(path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "tinny"}, "model 'tinny' is not known; did you mean 'tiny'?"),
        ({"dtype": "float16x"}, "dtype 'float16x' is not known"),
        ({"tokens": "bite"}, "did you mean 'byte'?"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"lr": -1.0}, "lr is -1.0; it must be at least 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"beta2": 1.0}, "beta2 is 1.0; it must be below 1"),
    ],
)
def test_a_bad_value_gives_one_clear_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        TrainConfig(**options)  # type: ignore[arg-type]
    assert message in str(error.value)
