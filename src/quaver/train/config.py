"""Options of a training run: a frozen dataclass, read from TOML and written back to the run's folder.

The text in a field's annotation is its documentation and its `--help` text: the command line is generated from the
dataclass (`commands/cli.py`), so a new field is a new option. The module also parses the names of pipeline schedules,
optimizers and recipes.
"""

import dataclasses
import hashlib
import json
import math
import tomllib
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import quaver.recipes
from quaver.recipes.schedule import Schedule, ScheduleEnd, SchedulePhase, read
from quaver.recipes.spec import Recipe
from quaver.recipes.text import end_of, items, pieces, shown, suggest
from quaver.reference.optimizer_state import PRESETS, SMALL, Preset
from quaver.train import files
from quaver.train.model_config import MODELS

# ---- pipelines ----
# Pipeline schedules, and the stages that each of them assigns to a rank.
#
# The names are those of torch.distributed.pipelining's `get_schedule_class`.


class PipelineSchedule(NamedTuple):
    """Requirements of one of torch's pipeline schedules."""

    #: Minimum and maximum number of stages per rank.
    least: int
    most: int
    #: True if stages are assigned in a V, so that the first rank has the first and the last stage; else round-robin.
    v_shaped: bool
    #: True if the schedule runs the two parts of a backward separately.
    splits: bool
    #: True if micro-batches are processed in rounds of equal size.
    rounds: bool = False
    #: True if it needs at least as many micro-batches as stages, else as many as ranks.
    fills: bool = False


#: Default number of stages per rank for schedules with several.
DEFAULT_STAGES = 2
_ANY = 1 << 20
PIPELINE_SCHEDULES = {
    "1F1B": PipelineSchedule(1, 1, v_shaped=False, splits=False),
    "GPipe": PipelineSchedule(1, 1, v_shaped=False, splits=False),
    "Interleaved1F1B": PipelineSchedule(DEFAULT_STAGES, _ANY, v_shaped=False, splits=False, rounds=True),
    "InterleavedZeroBubble": PipelineSchedule(DEFAULT_STAGES, _ANY, v_shaped=False, splits=True, rounds=True),
    "ZBVZeroBubble": PipelineSchedule(DEFAULT_STAGES, DEFAULT_STAGES, v_shaped=True, splits=True),
    "DualPipeV": PipelineSchedule(DEFAULT_STAGES, DEFAULT_STAGES, v_shaped=True, splits=True, fills=True),
}


def stages_per_rank(schedule: str, wanted: int) -> int:
    """Return the stages per rank: `wanted`, or the default if 0."""
    return wanted or min(DEFAULT_STAGES, PIPELINE_SCHEDULES[schedule].most)


def stage_ranks(schedule: str, ranks: int, each: int) -> list[int]:
    """Return the rank of each stage, from the first stage to the last."""
    down = [*range(ranks)]
    up = down[::-1] if PIPELINE_SCHEDULES[schedule].v_shaped else down
    return [rank for index in range(each) for rank in (up if index % 2 else down)]


# ---- optimizer names ----
# Optimizers as the user writes them.
#
# adamw              torch's fused AdamW, all in float32
# PRESET             AdamW with a preset of `quaver.reference.optimizer_state.PRESETS`: lean, balanced, exact, ...
# RULE-PRESET        another rule with a preset: lion-lean, sgd-balanced, schedulefree-lean, muon-lean
# RULE               that rule with states in float32: lion, sgd, adam, schedulefree, muon
#
# Muon steps the matrices of layers, and AdamW everything else.

#: Default optimizer.
TORCH_ADAMW = "adamw"
#: Number of moments of a layer's matrix, by rule.
RULES = {"adamw": 2, "adam": 2, "schedulefree": 2, "lion": 1, "sgd": 1, "muon": 1}
#: Formats whose codes can be a trainable parameter.
EIGHT_BITS = ("e4m3", "e5m2")
#: Matrices of a layer whose columns tensor parallelism shards.
ROWWISE_MATRICES = ("o_proj", "down_proj")


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer's rule and preset; no preset means torch's fused AdamW."""

    rule: str
    preset: Preset | None

    def weights(self, recipe: Recipe, dtype: str, codes: bool = True) -> str:
        """Return the storage of matrices between embedding and head: "codes", "bfloat16" or "float32".

        Args:
            recipe: recipe of the run.
            dtype: dtype of the run; bfloat16 storage is used only with bfloat16 autocast.
            codes: codes are allowed, see `allows_codes`.
        """
        weights_dtype = "float32" if self.preset is None else self.preset.weights
        if weights_dtype == "codes" and codes and recipe.quantizes and not _why_no_codes(recipe):
            return weights_dtype
        return "float32" if dtype == "float32" else self.others(dtype)

    @property
    def moments(self) -> tuple[int, int]:
        """Number of moments of a layer's matrix, and of any other parameter."""
        own = RULES[self.rule]
        return own, 2 if self.rule == "muon" else own

    def others(self, dtype: str) -> str:
        """Return the storage of other matrices, such as the head: "bfloat16" or "float32"."""
        narrow = self.preset is not None and self.preset.weights != "float32" and dtype == "bfloat16"
        return "bfloat16" if narrow else "float32"


