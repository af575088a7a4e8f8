"""Every option of a training run: one frozen dataclass, read from TOML and written back to the run's folder.

The sentence beside a field is its documentation and its `--help` text: the command line is made from this
table (`commands/cli.py`), so that a new field is a new option by being here.
"""

import dataclasses
import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from quaver.core.text.given import shown
from quaver.core.text.spelling import suggest
from quaver.train.configuration import optimizer_name
from quaver.train.configuration.pipelines import ORDERS
from quaver.train.configuration.sizes import MODELS
from quaver.train.files import whole_file

#: Before the digest of the lines above it, in the file of a run.
DIGEST = "# SHA-256 of the lines above: "
FRAMEWORKS = ("torch", "jax")
RECOMPUTE = ("none", "mlp", "full")
CAPTURE = ("none", "step")
CP_HOW = ("gather", "ring", "all_to_all")
TRACKERS = ("tensorboard", "wandb")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What a run does; equal configurations train the same model, bit for bit, on the same machine."""

    recipe: Annotated[str, "mxfp8, 'delayed(history=16)'; several over the run: 'nvfp4 until 85%, bf16'"] = "bf16"
    model: Annotated[str, "a size of Llama, or a family and a size: " + " ".join(MODELS)] = "tiny"
    text: Annotated[tuple[str, ...], "files or folders of text; none: Python's own library"] = ()
    tokens: Annotated[str, "byte, bpe (trained on the text), or the path of a tokenizer.json"] = "byte"
    vocab: Annotated[int, "number of tokens that bpe learns"] = 2048
    capacity: Annotated[float, "choices that an expert takes, in even shares; 0: all of them"] = 0.0

    steps: Annotated[int, "optimizer steps in all"] = 300
    batch: Annotated[int, "sequences in a micro-batch"] = 8
    sequence: Annotated[int, "tokens in a sequence"] = 128
    accumulate: Annotated[int, "micro-batches in a step"] = 1

    optimizer: Annotated[str, "adamw: torch's; states in few bits: lean, balanced, exact, muon-lean, ..."] = "adamw"
    lr: Annotated[float, "highest learning rate; 0: the model's own"] = 0.0
    final_lr: Annotated[float, "learning rate at the end of the cosine, as a fraction of the highest"] = 0.0
    warmup: Annotated[int, "steps of linear warm-up"] = 30
    weight_decay: Annotated[float, "AdamW's, on matrices only"] = 0.1
    beta1: Annotated[float, "AdamW's first moment"] = 0.9
    beta2: Annotated[float, "AdamW's second moment"] = 0.95
    clip: Annotated[float, "largest norm of the gradient; 0: no clipping"] = 1.0
    seed: Annotated[int, "of the initial weights and of the batches"] = 0

    framework: Annotated[str, "torch or jax: the same weights, batches and checkpoints"] = "torch"
    dtype: Annotated[str, "bfloat16 (autocast over float32 parameters) or float32"] = "bfloat16"
    device: Annotated[str, "cpu, cuda, cuda:1, ...; auto: a GPU if there is one"] = "auto"
    recompute: Annotated[str, "what backward computes again to save memory: none, mlp or full (whole layers)"] = "none"
    fsdp: Annotated[int, "ranks that share batch, weights and moments; 0: all that are left of those started"] = 0
    pp: Annotated[int, "ranks of a pipeline, each with layers that follow one another"] = 1
    pp_schedule: Annotated[str, "the order of micro-batches among those, by torch's name: " + " ".join(ORDERS)] = "1F1B"
    pp_stages: Annotated[int, "stages of each of those, where the schedule takes several; 0: two"] = 0
    cp: Annotated[int, "ranks that share the tokens of each sequence"] = 1
    cp_how: Annotated[str, "what attention sends between those: gather, ring or all_to_all"] = "gather"
    tp: Annotated[int, "ranks that share each layer's heads and features, and the words"] = 1
    sp: Annotated[bool, "ranks of --tp share the tokens between those layers, too"] = False
    timeout: Annotated[int, "seconds that a rank waits for another one, which is then named; 0: torch's own"] = 0
    loss_chunk: Annotated[int, "tokens whose logits exist at once, for large vocabularies (torch); 0: all of them"] = 0
    capture: Annotated[str, "step: record a step as a CUDA graph and replay it, for the host's time; or none"] = "none"
    threads: Annotated[int, "CPU threads; 0: one on a CPU (small models lose with more)"] = 0

    out: Annotated[str, "folder of the run; none: runs/MODEL-RECIPE-seedN"] = ""
    validate_every: Annotated[int, "steps between validations; 0: only at the end"] = 50
    validation_batches: Annotated[int, "batches of a validation, the same in every run"] = 16
    checkpoint_every: Annotated[int, "steps between checkpoints; 0: only at the end"] = 100
    async_save: Annotated[bool, "several ranks go on while a copy of their state is written"] = False
    keep: Annotated[int, "newest checkpoints that stay; 0: all"] = 2
    report_to: Annotated[tuple[str, ...], "what gets the records beside metrics.jsonl: tensorboard, wandb"] = ()

    def __post_init__(self) -> None:
        choose("model", self.model, MODELS)
        choose("framework", self.framework, FRAMEWORKS)
        choose("dtype", self.dtype, ("bfloat16", "float32"))
        choose("recompute", self.recompute, RECOMPUTE)
        choose("capture", self.capture, CAPTURE)
        choose("cp_how", self.cp_how, CP_HOW)
        choose("pp_schedule", self.pp_schedule, ORDERS)
        optimizer_name.find(self.optimizer)
        for tracker in self.report_to:
            choose("report_to", tracker, TRACKERS)
        if self.capacity and MODELS[self.model].experts is None:
            raise ValueError(f"capacity is {self.capacity}, and {self.model} has no experts; leave out --capacity")
        if not math.isfinite(self.capacity):
            raise ValueError("capacity is infinite; leave it out, which takes all choices, or give some, such as 1.25")
        if not self.tokens.endswith(".json"):
            choose("tokens", self.tokens, ("byte", "bpe"))
        for name, least in SMALLEST.items():
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"{name} is {shown(value)}; it must be at least {least}")
            if isinstance(value, int) and value > LARGEST.get(name, 2**63 - 1):
                raise ValueError(f"{name} is {shown(value)}; it must be at most {LARGEST.get(name, 2**63 - 1)}")
        for name in ("beta1", "beta2"):
            if not getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be below 1")
        for name, value in dataclasses.asdict(self).items():
            for word in value if isinstance(value, tuple) else [value]:
                if isinstance(word, str) and not is_plain(word):
                    raise ValueError(f"{name} is {shown(word)}, which is no text of Unicode characters")


SMALLEST: Mapping[str, float] = {
    **dict.fromkeys(("steps", "batch", "sequence", "accumulate", "validation_batches"), 1),
    **dict.fromkeys(("capacity", "lr", "final_lr", "warmup", "weight_decay", "beta1", "beta2", "clip", "seed"), 0),
    **dict.fromkeys(
        ("threads", "validate_every", "checkpoint_every", "keep", "loss_chunk", "fsdp", "timeout", "pp_stages"), 0
    ),
    **dict.fromkeys(("pp", "cp", "tp"), 1),
    "pp_stages": 0,
    "vocab": 257,  # 256 bytes and the mark between files
}
#: 2**63 - 1 for the others: what a file of integers holds.
LARGEST: Mapping[str, int] = {
    **{"threads": 1024, "vocab": 1 << 20},
    **dict.fromkeys(("fsdp", "pp", "pp_stages", "cp", "tp", "timeout"), 1 << 20),
}


def is_plain(text: str) -> bool:
    """Whether a text can be written to a file and name one: no NUL, no half of a surrogate pair."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def choose(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise a ValueError that suggests the right word unless `value` is one of `choices`."""
    known = list(choices)
    if value not in known:
        raise ValueError(f"{name} {shown(value)} is not known; {suggest(value[:100], known)}")


