"""Distribution of a decoder over ranks: pipeline stages, parallelization, and sharded checkpoints."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import quaver.torch as qt
from quaver.recipes.conversion import ConversionReport
from quaver.recipes.spec import Recipe
from quaver.torch.nn.norm import NormKind
from quaver.torch.nn.transformer import TransformerLayer
from quaver.torch.optim import Optimizer
from quaver.torch.parallel import (
    ColwiseParallel,
    HeadParallel,
    RowwiseParallel,
    SequenceParallel,
    VocabParallel,
    context_parallel,
    gather_quantized,
    pipeline_stage,
    refresh_gather,
    sync_amax_histories,
)
from quaver.torch.state.buffers import STATE
from quaver.train.config import PIPELINE_SCHEDULES, TrainConfig, stage_ranks, stages_per_rank
from quaver.train.mesh import check_words
from quaver.train.torch.decoder import Decoder, change_layers, convert_decoder, mean_loss
from quaver.train.torch.optimizer import load_state, state_of
from quaver.train.torch.process_group import TorchProcessGroup

# ---- pipeline ----
# Split a decoder's layers into consecutive stages over ranks. Stages and schedules are torch's own.


def keep_stages(model: Decoder, stages: Sequence[int], count: int) -> None:
    """Remove all layers that are not in this rank's stages; the first stage has the embedding, the last one the head.

    Remaining layers keep their names.
    """
    for number in range(len(model.layers)):
        if stage_of(f"layers.{number}", model.config.layers, count) not in stages:
            delattr(model.layers, str(number))
    if 0 not in stages:
        model.register_module("embedding", None)
    if count - 1 not in stages:
        model.register_module("norm", None)
        model.register_module("head", None)


def stage_of(name: str, layers: int, count: int) -> int:
    """Return the stage of a module or parameter of a decoder with `layers` layers in `count` stages."""
    first, *rest = name.split(".")
    if first == "layers":
        return int(rest[0]) * count // layers
    return 0 if first == "embedding" else count - 1


class StageModule(nn.Module):
    """A pipeline stage: takes ids or the previous stage's output, and returns the next stage's input or the loss.

    Without targets, the last stage returns a loss of 0, for shape inference.

    Args:
        model: the rank's decoder, whose modules are shared.
        index: index of the stage.
        count: number of stages.
        dtype, chunk: as in `mean_loss`.
    """

    def __init__(self, model: Decoder, index: int, count: int, dtype: str, chunk: int) -> None:
        super().__init__()
        own, layers = copy.copy(model), model.config.layers
        own._modules = {
            name: nn.ModuleList() if name == "layers" else module if stage_of(name, layers, count) == index else None
            for name, module in model._modules.items()
        }
        for name, layer in model.layers.named_children():
            if stage_of(f"layers.{name}", layers, count) == index:
                own.layers.add_module(name, layer)
        self.model, self.index, self.dtype, self.chunk = own, index, dtype, chunk

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.model.norm is None:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
                y: Tensor = self.model(x)
            return y
        if targets is None:
            return torch.zeros(1, dtype=torch.float32, device=x.device)
        return mean_loss(self.model, x, targets, self.dtype, self.chunk).view(1)


class Pipeline:
    """All pipeline stages of a decoder; every rank passes the micro-batches and gets the loss.

    A rank's stages run by the schedule of the options. Schedules that split backwards are supported, see
    `quaver.torch.parallel.pipeline_stage`.

    Attributes:
        parts: this rank's stages, each to be wrapped by fully_shard.

    Args:
        model: the decoder; this rank keeps the layers of its stages.
        recipe: recipe of the layers; histories roll once per step of all micro-batches.
        config: options of the run.
        group: ranks of the run.
    """

    def __init__(self, model: Decoder, recipe: Recipe, config: TrainConfig, group: TorchProcessGroup) -> None:
        self.recipe, self.config, self.group = recipe, config, group
        self.layers, self.rank = model.config.layers, group.mesh.get_local_rank("pp")
        each = stages_per_rank(config.pp_schedule, config.pp_stages)
        #: Pipeline rank of each stage.
        self.holders = stage_ranks(config.pp_schedule, group.sizes.pp, each)
        count = len(self.holders)
        own = [index for index, rank in enumerate(self.holders) if rank == self.rank]
        keep_stages(model, own, count)
        chunk = group.loss_chunk(config)
        self.parts = [StageModule(model, index, count, config.dtype, chunk) for index in own]
        self.among = group.mesh.get_group("pp")
        self.shape = (config.batch // group.sizes.fsdp, group.tokens(config), model.config.dim)
        stages = [pipeline_stage(part, part.index, count, self._example(part), group=self.among) for part in self.parts]
        kind = get_schedule_class(config.pp_schedule)
        rank_stages: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        self.schedule = kind(rank_stages, config.accumulate, _MicrobatchLoss(config.accumulate), scale_grads=False)

    def _example(self, part: StageModule) -> Tensor:
        device = self.group.device
        if part.index:
            return torch.empty(self.shape, dtype=torch.float32, device=device)
        tokens = self.config.sequence // self.group.sizes.cp
        return torch.zeros((self.shape[0], tokens), dtype=torch.int64, device=device)

    def stage_of(self, name: str) -> int:
        """Return the stage of a module or parameter of the whole decoder."""
        return stage_of(name, self.layers, len(self.holders))

    def step(self, batches: Tensor) -> Tensor:
        """Return the mean loss, float32 [], of micro-batches int64 [accumulate, B, S + 1], and accumulate gradients."""
        schedule_arguments: dict[str, Any] = {}
        inputs: tuple[Tensor, ...] = ()
        losses: list[Tensor] = []
        if self.rank == self.holders[0]:
            inputs = (self.group.cut(batches[..., :-1].flatten(0, 1)),)
        if self.rank == self.holders[-1]:
            targets = self.group.cut(batches[..., 1:].flatten(0, 1))
            schedule_arguments = {"targets": targets, "target": targets, "losses": losses}
        with qt.autocast(self.recipe):
            self.schedule.step(*inputs, **schedule_arguments)
        total = torch.zeros((), dtype=torch.float32, device=batches.device)
        for loss in losses:
            total += loss.detach()
        return self._from_last_stage(total)

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean loss, float32 [], of a batch int64 [B, S + 1], without gradients."""
        ranks = dist.get_process_group_ranks(self.among)
        x, last = self.group.cut(batch[:, :-1]), len(self.holders) - 1
        parts = iter(self.parts)
        for index, rank in enumerate(self.holders):
            if rank != self.rank:
                continue
            if index and self.holders[index - 1] != rank:
                x = torch.empty((len(batch), *self.shape[1:]), dtype=torch.float32, device=batch.device)
                dist.recv(x, ranks[self.holders[index - 1]], self.among)
            x = next(parts)(x, self.group.cut(batch[:, 1:]) if index == last else None)
            if index < last and self.holders[index + 1] != rank:
                dist.send(x.contiguous(), ranks[self.holders[index + 1]], self.among)
        has_last = self.holders[-1] == self.rank
        return self._from_last_stage(
            x.squeeze() if has_last else torch.zeros((), dtype=torch.float32, device=batch.device)
        )

    def _from_last_stage(self, value: Tensor) -> Tensor:
        """Broadcast a number from the last stage."""
        dist.broadcast(value, dist.get_process_group_ranks(self.among)[self.holders[-1]], self.among)
        return value


