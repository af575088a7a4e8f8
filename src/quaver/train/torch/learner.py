"""The learner interface of the training loop under PyTorch, decoding of trained models, and trials for `quaver
doctor`.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import quaver.torch as qt
from quaver.recipes.spec import Recipe
from quaver.torch.conversion.quantized_weights import drop_initial_value, frozen
from quaver.torch.cuda_graph import CapturedStep
from quaver.torch.linear import stored_weight
from quaver.torch.linear.stored_weight import SCALES
from quaver.torch.optim import Optimizer
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.train import config as optimizer_name
from quaver.train import config as recipe_name
from quaver.train.checkpoint import BFLOAT16, CheckpointError, SavedCheckpoint
from quaver.train.config import TrainConfig
from quaver.train.learner import Tensors
from quaver.train.model_config import MODELS, with_capacity
from quaver.train.torch import sharding
from quaver.train.torch.decoder import (
    DecoderCaches,
    bf16_copy,
    build_decoder,
    change_layers,
    convert_decoder,
    count_different_choices,
    loss_and_routings,
    quantize_layers,
)
from quaver.train.torch.optimizer import TrainStep, load_state, optimizer_of, set_averaged, state_of
from quaver.train.torch.process_group import TorchProcessGroup, device_of
from quaver.train.torch.sharding import change_recipe, parallelize

# ---- non-finite values ----
# Find where a NaN or an infinity first appeared, for the message that stops a run.


class NonFinitePlace(NamedTuple):
    """Location of a value that is not finite."""

    #: Order within one stage; the smallest comes first.
    number: int
    #: Name of the module or parameter, or "".
    name: str
    #: Message for the user.
    message: str


def is_finite(value: Any) -> bool:
    """Return True if a tensor, or all outputs of a module, are finite."""
    if isinstance(value, tuple):
        return all(map(is_finite, value))
    if isinstance(value, DTensor):  # all ranks take part and get the same result
        value = value.full_tensor()
    if isinstance(value, QuantizedTensor):
        value = value.dequantize()
    return not isinstance(value, torch.Tensor) or bool(torch.isfinite(value).all())


def first_module(model: nn.Module, batch: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]) -> NonFinitePlace:
    """Find the first non-finite value, in order of computation, on a batch int64 [accumulate, B, S + 1].

    The forward pass runs again without gradients, so that no amax is recorded twice. All ranks must call it, because
    pipeline stages have different parameters and wait for one another.

    Args:
        model: the decoder.
        batch: token ids.
        loss: computes the loss of a batch [B, S + 1].
    Returns:
        The location; its number is the index of the module call, or 0 for a parameter.
    """
    places: list[NonFinitePlace] = []
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            places.append(NonFinitePlace(0, name, f"the parameter {name} is already not finite"))
            break
    calls = count(1)

    def look(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            call = next(calls)
            if not is_finite(output) and not places:  # `is_finite` first, because it gathers DTensors on all ranks
                places.append(NonFinitePlace(call, name, f"the first output that is not finite is that of {name}"))

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            for micro_batch in batch:
                loss(micro_batch)
    finally:
        for hook in hooks:
            hook.remove()
    return places[0] if places else NonFinitePlace(0, "", "every module's output is finite")


def first_gradient(model: nn.Module) -> NonFinitePlace:
    """Find the first parameter, in order of backward (from the head down), whose gradient is not finite."""
    names = [name for name, p in model.named_parameters() if not is_finite(p.grad)]
    if not names:
        return NonFinitePlace(0, "", "the norm overflowed")
    return NonFinitePlace(0, names[-1], f"the first gradient that is not finite is that of {names[-1]}")


# ---- learner ----


class TorchLearner:
    """A converted `Decoder` with its optimizer; with a group, this rank's part of them.

    Every rank gets whole batches and selects its own sequences; losses and norms cover all ranks.
    """

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        vocab: int,
        group: TorchProcessGroup | None = None,
        codes: bool = True,
    ) -> None:
        self.group = group
        self.device = device_of(config.device) if group is None else group.device
        if config.threads or self.device.type == "cpu":
            torch.set_num_threads(config.threads or 1)
        self.config = config
        sizes = with_capacity(MODELS[config.model], config.capacity)
        self.model = build_decoder(sizes, vocab, config.seed, self.device, config.recompute, config.nudge)
        self.recipe = recipe
        tp = 1 if group is None else group.sizes.tp
        codes = codes and optimizer_name.allows_codes(len(recipe_name.parse_phases(config.recipe)), tp)
        if group is None:
            self.conversion = convert_decoder(self.model, recipe, config, codes)
        else:
            self.conversion = parallelize(self.model, recipe, config, group, codes)
        self.optimizer = optimizer_of(self.model, config, 0 if group is None else group.mesh.get_local_rank("pp"))
        begin_states(self.model, self.optimizer)
        self.update = TrainStep(self.model, self.optimizer, config, group)
        self.extra_metrics: dict[str, float] = {}
        self.inspector: qt.Inspector | None = None
        self._run = self._runner()

    def inspect(self, folder: Path, first: int) -> AbstractContextManager[object]:
        every = self.config.inspect_every
        self.inspector = qt.inspect(self.model, every=every, start=every, out=folder, resume=first)
        return self.inspector

    def step(self, batch: np.ndarray, lr: float) -> tuple[float, float]:
        self.update.set_lr(lr, self.device)
        set_averaged(self.optimizer, False)
        loss, norm, *expert_stats = self._run(self._ids(batch)).tolist()
        balance = self.update.balance
        self.extra_metrics = {} if balance is None else balance.extra_metrics(expert_stats)
        if self.inspector is not None:
            self.inspector.step()
            self.extra_metrics |= {f"inspect_{name}": value for name, value in self.inspector.summary().items()}
            self.inspector.rows.clear()  # the file has them
        return loss, norm

    def change_recipe(self, recipe: Recipe) -> None:
        if recipe is self.recipe:
            return
        self.recipe = recipe
        if self.group is None:
            self.conversion = change_layers(self.model, recipe, self.config.seed)
        else:
            self.conversion = change_recipe(self.model, recipe, self.config, self.group)
        # A captured graph would still use the old recipe.
        self._run = self._runner()

    def loss(self, batches: np.ndarray) -> float:
        set_averaged(self.optimizer, True)
        self.model.eval()
        with torch.no_grad(), self._unmeasured(), frozen(self.model):
            losses = self._losses(self._ids(batches))
        self.model.train()
        mean = sum(losses) / len(losses)
        if self.group is None:
            return mean
        return self.group.agree_if_finite(self.group.mean(torch.tensor(mean, dtype=torch.float64, device="cpu"))).item()

    def _losses(self, batches: torch.Tensor) -> list[float]:
        """Return the loss of each batch; also count choices of experts that differ from bf16's, if possible."""
        self.extra_metrics = {}
        plain = None
        if self.update.balance is not None and self.group is None and self.recipe.quantizes:
            plain = bf16_copy(self.model, self.config.seed)
        if plain is None:
            return [self.update.loss(batch).item() for batch in batches]
        losses, counts = [], []
        for batch in batches:
            loss, routings = self.update.routed(batch)
            losses.append(loss.item())
            _, others = loss_and_routings(plain, batch, self.config.dtype, self.config.loss_chunk)
            counts.append(count_different_choices(routings, others))
        differ, choices = map(sum, zip(*counts, strict=True))
        self.extra_metrics = {"choices_differ": differ / choices}
        return losses

    def first_output(self, batch: np.ndarray) -> str:
        # Every rank runs all sequences, with the batch size of training, and reports the same.
        size = batch.shape[1] if self.group is None else batch.shape[1] // self.group.sizes.fsdp
        pieces = torch.from_numpy(batch).to(self.device).view(-1, size, batch.shape[-1])
        with self._unmeasured():
            first = first_module(self.model, pieces, self.update.loss)
        if self.group is None:
            return first.message
        # Before the first step, as in a validation, no rank has a loss of its own.
        nonfinite = "" if self.update.own is None else self.group.ranks_of_nonfinite(self.update.own)
        return nonfinite + self.group.first_message(first)

    def first_gradient(self, batch: np.ndarray) -> str:
        first = first_gradient(self.model)
        return first.message if self.group is None else self.group.first_message(first, backward=True)

    def tensors(self) -> tuple[Tensors, Tensors]:
        set_averaged(self.optimizer, True)
        return arrays(self.model.state_dict()), arrays(state_of(self.model, self.optimizer))

    def load(self, model: Tensors, optimizer: Tensors) -> None:
        # Checkpoints have averaged weights.
        set_averaged(self.optimizer, True)
        try:
            self.model.load_state_dict(tensors_of(model))
            load_state(self.model, self.optimizer, tensors_of(optimizer))
            # A captured graph would still use the old tensors.
            self._run = self._runner()
        except RuntimeError as error:
            raise ValueError(short_text(error)) from error

    def names(self) -> set[str]:
        own = set(self.model.state_dict())
        return own if self.group is None else own.union(*self.group.gather_objects(own))

    def write(self, folder: Path, behind: bool = False) -> Callable[[], None]:
        """Start to write the state of all ranks into a folder, each its own shards."""
        assert self.group is not None
        set_averaged(self.optimizer, True)
        return sharding.write(self.model, self.optimizer, folder, self.group.saving if behind else None)

    def read(self, folder: Path) -> None:
        """Load this rank's shards of a checkpoint. Raises: ValueError if they do not fit."""
        set_averaged(self.optimizer, True)
        try:
            sharding.read(self.model, self.optimizer, folder)
        except RuntimeError as error:
            raise ValueError(short_text(error)) from error

    def _runner(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return CapturedStep(self.update) if self.config.capture == "step" else self.update

    def _unmeasured(self) -> AbstractContextManager[None]:
        return nullcontext() if self.inspector is None else self.inspector.pause()

    def _ids(self, batch: np.ndarray) -> torch.Tensor:
        if self.group is not None:
            batch = batch[:, self.group.rows(batch.shape[1])]
        return torch.from_numpy(batch).to(self.device)


def begin_states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Initialize optimizer states of stored weights from their values before quantization, then free those values."""
    if isinstance(optimizer, Optimizer):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if stored_weight.holds_codes(p):
                    optimizer.state[p] = optimizer.first_state(p, group)
        drop_initial_value(model)


def arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Convert tensors to numpy arrays, bfloat16 to `BFLOAT16`."""
    return {name: array_of(tensor.detach().cpu()) for name, tensor in tensors.items()}


def array_of(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(BFLOAT16)
    return tensor.numpy()


def short_text(error: Exception) -> str:
    """Return the beginning of a long error message, in one line."""
    return " ".join(str(error).split())[:300]


def tensors_of(arrays: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor_of(array) for name, array in arrays.items()}


def tensor_of(array: np.ndarray) -> torch.Tensor:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


# ---- decoding ----


class NextTokenLogits:
    """Callable that takes the next tokens and returns the logits, float32 [vocab], of the token after them.

    Args:
        config: options of the run; model, dtype, device and threads are used, at most as many threads as cores.
        recipe: recipe of the layers.
        vocab: size of the vocabulary.
        saved: the weights.
        cache: "plain", "paged", or "none", which recomputes all tokens in each call.
        capacity: maximum number of tokens.
    Raises: CheckpointError if the weights are not this model's, ValueError if the device is missing.
    """

    def __init__(
        self, config: TrainConfig, recipe: Recipe, vocab: int, saved: SavedCheckpoint, cache: str, capacity: int
    ) -> None:
        self.device = device_of(config.device)
        if config.threads or self.device.type == "cpu":
            torch.set_num_threads(min(config.threads, os.cpu_count() or 1) or 1)
        self.autocast = config.dtype == "bfloat16"
        self.vocab = vocab
        sizes = MODELS[config.model]
        self.model = build_decoder(sizes, vocab, config.seed, self.device).eval()
        own = recipe_name.parse_phases(config.recipe)[-1].recipe
        # Runs with tensor parallelism or a recipe schedule store floats where others store codes.
        codes = any(name.endswith(SCALES[0]) for name in saved.model)
        convert_decoder(self.model, own, config, codes)
        if recipe != own:
            quantize_layers(self.model, recipe, config.seed)
        try:
            with warnings.catch_warnings():
                # Histories and counters missing in the checkpoint start fresh, which does not matter without training.
                warnings.simplefilter("ignore", UserWarning)
                self.model.load_state_dict(tensors_of(saved.model))
        except RuntimeError as error:
            raise CheckpointError(f"the checkpoint of step {saved.step} does not fit: {short_text(error)}") from error
        self.cache = None if cache == "none" else DecoderCaches(sizes, cache, capacity)
        self.seen: list[int] = []

    def frozen_weights(self) -> frozen:
        """Return a context in which the weights are quantized once for all tokens."""
        return frozen(self.model)

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int]) -> np.ndarray:
        self.seen += tokens
        ids_so_far = self.seen if self.cache is None else list(tokens)
        ids = torch.tensor([ids_so_far], dtype=torch.int64, device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.model(ids, self.cache)
        last: np.ndarray = logits[0, -1, : self.vocab].float().cpu().numpy()
        return last


# ---- trials ----
# Run a small layer's forward and backward under a recipe on this machine, for `quaver doctor`.

#: Features of the layer and number of tokens; all GPUs' GEMMs support this size.
SIZE = 256


def run_trial(recipe: Recipe) -> list[tuple[str, str, str]]:
    """Run a layer and return, for its three GEMMs, the name, the implementation, and why the native one was not used.

    It runs on the first GPU if there is one, else on the CPU.
    Raises: RuntimeError if the layer cannot run there.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = qt.Linear(SIZE, SIZE, device=device, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the table reports emulation on a GPU anyway
        layer(x).sum().backward()
        rows = qt.explain(layer, x).rows
    return [
        (row.what.removesuffix(" GEMM"), row.runs, dict(row.passed_over).get("native", ""))
        for row in rows
        if row.what.endswith(" GEMM")
    ]
