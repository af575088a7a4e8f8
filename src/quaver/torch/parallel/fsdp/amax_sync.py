"""Agreement of all ranks on weight amaxes: one all-reduce for all weights of a model when any of them may have changed.

If tensor parallelism has sharded weights too, all ranks with shards of them take part. Amaxes that differ between
tensor-parallel ranks then get one slot per rank in the all-reduce.

An agreement is valid for one forward and its backward, because a write through `.data` or `to_local()` leaves no trace
that a later forward could detect. Within `micro_batches` it is valid for all forwards until a weight's version or
memory changes or a torch optimizer steps. These conditions are the same on all ranks, so no rank waits for a collective
that another does not call. While an agreement is valid, a rank's rows are quantized once.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from quaver.recipes.spec import Recipe
from quaver.torch.backends.gpu.buffers import CrossStream
from quaver.torch.conversion.convert import RollHistories
from quaver.torch.numerics.quantized import ScalarOverride
from quaver.torch.parallel.comm import all_reduce_amax
from quaver.torch.parallel.fsdp.operands import (
    ALL_ROWS_KEY,
    TENSOR_KEY,
    OperandGather,
    OperandShard,
    RowShard,
    SyncedAmaxes,
    WeightOperand,
    amaxes,
    quantize_shard,
    tensor_amax,
    weight_operands,
)
from quaver.torch.parallel.fsdp.torch_internals import FsdpParameter, local, managed_parameters
from quaver.torch.state.context import active_context
from quaver.torch.state.history import amax
from quaver.torch.state.history.sync import check_agreement, new_group
from quaver.torch.state.layer_state import graph_task_id


class TensorParallelShard(NamedTuple):
    """How tensor parallelism has sharded a weight before fully_shard does."""

    #: The sharded axis of the weight and the mesh of the ranks with its shards; None if it is not sharded.
    axis: int | None = None
    mesh: Any = None


class _AmaxEntry(NamedTuple):
    """Amaxes of one operand that ranks agree on."""

    weight_state: "GatheredWeightState"
    operand: WeightOperand
    #: Key of the amaxes in `SyncedAmaxes`.
    key: int
    bits: Tensor

    @property
    def differs_by_rank(self) -> bool:
        """True if these amaxes differ between tensor-parallel ranks, so that each needs its own slot."""
        axis, operand = self.weight_state.tensor_parallel.axis, self.operand
        if self.key in (TENSOR_KEY, ALL_ROWS_KEY):
            return axis is None
        return not ((axis == 0 and operand.height is None) or (axis == 1 and operand.width is None))


class GatheredWeightState:
    """State on this rank of one weight that is gathered as codes."""

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        recipe: Recipe,
        shape: tuple[int, int],
        amax_sync: "ModelAmaxSync",
        tensor_parallel: "TensorParallelShard",
    ) -> None:
        self.layer, self.name, self.recipe, self.amax_sync = weakref.ref(layer), name, recipe, amax_sync
        #: Shape of the tensor that fully_shard shards: the weight, or this rank's tensor-parallel shard of it.
        self.shape = shape
        self.tensor_parallel = tensor_parallel
        self.operands = weight_operands(recipe)
        #: fully_shard's object for the weight; None before the first gather or if this torch has other internals.
        self.fsdp_parameter: FsdpParameter | None = None
        #: The sharded parameter, as last seen.
        self.parameter: Any = None
        #: Agreed amaxes and quantized shards by GEMM ("fprop" or "dgrad").
        self.synced_amaxes: dict[str, SyncedAmaxes] = {}
        self.quantized_shards: dict[str, tuple[Any, OperandShard, CrossStream]] = {}
        #: Passes that needed an operand which their gather had not brought; from then on both operands are sent.
        self.passes_needing_both: set[str] = set()
        #: Number of the agreement that the last forward's gather used.
        self.forward_agreement_id = -1
        #: Version and data pointer of the parameter at the last agreement.
        self.agreed_version: tuple[int, int] | None = None
        #: Shapes of the last gather's inputs.
        self.last_input_shapes: Sequence[torch.Size] = ()

    def rows(self, mesh: Any) -> RowShard:
        """Return the rows of this rank, given the mesh over which fully_shard shards the weight."""
        return RowShard.of(self.shape[0], mesh.size(), mesh.get_local_rank(), self.tensor_parallel.axis)

    @property
    def fprop_serves_dgrad(self) -> bool:
        """True if fprop's operand also serves dgrad."""
        return len(self.operands) == 1

    def operand(self, gemm: str) -> WeightOperand:
        """Return the operand of "fprop" or "dgrad"; the only one if both are the same."""
        return self.operands[0] if self.fprop_serves_dgrad or gemm == "fprop" else self.operands[1]

    def find_parameter(self) -> Any:
        """Find and return the sharded parameter."""
        if self.fsdp_parameter is not None:
            self.parameter = self.fsdp_parameter.sharded
        else:
            layer = self.layer()
            layer_weight = None if layer is None else layer._parameters.get("weight")
            if local(layer_weight) is not None:
                self.parameter = layer_weight
        return self.parameter

    def current_version(self) -> tuple[int, int]:
        """Return the version and data pointer of the sharded parameter, to detect writes."""
        parameter = self.find_parameter()
        shard: Any = local(parameter)
        return parameter._version, 0 if shard is None else getattr(shard, "plain", shard).data_ptr()

    def values(self) -> Tensor | None:
        """Return this rank's rows [n, K] in the dtype to quantize from, or None if the weight is not sharded."""
        rows: Any = local(self.find_parameter())
        rows = getattr(rows, "plain", rows)
        if rows is None or rows.is_meta:
            return None
        dtype = None if self.fsdp_parameter is None else self.fsdp_parameter.dtype
        return rows.detach() if dtype is None else rows.detach().to(dtype)

    def factor(self) -> tuple[float, ScalarOverride]:
        """Return the layer's present delayed-scaling factor for the weight, preceded by a key that changes with it."""
        layer = self.layer()
        if self.recipe.delayed is None or layer is None:
            return 0.0, None
        factors = amax.saved_factors(layer)
        if isinstance(factors, Tensor):
            buffer = layer._buffers["factor"]
            assert buffer is not None
            return buffer._version, factors[amax.WEIGHT]
        return factors[amax.WEIGHT], factors[amax.WEIGHT]

    def quantized_shard(
        self, operand: WeightOperand, rows: RowShard, key: float, factor: ScalarOverride
    ) -> OperandShard:
        """Return this rank's shard of an operand, quantized once per agreement.

        fully_shard calls it on its copy-in stream, and for some gathers on the compute stream.
        """
        x = self.values()
        assert x is not None
        self.amax_sync.amaxes.wait()
        cache_key = (
            self.amax_sync.agreement_id,
            key,
            x.data_ptr() if self.fsdp_parameter is None or self.fsdp_parameter.dtype is None else 0,
        )
        cached = self.quantized_shards.get(operand.gemm)
        if cached is None or cached[0] != cache_key:
            shard = quantize_shard(x, operand, rows, self.synced_amaxes[operand.gemm], factor)
            write_event = CrossStream([t for t in shard if isinstance(t, Tensor)], x.device)
            cached = self.quantized_shards[operand.gemm] = cache_key, shard, write_event
        cached[2].wait()
        return cached[1]

    def operand_gather(self, gemm: str, mesh: Any, key: float, factor: ScalarOverride) -> OperandGather:
        """Return this rank's input to the all-gather of the operand of "fprop" or "dgrad"."""
        operand, rows = self.operand(gemm), self.rows(mesh)
        own = self.quantized_shard(operand, rows, key, factor)
        write_events = self.amax_sync.amaxes, self.quantized_shards[operand.gemm][2]
        return OperandGather(
            operand, self.shape, rows, own, tensor_amax(self.synced_amaxes[operand.gemm]), write_events
        )


