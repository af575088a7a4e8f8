"""Amaxes and codes of a rank's rows of the weights that fully_shard gathers as codes.

A rank quantizes its own rows, made of whole blocks. If a scale covers rows or columns of other ranks, ranks first agree
on its amax. The amaxes of all weights of a model are all-reduced together: started as soon as optimizers have stepped
all of them, by `precompute_scales`, or by the next forward. They, and the codes made with them, are valid until the
weight is written.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.backends.gpu import capture
from quaver.torch.backends.gpu.buffers import CrossStream
from quaver.torch.conversion.convert import RollHistories
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized, ScalarOverride, pack
from quaver.torch.numerics.rounding import SMALLEST_NORMAL_BITS, magnitude_bits, rotate
from quaver.torch.operations.functional import quantize
from quaver.torch.parallel.comm import start_all_reduce_amax
from quaver.torch.parallel.fsdp.torch_internals import FsdpParameter, local, managed_parameters
from quaver.torch.state.context import active_context
from quaver.torch.state.history import amax
from quaver.torch.state.history.sync import check_agreement, companion
from quaver.torch.state.layer_state import graph_task_id

# ---- one operand of a rank's rows ----


class WeightOperand(NamedTuple):
    """An operand made from a weight [N, K]: fprop's, or dgrad's, which is its transpose in the weight's layout."""

    #: "fprop" or "dgrad".
    gemm: str
    spec: QuantSpec

    @property
    def transposed(self) -> bool:
        """True if the operand is the transpose of the weight."""
        return self.gemm == "dgrad"

    @property
    def block(self) -> tuple[int | None, int | None]:
        """Rows and columns of the weight in a block; None for all of them."""
        return self.spec.block[::-1] if self.transposed else self.spec.block

    def oriented(self, x: Tensor) -> Tensor:
        """Return the weight x [N, K] in the operand's orientation."""
        return x.t() if self.transposed else x


def weight_operands(recipe: Recipe) -> tuple[WeightOperand, ...]:
    """Return the weight operands of a recipe; only one if fprop's codes also serve dgrad."""
    assert recipe.fprop.b is not None and recipe.dgrad.b is not None
    first = WeightOperand("fprop", recipe.fprop.b)
    return (first,) if recipe.reuse.weight else (first, WeightOperand("dgrad", recipe.dgrad.b))


class OperandAmaxes(NamedTuple):
    """int32 bits of the amaxes of an operand that ranks agree on."""

    #: Amaxes of its blocks, in the shape of `quantize`'s amax, if their scales cover other ranks' elements; else None.
    blocks: Tensor | None
    #: Amax of the whole weight, [1, 1], for two-level scales and histories; None otherwise and if it is the only block.
    tensor: Tensor | None


def own_amaxes(x: Tensor, operand: WeightOperand, need_blocks: bool, need_tensor: bool) -> OperandAmaxes:
    """Return what a rank's rows x [n, K] contribute to the agreed amaxes: those of blocks, of the weight, or both."""
    if not (need_blocks or need_tensor):
        return OperandAmaxes(None, None)
    y = operand.oriented(x).to(torch.float32)
    bits = magnitude_bits(rotate(y) if operand.spec.hadamard else y)
    blocks = reference.block_bits(bits, operand.spec) if need_blocks else None
    if not need_tensor:
        return OperandAmaxes(blocks, None)
    largest = bits.amax().view(1, 1) if bits.numel() else bits.new_zeros((1, 1))
    return OperandAmaxes(blocks, torch.where(largest < SMALLEST_NORMAL_BITS, 0, largest))


