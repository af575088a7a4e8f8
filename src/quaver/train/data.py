"""Text, tokens and batches. Batches are pure functions of the text, and in training also of seed and step.

So a resumed run needs no state to see the same batches, and two runs with one seed see the same ones.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from quaver.train import files as whole_file
from quaver.train import memory
from quaver.train.config import TrainConfig
from quaver.train.files import OWNER_FILE

# ---- batches ----


def training_batch(tokens: np.ndarray, config: TrainConfig, step: int) -> np.ndarray:
    """Return the sequences of one step and the token after each: int64 [accumulate, batch, sequence + 1]."""
    random = np.random.default_rng([config.seed, step])
    starts = random.integers(0, len(tokens) - config.sequence, (config.accumulate, config.batch))
    return windows(tokens, starts, config.sequence)


def validation_batches(tokens: np.ndarray, config: TrainConfig) -> np.ndarray:
    """Return sequences spread evenly over the held-out text: int64 [batches, batch, sequence + 1].

    There are `config.validation_batches`, or as many as the text fills without overlap, but at least one.
    """
    buffer = (len(tokens) - 1) // config.sequence
    batches = max(1, min(config.validation_batches, buffer // config.batch))
    starts = np.linspace(0, len(tokens) - config.sequence - 1, batches * config.batch).astype(np.int64)
    return windows(tokens, starts.reshape(batches, config.batch), config.sequence)


def windows(tokens: np.ndarray, starts: np.ndarray, sequence: int) -> np.ndarray:
    return tokens[starts[..., None] + np.arange(sequence + 1)].astype(np.int64)


# ---- frozen tokens ----
# Tokens of a text in a file, written once by a comparison so that every run trains on the same data.
#
# A text may change between runs (`--text .` is a working tree). The file has both splits, the options they were read
# with, and a digest that is checked on every read.

NAME = "text.safetensors"


@dataclass(frozen=True)
class TokenSplits:
    """Token ids of the training and validation splits, 1-D and unsigned."""

    train: np.ndarray
    validation: np.ndarray

    @property
    def fingerprint(self) -> str:
        """Identify this data by the beginning of a SHA-256, so that no run resumes with another text."""
        parts = [np.ascontiguousarray(part) for part in (self.train, self.validation)]
        whole = hashlib.sha256(json.dumps([[str(part.dtype), part.size] for part in parts]).encode())
        for part in parts:
            whole.update(part.data)
        return whole.hexdigest()[:16]


@dataclass(frozen=True)
class SavedTokens(TokenSplits):
    """Contents of a file of frozen tokens."""

    # Digest of the tokenizer; "" for bytes.
    tokenizer: str
    # Options that the text was read with.
    options_read_with: dict[str, Any]

    @property
    def digest(self) -> str:
        """Return the SHA-256 of all contents."""
        return hashlib.sha256(
            json.dumps([self.fingerprint, self.tokenizer, self.options_read_with]).encode()
        ).hexdigest()


def is_token_file(text: tuple[str, ...]) -> bool:
    """True if the option `text` names a file of frozen tokens."""
    return len(text) == 1 and text[0].endswith(".safetensors")


def write(path: Path, frozen: SavedTokens) -> None:
    header = {"tokenizer": frozen.tokenizer, "asked": json.dumps(frozen.options_read_with), "digest": frozen.digest}
    with whole_file.replacing(path) as partial:
        save_file({"train": frozen.train, "validation": frozen.validation}, partial, metadata=header)


def read(path: Path) -> SavedTokens:
    """Read a file of frozen tokens. Raises: ValueError if it is none, or was changed."""
    whole_file.check_file(path)
    if not path.exists():
        raise ValueError(f"there is no text file {path}; --text takes files and folders that exist")
    try:
        with safe_open(path, framework="np") as file:
            header: Mapping[str, str] = file.metadata() or {}
            parts = {name: file.get_tensor(name) for name in ("train", "validation")}
        frozen = SavedTokens(**parts, tokenizer=header["tokenizer"], options_read_with=json.loads(header["asked"]))
        if any(part.ndim != 1 or part.dtype not in (np.uint8, np.uint32) for part in parts.values()):
            raise ValueError("its parts are no token ids")
    except (SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a text that quaver compare wrote ({error}); --text takes text files"
        ) from error
    if frozen.digest != header.get("digest"):
        raise ValueError(f"{path} is not as it was written: its SHA-256 differs; begin again in another --out")
    return frozen


# ---- text ----
# Find and read the text to train on, and split it by file.
#
# The default text is the running Python's standard library, about 11 MB that are always available.

# Excluded from the default text: other packages, and tests, which not every distribution ships.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}

# One file in this many is held out for validation.
VALIDATION_SHARE = 20


@dataclass(frozen=True)
class Document:
    """One file: its path, for messages, and its bytes: non-empty UTF-8 without NUL."""

    path: Path
    data: bytes


def read_text(paths: Sequence[str], out: Path | None = None) -> list[Document]:
    """Read the documents of the given files and folders, or of the standard library if none are given.

    A named file must be text. In a folder, empty files, hidden files, binary files and the folders of runs and
    comparisons are skipped.

    Args:
        paths: files and folders.
        out: folder that this run writes into.
    Raises: ValueError for a missing, empty or non-text file, for a folder without text, and for `out` itself.
    """
    if not paths:
        return library()
    documents: dict[Path, Document] = {}
    for name in paths:
        path = Path(name)
        for document in folder(path, out) if path.is_dir() else [single(path)]:
            documents.setdefault(document.path.resolve(), document)
    return list(documents.values())


def library() -> list[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if not NOT_LIBRARY.intersection(path.relative_to(root).parts)]
    documents = texts(sorted(files, key=lambda path: path.relative_to(root).as_posix()))
    if not documents:
        raise ValueError(f"this Python keeps no .py files in {root}; name files or folders with --text")
    return documents


def folder(root: Path, out: Path | None) -> list[Document]:
    if out and root.resolve() == out.resolve():
        raise ValueError(f"the text {root} is the folder that this run writes into; give another --out")
    documents = texts(sorted(path for path in list_files(root) if path.is_file()))
    if not documents:
        raise ValueError(f"the folder {root} holds no text; name files or folders of text with --text")
    return documents


def list_files(root: Path) -> Iterator[Path]:
    """Yield all files below a folder, except hidden ones and those that runs wrote."""
    for parent, folders, names in os.walk(root):
        here = Path(parent)
        if here != root and (here / OWNER_FILE).exists():
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (here / name for name in names if not name.startswith("."))


def single(path: Path) -> Document:
    if not path.exists():
        raise ValueError(f"there is no text file {path}; --text takes files and folders that exist")
    if not path.is_file():
        raise ValueError(f"{path} is a pipe, a device or a socket; --text takes files, which end")
    check_size(path.stat().st_size, f"the text file {path}")
    data = path.read_bytes() if path.stat().st_size else b""
    if not data:
        raise ValueError(f"the text file {path} is empty; --text takes files with text in them")
    if not is_text(data):
        raise ValueError(f"{path} is not text (UTF-8); --text takes text files and folders of them")
    return Document(path, data)


def texts(files: Sequence[Path]) -> list[Document]:
    sizes = [(path, path.stat().st_size) for path in files]  # virtual files, such as in /proc, have size 0
    check_size(sum(size for _, size in sizes), "the text")
    documents = (Document(path, path.read_bytes()) for path, size in sizes if size)
    return [document for document in documents if document.data and is_text(document.data)]


def check_size(size: int, what: str) -> None:
    """Raise a ValueError if a text and its tokens do not fit into memory."""
    if 4 * size > memory.available():
        have = memory.size_text(memory.available())
        raise ValueError(f"{what} has {memory.size_text(size)} where there are {have} of memory; give less with --text")


def is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode("utf-8")
    except UnicodeDecodeError:
        return False


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Split documents for training and validation: every twentieth file is held out, or the last of fewer.

    A single file is split: its last tenth is held out.
    """
    if len(documents) == 1:
        (only,) = documents
        cut = len(only.data) - len(only.data) // 10
        while cut < len(only.data) and only.data[cut] & 0xC0 == 0x80:  # not inside a character
            cut += 1
        return [Document(only.path, only.data[:cut])], [Document(only.path, only.data[cut:])]
    every = min(len(documents), VALIDATION_SHARE)
    held_out = [index % every == every - 1 for index in range(len(documents))]
    train = [document for document, out in zip(documents, held_out, strict=True) if not out]
    return train, [document for document, out in zip(documents, held_out, strict=True) if out]


