"""What a Trainer of transformers calls while it trains a converted model: saturation logged, scaling state kept.

A Trainer's checkpoint is a folder of weights. What recipes add to them goes into a file beside them, so that a resumed
run goes on with the bits of one that was not interrupted. Each rank has a file of its own, since a rank may have
recorded what others have not: a run resumes on as many processes as it was saved by. Histories that all of them have
are agreed on before.
"""

import json
import os
import zlib
from collections.abc import Sized
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from quaver.torch.model.weights.state_dicts import load_scaling_state_dict, scaling_state_dict
from quaver.torch.parallel import agree_histories
from quaver.torch.state.counters import Counters, count

#: The file in each checkpoint's folder of a run of one process.
FILE = "quaver_scaling.safetensors"
#: The operands whose counts are logged; each with those of its copy for another GEMM.
OPERANDS = ("input", "weight", "grad_output")
#: Bytes of a parameter, evenly spaced, whose places its digest tells.
SAMPLED = 1 << 14


class ScalingCallback(TrainerCallback):
    """Keeps a converted model's scaling state with a Trainer's checkpoints, and logs what saturates.

    Each process keeps a file of its own: `quaver_scaling.safetensors`, or one with its rank and their number.

    Args:
        saturation: True counts in each step that is logged, which takes some times its time (`quaver.torch.count`).
            `saturated_input`, `flushed_input` and so on are shares of the elements of all layers; they stand in the
            Trainer's `log_history`, and reach callbacks that come after this one.
        resume_from: the folder to resume from, if it is neither the path in the arguments' `resume_from_checkpoint` nor
            in the Trainer's own output folder.
    Raises:
        ValueError: when training resumes from a checkpoint without the process's file, or with one of another step or
            of other weights, before a step is spent on it.
    """

    def __init__(self, *, saturation: bool = True, resume_from: str | os.PathLike[str] | None = None) -> None:
        self.saturation = saturation
        self.resume_from = resume_from
        self._counting = ExitStack()
        self._counters: Counters | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._counting.close()
        if state.global_step == 0:
            return
        folder = self.resume_from or _given_folder(args) or _folder(args, state.global_step)
        file = file_of(args.process_index, args.world_size)
        if not load(model, folder, file, step=state.global_step):
            ranks = f", or resume on as many processes as saved it (here {args.world_size})"
            raise ValueError(
                f"training resumes at step {state.global_step}, and {Path(folder) / file} is not there: give "
                f"ScalingCallback(resume_from=the folder that you resume from){ranks}, or leave the callback out to "
                "let histories and counts start fresh"
            )

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        folder = _folder(args, state.global_step)
        if args.world_size > 1:
            agree_histories(model)
            # The rank that writes the weights may not have come to make it yet.
            folder.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():
            save(model, folder, file_of(args.process_index, args.world_size), step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._counting.close()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            load(model, state.best_model_checkpoint, file_of(args.process_index, args.world_size))

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.saturation and _logs(args, state, kwargs.get("train_dataloader")):
            self._counters = self._counting.enter_context(count(model))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._counting.close()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._counters is None:
            return
        shares, self._counters = saturation(self._counters), None
        if logs is not None:
            logs.update(shares)
        if state.log_history:
            state.log_history[-1].update(shares)


def file_of(rank: int, ranks: int) -> str:
    """The name of a process's file: `FILE` of one process, or with the rank and their number in it."""
    path = Path(FILE)
    return FILE if ranks == 1 else f"{path.stem}-{rank:05d}-of-{ranks:05d}{path.suffix}"


def save(model: nn.Module, folder: str | os.PathLike[str], file: str = FILE, *, step: int | None = None) -> None:
    """Write a model's scaling state into a folder, whole or not at all; an empty one too."""
    state = {name: value.contiguous().clone() for name, value in scaling_state_dict(model).items()}
    path = Path(folder) / file
    partial = path.with_suffix(".partial")
    save_file(state, partial, metadata={"step": str(step), "parameters": json.dumps(digests(model))})
    os.replace(partial, path)


def load(model: nn.Module, folder: str | os.PathLike[str], file: str = FILE, *, step: int | None = None) -> bool:
    """Load what `save` wrote; False where a folder has no such file.

    Args:
        step: if given, that of the file, whose weights the model then has.
    Raises:
        ValueError: a file of another step or of other weights, before anything is loaded.
    """
    path = Path(folder) / file
    if not path.is_file():
        return False
    with safe_open(path, framework="pt") as opened:
        kept = opened.metadata() or {}
        state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if step is not None and kept.get("step", str(step)) != str(step):
        raise ValueError(f"training resumes at step {step}, and {path} is of step {kept['step']}: {_OTHER_RUN}")
    if step is not None:
        _check_weights(model, json.loads(kept.get("parameters", "{}")), step, path)
    load_scaling_state_dict(model, state)
    return True


_OTHER_RUN = (
    "it belongs to another run. Give ScalingCallback(resume_from=the folder that you resume from), or leave the "
    "callback out to let histories and counts start fresh"
)


def digests(model: nn.Module) -> dict[str, str]:
    """A digest of each parameter by its name: of all its bits, and of a sample that tells where they lie."""
    return {name: _digest(p) for name, p in model.named_parameters() if not p.is_meta}


def _digest(p: Any) -> str:
    local = p.detach().to_local() if hasattr(p, "to_local") else p.detach()
    flat = local.contiguous().reshape(-1).view(torch.uint8)
    # Four bytes at a time where they divide it: a sum without a copy, exact whatever its order.
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 and flat.data_ptr() % 4 == 0 else flat
    sample = flat[:: max(1, flat.numel() // SAMPLED)].contiguous().cpu()
    return f"{int(words.sum(dtype=torch.int64)) & (1 << 64) - 1:016x}{zlib.crc32(sample.numpy()):08x}"


def _check_weights(model: nn.Module, saved: dict[str, str], step: int, path: Path) -> None:
    """Check that each parameter has the bits that it had when `path` was written.

    Raises:
        ValueError: another run's file, or parameters that were not loaded from the checkpoint.
    """
    own = digests(model)
    others = [name for name in own if saved.get(name, own[name]) != own[name]]
    if not others:
        return
    names = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
    raise ValueError(
        f"training resumes at step {step}, and {path} is of other weights in {len(others)} of {len(own)} parameters: "
        f"{names}. If it belongs to another run, give ScalingCallback(resume_from=the folder that you resume from). If "
        "the Trainer did not load them, as it does not load stacked experts, make the model with "
        f"from_pretrained({str(path.parent)!r}), convert it, and resume with that"
    )


def saturation(counters: Counters) -> dict[str, float]:
    """Shares of the elements of each operand that saturated, became zero, or were not finite."""
    shares: dict[str, float] = {}
    for operand in OPERANDS:
        counts = [c for table in counters.table.values() for key, c in table.items() if key.split(".")[0] == operand]
        elements = sum(c.elements for c in counts)
        if elements:
            shares[f"saturated_{operand}"] = sum(c.saturated for c in counts) / elements
            shares[f"flushed_{operand}"] = sum(c.flushed for c in counts) / elements
            shares[f"nonfinite_{operand}"] = sum(c.nonfinite for c in counts) / elements
    return shares


def _logs(args: Any, state: Any, batches: Any) -> bool:
    """Whether the step that begins is one that the Trainer's strategy logs after."""
    step = state.global_step + 1
    if step == 1 and args.logging_first_step:
        return True
    if args.logging_strategy == IntervalStrategy.STEPS:
        return bool(state.logging_steps) and step % state.logging_steps == 0
    if args.logging_strategy == IntervalStrategy.EPOCH:
        # A data set without a length does not say where an epoch ends.
        epoch = -(-len(batches) // args.gradient_accumulation_steps) if isinstance(batches, Sized) else 0
        return step == state.max_steps or (bool(epoch) and step % epoch == 0)
    return False


def _folder(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"


def _given_folder(args: Any) -> str | None:
    """What the arguments say to resume from, where that is a folder."""
    given = args.resume_from_checkpoint
    return given if isinstance(given, str) and os.path.isdir(given) else None