class OperandShard(NamedTuple):
    """A rank's rows of an operand.

    Exact: codes and scales are those of the whole weight. Both have the weight's layout, so that the bytes of a rank
        follow directly on those of the previous rank.
    """

    operand: WeightOperand
    #: The rows as an operand; `amax` is that of the whole weight.
    own: Quantized
    #: Makes the current CUDA stream wait for the one that wrote the tensors; the host does not wait.
    written: CrossStream

    @property
    def sent(self) -> list[Tensor]:
        """The inputs of the all-gather, uint8: codes [rows, bytes], and scales [block rows, bytes] if ranks differ in
        them.
        """
        codes, scale = self.own.data.view(torch.uint8), self.own.scale
        if self.operand.block[0] is None:
            return [codes]
        assert isinstance(scale, Tensor)
        return [codes, scale.view(-1).view(torch.uint8).view(scale.shape[0], scale.shape[1] * scale.element_size())]

    def assemble(self, gathered: Sequence[Tensor], n: int) -> Quantized:
        """Return the whole operand as a view of the bytes of all ranks.

        Args:
            gathered: what all ranks `sent`, in rank order.
            n: rows of the weight; further rows are padding.
        """
        self.written.wait()
        own, height = self.own, self.operand.block[0]
        data = gathered[0].view(-1, own.data.shape[1])[:n].view(own.data.dtype)
        scale, shape = own.scale, (own.shape[0], n) if own.transposed else (n, own.shape[1])
        if height is not None:
            assert isinstance(scale, Tensor)
            scale = gathered[1].view(-1, self.sent[1].shape[1])[: -(-n // height)].view(scale.dtype)
        return Quantized(data, scale, own.spec, shape, own.transposed, own.tensor_factor, own.amax)


def quantize_rows(x: Tensor, operand: WeightOperand, amaxes: OperandAmaxes, factor: ScalarOverride) -> OperandShard:
    """Quantize a rank's rows.

    Args:
        x: this rank's rows [n, K], float32, bfloat16 or float16, padded with zeros to as many as other ranks have.
        operand: the operand.
        amaxes: amaxes that ranks have agreed on.
        factor: delayed-scaling factor, as in `quantize`.
    """
    spec = operand.spec
    bits = amaxes.tensor if spec.two_level else amaxes.blocks
    q = quantize(operand.oriented(x), spec, None if bits is None else bits.view(torch.float32), factor=factor).plain()
    data, scale = q.data, q.scale
    if q.transposed != operand.transposed:
        codes = q.stored_codes().t()
        data = pack(codes) if spec.format.packed else codes.contiguous().view(data.dtype)
        scale = scale.t().contiguous() if isinstance(scale, Tensor) else scale
    largest = amaxes.blocks if spec.per_tensor else amaxes.tensor
    largest = None if largest is None else largest.view(torch.float32)
    own = Quantized(data, scale, spec, q.shape, operand.transposed, q.tensor_factor, largest)
    tensors = [t for t in (data, scale, q.tensor_factor, largest) if isinstance(t, Tensor)]
    return OperandShard(operand, own, CrossStream(tensors, x.device))


# ---- weights of a model ----


@dataclass
class GatheredOperands:
    """Operands that the last gather of a weight has brought."""

    #: Key of the delayed-scaling factor of the codes.
    factor_key: float = 0.0
    #: The pass that the gather was for: "forward", "backward" or "recomputation" of activations.
    for_pass: str = "forward"
    by_gemm: dict[str, Quantized] = field(default_factory=dict)


class GatheredWeightState:
    """State on this rank of one weight that is gathered as codes.

    Args:
        model: the state of its model.
        layer: the layer that multiplies by it.
        name: name of the layer.
        recipe: the recipe of its codes.
        shape: shape of the tensor that fully_shard shards: the weight, or this rank's tensor-parallel shard of it.
        tp_axis: axis along which tensor parallelism has sharded the weight before, or None.
        tp_mesh: mesh of the ranks with those shards.
    """

    def __init__(
        self,
        model: "GatheredModelState",
        layer: nn.Module,
        name: str,
        recipe: Recipe,
        shape: tuple[int, int],
        tp_axis: int | None = None,
        tp_mesh: Any = None,
    ) -> None:
        self.model, self.layer, self.name, self.recipe, self.shape = model, weakref.ref(layer), name, recipe, shape
        self.tp_axis, self.tp_mesh, self.operands = tp_axis, tp_mesh, weight_operands(recipe)
        #: fully_shard's object for the weight; None before the first gather or if this torch has other internals.
        self.fsdp_parameter: FsdpParameter | None = None
        #: The sharded parameter, as last seen.
        self.parameter: Any = None
        #: Mesh dimension over which fully_shard shards the weight; None before fully_shard or the first gather.
        self.mesh: Any = None
        #: Agreed amaxes by GEMM ("fprop" or "dgrad"); None if the weight was written since.
        self.amaxes: dict[str, OperandAmaxes] | None = None
        #: Version of the weight at the last agreement.
        self.agreed_version: tuple[int, ...] = ()
        #: This rank's rows by GEMM, with the key of the delayed-scaling factor used: its value, or its buffer's version
        #: if it is a tensor. Keys are compared for equality only.
        self.shards: dict[str, tuple[float, OperandShard]] = {}
        #: Passes ("forward", "backward") that needed an operand which their gather had not brought; later gathers for
        #: such a pass send both operands.
        self.passes_needing_both: set[str] = set()
        self.gathered = GatheredOperands()

    @property
    def why_high_precision(self) -> str:
        """Why the weight is gathered in high precision (a rank's shard ends within a block); "" if it is sent as codes.

        fully_shard's shards are checked once `mesh` is set.
        """
        n, ranks = self.shape[0], 1 if self.mesh is None else self.mesh.size()
        own = -(-n // ranks)
        for height in (operand.block[0] for operand in self.operands):
            if height is not None and own < n and own % height:
                return f"ranks have {own} rows each, which is no multiple of {height}"
        if self.tp_axis is not None:
            own, needed = self.shape[self.tp_axis], 1
            for operand in self.operands:
                rotated = self.tp_axis == 1 and operand.spec.hadamard
                needed = math.lcm(needed, operand.block[self.tp_axis] or 1, 16 if rotated else 1)
            if own % needed:
                return f"ranks of tensor parallelism have {own} features each, which is no multiple of {needed}"
        return ""

    def operand(self, gemm: str) -> WeightOperand:
        """Return the operand of "fprop" or "dgrad"; the only one if both are the same."""
        return self.operands[0 if gemm == "fprop" else -1]

    def sharded(self) -> Any:
        """Return the sharded parameter, as last seen if it is gathered now; None before fully_shard."""
        layer = self.layer()
        if self.fsdp_parameter is not None:
            self.parameter = self.fsdp_parameter.sharded
        elif layer is not None and hasattr(local(layer._parameters.get("weight")), "plain"):
            self.parameter = layer._parameters["weight"]
        return self.parameter

    def rows(self) -> Tensor | None:
        """Return this rank's rows in the dtype to quantize from, padded with zeros to as many as other ranks have.

        None on meta and before fully_shard.
        """
        shard: Any = local(self.sharded())
        if shard is None or self.mesh is None or shard.plain.is_meta:
            return None
        rows: Tensor = shard.plain.detach()
        missing = -(-self.shape[0] // self.mesh.size()) - rows.shape[0]
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        dtype = None if self.fsdp_parameter is None else self.fsdp_parameter.dtype
        return rows if dtype is None else rows.to(dtype)

    def invalidate(self) -> None:
        """Drop amaxes and codes: the weight was written."""
        self.amaxes, self.shards = None, {}

    def is_stale(self) -> bool:
        """Return True if the weight was written or replaced since ranks agreed on its amaxes."""
        return self.amaxes is None or self._version() != self.agreed_version

    def _version(self) -> tuple[int, ...]:
        parameter = self.sharded()
        plain: Any = getattr(local(parameter), "plain", None)
        if plain is None:
            return ()
        return parameter._version, plain.data_ptr(), -1 if plain.is_inference() else plain._version

    def measure(self) -> list[tuple[Tensor, list[Any]]]:
        """Compute this rank's contribution to the agreed amaxes.

        Returns:
            Each amax with the process groups over which it is reduced: fully_shard's and tensor parallelism's.
        """
        self.invalidate()
        x, reductions = self.rows(), list[tuple[Tensor, list[Any]]]()
        if x is None or self.why_high_precision:
            return reductions
        self.agreed_version, self.amaxes = self._version(), {}
        over_fsdp = [] if self.mesh.size() == 1 else [self.mesh.get_group()]
        over_tp = [] if self.tp_mesh is None else [self.tp_mesh.get_group()]
        for operand in self.operands:
            spec = operand.spec
            crosses_fsdp = operand.block[0] is None
            crosses_tp = self.tp_axis is not None and operand.block[self.tp_axis] is None
            need_tensor = (spec.two_level or self.recipe.delayed is not None) and not spec.per_tensor
            blocks, tensor = amaxes = own_amaxes(x, operand, crosses_fsdp or crosses_tp, need_tensor)
            self.amaxes[operand.gemm] = amaxes
            if blocks is not None:
                reductions.append((blocks, (over_fsdp if crosses_fsdp else []) + (over_tp if crosses_tp else [])))
            if tensor is not None:
                reductions.append((tensor, over_fsdp + over_tp))
        return reductions

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

    def shard(self, gemm: str, key: float, factor: ScalarOverride) -> OperandShard:
        """Return this rank's rows of an operand, quantized once until the weight is written or the factor changes.

        fully_shard calls it on its copy-in stream, and for some gathers on the compute stream.
        """
        operand = self.operand(gemm)
        cached = self.shards.get(operand.gemm)
        if cached is None or cached[0] != key:
            x = self.rows()
            assert x is not None and self.amaxes is not None
            self.model.agreed.wait()
            cached = self.shards[operand.gemm] = key, quantize_rows(x, operand, self.amaxes[operand.gemm], factor)
        cached[1].written.wait()
        return cached[1]


class GatheredModelState:
    """The weights of a model that are gathered as codes."""

    def __init__(self, root: nn.Module) -> None:
        self.root = weakref.ref(root)
        self.weights: list[GatheredWeightState] = []
        #: The agreed amaxes, with the CUDA stream that wrote them.
        self.agreed = CrossStream((), torch.device("cpu"))
        #: Process groups of all ranks, including replicas, that hold shards of the weights; () before the first gather.
        self.groups: tuple[Any, ...] = ()
        #: Handle of the root's forward pre-hook.
        self.hook: Any = None
        #: Waits for the agreement that a step has started; None if there is none.
        self.started: Callable[[], None] | None = None
        #: CUDA stream of the agreements; None before the first, and on a CPU.
        self.stream: Any = None
        #: True once the user calls `precompute_scales`; steps then start no agreement.
        self.explicit = False

    def ensure_amaxes(self, weight: GatheredWeightState, mesh: Any) -> None:
        """Make sure that ranks have agreed on amaxes of the present values before a weight is gathered.

        Args:
            weight: the weight.
            mesh: mesh dimension over which fully_shard shards it.
        Raises:
            ValueError: on all ranks, if they prepared different weights or recipes.
        """
        if not self.groups:
            self.begin()
        for each in self.weights if weight.mesh is None else ():
            # This torch has other internals.
            each.mesh = mesh
        if self.started is not None:
            self.agree()
        if not weight.why_high_precision and weight.is_stale():
            self.agree()

    def find_shards(self) -> None:
        """Find fully_shard's objects for the weights."""
        root, by_layer = self.root(), {weight.layer(): weight for weight in self.weights}
        for module, name, fsdp_parameter in managed_parameters(root) if root is not None else ():
            if name == "weight" and module in by_layer:
                by_layer[module].fsdp_parameter, by_layer[module].mesh = fsdp_parameter, fsdp_parameter.mesh

    def begin(self) -> None:
        """Before the first agreement, raise on all ranks if they prepared different weights, and register hooks."""
        self.find_shards()
        for weight in self.weights:
            if weight.fsdp_parameter is not None:
                weight.fsdp_parameter.initialize()
        meshes = dict.fromkeys(p.device_mesh for p in (weight.sharded() for weight in self.weights) if p is not None)
        groups = tuple(dict.fromkeys(mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)))
        offloaded = next(
            (w.name for w in self.weights if w.fsdp_parameter is not None and w.fsdp_parameter.offloads), ""
        )
        error = (
            f"{offloaded} is gathered as codes, which are computed on the GPU, and CPUOffloadPolicy keeps its "
            "rows on the CPU: give fully_shard no offload_policy, or leave the layer out with "
            "gather_quantized(model, skip=[...])"
        )
        facts = {w.name: f"{w.shape} sharded along {w.tp_axis} under {w.recipe.text}" for w in self.weights}
        check_agreement(
            "gather_quantized's first gather",
            {"weights": len(facts), **facts, **self._facts()},
            *groups,
            error=error if offloaded else "",
            advice="build and convert the model in the same way on all ranks before gather_quantized",
        )
        self.groups, root = groups, self.root()
        for module in root.modules() if root is not None else ():
            for key, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, RollHistories):
                    # Run before fully_shard's own hook, so that a root's weights are gathered with the rolled factors.
                    module._forward_pre_hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]
        if root is not None:
            # This hook, too, must run before fully_shard's own.
            self.hook = root.register_forward_pre_hook(partial(_begin_forward, weakref.ref(self)), prepend=True)
        _watch_optimizers()

    def begin_forward(self) -> None:
        """Begin a forward of the root: check that ranks agree on its settings, and compute amaxes if any rank has
        written a weight.

        Raises:
            ValueError: on all ranks, if one runs under another recipe or dtype, or with other gradient settings.
        """
        stale = any(not weight.why_high_precision and weight.is_stale() for weight in self.weights)
        needed = check_agreement(
            "a forward after gather_quantized", self._facts(), *self.groups, flag=self.agreements_needed(stale)
        )
        for _ in range(needed):
            self.agree()

    def agreements_needed(self, again: bool) -> int:
        """Return how many agreements this rank needs: to complete the one that a step has started, and one `again`.

        Every rank then makes as many as any of them needs, so that those that have started one agree with the others.
        """
        return (self.started is not None) + again

    def stepped(self) -> None:
        """Start an agreement if optimizers have stepped all weights that can be trained; the next forward waits for it.

        Its collectives have process groups of their own, so a rank that has not made this step joins in the forward.
        """
        if not self.groups or self.explicit or self.started is not None:
            return
        trained = (w for w in self.weights if not w.why_high_precision and getattr(w.parameter, "requires_grad", False))
        if all(weight.is_stale() for weight in trained) and not capture.capturing(self._device()):
            self.started = self._start()

    def agree(self) -> None:
        """Compute the amaxes of all weights, or wait for those that a step has started to compute."""
        wait, self.started = self.started or self._start(), None
        wait()

    def _start(self) -> Callable[[], None]:
        """Start to compute the amaxes of all weights, with one all-reduce for each mesh dimension they differ over.

        Returns:
            A function that waits. On a GPU all work is queued on a stream of its own, and `agreed` waits for it.
        """
        device = self._device()
        with self._side_stream(device):
            reductions = [each for weight in self.weights for each in weight.measure()]
            groups = list(dict.fromkeys(group for _, groups in reductions for group in groups))
            first = _reduce(reductions, groups[0]) if groups else None

            def finish() -> None:
                if first is not None:
                    first()
                for group in groups[1:]:
                    _reduce(reductions, group)()
                self.agreed = CrossStream([bits for bits, _ in reductions], device)

            if device.type == "cpu":
                return finish
            finish()
        return lambda: None

    @contextmanager
    def _side_stream(self, device: torch.device) -> Iterator[None]:
        """Queue the work of a block on another CUDA stream, after the work of the current one; nothing on a CPU."""
        if device.type != "cuda":
            yield
            return
        self.stream = self.stream or torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            yield

    def _device(self) -> torch.device:
        shards: Iterator[Any] = (local(weight.sharded()) for weight in self.weights)
        return next((shard.plain.device for shard in shards if shard is not None), torch.device("cpu"))

    def _facts(self) -> dict[str, Any]:
        """Return the settings that must be the same on all ranks in a forward."""
        # A reverted layer has no recipe.
        recipes = [(weight, getattr(weight.layer(), "recipe", None)) for weight in self.weights]
        others = [
            f"{weight.name} {own.text}" for weight, own in recipes if own is not None and own is not weight.recipe
        ]
        parameter = self.weights[0].parameter
        device = "cpu" if parameter is None else parameter.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        recipe, root = active_context.now[0], self.root()
        return {
            "recipe of autocast": None if recipe is None else recipe.text,
            "recipes switched off": active_context.now[1],
            "recipes of layers": others or "those of gather_quantized",
            "dtype of torch.autocast": cast,
            "gradients": torch.is_grad_enabled(),
            "frozen": [] if root is None else [name for name, p in root.named_parameters() if not p.requires_grad],
        }


def _reduce(reductions: Sequence[tuple[Tensor, list[Any]]], group: Any) -> Callable[[], None]:
    """Start to all-reduce the amaxes that ranks of a process group share; returns a function that waits."""
    members = [bits for bits, groups in reductions if group in groups]
    wait = start_all_reduce_amax(torch.cat([bits.reshape(-1) for bits in members]), companion(group, "weight amaxes"))

    def finish() -> None:
        try:
            flat = wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"the all-reduce of weight amaxes failed on this rank ({error}); a rank that has written no "
                "weights, or has run other forwards, does not call it: write weights on all ranks or on none, "
                "and skip a step by an all-reduce of the condition"
            ) from error
        for bits, agreed in zip(members, flat.split([bits.numel() for bits in members]), strict=True):
            bits.copy_(agreed.view_as(bits))

    return finish


