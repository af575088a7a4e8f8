from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quaver.train import frameworks, generate, run_training
from quaver.train.config import TrainConfig, read_toml, to_toml
from quaver.train.data import load
from quaver.train.generate import CACHES, END, Sampling, Vocabulary
from quaver.train.model_config import MODELS
from tests.train.conftest import MakeConfig

GREEDY = Sampling(temperature=0)
FAMILIES = [name for name in MODELS if name.endswith("-tiny")]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_trains_and_decodes_the_same_with_each_cache(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """28 tokens: Gemma 2's and Mistral's windows are 16; two layers are of both kinds that Gemma 2 has, three of all of
    Nemotron-H's."""
    monkeypatch.setitem(MODELS, name, replace(MODELS[name], layers=3 if name.startswith("nemotron") else 2))
    result = run_training(
        make_config(model=name, recipe="mxfp8", recompute="mlp", dtype="float32", steps=4, validate_every=0)
    )
    assert result.losses[4] < result.losses[1]
    options = {"tokens": 21, "how": GREEDY, "recipe": "bf16"}
    decoded = [generate.generate(result.folder, "7 times", cache=cache, **options) for cache in CACHES]
    assert decoded[0].tokens == decoded[1].tokens == decoded[2].tokens and decoded[0].tokens


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8", "blockwise", "rowwise_bf16_wgrad"])
def test_recipes_that_quantize_row_by_row_decode_the_same_with_each_cache(trained: Path, recipe: str) -> None:
    decoded = [
        generate.generate(trained, "7 times", tokens=12, how=GREEDY, cache=cache, recipe=recipe).tokens
        for cache in CACHES
    ]
    assert decoded[0] == decoded[1] == decoded[2]


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "tensorwise", "nvfp4", "tensorwise(attention=True)"])
def test_every_recipe_decodes_a_model_trained_in_bf16(trained: Path, recipe: str) -> None:
    for cache in CACHES:
        assert generate.generate(trained, "7 times", tokens=3, recipe=recipe, cache=cache).tokens


def test_a_delayed_run_decodes_under_its_own_recipe_and_others(make_config: MakeConfig) -> None:
    folder = run_training(make_config(recipe="delayed(history=4)", steps=3)).folder
    for recipe in ("", "bf16", "mxfp8"):
        assert len(generate.generate(folder, "7", tokens=5, how=GREEDY, recipe=recipe).tokens) == 5, recipe


def test_a_jax_run_generates_in_pytorch(make_config: MakeConfig) -> None:
    folder = run_training(make_config(framework="jax", steps=2)).folder
    assert len(generate.generate(folder, "7 times", tokens=4, how=GREEDY).tokens) == 4


def test_text_comes_in_whole_characters_and_is_all_of_it(trained: Path) -> None:
    pieces: list[str] = []
    result = generate.generate(trained, "é 3", tokens=60, how=Sampling(temperature=3.0, top_k=0), emit=pieces.append)
    assert "".join(pieces) == result.text
    assert result.text == bytes(result.tokens).decode("utf-8", "replace")
    assert "tokens/s" in str(result) and str(result).startswith(f"{len(result.tokens)} tokens")


def test_the_seed_alone_decides(trained: Path) -> None:
    hot = Sampling(temperature=2.0, top_k=0)
    one, same, other = (generate.generate(trained, "7", tokens=20, how=hot, seed=seed).tokens for seed in (1, 1, 2))
    assert one == same != other


def test_byte_pairs_are_put_together_again(make_config: MakeConfig) -> None:
    folder = run_training(make_config(tokens="bpe", vocab=300, steps=2)).folder
    pieces: list[str] = []
    result = generate.generate(folder, "7 times 3", tokens=12, how=GREEDY, emit=pieces.append)
    assert "".join(pieces) == result.text and max(result.tokens) < 300


def test_the_mark_between_files_ends_the_text(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = iter([55, 32, END, 33])
    monkeypatch.setattr(generate, "sample", lambda logits, how, random: next(chosen))
    result = generate.generate(trained, "7", tokens=9)
    assert result.ended and result.text == "7 " and "ended the text" in str(result)


@pytest.mark.parametrize("words", ["plain", "naïve 中文 🙂", " \n\t"])
def test_a_vocabulary_gives_text_back(make_config: MakeConfig, words: str) -> None:
    learnt = load(make_config(tokens="bpe", vocab=300)).tokenizer
    for vocabulary in (Vocabulary(None), Vocabulary(learnt)):
        ids = vocabulary.encode(words)
        assert vocabulary.decode(ids) == words and max(ids) < vocabulary.size


def test_lengths_beyond_training_warn_and_beyond_the_positions_are_refused(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generate.generate(trained, "7", tokens=31, how=GREEDY).notes == ()
    (note,) = generate.generate(trained, "7", tokens=33, how=GREEDY).notes
    assert "trained on 32 tokens at a time" in note
    monkeypatch.setitem(MODELS, "nano", replace(MODELS["nano"], positions=40))
    with pytest.raises(ValueError, match="the prompt has 40 tokens, and nano takes 40 in all; shorten it"):
        generate.generate(trained, "x" * 40)
    with pytest.raises(ValueError, match="after 30 of 40 tokens 11 more do not fit; give --tokens 10 or fewer"):
        generate.generate(trained, "x" * 30, tokens=11)


def test_a_folder_without_a_run_or_without_a_checkpoint_gives_one_clear_error(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing holds no run; give the folder that quaver train wrote"):
        generate.generate(tmp_path / "missing", "7")
    for path in trained.glob("step-*"):
        path.rename(trained / f"not-{path.name}")
    with pytest.raises(ValueError, match=r"has no checkpoint yet; train it on with: quaver train --out .* --resume"):
        generate.generate(trained, "7")


def test_a_checkpoint_of_another_model_gives_one_clear_error(trained: Path) -> None:
    path = trained / "config.toml"
    path.write_text(to_toml(replace(TrainConfig(**read_toml(path)), model="gemma2-tiny")))
    with pytest.raises(ValueError, match="the checkpoint of step 20 does not fit"):
        generate.generate(trained, "7")


def test_without_pytorch_it_says_what_to_install(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"quaver generate needs torch, .*: pip install 'quaver\[train\]'"):
        generate.generate(trained, "7")


def test_logits_that_overflowed_stop_with_a_clear_error(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quaver.train.torch import learner

    monkeypatch.setattr(learner.NextTokenLogits, "__call__", lambda self, ids: np.full(256, np.nan, np.float32))
    with pytest.raises(ValueError, match="logits are not finite"):
        generate.generate(trained, "7")