class ModelAmaxSync:
    """All weights of one model that are gathered as codes, and the agreement of ranks on their amaxes."""

    def __init__(self, root: nn.Module) -> None:
        self.root = weakref.ref(root)
        self.weight_states: list[GatheredWeightState] = []
        #: Number of the present agreement, and True once a forward of the root or an optimizer step has ended it.
        self.agreement_id = 0
        self.ended = True
        #: The agreed amaxes, with the CUDA stream that wrote them.
        self.amaxes = CrossStream((), torch.device("cpu"))
        #: True if a backward has read operands of this agreement.
        self.in_backward = False
        #: True within `micro_batches`, where the user declares that weights do not change.
        self.in_micro_batches = False
        self._compared = False
        #: Process groups of all ranks, including replicas, that hold shards of the first gathered weight.
        self.groups: tuple[Any, ...] = ()
        #: Process groups by their member ranks.
        self._groups: dict[tuple[int, ...], Any] = {}

    def ensure_synced_amaxes(self, weight_state: GatheredWeightState, mesh: Any) -> None:
        """Make sure that ranks have valid agreed amaxes before a weight is gathered.

        Raises:
            ValueError: on all ranks, if they prepared different weights or recipes.
        """
        if not self._compared:
            self._attach_hooks()
            self._compare(weight_state, mesh)
            self._compared = True
        backward = graph_task_id() != -1
        is_new_forward = (
            not backward
            and not self.in_micro_batches
            and (self.in_backward or weight_state.forward_agreement_id == self.agreement_id)
        )
        if self.ended or is_new_forward or weight_state.current_version() != weight_state.agreed_version:
            self._sync_amaxes(weight_state, mesh)
        if backward:
            self.in_backward = True
        else:
            weight_state.forward_agreement_id = self.agreement_id

    def begin_forward(self) -> None:
        """Begin a forward of the root: check that ranks agree on recipe, dtype and gradients, and invalidate old codes.

        Codes of an earlier forward are reused only within `micro_batches`.

        Raises:
            ValueError: on all ranks, if one runs under another recipe or dtype, or with other gradient settings.
        """
        self.ended = self.ended or not self.in_micro_batches
        check_agreement("a forward after gather_quantized", self._facts(), *self.groups)

    def _facts(self) -> dict[str, Any]:
        """Return the settings that must be the same on all ranks in a forward."""
        # A reverted layer has no recipe.
        recipes = [(weight_state, getattr(weight_state.layer(), "recipe", None)) for weight_state in self.weight_states]
        others = [f"{w.name} {own.text}" for w, own in recipes if own is not None and own is not w.recipe]
        device = "cpu" if self.weight_states[0].parameter is None else self.weight_states[0].parameter.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        recipe, root = active_context.now[0], self.root()
        return {
            "recipe of autocast": None if recipe is None else recipe.text,
            "recipes switched off": active_context.now[1],
            "recipes of layers": others or "those of gather_quantized",
            "dtype of torch.autocast": cast,
            "gradients": torch.is_grad_enabled(),
            "frozen": [] if root is None else [name for name, p in root.named_parameters() if not p.requires_grad],
            "micro_batches": self.in_micro_batches,
        }

    def _attach_hooks(self) -> None:
        root = self.root()
        by_layer = {weight_state.layer(): weight_state for weight_state in self.weight_states}
        for module, name, fsdp_parameter in managed_parameters(root) if root is not None else ():
            if name == "weight" and module in by_layer:
                by_layer[module].fsdp_parameter = fsdp_parameter
        for module in root.modules() if root is not None else ():
            for key, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, RollHistories):
                    # Run before fully_shard's own hook, so that a root's weights are gathered with the rolled factors.
                    module._forward_pre_hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]
        if root is not None:
            # This hook, too, must run before fully_shard's own.
            root.register_forward_pre_hook(_ForwardHook(self), prepend=True)
        _watch(self)

    def _compare(self, weight_state: GatheredWeightState, mesh: Any) -> None:
        """Raise on all ranks if they prepared different weights, or if a weight is offloaded to the CPU."""
        over = getattr(weight_state.find_parameter(), "device_mesh", mesh)
        self.groups = tuple(over.get_group(dim) for dim in range(over.ndim))
        offloaded = next(
            (w.name for w in self.weight_states if w.fsdp_parameter is not None and w.fsdp_parameter.offloads), None
        )
        error = (
            f"{offloaded} is gathered as codes, which are computed on the GPU, and CPUOffloadPolicy keeps its "
            "rows on the CPU: give fully_shard no offload_policy, or leave the layer out with "
            "gather_quantized(model, skip=[...])"
        )
        what = {
            w.name: f"{w.shape} cut along {w.tensor_parallel.axis} under {w.recipe.text}" for w in self.weight_states
        }
        check_agreement(
            "gather_quantized's first gather",
            {"weights": len(what), **what, **self._facts()},
            *self.groups,
            error="" if offloaded is None else error,
            advice="build and convert the model in the same way on all ranks before gather_quantized",
        )

    def _sync_amaxes(self, requesting: GatheredWeightState, mesh: Any) -> None:
        """Compute amaxes of all weights and all-reduce them: one all-reduce per mesh with blocks that cross shards."""
        self.agreement_id += 1
        self.ended = self.in_backward = False
        # Entries by fully_shard's process group, and for each group one weight that is also sharded by tensor
        # parallelism.
        by_group: dict[Any, list[_AmaxEntry]] = {}
        tp_weights: dict[Any, GatheredWeightState] = {}
        for weight_state in self.weight_states:
            x = weight_state.values()
            fsdp_mesh = mesh if weight_state.fsdp_parameter is None else weight_state.fsdp_parameter.mesh
            weight_state.synced_amaxes, weight_state.quantized_shards = {}, {}
            if x is None:
                continue
            group = fsdp_mesh.get_group()
            weight_state.agreed_version = weight_state.current_version()
            if weight_state.tensor_parallel.axis is not None:
                tp_weights.setdefault(group, weight_state)
            has_history = weight_state.recipe.delayed is not None
            for operand in weight_state.operands:
                own = amaxes(x, operand, weight_state.rows(fsdp_mesh), operand.spec.two_level or has_history)
                weight_state.synced_amaxes[operand.gemm] = own
                entries = [_AmaxEntry(weight_state, operand, key, bits) for key, bits in own.items()]
                by_group.setdefault(group, []).extend(
                    e for e in entries if fsdp_mesh.size() > 1 or not e.differs_by_rank
                )
        for group, entries in by_group.items():
            if entries:
                self._all_reduce_entries(entries, group, tp_weights.get(group), _device(requesting))
        synced = [
            bits
            for weight_state in self.weight_states
            for by_key in weight_state.synced_amaxes.values()
            for bits in by_key.values()
        ]
        self.amaxes = CrossStream(synced, synced[0].device if synced else torch.device("cpu"))

    def _all_reduce_entries(
        self, entries: Sequence[_AmaxEntry], group: Any, tp_weight: GatheredWeightState | None, device: torch.device
    ) -> None:
        """All-reduce the amaxes of weights that fully_shard shards over one group.

        Args:
            entries: the amaxes; results are written to `weight_state.synced_amaxes`.
            group: fully_shard's process group.
            tp_weight: a weight of this group that tensor parallelism shards too, or None. If present, its ranks take
                part.
            device: device for the collective.
        """
        every = [entry.bits.to(device) for entry in entries]
        tp_size, rank = 1, 0
        if tp_weight is not None and not all(entry.differs_by_rank for entry in entries):
            tp_size, rank = tp_weight.tensor_parallel.mesh.size(), tp_weight.tensor_parallel.mesh.get_local_rank()
            group = self._group(tp_weight)
        for i, (entry, bits) in enumerate(zip(entries, every, strict=True)):
            if entry.differs_by_rank and tp_size > 1:
                every[i] = bits.new_zeros((tp_size, bits.numel()))
                every[i][rank] = bits
        try:
            flat = all_reduce_amax(torch.cat([bits.view(-1) for bits in every]), group)
        except RuntimeError as error:
            raise RuntimeError(
                "the all-reduce of weight amaxes, which runs after each optimizer step, failed on this rank "
                f"({error}); a rank that has not stepped, or has run other forwards, does not call it: skip a "
                "step on all ranks or on none, for instance by an all-reduce of the condition"
            ) from error
        for entry, sent, received in zip(entries, every, flat.split([b.numel() for b in every]), strict=True):
            own = received if sent.dim() == 1 else received.view_as(sent)[rank]
            synced_amaxes: Any = entry.weight_state.synced_amaxes[entry.operand.gemm]
            synced_amaxes[entry.key] = own.to(entry.bits.device)

    def _group(self, weight_state: GatheredWeightState) -> Any:
        """Return the process group of all ranks with shards of a weight that tensor parallelism and fully_shard both
        shard.
        """
        mesh = weight_state.parameter.device_mesh
        # Mesh dimensions: the last is tensor parallelism, the one before is fully_shard, all earlier ones are replicas.
        ranks = mesh.mesh
        for index in mesh.get_coordinate()[:-2]:
            ranks = ranks[index]
        members = tuple(ranks.flatten().tolist())
        if members not in self._groups:
            if len(members) == weight_state.tensor_parallel.mesh.size():
                group = weight_state.tensor_parallel.mesh.get_group()
            elif len(members) == dist.get_world_size():
                group = None
            else:
                group = new_group(members, use_local_synchronization=True)
            self._groups[members] = group
        return self._groups[members]