def kinds() -> dict[str, Any]:
    """Name and plain type of every option."""
    return get_type_hints(TrainConfig)


def read_toml(path: Path) -> dict[str, Any]:
    """The options that a TOML file holds, each checked for its name and type.

    Raises: ValueError for a missing file, bad TOML, an unknown option (with the nearest) or a wrong type.
    """
    try:
        text = whole_file.read(path, longest=1 << 20)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the configuration {path}: {reason(error)}") from error
    try:
        table = tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not valid TOML: it is nested too deeply") from error
    known = kinds()
    options = {key.replace("-", "_"): value for key, value in table.items()}
    for key, value in options.items():
        if key not in known:
            raise ValueError(f"{path}: there is no option {shown(key)}; {suggest(key[:100], known)}")
        options[key] = typed(path, key, value, known[key])
    return options


def typed(path: Path, key: str, value: Any, kind: Any) -> Any:
    """`value` as the option's type; integers pass as floats, nothing else is converted."""
    if kind is bool:
        right, wanted = isinstance(value, bool), "true or false"
    elif kind in (int, float, str):
        right = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        wanted = {int: "a whole number", float: "a number", str: "a string"}[kind]
    else:
        right = isinstance(value, list) and all(isinstance(item, str) for item in value)
        wanted, kind = "a list of strings", tuple
    if not right:
        raise ValueError(f"{path}: {key} = {shown(value)} should be {wanted}")
    try:
        return kind(value)
    except OverflowError as error:
        raise ValueError(f"{path}: {key} = {shown(value)} is too large") from error


def read_run(path: Path) -> dict[str, Any]:
    """`read_toml` of the file that a run wrote. Raises: ValueError if it was changed since, too."""
    options = read_toml(path)
    lines, _, said = whole_file.read(path).rpartition(DIGEST)
    # Earlier runs wrote no digest, and who changes an option on purpose deletes it.
    if lines and said.strip() != digest(lines):
        raise ValueError(
            f"{path} is not as the run wrote it; restore it, or delete its last line if you changed it on purpose"
        )
    return options


def digest(text: str) -> str:
    """SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()


def to_toml(config: TrainConfig) -> str:
    """All options as TOML, in the order of the table; `read_toml` gives the same values back."""
    lines = ["# Every option of this run; start another one from it with: quaver train --config config.toml"]
    for key, value in dataclasses.asdict(config).items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        written = repr(value) if number else json.dumps(value, ensure_ascii=False)
        lines.append(f"{key} = " + written.replace("\x7f", "\\u007f"))  # which TOML takes no other way
    text = "\n".join(lines) + "\n"
    return text + DIGEST + digest(text) + "\n"


def reason(error: Exception) -> str:
    """An error's message, without Python's decoration."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
