"""transformers integration: `QuaverConfig` and its quantizer for `from_pretrained`, and a Trainer callback."""

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence, Sized
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import TrainerCallback
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.trainer_utils import IntervalStrategy
from transformers.utils.quantization_config import QuantizationConfigMixin

from quaver import recipes
from quaver.recipes.conversion import ModuleRule, Rules
from quaver.recipes.spec import Recipe
from quaver.torch.conversion.convert import convert, revert
from quaver.torch.conversion.quantized_weights import load_scaling_state_dict, quantize_weights, scaling_state_dict
from quaver.torch.inspection.inspector import Inspector, inspect
from quaver.torch.linear import stored_weight
from quaver.torch.linear.linear import Quantizable
from quaver.torch.parallel import sync_amax_histories
from quaver.torch.quantized_tensor import QuantizedTensor

# ---- Trainer callback: logs saturation and saves the scaling state ----
#
# A Trainer's checkpoint is a folder of weights. The recipes' state is saved in a file next to them, so that a resumed
# run gives the same bits as an uninterrupted one. Each rank has its own file, since it may have recorded other amaxes,
# so a run must resume on the same number of processes. Histories shared by all ranks are synchronized first.

#: File name in a checkpoint folder, for a run with one process.
FILE = "quaver_scaling.safetensors"
#: Operands whose shares are logged.
OPERANDS = ("input", "weight", "grad_output")
#: Number of evenly spaced bytes of a parameter that its digest samples by position.
SAMPLED = 1 << 14