def _device(weight_state: GatheredWeightState) -> torch.device:
    """Return the device type of the weight's mesh, on which the all-reduce runs."""
    kind = weight_state.parameter.device_mesh.device_type if weight_state.parameter is not None else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


class _ForwardHook:
    """Forward pre-hook of the root module that calls `ModelAmaxSync.begin_forward`."""

    def __init__(self, amax_sync: ModelAmaxSync) -> None:
        self._amax_sync = weakref.ref(amax_sync)

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: object) -> None:
        amax_sync = self._amax_sync()
        if amax_sync is not None and graph_task_id() == -1:
            amax_sync.begin_forward()


def remove_forward_hooks(root: nn.Module) -> None:
    """Remove the hooks of earlier preparations of a model. Garbage collection cannot do it: its time differs between
    ranks.
    """
    for module in root.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, _ForwardHook):
                del module._forward_pre_hooks[key]


@contextmanager
def micro_batches(model: nn.Module) -> Iterator[None]:
    """Declare that a model's weights do not change within the block, so that its forwards quantize them only once.

        with micro_batches(model):
            for x in batches:
                model(x).backward()
        optimizer.step()

    Outside the block, each forward quantizes this rank's rows of the weights prepared by `gather_quantized`, and all
    ranks agree on their amaxes again, since a step that writes through `.data` leaves no trace. Inside it, an optimizer
    step, an in-place write or a replaced parameter still triggers a new quantization. Enter and leave it on all ranks
    at the same steps.

    Args:
        model: model prepared by `gather_quantized`; without such weights the block has no effect.
    """
    # A prepared shard refers to the `ModelAmaxSync` it was prepared with.
    prepared: set[Any] = {getattr(local(p), "amax_sync", None) for p in model.parameters()} - {None}
    for each in prepared:
        each.ended, each.in_micro_batches = True, True
    try:
        yield
    finally:
        for each in prepared:
            each.ended, each.in_micro_batches = True, False


class _OptimizerStepHook:
    """True once the global optimizer post-step hook is registered."""

    hooked = False


#: Models whose agreement ends with an optimizer step on their weights.
_watched: "weakref.WeakSet[ModelAmaxSync]" = weakref.WeakSet()


def _watch(amax_sync: ModelAmaxSync) -> None:
    if not _OptimizerStepHook.hooked:
        _OptimizerStepHook.hooked = True
        register_optimizer_step_post_hook(_stepped)
    _watched.add(amax_sync)


def _stepped(optimizer: Optimizer, *_: object) -> None:
    """End the agreement of every model with weights in this optimizer."""
    for amax_sync in list(_watched):
        if not amax_sync.ended and any(
            getattr(local(p), "amax_sync", None) is amax_sync
            for group in optimizer.param_groups
            for p in group["params"]
        ):
            amax_sync.ended = True
            for weight_state in amax_sync.weight_states:
                # Drop codes of the old weight values.
                weight_state.quantized_shards = {}
