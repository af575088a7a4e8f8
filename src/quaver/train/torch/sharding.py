"""What makes a decoder the decoder of many ranks, in the order in which it is done."""

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
from quaver.recipes.conversion import Report
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
from quaver.torch.parallel.comm import during, waiting
from quaver.torch.state.buffers import STATE
from quaver.train.config import ORDERS, TrainConfig, holders, stages_each
from quaver.train.mesh import check_words
from quaver.train.torch.decoder import Decoder, change_layers, mean_loss, prepare
from quaver.train.torch.optimizer import load_state, state_of
from quaver.train.torch.process_group import TorchProcessGroup

# ---- pipeline --------------------------------------------------------------------------------------------
# A decoder's layers in stages, one after the other over ranks: what a rank keeps, and what runs its micro-batches.
#
# The stages are torch's own, and so are the schedules.


def keep_stages(model: Decoder, stages: Sequence[int], count: int) -> None:
    """Leave a decoder the layers of its rank's stages, under their names; the first stage has the embedding, the last
    the head."""
    for number in range(len(model.layers)):
        if stage_of(f"layers.{number}", model.config.layers, count) not in stages:
            delattr(model.layers, str(number))
    if 0 not in stages:
        model.register_module("embedding", None)
    if count - 1 not in stages:
        model.register_module("norm", None)
        model.register_module("head", None)


def stage_of(name: str, layers: int, count: int) -> int:
    """The stage of a module or parameter of a decoder of so many layers in `count` stages."""
    first, *rest = name.split(".")
    if first == "layers":
        return int(rest[0]) * count // layers
    return 0 if first == "embedding" else count - 1


class StageModule(nn.Module):
    """A stage as the pipeline calls it: what the stage before gave, or ids, to what the next one takes, or to the loss.

    Given no targets, the last stage gives a loss of 0, for its shape.

    Args:
        model: the rank's decoder; the part has those of its modules that are the stage's.
        index, count: which stage it is, of how many.
        dtype, chunk: as `mean_loss` takes them.
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
    """The stages of a decoder; every rank of one gives the micro-batches, and gets the loss.

    A rank's stages take turns by the schedule of the options. Those that cut a backward in two find it cut: `stage`.

    Attributes:
        parts: this rank's stages, each to be wrapped by fully_shard.

    Args:
        model: of which this rank keeps its stages' layers.
        recipe: of the layers; one with histories rolls them once a step, of all micro-batches.
    """

    def __init__(self, model: Decoder, recipe: Recipe, config: TrainConfig, group: TorchProcessGroup) -> None:
        self.recipe, self.config, self.group = recipe, config, group
        self.layers, self.rank = model.config.layers, group.mesh.get_local_rank("pp")
        each = stages_each(config.pp_schedule, config.pp_stages)
        #: The rank of each stage.
        self.holders = holders(config.pp_schedule, group.sizes.pp, each)
        count = len(self.holders)
        own = [index for index, rank in enumerate(self.holders) if rank == self.rank]
        keep_stages(model, own, count)
        chunk = group.loss_chunk(config)
        self.parts = [StageModule(model, index, count, config.dtype, chunk) for index in own]
        self.among = group.mesh.get_group("pp")
        self.shape = (config.batch // group.sizes.fsdp, group.tokens(config), model.config.dim)
        stages = [pipeline_stage(part, part.index, count, self._example(part), group=self.among) for part in self.parts]
        kind = get_schedule_class(config.pp_schedule)
        of_rank: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        self.schedule = kind(of_rank, config.accumulate, _MicrobatchLoss(config.accumulate), scale_grads=False)

    def _example(self, part: StageModule) -> Tensor:
        device = self.group.device
        if part.index:
            return torch.empty(self.shape, dtype=torch.float32, device=device)
        tokens = self.config.sequence // self.group.sizes.cp
        return torch.zeros((self.shape[0], tokens), dtype=torch.int64, device=device)

    def stage_of(self, name: str) -> int:
        """The stage of a module or parameter of the whole decoder."""
        return stage_of(name, self.layers, len(self.holders))

    def step(self, batches: Tensor) -> Tensor:
        """The mean loss, float32 [], of micro-batches int64 [accumulate, B, S + 1], whose gradients are added up."""
        of_schedule: dict[str, Any] = {}
        given: tuple[Tensor, ...] = ()
        losses: list[Tensor] = []
        if self.rank == self.holders[0]:
            given = (self.group.cut(batches[..., :-1].flatten(0, 1)),)
        if self.rank == self.holders[-1]:
            targets = self.group.cut(batches[..., 1:].flatten(0, 1))
            of_schedule = {"targets": targets, "target": targets, "losses": losses}
        with qt.autocast(self.recipe):
            self.schedule.step(*given, **of_schedule)
        total = torch.zeros((), dtype=torch.float32, device=batches.device)
        for loss in losses:
            total += loss.detach()
        return self._of_last(total)

    def loss(self, batch: Tensor) -> Tensor:
        """The mean loss, float32 [], of a batch int64 [B, S + 1], without gradients."""
        ranks = dist.get_process_group_ranks(self.among)
        x, last = self.group.cut(batch[:, :-1]), len(self.holders) - 1
        parts = iter(self.parts)
        for index, rank in enumerate(self.holders):
            if rank != self.rank:
                continue
            if index and self.holders[index - 1] != rank:
                x = torch.empty((len(batch), *self.shape[1:]), dtype=torch.float32, device=batch.device)
                with waiting("activations", x):
                    dist.recv(x, ranks[self.holders[index - 1]], self.among)
            x = next(parts)(x, self.group.cut(batch[:, 1:]) if index == last else None)
            if index < last and self.holders[index + 1] != rank:
                with during("activations", "send", x, self.among):
                    dist.send(x.contiguous(), ranks[self.holders[index + 1]], self.among)
        has_last = self.holders[-1] == self.rank
        return self._of_last(x.squeeze() if has_last else torch.zeros((), dtype=torch.float32, device=batch.device))

    def _of_last(self, value: Tensor) -> Tensor:
        """The last stage's number, on all of them."""
        gives = self.holders[-1] == self.rank
        with during("control", "send", value, self.among) if gives else waiting("control", value):
            dist.broadcast(value, dist.get_process_group_ranks(self.among)[self.holders[-1]], self.among)
        return value