class ScalingCallback(TrainerCallback):
    """Trainer callback that saves a converted model's scaling state with checkpoints, and logs saturation.

    Each process writes its own file: `quaver_scaling.safetensors`, or one with its rank and the number of ranks.

    Args:
        saturation: True measures the operands in each logged step, which then takes several times as long
            (`quaver.torch.inspect`). `saturated_input`, `flushed_input` and so on are the shares of `saturation`. They
            appear in the Trainer's `log_history` and are passed to later callbacks.
        resume_from: folder to resume from, if it is neither the path in the arguments' `resume_from_checkpoint` nor in
            the Trainer's output folder.
    Raises:
        ValueError: training resumes from a checkpoint without this process's file, or with a file of another step or
            other weights; raised before the first step.
    """

    def __init__(self, *, saturation: bool = True, resume_from: str | os.PathLike[str] | None = None) -> None:
        self.saturation = saturation
        self.resume_from = resume_from
        self._inspector: Inspector | None = None
        #: Rows of the last measured step, until they are logged.
        self._rows: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._stop()
        if state.global_step == 0:
            return
        folder = self.resume_from or _folder_from_arguments(args) or _folder(args, state.global_step)
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
            sync_amax_histories(model)
            # The rank that writes the weights may not have created the folder yet.
            folder.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():
            save(model, folder, file_of(args.process_index, args.world_size), step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._stop()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            load(model, state.best_model_checkpoint, file_of(args.process_index, args.world_size))

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.saturation or not _logs(args, state, kwargs.get("train_dataloader")):
            return
        if any(isinstance(module, Quantizable) for module in model.modules()):
            self._inspector = inspect(model, every=1, stop=1)
            self._inspector.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._inspector is not None:
            self._inspector.step()
            self._rows = self._inspector.rows
            self._stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        shares, self._rows = saturation(self._rows), []
        if logs is not None:
            logs.update(shares)
        if state.log_history:
            state.log_history[-1].update(shares)

    def _stop(self) -> None:
        if self._inspector is not None:
            self._inspector.close()
            self._inspector = None


def file_of(rank: int, ranks: int) -> str:
    """Return the name of a process's file: `FILE` for one process, else with its rank and the number of ranks."""
    path = Path(FILE)
    return FILE if ranks == 1 else f"{path.stem}-{rank:05d}-of-{ranks:05d}{path.suffix}"


def save(model: nn.Module, folder: str | os.PathLike[str], file: str = FILE, *, step: int | None = None) -> None:
    """Write a model's scaling state, possibly empty, into a folder atomically."""
    state = {name: value.contiguous().clone() for name, value in scaling_state_dict(model).items()}
    path = Path(folder) / file
    partial = path.with_suffix(".partial")
    save_file(state, partial, metadata={"step": str(step), "parameters": json.dumps(digests(model))})
    os.replace(partial, path)


def load(model: nn.Module, folder: str | os.PathLike[str], file: str = FILE, *, step: int | None = None) -> bool:
    """Load the result of `save`; return False if the folder has no such file.

    Args:
        model: a model converted in the same way.
        folder, file: location of the file.
        step: if passed, the step that the file must be of; the model's weights must then match too.
    Raises:
        ValueError: the file is of another step or of other weights; raised before anything is loaded.
    """
    path = Path(folder) / file
    if not path.is_file():
        return False
    with safe_open(path, framework="pt") as opened:
        metadata_of_file = opened.metadata() or {}
        state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if step is not None and metadata_of_file.get("step", str(step)) != str(step):
        raise ValueError(
            f"training resumes at step {step}, and {path} is of step {metadata_of_file['step']}: {_OTHER_RUN}"
        )
    if step is not None:
        _check_weights(model, json.loads(metadata_of_file.get("parameters", "{}")), step, path)
    load_scaling_state_dict(model, state)
    return True


_OTHER_RUN = (
    "it belongs to another run. Give ScalingCallback(resume_from=the folder that you resume from), or leave the "
    "callback out to let histories and counts start fresh"
)


def digests(model: nn.Module) -> dict[str, str]:
    """Return a digest of each parameter by name: the sum of all its bits, and a checksum of a sample for their
    order.
    """
    return {name: _digest(p) for name, p in model.named_parameters() if not p.is_meta}


def _digest(p: Any) -> str:
    local = p.detach().to_local() if hasattr(p, "to_local") else p.detach()
    flat = local.contiguous().reshape(-1).view(torch.uint8)
    # Sum int32 words if the size allows: no copy, and exact in any order.
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 and flat.data_ptr() % 4 == 0 else flat
    sample = flat[:: max(1, flat.numel() // SAMPLED)].contiguous().cpu()
    return f"{int(words.sum(dtype=torch.int64)) & (1 << 64) - 1:016x}{zlib.crc32(sample.numpy()):08x}"


def _check_weights(model: nn.Module, saved: dict[str, str], step: int, path: Path) -> None:
    """Check that each parameter has the same bits as when `path` was written.

    Raises:
        ValueError: the file belongs to another run, or parameters were not loaded from the checkpoint.
    """
    own = digests(model)
    others = [name for name in own if saved.get(name, own[name]) != own[name]]
    if not others:
        return
    names = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
    raise ValueError(
        f"training resumes at step {step}, and {path} was saved with other weights in {len(others)} of {len(own)} "
        f"parameters: {names}. If it belongs to another run, give ScalingCallback(resume_from=the folder that you "
        "resume from). If the Trainer did not load them, as it does not load stacked experts, make the model with "
        f"from_pretrained({str(path.parent)!r}), convert it, and resume with that"
    )


def saturation(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the shares of each operand that saturated, became zero, or were not finite: means over elements.

    Args:
        rows: rows of `quaver.torch.inspect`, of one step; an operand of two GEMMs counts for each.
    """
    shares: dict[str, float] = {}
    for operand in OPERANDS:
        own = [row for row in rows if row["tensor"] == operand and "format" in row]
        elements = sum(row["elements"] for row in own)
        if elements:
            for name in ("saturated", "flushed"):
                shares[f"{name}_{operand}"] = sum(row[name] * row["elements"] for row in own) / elements
            shares[f"nonfinite_{operand}"] = sum(row["nonfinite"] for row in own) / elements
    return shares


def _logs(args: Any, state: Any, batches: Any) -> bool:
    """Return True if the Trainer will log after the step that begins now."""
    step = state.global_step + 1
    if step == 1 and args.logging_first_step:
        return True
    if args.logging_strategy == IntervalStrategy.STEPS:
        return bool(state.logging_steps) and step % state.logging_steps == 0
    if args.logging_strategy == IntervalStrategy.EPOCH:
        # The end of an epoch is unknown for a dataset without length.
        epoch = -(-len(batches) // args.gradient_accumulation_steps) if isinstance(batches, Sized) else 0
        return step == state.max_steps or (bool(epoch) and step % epoch == 0)
    return False


def _folder(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"


def _folder_from_arguments(args: Any) -> str | None:
    """Return the arguments' `resume_from_checkpoint` if it is a folder, else None."""
    passed = args.resume_from_checkpoint
    return passed if isinstance(passed, str) and os.path.isdir(passed) else None


# ---- quantization config: the argument of `from_pretrained`, and the recipe in a folder's config.json ----

#: Name of the quantization method. transformers prints it if it does not know it, so it says what to import.
METHOD = "quaver, by import quaver.integrations.huggingface"
#: Values of `weights`: high precision, or stored as codes.
WEIGHTS = ("high", "stored")


@register_quantization_config(METHOD)
class QuaverConfig(QuantizationConfigMixin):
    """A recipe for a transformers model as a quantization config.

    Args:
        recipe: name of a recipe, or rules {pattern: name or None}; the first match wins.
        options: arguments of the recipe function, such as {"history": 16}; only with a name.
        skip: name patterns to leave alone, as for `quaver.torch.convert`.
        head: True also converts output heads.
        seed: seed of stochastic rounding.
        blocks: True replaces norms and MLPs by Quaver's blocks, as for `quaver.torch.convert`.
        weights: "high" keeps weights in high precision, for training; "stored" stores them as codes, as
            `quantize_weights`.
        quant_method: written into folders; leave it out.
    Raises:
        ValueError: an unknown recipe or option, a `Recipe` instead of a name, or an unknown value of weights.
    """

    def __init__(
        self,
        recipe: str | Mapping[str, str | None] | Iterable[tuple[str, str | None]] = "tensorwise",
        *,
        options: Mapping[str, Any] | None = None,
        skip: Iterable[str] = (),
        head: bool = False,
        seed: int = 0,
        blocks: bool = False,
        weights: str = "high",
        quant_method: str = METHOD,
    ) -> None:
        if weights not in WEIGHTS:
            raise ValueError(f"weights is {weights!r}; give 'high' to train them, or 'stored' to keep only codes")
        if not isinstance(blocks, bool):
            raise ValueError(f"blocks is {blocks!r}; give True or False: a folder cannot store the options of Blocks")
        if isinstance(skip, str):
            raise ValueError(f"skip is {skip!r}; give a list of patterns, such as [{skip!r}]")
        self.quant_method: Any = quant_method
        # A list, because JSON in folders has sorted keys and the order of rules matters.
        self.recipe = recipe if isinstance(recipe, str) else [list(rule) for rule in _pairs(recipe)]
        self.options = dict(options or {})
        self.skip, self.head, self.seed, self.blocks, self.weights = list(skip), head, seed, blocks, weights
        self.rules()

    def rules(self) -> Recipe | Rules:
        """Return the recipe or rules for `quaver.torch.convert`."""
        if isinstance(self.recipe, str):
            return recipes.get(self.recipe, **self.options)
        if self.options:
            raise ValueError(f"options {sorted(self.options)} are of one recipe, and these are rules; leave them out")
        return Rules(
            [ModuleRule(pattern=p, recipe=None if name is None else recipes.get(name)) for p, name in self.recipe]
        )


def _pairs(recipe: Any) -> list[Any]:
    if isinstance(recipe, Recipe):
        raise ValueError(
            "a folder stores a recipe by name and options, and this is a Recipe: give "
            f"QuaverConfig({recipe.name!r}, options={{...}})"
        )
    pairs = list(recipe.items() if isinstance(recipe, Mapping) else recipe)
    for _, name in pairs:
        if isinstance(name, Recipe):
            return _pairs(name)
    return pairs


# ---- quantizer: called by transformers around loading and saving of a model with a `QuaverConfig` ----
#
# A folder contains the state dict. Codes are stored as bytes [N, K, 1] under the weight's own name. Code that does not
# know them rejects this shape; with [N, K] it would have used codes as weights.


@register_quantizer(METHOD)
class QuaverQuantizer(HfQuantizer):
    """transformers quantizer that converts the model in `from_pretrained`, and lets `save_pretrained` write its full
    state.

    A folder of the unconverted model is loaded and then converted. A folder saved by this quantizer contains histories,
    counts and codes, which are restored bit for bit.
    """

    requires_calibration = False
    quantization_config: QuaverConfig

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.pre_quantized:
            self._convert(model)
            self._stored_weights = _as_bytes(model)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.pre_quantized:
            _as_codes(self._stored_weights)
            self._stored_weights = {}
            _fix_history_layout(model)
        else:
            self._convert(model)
        return model

    def _convert(self, model: nn.Module) -> None:
        config = self.quantization_config
        if config.weights == "stored":
            quantize_weights(model, config.rules(), skip=config.skip, head=config.head)
        report = convert(
            model, config.rules(), skip=config.skip, seed=config.seed, head=config.head, blocks=config.blocks
        )
        if not report.converted and not report.attention and not any(row.block for row in report.blocks):
            why = next((f" ({row.name}: {row.why})" for row in report.rows if row.why), "")
            raise ValueError(
                f"QuaverConfig converted nothing in {type(model).__name__}{why}, although its folder would say so: "
                "load it without device_map, whose hooks replace forwards, and move it by model.to(device), or "
                "give a recipe and a skip that match its layers"
            )

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        revert(model)
        return model

    def is_serializable(self, *_: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _as_bytes(model: nn.Module) -> dict[Quantizable, QuantizedTensor]:
    """Replace stored weights by empty parameters and buffers in the folder's layout; return the original ones."""
    stored_weights: dict[Quantizable, QuantizedTensor] = {}
    for layer in model.modules():
        if isinstance(layer, Quantizable) and layer.weight_spec is not None:
            weight: Any = layer._parameters["weight"]
            assert weight is not None
            stored_weights[layer] = weight
            empty, scales = torch.empty_like(weight.codes, dtype=torch.uint8), stored_weight.scales_of(layer)
            layer._parameters["weight"] = nn.Parameter(empty.unsqueeze(-1), requires_grad=False)
            for name, scale in scales.items():
                layer.register_buffer(name, torch.empty_like(scale))
    return stored_weights


def _as_codes(stored_weights: dict[Quantizable, QuantizedTensor]) -> None:
    """Convert the loaded bytes back to stored weights."""
    for layer, weight in stored_weights.items():
        codes = layer.get_parameter("weight").detach().squeeze(-1).view(weight.codes.dtype)
        scale, factor = (layer._buffers.pop(name, None) for name in stored_weight.SCALES)
        assert scale is not None
        layer.weight = nn.Parameter(weight.like(codes, scale, factor), requires_grad=weight.requires_grad)


def _fix_history_layout(model: nn.Module) -> None:
    """Convert histories to the memory layout in which layers create them."""
    for layer in model.modules():
        history = layer._buffers.get("history") if isinstance(layer, Quantizable) else None
        if history is not None:
            layer._buffers["history"] = history.mT.contiguous().mT


if find_spec("transformers") is None:
    sentence = f"{__name__} needs transformers, which is not installed: pip install transformers"
    raise ModuleNotFoundError(sentence, name="transformers")


__all__ = ["QuaverConfig", "QuaverQuantizer", "ScalingCallback"]