def find_optimizer(text: str) -> OptimizerChoice:
    """Return the optimizer with a given name. Raises: ValueError, with a suggestion, if there is none."""
    if text == TORCH_ADAMW:
        return OptimizerChoice(TORCH_ADAMW, None)
    rule, _, name = text.partition("-")
    if rule in RULES and (name or rule != TORCH_ADAMW):
        name = name or ("" if text.endswith("-") else "float32")
    elif not name:
        rule, name = TORCH_ADAMW, text
    if rule in RULES and name in PRESETS:
        return OptimizerChoice(rule, PRESETS[name])
    known = [*RULES, *PRESETS, *(f"{rule}-{preset}" for rule in RULES for preset in PRESETS)]
    raise ValueError(f"optimizer {text[:100]!r} is not known; {suggest(text[:100], known)}")


def is_schedule_free(text: str) -> bool:
    """True if an optimizer needs no learning rate schedule after warm-up."""
    return find_optimizer(text).rule == "schedulefree"


def check_optimizer(text: str, recipe: Recipe) -> None:
    """Raise a ValueError if the optimizer stores weights as codes and the recipe has no suitable format for them."""
    preset = find_optimizer(text).preset
    if preset is None or preset.weights != "codes" or not recipe.quantizes:
        return
    why = _why_no_codes(recipe)
    if why:
        raise ValueError(
            f"optimizer {text} stores weights as eight-bit codes, and recipe {recipe} {why}; take a recipe with "
            "weights in eight bits, such as tensorwise or mxfp8, or --optimizer exact"
        )


def allows_codes(recipes: int, tp: int) -> bool:
    """True if matrices of a run may be stored as codes, which belong to one recipe and cannot be sharded by columns.

    Args:
        recipes: number of recipes of the run.
        tp: ranks of tensor parallelism, which requires float weights.
    """
    return recipes == 1 and tp == 1


def _why_no_codes(recipe: Recipe) -> str:
    """Return why a quantizing recipe has no weight codes that can be trained, or ""."""
    spec = recipe.fprop.b
    if spec is None:
        return "quantizes no weight"
    return "" if spec.format.name in EIGHT_BITS else f"has weights in {spec.format}, which take no gradient"


def check_sharded_optimizer(text: str, shapes: Mapping[str, tuple[int, ...]], parts: int, tp: int) -> None:
    """Raise a ValueError if ranks cannot step their shards of matrices independently.

    Args:
        text: name of the optimizer.
        shapes: [out, in] of the layers' matrices by name; of experts [experts, out, in].
        parts: number of ranks over which each matrix is sharded.
        tp: number of ranks of tensor parallelism among them.
    """
    chosen = find_optimizer(text)
    preset, sharded = chosen.preset, f"{parts} ranks have parts of each matrix"
    if preset is None or parts == 1:
        return
    if chosen.rule == "muon":
        raise ValueError(
            f"optimizer {text} orthogonalizes whole matrices, and {sharded}; use only pipeline parallelism (--pp), or "
            "take --optimizer lean or lion-lean"
        )
    specs = [spec for spec in (preset.first, preset.second)[: chosen.moments[0]] if spec.of.scaled]
    if any(spec.block is None for spec in specs):
        raise ValueError(
            f"optimizer {text} has one scale for a whole matrix, and {sharded}; take one with scales of blocks: lean, "
            "balanced or exact"
        )
    block = max((spec.block or 1 for spec in specs), default=1)
    for name, (*first, columns) in shapes.items():
        rows = math.prod(first)
        divided = tp > 1 and name.endswith(ROWWISE_MATRICES) and rows * columns >= SMALL
        if divided and columns % (block * tp):
            raise ValueError(
                f"tp is {tp}, which divides the {columns} columns of {name}, and optimizer {text} has a scale for each "
                f"{block}; give --tp a smaller number, or take --optimizer exact"
            )