class _MicrobatchLoss:
    """What the schedule takes for a loss of a micro-batch: its part of the mean."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __call__(self, loss: Tensor, targets: Tensor) -> Tensor:
        return loss.squeeze() / self.batches


# ---- parallelize model -----------------------------------------------------------------------------------


def parallelize(model: Decoder, recipe: Recipe, config: TrainConfig, group: TorchProcessGroup, codes: bool) -> Report:
    """Give a decoder its recipe and divide it among the ranks.

    1. `convert`: the layers' matrices get the recipe, and exist only as its codes where the optimizer keeps them so.
    2. `parallelize_module`, where tp is given: each rank computes some heads and some features of every layer, has some
       words of the embedding and of the head, and with sp some tokens of what is between them.
    3. `context_parallel`, where cp is given: each rank has some tokens of a sequence, and attention goes across them.
    4. `stage`, where pp is given: each rank keeps the layers of its stages, which are one or several.
    5. `gather_quantized`: torch's fully_shard will gather the layers' weights as codes and scales, in parts or whole.
    6. `fully_shard`, layer by layer and then what is left: weights, gradients and moments are divided among the ranks
       of fsdp and of cp. Where the optimizer keeps matrices in bfloat16, norms and embedding are units of their own.

    Args:
        model: with the same values on every rank.
        group: the ranks.
        codes: whether the optimizer may keep matrices as codes, under tensor parallelism never.
    Returns:
        What the recipe was applied to.
    """
    report = prepare(model, recipe, config, codes, in_parts=True)
    if group.sizes.tp > 1:
        check_words(model.embedding.num_embeddings, group.sizes.tp)
        parallelize_module(model, group.mesh["tp"], plan(model, config.sp), src_data_rank=None)
    if group.across is not None:
        group.cut = context_parallel(model, group.across["cp"], config.cp_how).cut
    wholes: list[nn.Module] = [model]
    if group.sizes.pp > 1:
        group.pipeline = pipeline = Pipeline(model, recipe, config, group)
        wholes = [*pipeline.parts]
    if travels(recipe) or any(getattr(module, "weight_spec", None) is not None for module in model.modules()):
        gather_quantized(model, mesh=group.mesh["data"])
    # Parts of a backward that are run apart would each gather a layer anew: it stays gathered until its stage is done.
    reshards = False if group.sizes.pp > 1 and ORDERS[config.pp_schedule].splits else None
    for unit in (*model.layers, *wholes):
        shard(unit, group, reshards)
    for whole in wholes:
        group.watch(whole)
    return report


def shard(unit: nn.Module, group: TorchProcessGroup, reshards: bool | None) -> None:
    """fully_shard what it has not of a module yet. It wants gradients of one dtype in a unit: beside matrices in
    bfloat16 each module of float32 is a unit of its own, and biases become bfloat16."""
    mesh, held = group.mesh["data"], set()
    for name, module in unit.named_modules():
        if name and (isinstance(module, FSDPModule) or name.rpartition(".")[0] in held):
            held.add(name)
    left = [(module, p) for name, module in unit.named_modules() if name not in held for p in own(module)]
    dtypes = {p.dtype for _, p in left}
    if len(dtypes) > 1:
        for module in dict.fromkeys(module for module, _ in left):
            kinds = {p.dtype for p in own(module)}
            if torch.bfloat16 not in kinds:
                fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
            elif len(kinds) > 1:
                narrow(module)
    # Sums of gradients over ranks are in float32 all the same.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32) if torch.bfloat16 in dtypes else MixedPrecisionPolicy()
    fully_shard(unit, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy)


def own(module: nn.Module) -> list[nn.Parameter]:
    """A module's own parameters."""
    return [p for p in module._parameters.values() if p is not None]


