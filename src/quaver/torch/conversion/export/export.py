"""`quaver.torch.export`: write the codes and scales that training multiplies by into checkpoints that servers read."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from quaver.recipes.spec import QuantSpec
from quaver.recipes.text import check_instance, check_name
from quaver.torch.conversion.export.check import (
    ExportCheck,
    Written,
    compare,
    evaluating,
    log_probabilities,
    recording_input_amaxes,
    run,
)
from quaver.torch.conversion.export.layouts import FORMATS, FileFormat
from quaver.torch.conversion.export.operands import DisassembledModel, Reader, disassemble, unwrapped
from quaver.torch.conversion.export.plan import group_fused, plan_weights, tensors_of_group
from quaver.torch.conversion.matchers.swap_class import original, unconverted_class

# ---- writing a folder of safetensors, an index and JSON files; it appears complete or not at all ----


def safetensors_torch() -> ModuleType:
    """Return the module safetensors.torch.

    Raises:
        ModuleNotFoundError: safetensors is not installed; the message says how to install it.
    """
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        sentence = "exported files are safetensors, which is not installed: pip install 'quaver[serving]'"
        raise ModuleNotFoundError(sentence, name="safetensors") from error
    return safetensors.torch


class Writing:
    """Writer of safetensors shards and JSON files into a folder.

    Args:
        folder: an existing, empty folder.
        limit: maximum bytes of tensors per file; a single larger tensor gets a file of its own.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.save = safetensors_torch().save_file
        self.files: list[Path] = []
        self.collected: dict[str, Tensor] = {}
        self.where: dict[str, int] = {}
        self.bytes = 0
        self.total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; writes a file when the size limit is reached."""
        if name in self.where:
            raise ValueError(f"two tensors of this model have the same name {name!r} in its checkpoint")
        if self.collected and self.bytes + tensor.nbytes > self.limit:
            self._flush()
        # Clone: safetensors cannot store two tensors that share memory.
        self.collected[name] = tensor.detach().cpu().contiguous().clone()
        self.where[name] = len(self.files)
        self.bytes += tensor.nbytes
        self.total += tensor.nbytes

    def _flush(self) -> None:
        path = self.folder / f"part-{len(self.files)}.safetensors"
        self.save(self.collected, path, metadata={"format": "pt"})
        self.files.append(path)
        self.collected, self.bytes = {}, 0

    def close(self) -> None:
        """Write the remaining tensors, rename the files to their final names and write the index."""
        self._flush()
        count = len(self.files)
        names = (
            ["model.safetensors"]
            if count == 1
            else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        )
        for path, name in zip(self.files, names, strict=True):
            path.rename(self.folder / name)
        if count > 1:
            weight_map = {name: names[number] for name, number in self.where.items()}
            self.json(
                "model.safetensors.index.json", {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            )

    def json(self, name: str, content: dict[str, Any]) -> None:
        (self.folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def writing(folder: Path, limit: int) -> Iterator[Writing]:
    """Context that writes into a temporary folder, renamed to `folder` on success and deleted on error.

    Raises:
        ValueError: the folder exists and is not empty, is not a folder, or cannot be written.
    """
    check_place(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.parent / f".{folder.name}.{secrets.token_hex(8)}"
        partial.mkdir()
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}); give a folder that can be") from error
    try:
        result = Writing(partial, limit)
        yield result
        result.close()
        os.replace(partial, folder)
    except OSError as error:
        raise ValueError(
            f"{folder} could not be written ({error.strerror}); free some space, or give another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_place(folder: Path) -> None:
    """Raise if the target folder exists and is not empty, or is not a folder.

    Raises:
        ValueError: the message says which.
    """
    if folder.is_dir():
        if any(folder.iterdir()):
            raise ValueError(f"{folder} already exists and is not empty; give a new folder, or remove that one first")
    elif folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} exists and is not a folder; give a new folder")


# ---- export ----

#: Default maximum bytes of tensors per file.
SHARD_BYTES = 5_000_000_000


@dataclass
class Exported:
    """Result of `export`: a printable summary of the written files."""

    folder: Path
    format: str
    #: Checkpoint names of the quantized layers, by (scheme name in the format, spec of the weight).
    layers: dict[tuple[str, QuantSpec], list[str]]
    #: Text that says how readers quantize the inputs of these layers, by the same keys.
    reads: dict[tuple[str, QuantSpec], str]
    #: Bytes of the tensor files, and bytes of the same tensors in the model's dtypes.
    bytes: int
    bytes_before: int
    #: Layers that train quantized but were written in high precision, and the reason.
    left: dict[str, str] = field(default_factory=dict)
    #: Divergences that `check` measured, or None.
    check: ExportCheck | None = None

    def __str__(self) -> str:
        share = f" ({self.bytes / self.bytes_before:.1%})" if self.bytes_before else ""
        lines = [f"{self.folder}: {self.format}, {self.bytes:,} bytes of {self.bytes_before:,}{share}"]
        for (name, spec), layers in self.layers.items():
            lines.append(f"  {len(layers)} weights as {name}, {spec}: {self.reads[name, spec]}")
        lines += [f"  in high precision though trained quantized: {name} ({why})" for name, why in self.left.items()]
        return "\n".join([*lines, *([] if self.check is None else [f"  {self.check}"])])


def export(
    model: nn.Module,
    folder: str | Path,
    *,
    format: str = "compressed-tensors",
    check: Any = None,
    calibrate: Any = None,
    high_precision: Sequence[str] = (),
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write the codes and scales that a model's forward multiplies by into files that servers read.

    Embeddings, norms, biases and the head stay in the model's dtype. Tensor names are those of the unconverted model's
    checkpoint. The model is not changed. Save the tokenizer into the same folder yourself.

    Args:
        model: a converted model, or one of `quaver.torch` layers inside the autocast that it trains under. It may be on
            one device or several, but not sharded across ranks.
        folder: a new or empty folder; it appears complete or not at all.
        format: "compressed-tensors", "deepseek", "modelopt", or for the experts of GPT-OSS "mxfp4".
        check: inputs of the model (a tensor, a tuple or a dict). The files are read back, and the divergence of their
            next-token distribution from the model's own forward is reported.
        calibrate: inputs from which the amax of each layer's input is measured, for formats that store its scale.
        high_precision: name patterns of layers to write in high precision although they are trained quantized.
        shard_bytes: maximum bytes of tensors per file.
    Returns:
        A summary that can be printed.
    Raises:
        ValueError: the format cannot store a layer's codes (the message lists formats that can); a weight is not
            finite, on meta, or sharded; the folder is not empty or cannot be written. Raised before the folder appears.
        ModuleNotFoundError: safetensors is not installed.
    Exact: the files decode to the operand of fprop's GEMM, bit for bit. Each weight is decoded again and compared
        before it is written.
    """
    check_instance("export", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    check_name("format of exported files", format, FORMATS)
    folder, kind = Path(folder), FORMATS[format]
    safetensors_torch()
    check_place(folder)
    for name, inputs in (("check", check), ("calibrate", calibrate)):
        if inputs is not None and not isinstance(inputs, Tensor | tuple | Mapping):
            raise ValueError(
                f"{name} is a {type(inputs).__name__}; give inputs of the model: a tensor, a tuple or a dict"
            )
    model = unwrapped(model)
    parts = disassemble(model, high_precision)
    seen: Mapping[tuple[nn.Module, str], float] = {}
    if calibrate is not None:
        with evaluating(model), recording_input_amaxes(model) as seen:
            run(model, calibrate)
    plan = plan_weights(kind, parts, seen)
    trained = None if check is None else log_probabilities(model, check)
    before = 0
    groups = group_fused(plan, parts.matrices)
    with writing(folder, shard_bytes) as files:
        for name, tensor in parts.plain.items():
            files.add(name, tensor)
            before += tensor.nbytes
        for group in groups:
            operands = [one.operand() for one, _, _ in group]
            for name, tensor in tensors_of_group(kind, group, operands, verified=True):
                files.add(name, tensor)
            before += sum(
                q.shape[0] * q.shape[1] * one.dtype.itemsize for (one, _, _), q in zip(group, operands, strict=True)
            )
        _describe(files, kind, model, parts, plan)
    result = Exported(folder, kind.name, {}, {}, files.total, before, dict.fromkeys(parts.left, "asked for by name"))
    for one, scheme, _ in plan:
        key = scheme.name, scheme.weight
        result.layers.setdefault(key, []).extend(piece.prefix.rstrip(".") for piece in one.pieces)
        result.reads[key] = scheme.reads
    if trained is not None:
        result.check = compare(model, check, trained, plan, list(parts.left.values()), Reader(folder))
    return result


def _describe(
    files: Writing, kind: FileFormat, model: nn.Module, parts: DisassembledModel, plan: Sequence[Written]
) -> None:
    """Write config.json and the other JSON files."""
    schemes = {piece.prefix.rstrip("."): scheme for one, scheme, _ in plan for piece in one.pieces}
    own: Any = getattr(model, "checkpoint_config", None) or getattr(model, "config", None)
    config: dict[str, Any] = {}
    if hasattr(own, "to_json_string"):
        config = json.loads(own.to_json_string())
        config["architectures"] = [(original(unconverted_class(model)) or type(model)).__name__]
        # Names of weights that a transformers model ties to others.
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        if getattr(own, "tie_word_embeddings", False) and any(one.name in tied for one, _, _ in plan):
            config["tie_word_embeddings"] = False
    elif isinstance(own, dict):
        config = dict(own)
    configuration = kind.configuration(schemes, parts.matrices)
    config["quantization_config"] = {"quant_method": kind.method} | configuration
    files.json("config.json", config)
    for name, content in kind.further_files(schemes, parts.matrices).items():
        files.json(name, content)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        files.json("generation_config.json", json.loads(generation.to_json_string()))
