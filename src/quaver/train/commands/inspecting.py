"""`quaver inspect`: a report of a run's sampled steps, or of one step of a Hugging Face model."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quaver import recipes as recipe_table
from quaver.costs import hardware
from quaver.inspection.table import WHAT_IF_FILE
from quaver.recipes.text import check_name
from quaver.train import files, frameworks
from quaver.train.commands import doctor
from quaver.train.inspection_table import STATISTICS, read_table

#: Recipes that a model is compared under unless --recipe names others.
RECIPES = ("mxfp8", "nvfp4", "tensorwise", "rowwise", "blockwise")
#: Longest sequence of the text's tokens.
SEQUENCE = 1024


def report_run(
    run: Path, folder: Path | None, statistic: str, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Write report.html and inspect.png of a run.

    Args:
        run: folder with inspect.jsonl, or that file.
        folder: destination; None is the folder of the run.
        statistic: one of `STATISTICS`, for the picture.
        environment: texts about the run and its machine by title; None describes this machine.
    Returns:
        Lines that name the files.
    Raises:
        ValueError: bokeh is missing, the statistic is unknown, or the run has no rows.
    """
    check_before(statistic)
    table = read_table(run)
    source = run if run.is_dir() else run.parent
    rules = read_rules(source / WHAT_IF_FILE)
    from quaver.train.inspection_report import FILE, write_report
    from quaver.train.plots import plot_inspection

    folder = folder or source
    folder.mkdir(parents=True, exist_ok=True)
    here = "\n".join([*_versions(), f"{platform.system()}, {platform.machine()}, {os.cpu_count()} cores"])
    texts = dict(environment or {"This report was written with": here})
    if (source / "config.toml").is_file():
        texts["config.toml"] = files.read(source / "config.toml").strip()
    picture = plot_inspection(table, statistic, folder / "inspect.png")
    report = write_report(table, folder / FILE, f"quaver inspect: {source.resolve().name}", texts, rules)
    return [f"report: {report}", f"picture: {picture}"]


def _once_each(texts: Mapping[str, str]) -> str:
    """Return each text once, after the names that have it."""
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    return "\n\n".join("\n".join([*own, text]) for text, own in names.items())


def _versions() -> list[str]:
    return [f"{name} {version}" for name, version in doctor.versions().items()]


def check_before(statistic: str) -> None:
    """Check what needs no rows, so that no work is lost."""
    check_name("statistic", statistic, STATISTICS)
    frameworks.check_installed("bokeh", "quaver inspect")


def read_rules(path: Path) -> dict[str, Any] | None:
    """Return the contents of what_if.json, or None without the file."""
    if not path.is_file():
        return None
    try:
        rules = json.loads(files.read(path))
        texts = [rules["code"], rules["note"], *(cell for row in rules["table"] for cell in row)]
        if not rules["table"] or not all(isinstance(text, str) for text in texts):
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not what WhatIf.save writes; restore it, or delete it") from error
    return rules


def report_model(
    model: str,
    text: Sequence[Path],
    recipes: Sequence[str],
    folder: Path,
    statistic: str,
    *,
    tokens: int,
    gpu: str,
    widen: int,
    device: str,
) -> list[str]:
    """Inspect one step of a Hugging Face model on text and write its report, inspect.jsonl and what_if.json.

    Args:
        model: hf:PATH, the folder of a causal language model with its tokenizer.
        text: files whose first tokens are the batch.
        recipes: recipes to compare; the first one is inspected.
        folder: destination.
        statistic: as for `report_run`.
        tokens: number of tokens at most.
        gpu, widen: as for `what_if`, for the predicted time.
        device: name of a device, or "auto".
    Returns:
        The lines of `what_if`, and those of `report_run`.
    Raises:
        ValueError: no such model, text, recipe or GPU, a library is missing, or the folder has another run's rows.
    """
    check_before(statistic)
    hardware.get(gpu)
    for recipe in recipes:
        recipe_table.get(recipe)
    kind, _, name = model.partition(":")
    path = Path(name)
    if kind != "hf" or not (path / "config.json").is_file():
        raise ValueError(f"--model {model} is no model; give hf:PATH, a folder with config.json, weights and tokenizer")
    if not text:
        raise ValueError("--model needs --text FILE..., the text to run the model on")
    if tokens < 2:
        raise ValueError(f"--tokens is {tokens}; give 2 or more")
    frameworks.check_installed("torch", "quaver inspect --model")
    if find_spec("transformers") is None:
        raise ValueError("quaver inspect --model needs transformers, which is not installed: pip install transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import quaver.torch as qt
    from quaver.train.torch.process_group import device_of

    where = device_of(device)
    words = "\n".join(files.read(each) for each in text)
    ids = AutoTokenizer.from_pretrained(path, local_files_only=True)(words)["input_ids"][:tokens]
    if len(ids) < 2:
        raise ValueError(f"--text has {len(ids)} tokens; give a longer text")
    loaded = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32).to(where)
    length = min(len(ids), SEQUENCE, getattr(loaded.config, "max_position_embeddings", SEQUENCE))
    batch = torch.tensor(ids[: len(ids) // length * length], dtype=torch.int64, device=where).view(-1, length)  # [B, S]

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(input_ids=batch, labels=batch, use_cache=False).loss

    converted = qt.convert(loaded, recipes[0])
    with qt.inspect(loaded, every=1, out=folder) as inspector:
        loss_fn(loaded, batch).backward()
        inspector.step()
    loaded.zero_grad()
    result = qt.what_if(loaded, batch, loss_fn, recipes, gpu=gpu, widen=widen)
    result.save(folder)
    card = torch.cuda.get_device_name(where) if where.type == "cuda" else doctor.cpu()
    about = [f"model {path}, {batch.numel()} tokens, inspected under {recipes[0]}", *_versions(), card]
    environment = {
        "Environment of the run": "\n".join(about),
        "Converted layers": str(converted),
        "Layers that a forward reached": str(converted.check(loaded, batch)),
        "Implementations": _once_each({name: str(each) for name, each in qt.explain(loaded, batch).items()}),
    }
    return [*str(result).split("\n"), *report_run(folder, None, statistic, environment)]
