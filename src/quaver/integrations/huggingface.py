"""transformers' own seams: a quantization config, a quantizer and a Trainer's callback; no model of transformers."""

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sized
from contextlib import ExitStack
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
from quaver.torch.linear import store_weight
from quaver.torch.linear.linear import Quantizable
from quaver.torch.parallel import sync_amax_histories
from quaver.torch.state.counters import Counters, count

# ---- callback --------------------------------------------------------------------------------------------
# What a Trainer of transformers calls while it trains a converted model: saturation logged, scaling state kept.
#
# A Trainer's checkpoint is a folder of weights. What recipes add to them goes into a file beside them, so that a
# resumed run goes on with the bits of one that was not interrupted. Each rank has a file of its own, since a rank may
# have recorded what others have not: a run resumes on as many processes as it was saved by. Histories that all of them
# have are agreed on before.

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
            sync_amax_histories(model)
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


# ---- config ----------------------------------------------------------------------------------------------
# What `from_pretrained(..., quantization_config=)` is given, and what a folder's config.json says of its recipe.

#: The name of the method. transformers shows it where it does not know it, so it says what to import.
METHOD = "quaver, by import quaver.integrations.huggingface"
#: How weights are kept.
WEIGHTS = ("high", "stored")


@register_quantization_config(METHOD)
class QuaverConfig(QuantizationConfigMixin):
    """A recipe for a model of transformers, as a quantization config.

    Args:
        recipe: the name of a recipe, or rules {pattern: name or None}, the first match wins.
        options: of the recipe function, such as {"history": 16}; only with a name.
        skip: patterns of names to leave alone, as of `quaver.torch.convert`.
        head: True converts output heads too.
        seed: of stochastic rounding.
        blocks: True has our blocks compute norms and MLPs in place, as of `quaver.torch.convert`.
        weights: "high" keeps them as they are, to train; "stored" turns them into codes, as `quantize_weights` does.
        quant_method: written into folders; leave it out.
    Raises:
        ValueError: an unknown recipe or option, a `Recipe` in place of a name, another way to keep weights.
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
            raise ValueError(f"weights is {weights!r}; give 'high' to train them, or 'stored' to keep codes alone")
        if not isinstance(blocks, bool):
            raise ValueError(f"blocks is {blocks!r}; give True or False: a folder keeps no options of blocks")
        if isinstance(skip, str):
            raise ValueError(f"skip is {skip!r}; give a list of patterns, such as [{skip!r}]")
        self.quant_method: Any = quant_method
        # A folder's JSON has its names sorted, and the order of rules counts: they are a list.
        self.recipe = recipe if isinstance(recipe, str) else [list(rule) for rule in _pairs(recipe)]
        self.options = dict(options or {})
        self.skip, self.head, self.seed, self.blocks, self.weights = list(skip), head, seed, blocks, weights
        self.rules()

    def rules(self) -> Recipe | Rules:
        """What `quaver.torch.convert` takes."""
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
            f"a folder keeps a recipe by name and options, not the Recipe: give QuaverConfig({recipe.name!r}, "
            "options={...})"
        )
    pairs = list(recipe.items() if isinstance(recipe, Mapping) else recipe)
    for _, name in pairs:
        if isinstance(name, Recipe):
            return _pairs(name)
    return pairs


# ---- quantizer -------------------------------------------------------------------------------------------
# What transformers calls around the loading and the saving of a model whose config is a `QuaverConfig`.
#
# A folder holds the state dict. Codes lie in it as bytes [N, K, 1] under the weight's own name: a class that does not
# know them refuses the shape, where it would have taken codes for weights.


@register_quantizer(METHOD)
class QuaverQuantizer(HfQuantizer):
    """Converts the model that `from_pretrained` makes, and gives `save_pretrained` all of its state.

    A folder of the unconverted model is loaded and then converted. One that was saved from here has histories, counts
    and codes, which come back bit for bit.
    """

    requires_calibration = False
    quantization_config: QuaverConfig

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.pre_quantized:
            self._convert(model)
            self._held = _as_bytes(model)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.pre_quantized:
            _as_codes(self._held)
            self._held = {}
            _column_by_column(model)
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
                f"QuaverConfig converted nothing of {type(model).__name__}{why}, and its folder would say that it did: "
                "load it without device_map, whose hooks replace forwards, and move it by model.to(device), or give a "
                "recipe and a skip that name its layers"
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


def _as_bytes(model: nn.Module) -> dict[Quantizable, nn.Parameter]:
    """Give stored weights the form that they have in a folder. Returns those that they had, of no values yet."""
    held: dict[Quantizable, nn.Parameter] = {}
    for layer in model.modules():
        if isinstance(layer, Quantizable) and layer.weight_spec is not None:
            weight = layer._parameters["weight"]
            assert weight is not None
            held[layer] = weight
            empty = torch.empty((*weight.shape, 1), dtype=torch.uint8, device=weight.device)
            layer._parameters["weight"] = nn.Parameter(empty, requires_grad=False)
    return held


def _as_codes(held: dict[Quantizable, nn.Parameter]) -> None:
    """Make parameters of codes of what was loaded."""
    for layer, weight in held.items():
        codes = layer._parameters["weight"].detach().squeeze(-1).view(weight.dtype)  # type: ignore[union-attr]
        layer._parameters["weight"] = nn.Parameter(codes, requires_grad=weight.requires_grad)
        store_weight.settle(layer)


def _column_by_column(model: nn.Module) -> None:
    """Lay histories out as layers make them."""
    for layer in model.modules():
        history = layer._buffers.get("history") if isinstance(layer, Quantizable) else None
        if history is not None:
            layer._buffers["history"] = history.mT.contiguous().mT


# ---- huggingface -----------------------------------------------------------------------------------------

if find_spec("transformers") is None:
    sentence = f"{__name__} needs transformers, which is not installed: pip install transformers"
    raise ModuleNotFoundError(sentence, name="transformers")


__all__ = ["QuaverConfig", "QuaverQuantizer", "ScalingCallback"]