# ---- options ----

#: Precedes the digest of all lines above it in a run's config file.
DIGEST = "# SHA-256 of the lines above: "
FRAMEWORKS = ("torch", "jax")
RECOMPUTE = ("none", "mlp", "full")
CAPTURE = ("none", "step")
OPTIMIZER_OFFLOAD = ("none", "cpu", "stream")
CP_HOW = ("gather", "ring", "all_to_all")
TRACKERS = ("tensorboard", "wandb")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of a run. Equal options train the same model, bit for bit, on the same machine."""

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
    optimizer_offload: Annotated[
        str, "cpu: its states in host memory, stepped by the CPU; stream: stepped on the GPU; or none"
    ] = "none"
    lr: Annotated[float, "highest learning rate; 0: the model's own"] = 0.0
    final_lr: Annotated[float, "learning rate at the end of the cosine, as a fraction of the highest"] = 0.0
    warmup: Annotated[int, "steps of linear warm-up"] = 30
    weight_decay: Annotated[float, "AdamW's, on matrices only"] = 0.1
    beta1: Annotated[float, "AdamW's first moment"] = 0.9
    beta2: Annotated[float, "AdamW's second moment"] = 0.95
    clip: Annotated[float, "largest norm of the gradient; 0: no clipping"] = 1.0
    seed: Annotated[int, "of the initial weights and of the batches"] = 0
    nudge: Annotated[
        float, "standard deviation of a relative change of the initial weights, to see what chance does"
    ] = 0.0

    framework: Annotated[str, "torch or jax: the same weights, batches and checkpoints"] = "torch"
    dtype: Annotated[str, "bfloat16 (autocast over float32 parameters) or float32"] = "bfloat16"
    device: Annotated[str, "cpu, cuda, cuda:1, ...; auto: a GPU if there is one"] = "auto"
    recompute: Annotated[str, "what backward computes again to save memory: none, mlp or full (whole layers)"] = "none"
    fsdp: Annotated[int, "ranks that share batch, weights and moments; 0: all that are left of those started"] = 0
    pp: Annotated[int, "ranks of a pipeline, each with layers that follow one another"] = 1
    pp_schedule: Annotated[
        str, "the order of micro-batches among those, by torch's name: " + " ".join(PIPELINE_SCHEDULES)
    ] = "1F1B"
    pp_stages: Annotated[int, "stages of each of those, where the schedule takes several; 0: two"] = 0
    cp: Annotated[int, "ranks that share the tokens of each sequence"] = 1
    cp_how: Annotated[str, "what attention sends between those: gather, ring or all_to_all"] = "gather"
    tp: Annotated[int, "ranks that share each layer's heads and features, and the words"] = 1
    sp: Annotated[bool, "ranks of --tp share the tokens between those layers, too"] = False
    timeout: Annotated[int, "seconds that a rank waits for another one; 0: torch's own"] = 0
    loss_chunk: Annotated[int, "tokens whose logits exist at once, for large vocabularies (torch); 0: all of them"] = 0
    capture: Annotated[str, "step: record a step as a CUDA graph and replay it, for the host's time; or none"] = "none"
    threads: Annotated[int, "CPU threads; 0: one on a CPU (small models lose with more)"] = 0

    out: Annotated[str, "folder of the run; none: runs/MODEL-RECIPE-seedN"] = ""
    validate_every: Annotated[int, "steps between validations; 0: only at the end"] = 50
    validation_batches: Annotated[int, "batches of a validation, the same in every run"] = 16
    checkpoint_every: Annotated[int, "steps between checkpoints; 0: only at the end"] = 100
    async_save: Annotated[bool, "several ranks go on while a copy of their state is written"] = False
    keep: Annotated[int, "newest checkpoints that stay; 0: all"] = 2
    inspect_every: Annotated[int, "steps between those that measure every quantized GEMM; 0: none"] = 0
    report_to: Annotated[tuple[str, ...], "what gets the records beside metrics.jsonl: tensorboard, wandb"] = ()

    def __post_init__(self) -> None:
        check_choice("model", self.model, MODELS)
        check_choice("framework", self.framework, FRAMEWORKS)
        check_choice("dtype", self.dtype, ("bfloat16", "float32"))
        check_choice("recompute", self.recompute, RECOMPUTE)
        check_choice("capture", self.capture, CAPTURE)
        check_choice("optimizer_offload", self.optimizer_offload, OPTIMIZER_OFFLOAD)
        check_choice("cp_how", self.cp_how, CP_HOW)
        check_choice("pp_schedule", self.pp_schedule, PIPELINE_SCHEDULES)
        find_optimizer(self.optimizer)
        for tracker in self.report_to:
            check_choice("report_to", tracker, TRACKERS)
        if self.capacity and MODELS[self.model].experts is None:
            raise ValueError(f"capacity is {self.capacity}, and {self.model} has no experts; leave out --capacity")
        if not math.isfinite(self.capacity):
            raise ValueError("capacity is infinite; leave it out, which takes all choices, or give some, such as 1.25")
        if not self.tokens.endswith(".json"):
            check_choice("tokens", self.tokens, ("byte", "bpe"))
        for name, least in MINIMUM.items():
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"{name} is {shown(value)}; it must be at least {least}")
            if isinstance(value, int) and value > MAXIMUM.get(name, 2**63 - 1):
                raise ValueError(f"{name} is {shown(value)}; it must be at most {MAXIMUM.get(name, 2**63 - 1)}")
        for name in ("beta1", "beta2"):
            if not getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be below 1")
        for name, value in dataclasses.asdict(self).items():
            for word in value if isinstance(value, tuple) else [value]:
                if isinstance(word, str) and not is_plain(word):
                    raise ValueError(f"{name} is {shown(word)}, which is not valid Unicode text")


MINIMUM: Mapping[str, float] = {
    **dict.fromkeys(("steps", "batch", "sequence", "accumulate", "validation_batches"), 1),
    **dict.fromkeys(
        ("capacity", "lr", "final_lr", "warmup", "weight_decay", "beta1", "beta2", "clip", "seed", "nudge"), 0
    ),
    **dict.fromkeys(
        ("threads", "validate_every", "checkpoint_every", "keep", "loss_chunk", "fsdp", "timeout", "inspect_every"), 0
    ),
    **dict.fromkeys(("pp", "cp", "tp"), 1),
    "pp_stages": 0,
    "vocab": 257,  # 256 bytes and the separator of files
}
#: Maximum values; 2**63 - 1 for all other integers, the largest in TOML.
MAXIMUM: Mapping[str, int] = {
    **{"threads": 1024, "vocab": 1 << 20},
    **dict.fromkeys(("fsdp", "pp", "pp_stages", "cp", "tp", "timeout"), 1 << 20),
}


def is_plain(text: str) -> bool:
    """True if a text can be written to a file and be a file name: no NUL, no lone surrogate."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise a ValueError with a suggestion unless `value` is one of `choices`."""
    known = list(choices)
    if value not in known:
        raise ValueError(f"{name} {shown(value)} is not known; {suggest(value[:100], known)}")


