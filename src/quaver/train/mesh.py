"""Ranks of a run and how they divide its work, independent of the framework; checks of model, batch and recipe.

Ranks of tensor parallelism, which communicate most, have consecutive numbers.
"""

import math
import os
from typing import Any, NamedTuple, Protocol

from quaver.recipes.spec import Recipe
from quaver.train.config import PIPELINE_SCHEDULES, TrainConfig, stages_per_rank
from quaver.train.memory import VOCAB_MULTIPLE
from quaver.train.model_config import MODELS

# ---- ranks ----
# The processes of one run. torchrun, or a scheduler in its place, sets RANK, WORLD_SIZE and LOCAL_RANK.


class OtherRankFailed(Exception):
    """Raised on ranks that stop because another rank has reported an error."""


class RankError(ValueError):
    """An error on a single rank other than the first; its message starts with the rank's number."""


class ProcessGroup(Protocol):
    """Interface of the ranks of a run, for the training loop."""

    @property
    def number(self) -> int:
        """Number of ranks."""

    @property
    def first(self) -> bool:
        """True on the rank that writes files and shows progress."""

    def wait(self) -> None:
        """Barrier: return once every rank has called it."""

    def largest(self, value: int) -> int:
        """Return the maximum of every rank's value."""

    def broadcast(self, value: Any) -> Any:
        """Broadcast the first rank's value, a small object of Python's built-in types."""


class SingleProcess:
    """The interface for a run of a single process."""

    number = 1
    first = True

    def wait(self) -> None:
        pass

    def largest(self, value: int) -> int:
        return value

    def broadcast(self, value: Any) -> Any:
        return value


def check_same(ranks: ProcessGroup, what: str, value: Any) -> None:
    """Raise a ValueError on ranks whose value differs from the first rank's."""
    first = ranks.broadcast(value)
    if value != first:
        raise ValueError(f"this rank has {what} {value!r}, and the first one {first!r}; give every rank the same")
    ranks.wait()  # all ranks must have compared before one continues


def rank() -> int:
    """Return this process's rank from the environment, or 0."""
    return _read_environment("RANK", 0) if "WORLD_SIZE" in os.environ else 0


def reports_errors() -> bool:
    """True if this process prints errors before the process group exists: the first rank of each machine."""
    return rank() == 0 or _read_environment("LOCAL_RANK", 0) == 0


def world() -> int:
    """Return the number of processes from the environment, or 1."""
    return _read_environment("WORLD_SIZE", 1) if "RANK" in os.environ else 1


def _read_environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"the variable {name} is {text!r}, which is no number; start the ranks by torchrun")
    return int(text)


# ---- mesh ----


class MeshSizes(NamedTuple):
    """Number of ranks along each mesh dimension, the outermost first."""

    #: Pipeline ranks, each with one stage or several.
    pp: int
    #: Ranks that shard the batch, weights and moments.
    fsdp: int
    #: Ranks that shard the tokens of each sequence.
    cp: int
    #: Ranks that shard each layer's heads and features.
    tp: int


def sizes_of(config: TrainConfig, recipe: Recipe) -> MeshSizes:
    """Return the mesh sizes of a run for the present number of ranks.

    Raises: ValueError with a suggestion if the options need another number of ranks, or something does not divide.
    """
    ranks = world()
    chosen = {name: number for name in ("pp", "cp", "tp") if (number := getattr(config, name)) > 1}
    others = math.prod(chosen.values())
    chosen_text = "".join(f" and {name} is {number}" for name, number in chosen.items())
    if ranks % others:
        raise ValueError(
            f"{chosen_text.removeprefix(' and ')}, and the number of ranks is {ranks}; "
            f"{torchrun_hint(others * (config.fsdp or 1))}, or give numbers that divide the ranks"
        )
    fsdp = config.fsdp or ranks // others
    if fsdp * others != ranks:
        raise ValueError(
            f"fsdp is {fsdp}{chosen_text}, and the number of ranks is {ranks}; give --fsdp {ranks // others}, or "
            f"{torchrun_hint(fsdp * others)}"
        )
    if config.batch % fsdp:
        raise ValueError(
            f"batch is {config.batch}, which {fsdp} ranks cannot share; give --batch a multiple of {fsdp}, or start "
            "fewer ranks"
        )
    sizes = MeshSizes(config.pp, fsdp, config.cp, config.tp)
    check_kinds(config)
    check_stages(config)
    check_features(config, recipe, sizes)
    check_tokens(config, recipe, sizes)
    return sizes


def torchrun_hint(ranks: int) -> str:
    return f"start them by: torchrun --nproc-per-node {ranks} -m quaver.train train ..."


def check_kinds(config: TrainConfig) -> None:
    """Raise a ValueError if a model has layers that can only be sharded by fully_shard."""
    kinds = MODELS[config.model].unusual
    for name in ("pp", "cp", "tp"):
        if kinds and (ranks := getattr(config, name)) > 1:
            raise ValueError(
                f"{name} is {ranks}, and {config.model} has {kinds[0]}, which the trainer divides among ranks of "
                f"--fsdp alone; leave out --{name}"
            )