def narrow(module: nn.Module) -> None:
    """Make a module's parameters bfloat16; an optimizer in few bits keeps of small ones what float32 has more."""
    for name, p in module._parameters.items():
        if p is not None and p.dtype is torch.float32:
            module._parameters[name] = nn.Parameter(p.detach().bfloat16())


def change_recipe(model: Decoder, recipe: Recipe, config: TrainConfig, group: TorchProcessGroup) -> Report:
    """Give the decoder of many ranks another recipe between two steps; all ranks call it.

    Weights are gathered in the new recipe's codes from here on, or in high precision where they cannot be.
    """
    report = change_layers(model, recipe, config.seed)
    if isinstance(group.pipeline, Pipeline):
        group.pipeline.recipe = recipe
    refresh_gather(model, mesh=group.mesh["data"])
    return report


def plan(model: Decoder, sequence: bool) -> dict[str, ParallelStyle]:
    """How each module lies on the ranks of tp; what is not named is whole on all of them.

    Args:
        sequence: each rank has some tokens of the residual stream, which norms work on and layers gather.
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


def travels(recipe: Recipe) -> bool:
    """Whether both operands that a recipe makes of a weight can travel as codes."""
    specs = recipe.fprop.b, recipe.dgrad.b
    return recipe.quantizes and all(spec is not None and not spec.hadamard for spec in specs)


# ---- shards ----------------------------------------------------------------------------------------------
# Checkpoints of many ranks by torch.distributed.checkpoint, as safetensors: each rank writes and reads its own part.
#
# A rank's file has the names that a single process's files have, and says where in the whole each part begins.


def write(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, group: Any = None) -> Callable[[], None]:
    """Begin to write a model's and its optimizer's state into a folder that is there, on all ranks at once.

    Args:
        group: of all ranks on CPUs, for this alone: the state is copied, and a thread writes the copy.
    Returns:
        What waits until all have written, and raises an OSError on every rank if one could not.
    """
    sync_amax_histories(model)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    state = {**model.state_dict(), **state_of(model, optimizer)}
    if group is None:
        begun = partial(dcp.save, state, storage_writer=writer)
    else:
        # What is on a CPU already torch would write as it is, while the optimizer changes it.
        copies = {
            name: value.detach().clone() if value.device.type == "cpu" else value for name, value in state.items()
        }
        future: Any = dcp.async_save(copies, storage_writer=writer, process_group=group)
        begun = getattr(future, "upload_completion", future).result

    def wait() -> None:
        try:
            begun()
        except CheckpointException as error:
            raise OSError(in_short(error)) from error

    return wait


def read(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Take up what any number of ranks, or a single process, has written.

    Raises: ValueError for what does not fit.
    """
    reader = HuggingFaceStorageReader(str(folder))
    of_model = as_saved(model.state_dict(), reader.read_metadata().state_dict_metadata)
    of_optimizer = fresh(model, optimizer)
    whole = {**of_model, **of_optimizer}
    try:
        dcp.load(whole, storage_reader=reader)
    except CheckpointException as error:
        raise ValueError(in_short(error)) from error
    model.load_state_dict({name: whole[name] for name in of_model})
    load_state(model, optimizer, {name: whole[name] for name in of_optimizer})


def as_saved(state: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model's state what a checkpoint has, where another recipe wrote that: layers begin the rest anew, and take
    histories of other lengths."""
    own = dict(state)
    for name, value in state.items():
        if name.rpartition(".")[2] not in STATE:
            continue
        held = saved.get(name)
        if held is None:
            del own[name]
        elif tuple(held.size) != tuple(value.shape):
            own[name] = torch.empty(tuple(held.size), dtype=value.dtype, device=value.device)
    return own


def in_short(error: CheckpointException) -> str:
    """The first rank's failure, in one line."""
    rank, (failure, _) = min(error.failures.items())
    return f"rank {rank}: {' '.join(str(failure).split())[:300]}"


def fresh(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state before the first step, under the names of `state_of` and divided as the parameters are."""
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
