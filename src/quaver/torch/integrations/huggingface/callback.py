"""What a Trainer of transformers calls while it trains a converted model: saturation logged, scaling state kept.

A Trainer's checkpoint is a folder of weights. What recipes add to them goes into a file beside them, so that a resumed
run goes on with the bits of one that was not interrupted.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerCallback

from quaver.torch.model.weights.state_dicts import load_scaling_state_dict, scaling_state_dict
from quaver.torch.state.counters import Counters, count

#: The file in each checkpoint's folder.
FILE = "quaver_scaling.safetensors"
#: The operands whose counts are logged; each with those of its copy for another GEMM.
OPERANDS = ("input", "weight", "grad_output")


class ScalingCallback(TrainerCallback):
    """Keeps a converted model's scaling state with a Trainer's checkpoints, and logs what saturates.

    Args:
        saturation: True counts in each step that is logged, which takes some times its time (`quaver.torch.count`).
            `saturated_input`, `flushed_input` and so on are shares of the elements of all layers; they stand in the
            Trainer's `log_history`, and reach callbacks that come after this one.
        resume_from: the folder to resume from, if it is none of the Trainer's own output folder.
    Raises:
        ValueError: when training resumes from a checkpoint without the file, before a step is spent on it.
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
        folder = self.resume_from or _folder(args, state.global_step)
        if not load(model, folder):
            raise ValueError(
                f"training resumes at step {state.global_step}, and {Path(folder) / FILE} is not there: give "
                "ScalingCallback(resume_from=the folder that you resume from), or leave the callback out to let "
                "histories and counts start fresh"
            )

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        folder = _folder(args, state.global_step)
        if args.should_save and folder.is_dir():
            save(model, folder)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._counting.close()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            load(model, state.best_model_checkpoint)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        every = state.logging_steps
        if self.saturation and every and (state.global_step + 1) % every == 0:
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


def save(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write a model's scaling state into a folder, whole or not at all; an empty one too."""
    state = {name: value.contiguous().clone() for name, value in scaling_state_dict(model).items()}
    path = Path(folder) / FILE
    partial = path.with_suffix(".partial")
    save_file(state, partial)
    os.replace(partial, path)


def load(model: nn.Module, folder: str | os.PathLike[str]) -> bool:
    """Load what `save` wrote; False where a folder has no such file."""
    path = Path(folder) / FILE
    if not path.is_file():
        return False
    load_scaling_state_dict(model, load_file(path))
    return True


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


def _folder(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"