class _MicrobatchLoss:
    """Loss function for the schedule: a micro-batch's share of the mean."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __call__(self, loss: Tensor, targets: Tensor) -> Tensor:
        return loss.squeeze() / self.batches


# ---- parallelization ----


def parallelize(
    model: Decoder, recipe: Recipe, config: TrainConfig, group: TorchProcessGroup, codes: bool
) -> ConversionReport:
    """Apply a recipe to a decoder and distribute it over the ranks.

    1. `convert` applies the recipe to the layers' matrices, stored as codes if the optimizer does so.
    2. `parallelize_module`, for tp > 1: each rank computes some heads and features of every layer, has a range of the
       vocabulary in embedding and head, and with sp some tokens between layers.
    3. `context_parallel`, for cp > 1: each rank has some tokens of a sequence, and attention works across ranks.
    4. `pipeline_stage`, for pp > 1: each rank keeps the layers of its stages.
    5. `gather_quantized` lets torch's fully_shard gather the layers' weights as codes and scales.
    6. `fully_shard`, for each layer and then the rest: weights, gradients and moments are sharded over the ranks of
       fsdp and cp. If the optimizer stores matrices in bfloat16, norms and embedding are separate units.

    Args:
        model: decoder with the same values on every rank.
        recipe: recipe of the layers.
        config: options of the run.
        group: the ranks.
        codes: the optimizer may store matrices as codes; always False with tensor parallelism.
    Returns:
        The report of the conversion.
    """
    report = convert_decoder(model, recipe, config, codes, in_parts=True)
    if group.sizes.tp > 1:
        check_words(model.embedding.num_embeddings, group.sizes.tp)
        parallelize_module(model, group.mesh["tp"], tensor_parallel_plan(model, config.sp), src_data_rank=None)
    if group.across is not None:
        group.cut = context_parallel(model, group.across["cp"], config.cp_how).cut
    wholes: list[nn.Module] = [model]
    if group.sizes.pp > 1:
        group.pipeline = pipeline = Pipeline(model, recipe, config, group)
        wholes = [*pipeline.parts]
    if gathers_codes(recipe) or any(getattr(module, "weight_spec", None) is not None for module in model.modules()):
        gather_quantized(model, mesh=group.mesh["data"])
    # A schedule that splits backward would gather a layer twice, so keep it gathered until its stage is finished.
    reshards = False if group.sizes.pp > 1 and PIPELINE_SCHEDULES[config.pp_schedule].splits else None
    for unit in (*model.layers, *wholes):
        shard(unit, group, reshards)
    return report


def shard(unit: nn.Module, group: TorchProcessGroup, reshards: bool | None) -> None:
    """Apply fully_shard to the modules of a unit that are not sharded yet.

    A unit needs gradients of one dtype. So next to bfloat16 matrices, each float32 module becomes a unit of its own,
    and biases become bfloat16.
    """
    mesh, wrapped = group.mesh["data"], set()
    for name, module in unit.named_modules():
        if name and (isinstance(module, FSDPModule) or name.rpartition(".")[0] in wrapped):
            wrapped.add(name)
    left = [(module, p) for name, module in unit.named_modules() if name not in wrapped for p in own_parameters(module)]
    dtypes = {p.dtype for _, p in left}
    if len(dtypes) > 1:
        for module in dict.fromkeys(module for module, _ in left):
            kinds = {p.dtype for p in own_parameters(module)}
            if torch.bfloat16 not in kinds:
                fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
            elif len(kinds) > 1:
                to_bfloat16(module)
    # Sum gradients over ranks in float32 in any case.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32) if torch.bfloat16 in dtypes else MixedPrecisionPolicy()
    fully_shard(unit, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy)


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return a module's own parameters, without those of submodules."""
    return [p for p in module._parameters.values() if p is not None]