def check_stages(config: TrainConfig) -> None:
    """Raise a ValueError if layers do not divide into stages, or the pipeline schedule does not fit the options."""
    model, ranks, order = MODELS[config.model], config.pp, PIPELINE_SCHEDULES[config.pp_schedule]
    if ranks == 1:
        for name, usual in (("pp_schedule", "1F1B"), ("pp_stages", 0)):
            if (value := getattr(config, name)) != usual:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{name} is {value}, and pp is 1; give --pp, or {option} {usual}")
        return
    each = stages_per_rank(config.pp_schedule, config.pp_stages)
    if not order.least <= each <= order.most:
        takes = f"{order.least} or more stages" if order.most > order.least else f"{order.least} on each rank"
        raise ValueError(f"pp_stages is {each}, and {config.pp_schedule} takes {takes}; leave out --pp-stages")
    stages, by = ranks * each, f" with {each} stages on each" if each > 1 else ""
    if model.layers % stages:
        raise ValueError(
            f"pp is {ranks}{by}, which cannot share the {model.layers} layers of {config.model}; give another"
            + (", or --pp-schedule 1F1B, which takes a stage a rank" if by and not model.layers % ranks else "")
        )
    if model.tied:
        raise ValueError(
            f"pp is {ranks}, and the head of {config.model} is its embedding, which the first and the last stage "
            "would share; leave out --pp, or take a model with a separate head"
        )
    least = stages if order.fills else ranks
    if config.accumulate < least:
        raise ValueError(
            f"pp is {ranks}{by}, and a step has {config.accumulate} micro-batches, which would leave stages idle; give "
            f"--accumulate {least} or more, and --batch so much less"
        )
    if order.rounds and config.accumulate % (config.accumulate // ranks):
        raise ValueError(
            f"accumulate is {config.accumulate}, and {config.pp_schedule} takes micro-batches by rounds of as many, of "
            f"{ranks} or a little more; give --accumulate a multiple of {ranks}"
        )
    if order.splits and config.tp > 1:
        raise ValueError(
            f"pp_schedule is {config.pp_schedule}, which fills its waits with the gradients of weights, and tp is "
            f"{config.tp}: tensor-parallel layers compute all gradients at once, and would do so twice; take "
            "--pp-schedule Interleaved1F1B or 1F1B, or leave out --tp"
        )


def check_features(config: TrainConfig, recipe: Recipe, sizes: MeshSizes) -> None:
    """Raise a ValueError if the heads and features of a layer cannot be sharded."""
    model, ranks = MODELS[config.model], sizes.tp
    if ranks == 1:
        return
    if model.heads % ranks or model.groups % ranks:
        most = math.gcd(model.heads, model.groups)
        raise ValueError(
            f"tp is {ranks}, which cannot share the {model.heads} heads of {config.model} and its {model.groups} of "
            f"keys and values; " + (f"give --tp {most} or a divisor of it" if most > 1 else "leave out --tp")
        )
    multiple = block_multiple(recipe)
    for features in (model.hidden, model.heads * model.head_dim, model.groups * model.head_dim):
        if features % (ranks * multiple):
            each = f"{features // ranks} of {features} features of {config.model} on each rank"
            block_text = f", and {recipe.name} quantizes them in blocks of {multiple}" if multiple > 1 else ""
            raise ValueError(
                f"tp is {ranks}, with {each}{block_text}; give --tp a smaller number, or take a recipe with scales of "
                "whole tensors or rows, such as tensorwise"
            )


def check_words(words: int, ranks: int) -> None:
    """Raise a ValueError if the rows of the embedding cannot be sharded over the ranks of tp."""
    if words % ranks:
        raise ValueError(
            f"tp is {ranks}, which cannot share the {words} entries of the vocabulary; take another --tp, or --tokens "
            f"bpe with --vocab a multiple of {math.lcm(ranks, VOCAB_MULTIPLE)}"
        )


def check_tokens(config: TrainConfig, recipe: Recipe, sizes: MeshSizes) -> None:
    """Raise a ValueError if the tokens of a sequence cannot be sharded, or attention cannot work across ranks."""
    model, ranks, how = MODELS[config.model], sizes.cp, config.cp_how
    if ranks > 1 and config.sequence % (2 * ranks):
        raise ValueError(
            f"sequence is {config.sequence}, and each of {ranks} ranks of cp takes a piece of its first half and one "
            f"of its second; give --sequence a multiple of {2 * ranks}, or another --cp"
        )
    if ranks > 1 and how == "all_to_all" and math.gcd(model.heads, model.groups) // sizes.tp % ranks:
        raise ValueError(
            f"cp_how is all_to_all, and {ranks * sizes.tp} ranks cannot share the {model.heads} heads of "
            f"{config.model} and its {model.groups} of keys and values; take --cp-how gather or ring"
        )
    if ranks > 1 and how != "all_to_all" and recipe.attention is not None:
        raise ValueError(
            f"{recipe.name} quantizes attention, which --cp-how {how} cuts in pieces of other scales; take --cp-how "
            "all_to_all, or a recipe that leaves attention in high precision"
        )
    if not config.sp:
        return
    if sizes.tp == 1:
        raise ValueError("sp divides tokens among the ranks of tp, and tp is 1; give --tp, or leave out --sp")
    multiple = sizes.cp * sizes.tp * block_multiple(recipe)
    if config.sequence % multiple:
        raise ValueError(
            f"sequence is {config.sequence}, which {sizes.cp * sizes.tp} ranks cannot share under {recipe.name}; give "
            f"--sequence a multiple of {multiple}, or leave out --sp"
        )


def block_multiple(recipe: Recipe) -> int:
    """Return the number that a rank's features or tokens must be a multiple of, so that no block of scales
    crosses ranks.
    """
    multiple = 1
    for spec in recipe.operands().values():
        if spec is not None:
            groups = 16 if spec.hadamard else 4 if spec.rounding == "stochastic" else 1
            multiple = math.lcm(multiple, groups, *(block or 1 for block in spec.block))
    return multiple