@torch.compiler.disable
def _begin_forward(model: "weakref.ref[GatheredModelState]", *_: object) -> None:
    """Forward pre-hook of the root module that calls `GatheredModelState.begin_forward`, but not in recomputation."""
    state = model()
    if state is not None and graph_task_id() == -1:
        state.begin_forward()


# ---- explicit and automatic invalidation ----


@cache
def _watch_optimizers() -> None:
    """Register the hook below once."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Optimizer, *_: object) -> None:
    """Invalidate the weights that an optimizer has stepped, and start to compute their amaxes once all are stepped."""
    models: dict[GatheredModelState, None] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = getattr(local(parameter), "weight_state", None)
            if state is not None:
                state.invalidate()
                if state.model is not None:
                    models[state.model] = None
    for model in models:
        model.stepped()


def precompute_scales(model: nn.Module) -> None:
    """Compute the scales of all weights that fully_shard gathers as codes, by an all-reduce for each mesh dimension.

        optimizer.step()
        precompute_scales(model)

    Call it on all ranks, after weights were written. Without it, the last optimizer that steps these weights starts the
    same, beside other work, and the next forward waits for it; once called, it replaces that for the model. A forward
    does the same for weights that were written through the model's parameters, `.data` and `to_local()` included. It
    is needed after other writes, for instance through `.data` of a tensor of the state dict. Scales and codes are
    reused until a weight is written.

    Args:
        model: model after `gather_quantized` and fully_shard; without weights gathered as codes nothing happens.
    Raises:
        ValueError: on all ranks, if one of them makes another call.
    Source: torchao's `precompute_float8_dynamic_scale_for_fsdp` (github.com/pytorch/ao, torchao/float8/fsdp_utils.py).
    """
    shards: list[Any] = [local(p) for p in model.parameters()]
    for state in dict.fromkeys(shard.weight_state.model for shard in shards if hasattr(shard, "weight_state")):
        if state is None:
            continue
        state.explicit = True
        # Before its first forward fully_shard may still replace shards; the first gather computes the scales.
        if state.groups:
            needed = check_agreement("precompute_scales", {}, *state.groups, flag=state.agreements_needed(True))
            for _ in range(needed):
                state.agree()