def to_bfloat16(module: nn.Module) -> None:
    """Convert a module's parameters to bfloat16; the optimizer stores the other float32 bits of small ones."""
    for name, p in module._parameters.items():
        if p is not None and p.dtype is torch.float32:
            module._parameters[name] = nn.Parameter(p.detach().bfloat16())


def change_recipe(model: Decoder, recipe: Recipe, config: TrainConfig, group: TorchProcessGroup) -> ConversionReport:
    """Switch the distributed decoder to another recipe between two steps; all ranks must call it.

    From then on weights are gathered in the new recipe's codes, or in high precision if that is not possible.
    """
    report = change_layers(model, recipe, config.seed)
    if isinstance(group.pipeline, Pipeline):
        group.pipeline.recipe = recipe
    refresh_gather(model, mesh=group.mesh["data"])
    return report


def tensor_parallel_plan(model: Decoder, sequence: bool) -> dict[str, ParallelStyle]:
    """Return the tensor-parallel style of each module; modules not listed are replicated.

    Args:
        model: the decoder.
        sequence: shard the tokens of the residual stream, so that norms work on shards and layers gather them.
    """
    styles: dict[str, ParallelStyle] = {"embedding": VocabParallel(sequence=sequence)}
    if model.head is not None:
        styles["head"] = ColwiseParallel(sequence=sequence)
    for name, module in model.named_modules():
        if isinstance(module, TransformerLayer):
            styles[f"{name}.attention"] = HeadParallel(sequence=sequence)
            if model.config.gated:
                styles[f"{name}.mlp.gate_proj"] = ColwiseParallel(sequence=sequence)
            styles[f"{name}.mlp.up_proj"] = ColwiseParallel(sequence=sequence)
            styles[f"{name}.mlp.down_proj"] = RowwiseParallel(sequence=sequence)
        elif sequence and isinstance(module, NormKind) and not name.endswith(("q_norm", "k_norm")):
            styles[name] = SequenceParallel()
    return styles


