"""Models of transformers trained by its Trainer on the default text, in bf16 and under recipes, paired by seed.

A null model, whose initial weights differ from bf16's by 1e-5 at most, shows the difference of two runs by chance.
It is a lower bound for the chance difference of a recipe, whose rounding in each step is larger than that nudge.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import quaver.torch as qt
from benchmarks.acceptance.training import NUDGE, NULL
from benchmarks.measuring import machine, results
from quaver.train.data import join_bytes, read_text, split

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "loops.md"
BEGIN, END = "<!-- python -m benchmarks families writes from here -->", "<!-- to here, families -->"
#: Options of each model's configuration: two layers of 64 features, bytes as tokens.
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 64, "d_kv": 32, "d_ff": 192, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 2, "max_seq_len": 64},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "llama": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
}
RECIPES = ("delayed", "mxfp8")
BASELINE = "bf16"
#: Shape of a batch, number of validation windows, and size of the vocabulary.
BATCH, SEQUENCE, VALIDATION, VOCABULARY = 8, 32, 64, 256


class Windows(torch.utils.data.Dataset[Any]):
    """Windows of a text at random positions; for an encoder-decoder, the second half is the label of the first."""

    def __init__(self, text: np.ndarray, count: int, seed: int, halves: bool) -> None:
        starts = np.random.default_rng(seed).integers(0, len(text) - SEQUENCE, count)
        self.rows = torch.from_numpy(text[starts[:, None] + np.arange(SEQUENCE)].astype(np.int64))
        self.halves = halves

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = self.rows[i]
        if self.halves:
            return {"input_ids": row[: SEQUENCE // 2], "labels": row[SEQUENCE // 2 :]}
        return {"input_ids": row, "labels": row}


def text() -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of the default text for training, and of its held-out files."""
    train, held_out = split(read_text(()))
    return join_bytes(train), join_bytes(held_out)


def model_of(family: str, seed: int, run: str) -> Any:
    """Return a model with random weights: for bf16, the null model, or a converted one."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **FAMILIES[family], **ids)
    kind: Any = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    torch.manual_seed(seed)
    model = kind.from_config(config)
    if run == NULL:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.empty_like(p).uniform_(-NUDGE, NUDGE))
    elif run != BASELINE:
        qt.convert(model, run)
    return model


def loss_of(family: str, seed: int, run: str, steps: int, train: np.ndarray, held_out: np.ndarray) -> float:
    """Train with transformers' Trainer in bf16; return the loss on held-out text in nats per byte."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            learning_rate=2e-3,
            warmup_steps=steps // 10,
            bf16=True,
            use_cpu=True,
            seed=seed,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
        )
        halves = family == "t5"
        trainer = Trainer(
            model=model_of(family, seed, run),
            args=arguments,
            train_dataset=Windows(train, steps * BATCH, seed, halves),
            eval_dataset=Windows(held_out, VALIDATION, 0, halves),
        )
        trainer.train()
        return float(trainer.evaluate()["eval_loss"])


def measured(
    families: Sequence[str], runs: Sequence[str], steps: int, seeds: int, report: Callable[[str], None]
) -> dict[tuple[str, str], list[float]]:
    """Return the losses of all seeds by family and run."""
    train, held_out = text()
    losses: dict[tuple[str, str], list[float]] = {}
    for family in families:
        for seed in range(seeds):
            for run in (BASELINE, NULL, *runs):
                loss = loss_of(family, seed, run, steps, train, held_out)
                losses.setdefault((family, run), []).append(loss)
                report(f"{family}, seed {seed}, {run}: {loss:.4f}")
    return losses


def rows(losses: dict[tuple[str, str], list[float]], runs: Sequence[str]) -> list[list[str]]:
    """Return the table's cells: bf16's loss, and each other run's difference from it, as a mean and by seed."""
    table = []
    for family in dict.fromkeys(family for family, _ in losses):
        base = losses[family, BASELINE]
        cells = [family, f"{statistics.mean(base):.4f}"]
        for run in (NULL, *runs):
            differences = [a - b for a, b in zip(losses[family, run], base, strict=True)]
            cells.append(f"{statistics.mean(differences):+.4f} ({', '.join(f'{d:+.4f}' for d in differences)})")
        table.append(cells)
    return table


def farthest(losses: dict[tuple[str, str], list[float]], runs: Sequence[str]) -> str:
    """Describe the largest difference of each run from bf16's loss, over seeds and families."""
    families, parts = dict.fromkeys(family for family, _ in losses), []
    for run in (NULL, *runs):
        differences = {
            family: max(abs(a - b) for a, b in zip(losses[family, run], losses[family, BASELINE], strict=True))
            for family in families
        }
        family = max(differences, key=differences.__getitem__)
        parts.append(f"{run} {differences[family]:.4f} ({family})")
    return f"Largest difference from bf16 of any seed: {', '.join(parts)}."


def header(runs: Sequence[str]) -> list[str]:
    return ["family", "bf16, nats", *(f"{run} minus bf16 (by seed)" for run in (NULL, *runs))]


def run(steps: int, seeds: int, only: Sequence[str], write: bool, console: Console) -> None:
    """Train all runs, print the table, and optionally write it into docs/guides/loops.md.

    Raises:
        ValueError: a family is unknown, or a library is missing.
    """
    unknown = [family for family in only if family not in FAMILIES]
    if unknown:
        raise ValueError(f"no family {unknown[0]!r}; there are {', '.join(FAMILIES)}")
    missing = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
    if missing:
        raise ValueError(f"transformers' Trainer needs {missing[0]}: pip install 'quaver[integrations]'")
    losses = measured(list(only) or list(FAMILIES), RECIPES, steps, seeds, console.print)
    table = Table(*header(RECIPES))
    cells = rows(losses, RECIPES)
    for row in cells:
        table.add_row(*row)
    console.print(table)
    if write:
        text = (
            f"{steps} steps of {BATCH} windows of {SEQUENCE} bytes, AdamW, `bf16=True`, {seeds} seeds; loss on "
            f"{VALIDATION} windows of held-out files. {machine.cpu()}, torch {torch.__version__}, {machine.today()}. "
            f"{farthest(losses, RECIPES)}"
        )
        results.write_between(PAGE, BEGIN, END, [text, "", *results.table(header(RECIPES), cells)])
