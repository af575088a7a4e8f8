from pathlib import Path

import numpy as np
import pytest

from quaver.train.data import load
from tests.train.conftest import MakeConfig


def test_bytes_are_the_text_with_a_mark_between_files(make_config: MakeConfig, text: Path) -> None:
    tokens = load(make_config())
    first, second = ((text / name).read_bytes() for name in ("00.txt", "01.txt"))
    assert tokens.train.tobytes().startswith(first + b"\0" + second + b"\0")
    assert tokens.vocab == 256


def test_bpe_decodes_to_the_text_and_is_the_same_when_saved(
    make_config: MakeConfig, text: Path, tmp_path: Path
) -> None:
    tokens = load(make_config(tokens="bpe", vocab=300))
    assert tokens.tokenizer is not None and tokens.vocab == 300
    held_out = tokens.tokenizer.decode(tokens.validation.tolist(), skip_special_tokens=True)
    assert held_out == (text / "19.txt").read_text()
    assert tokens.validation[-1] == 0

    path = tmp_path / "tokenizer.json"
    tokens.tokenizer.save(str(path))
    again = load(make_config(tokens=str(path)))
    assert np.array_equal(tokens.train, again.train) and tokens.fingerprint == again.fingerprint


def test_a_tiny_text_gives_one_clear_error(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a few words")
    with pytest.raises(ValueError, match="the text is too short: 10 tokens to train on and 1 held out"):
        load(make_config(text=(str(tmp_path / "one.txt"),)))


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0"}'])
def test_a_foreign_tokenizer_gives_one_clear_error(make_config: MakeConfig, tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ValueError, match="cannot read the tokenizer"):
        load(make_config(tokens=str(tmp_path / "t.json")))
