"""Text into token ids: one token a byte, or byte-pair encoding trained on the training files.

Documents are joined by token 0, which stands for nothing else: the byte NUL does not occur in text, and the
encoding reserves it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from quaver.train.configuration.config import TrainConfig
from quaver.train.data import frozen
from quaver.train.data.text import Document, read, split
from quaver.train.files import whole_file

BETWEEN_FILES = "<|file|>"


@dataclass(frozen=True)
class Tokens(frozen.Parts):
    """A text's parts, and what its token ids mean; `tokenizer` is None for bytes."""

    vocab: int
    tokenizer: tokenizers.Tokenizer | None


def load(config: TrainConfig, saved: Path | None = None, out: Path | None = None) -> Tokens:
    """The run's text as tokens.

    Args:
        config: its `text`, `tokens`, `vocab` and `sequence` are used.
        saved: a tokenizer.json to take instead of training one, as when a run is resumed.
        out: the folder that the run writes into, which is no text.
    Raises: ValueError if the text cannot be read or is too short for one sequence.
    """
    tokens = thawed(config, saved) if frozen.is_one(config.text) else tokenized(config, saved, out)
    shortest = min(len(tokens.train), len(tokens.validation))
    if shortest <= config.sequence:
        raise ValueError(
            f"the text is too short: {len(tokens.train)} tokens to train on and {len(tokens.validation)} "
            f"held out for validation, where each needs more than one sequence of {config.sequence}; "
            "give more text with --text or a smaller --sequence"
        )
    return tokens


def tokenized(config: TrainConfig, saved: Path | None, out: Path | None) -> Tokens:
    train, validation = split(read(config.text, out))
    if config.tokens == "byte":
        return Tokens(join_bytes(train), join_bytes(validation), 256, None)
    path = Path(config.tokens) if config.tokens.endswith(".json") else saved
    tokenizer = open_tokenizer(path) if path else learn(train, config.vocab)
    return Tokens(encode(tokenizer, train), encode(tokenizer, validation), tokenizer.get_vocab_size(), tokenizer)


def thawed(config: TrainConfig, saved: Path | None) -> Tokens:
    """What a comparison froze, for tokens that are the ones of then."""
    source = Path(config.text[0])
    given = frozen.read(source)
    path = Path(config.tokens) if config.tokens.endswith(".json") else saved
    tokenizer = open_tokenizer(path) if path and config.tokens != "byte" else None
    if given.tokenizer != digest(tokenizer):
        raise ValueError(f"{source} was made by other tokens than --tokens {config.tokens}; give those of then")
    size = 256 if tokenizer is None else tokenizer.get_vocab_size()
    if not max(part.max(initial=0) for part in (given.train, given.validation)) < size:
        raise ValueError(f"{source} holds tokens beyond the {size} of --tokens {config.tokens}")
    return Tokens(given.train, given.validation, size, tokenizer)


def digest(tokenizer: tokenizers.Tokenizer | None) -> str:
    """SHA-256 of a tokenizer; "" for bytes."""
    return "" if tokenizer is None else hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def join_bytes(documents: Sequence[Document]) -> np.ndarray:
    return np.frombuffer(b"\0".join(document.data for document in documents), dtype=np.uint8)


def learn(documents: Sequence[Document], vocab: int) -> tokenizers.Tokenizer:
    """A byte-level byte-pair encoding with `vocab` tokens, learnt from the documents."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[BETWEEN_FILES], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((document.data.decode() for document in documents), trainer)
    return tokenizer


def open_tokenizer(path: Path) -> tokenizers.Tokenizer:
    whole_file.check_file(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"cannot read the tokenizer {path}: {error}") from error
    if tokenizer.token_to_id(BETWEEN_FILES) != 0:
        raise ValueError(f"the tokenizer {path} does not begin with {BETWEEN_FILES}; take one that quaver trained")
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, documents: Sequence[Document]) -> np.ndarray:
    encoded = tokenizer.encode_batch([document.data.decode() for document in documents])
    pieces = [np.array([*one.ids, 0], dtype=np.uint32) for one in encoded]
    return np.concatenate(pieces)