def option_types() -> dict[str, Any]:
    """Return the name and plain type of every option."""
    return get_type_hints(TrainConfig)


def read_toml(path: Path) -> dict[str, Any]:
    """Read options from a TOML file, and check their names and types.

    Raises: ValueError for a missing file, bad TOML, an unknown option (with the nearest name) or a wrong type.
    """
    try:
        text = files.read(path, longest=1 << 20)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the configuration {path}: {error_text(error)}") from error
    try:
        table = tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not valid TOML: it is nested too deeply") from error
    known = option_types()
    options = {key.replace("-", "_"): value for key, value in table.items()}
    for key, value in options.items():
        if key not in known:
            raise ValueError(f"{path}: there is no option {shown(key)}; {suggest(key[:100], known)}")
        options[key] = as_type(path, key, value, known[key])
    return options


def as_type(path: Path, key: str, value: Any, kind: Any) -> Any:
    """Return `value` as the option's type; integers are accepted as floats, nothing else is converted."""
    if kind is bool:
        valid, expected = isinstance(value, bool), "true or false"
    elif kind in (int, float, str):
        valid = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        expected = {int: "a whole number", float: "a number", str: "a string"}[kind]
    else:
        valid = isinstance(value, list) and all(isinstance(item, str) for item in value)
        expected, kind = "a list of strings", tuple
    if not valid:
        raise ValueError(f"{path}: {key} = {shown(value)} should be {expected}")
    try:
        return kind(value)
    except OverflowError as error:
        raise ValueError(f"{path}: {key} = {shown(value)} is too large") from error