# ---- tokens ----
# Convert text to token ids: one token per byte, or byte-pair encoding trained on the training files.
#
# Documents are separated by token 0, which has no other use: NUL does not occur in text, and the encoding reserves
# it.

BETWEEN_FILES = "<|file|>"


@dataclass(frozen=True)
class TokenizedText(TokenSplits):
    """Token ids of both splits, and their tokenizer, None for bytes."""

    vocab: int
    tokenizer: tokenizers.Tokenizer | None


def load(config: TrainConfig, saved: Path | None = None, out: Path | None = None) -> TokenizedText:
    """Load the run's text as tokens.

    Args:
        config: options; uses `text`, `tokens`, `vocab` and `sequence`.
        saved: a tokenizer.json to use instead of training one, for instance on resume.
        out: folder that the run writes into, which is excluded from the text.
    Raises: ValueError if the text cannot be read or is too short for one sequence.
    """
    tokens = read_tokens(config, saved) if is_token_file(config.text) else tokenized(config, saved, out)
    shortest = min(len(tokens.train), len(tokens.validation))
    if shortest <= config.sequence:
        raise ValueError(
            f"the text is too short: {len(tokens.train)} tokens to train on and {len(tokens.validation)} "
            f"held out for validation, where each needs more than one sequence of {config.sequence}; "
            "give more text with --text or a smaller --sequence"
        )
    return tokens