def gathers_codes(recipe: Recipe) -> bool:
    """Return True if both operands that a recipe makes of a weight can be gathered as codes."""
    specs = recipe.fprop.b, recipe.dgrad.b
    return recipe.quantizes and all(spec is not None and not spec.hadamard for spec in specs)


# ---- checkpoints ----
# Sharded checkpoints with torch.distributed.checkpoint, as safetensors: each rank writes and reads its own shards.
#
# A rank's file uses the names of a single-process checkpoint and stores the offset of each shard.


def write(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, group: Any = None) -> Callable[[], None]:
    """Start to write the state of a model and its optimizer into an existing folder, on all ranks.

    Args:
        model, optimizer: the state to write.
        folder: existing destination.
        group: separate CPU process group of all ranks to write a copy in a background thread; None writes directly.
    Returns:
        A function that waits until all ranks have written, and raises an OSError on every rank if one failed.
    """
    sync_amax_histories(model)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    state = {**model.state_dict(), **state_of(model, optimizer)}
    if group is None:
        begun = partial(dcp.save, state, storage_writer=writer)
    else:
        # torch may write CPU tensors without a copy, while the optimizer already changes them.
        copies = {
            name: value.detach().clone() if value.device.type == "cpu" else value for name, value in state.items()
        }
        future: Any = dcp.async_save(copies, storage_writer=writer, process_group=group)
        begun = getattr(future, "upload_completion", future).result

    def wait() -> None:
        try:
            begun()
        except CheckpointException as error:
            raise OSError(short_text(error)) from error

    return wait


def read(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load a checkpoint that any number of ranks, or a single process, wrote.

    Raises: ValueError if it does not fit.
    """
    reader = HuggingFaceStorageReader(str(folder))
    model_state = restrict_to_saved(model.state_dict(), reader.read_metadata().state_dict_metadata)
    optimizer_state = first_states(model, optimizer)
    whole = {**model_state, **optimizer_state}
    try:
        dcp.load(whole, storage_reader=reader)
    except CheckpointException as error:
        raise ValueError(short_text(error)) from error
    model.load_state_dict({name: whole[name] for name in model_state})
    load_state(model, optimizer, {name: whole[name] for name in optimizer_state})


def restrict_to_saved(state: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Restrict a model's state to entries that a checkpoint of another recipe has, with its history lengths.

    The layers start all other entries fresh.
    """
    own = dict(state)
    for name, value in state.items():
        if name.rpartition(".")[2] not in STATE:
            continue
        wrapped = saved.get(name)
        if wrapped is None:
            del own[name]
        elif tuple(wrapped.size) != tuple(value.shape):
            own[name] = torch.empty(tuple(wrapped.size), dtype=value.dtype, device=value.device)
    return own


def short_text(error: CheckpointException) -> str:
    """Return the first rank's failure in one line."""
    rank, (failure, _) = min(error.failures.items())
    return f"rank {rank}: {' '.join(str(failure).split())[:300]}"


def first_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state before the first step, named as in `state_of` and sharded like the parameters."""
    state: dict[str, Tensor] = {}
    if isinstance(optimizer, Optimizer):
        names = {p: name for name, p in model.named_parameters()}
        for group in optimizer.param_groups:
            for p in group["params"]:
                state |= {f"{names[p]}/{key}": value for key, value in optimizer.first_state(p, group).items()}
        return state
    for name, value in model.state_dict().items():
        if name in dict(model.named_parameters()):
            state[f"{name}/step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            for moment in ("exp_avg", "exp_avg_sq"):
                state[f"{name}/{moment}"] = torch.zeros_like(value)
    return state