def read_run(path: Path) -> dict[str, Any]:
    """Read the config file of a run like `read_toml`. Raises: ValueError also if the file was changed since."""
    options = read_toml(path)
    lines, _, recorded = files.read(path).rpartition(DIGEST)
    # Earlier runs wrote no digest, and a user who changes an option on purpose deletes the digest.
    if lines and recorded.strip() != digest(lines):
        raise ValueError(
            f"{path} is not as the run wrote it; restore it, or delete its last line if you changed it on purpose"
        )
    return options


def digest(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def to_toml(config: TrainConfig) -> str:
    """Return all options as TOML, in the order of the fields; `read_toml` reads the same values back."""
    lines = ["# Every option of this run; start another one from it with: quaver train --config config.toml"]
    for key, value in dataclasses.asdict(config).items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        written = repr(value) if number else json.dumps(value, ensure_ascii=False)
        lines.append(f"{key} = " + written.replace("\x7f", "\\u007f"))  # TOML requires this escape
    text = "\n".join(lines) + "\n"
    return text + DIGEST + digest(text) + "\n"


def error_text(error: Exception) -> str:
    """Return an error's message without Python's decoration."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# ---- learning rate ----


def lr_at(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step, counted from 1: linear warm-up, then a cosine down to `final_lr` of
    the maximum, or the maximum with Schedule-Free AdamW.
    """
    highest = config.lr or MODELS[config.model].lr
    if step <= config.warmup:
        return highest * step / (config.warmup + 1)
    if is_schedule_free(config.optimizer):
        return highest
    done = (step - config.warmup) / (config.steps - config.warmup + 1)
    return highest * (config.final_lr + (1 - config.final_lr) * (1 + math.cos(math.pi * min(1.0, done))) / 2)


# ---- recipe names ----
# Recipes as the user writes them: `mxfp8`, with options `delayed(history=16)`, and changing `nvfp4 until 85%, bf16`.
#
# The grammar is that of `quaver.recipes.schedule`. In a comma-separated list of recipes, a part with `until` and the
# next part are one item: `bf16, nvfp4 until 85%, bf16, mxfp8` has three.


def find_recipe(text: str) -> Recipe:
    """Return the recipe that a text names. Raises: ValueError, with a suggestion, if there is none."""
    if any(end_of(piece)[1] is not None for piece in pieces(text)):
        raise ValueError(f"recipe {shown(text)} changes over a run, and here is no run; give the recipe of one part")
    with warnings.catch_warnings():
        # Unknown escapes are part of an option's value.
        warnings.simplefilter("ignore", SyntaxWarning)
        return quaver.recipes.get(text)


def parse_phases(text: str) -> tuple[SchedulePhase, ...]:
    """Parse a run's recipe text into phases. Raises: ValueError with the expected syntax."""
    return read(text, find_recipe)


def schedule_of(config: TrainConfig) -> Schedule:
    """Return the recipe schedule of a run.

    Raises: ValueError if the text cannot be parsed, or a phase would have no step.
    """
    peak = config.lr or MODELS[config.model].lr
    every = parse_phases(config.recipe)
    # Convert learning-rate ends to steps first, so that a phase without steps is rejected in advance.
    Schedule([replace(part, end=end_as_step(part.end, peak, config)) for part in every], steps=config.steps, peak=peak)
    return Schedule(every, steps=config.steps, peak=peak)


def end_as_step(end: ScheduleEnd | None, peak: float, config: TrainConfig) -> ScheduleEnd | None:
    """Convert an end by learning rate to the step where it is reached; return other ends unchanged.

    Raises: ValueError if the learning rate never falls that far.
    """
    if end is None or end.kind != "lr":
        return end
    bound = float(end.value) * peak
    falling = range(config.warmup + 1, config.steps + 1)  # after the linear warm-up, the cosine only falls
    at = bisect_left(falling, True, key=lambda step: lr_at(step, config) < bound)
    risen = max((lr_at(step, config) for step in (config.warmup, config.warmup + 1) if step), default=0.0)
    if at == len(falling) or risen < bound:
        raise ValueError(
            f"'until {end.text}' never comes: in {config.steps} steps, with warmup {config.warmup} and final_lr "
            f"{config.final_lr:g}, the learning rate does not fall so far; give a larger share, or a lower --final-lr"
        )
    return replace(end, kind="step", value=Fraction(falling[at] - 1))


def split_recipes(text: str) -> list[str]:
    """Split a comma-separated list of recipes.

    Commas inside parentheses belong to a recipe's options, and one after `until` and an end belongs to a schedule.
    """
    return list(items(text))