def tokenized(config: TrainConfig, saved: Path | None, out: Path | None) -> TokenizedText:
    train, validation = split(read_text(config.text, out))
    if config.tokens == "byte":
        return TokenizedText(join_bytes(train), join_bytes(validation), 256, None)
    path = Path(config.tokens) if config.tokens.endswith(".json") else saved
    tokenizer = open_tokenizer(path) if path else train_tokenizer(train, config.vocab)
    return TokenizedText(encode(tokenizer, train), encode(tokenizer, validation), tokenizer.get_vocab_size(), tokenizer)


def read_tokens(config: TrainConfig, saved: Path | None) -> TokenizedText:
    """Load tokens that a comparison froze, and check that the tokenizer is the same."""
    source = Path(config.text[0])
    frozen = read(source)
    path = Path(config.tokens) if config.tokens.endswith(".json") else saved
    tokenizer = open_tokenizer(path) if path and config.tokens != "byte" else None
    if frozen.tokenizer != digest(tokenizer):
        raise ValueError(f"{source} was made by other tokens than --tokens {config.tokens}; give those of then")
    size = 256 if tokenizer is None else tokenizer.get_vocab_size()
    if not max(part.max(initial=0) for part in (frozen.train, frozen.validation)) < size:
        raise ValueError(f"{source} holds tokens beyond the {size} of --tokens {config.tokens}")
    return TokenizedText(frozen.train, frozen.validation, size, tokenizer)


def digest(tokenizer: tokenizers.Tokenizer | None) -> str:
    """Return the SHA-256 of a tokenizer; "" for bytes."""
    return "" if tokenizer is None else hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def join_bytes(documents: Sequence[Document]) -> np.ndarray:
    return np.frombuffer(b"\0".join(document.data for document in documents), dtype=np.uint8)


def train_tokenizer(documents: Sequence[Document], vocab: int) -> tokenizers.Tokenizer:
    """Train a byte-level byte-pair encoding with `vocab` tokens on the documents."""
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
