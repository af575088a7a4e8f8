"""Tensor subclasses by which fully_shard gathers a weight as codes; `codes` has those of weights stored in codes.

`Shard` holds one rank's rows in high precision. Optimizers, gradient clipping and checkpoints use it like any tensor.
fully_shard calls `fsdp_pre_all_gather` of the local tensor of a DTensor, and gathers the codes that it returns instead
of the rows. `GatheredWeight` is the parameter that the layer sees after the all-gather: it has no values, but quantized
operands for fprop and dgrad.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quaver.recipes.spec import Recipe
from quaver.torch.linear import general
from quaver.torch.numerics.quantized import Quantized, make_wrapper_subclass
from quaver.torch.parallel.comm import count_collective
from quaver.torch.parallel.fsdp.amax_sync import GatheredWeightState
from quaver.torch.parallel.fsdp.operands import OperandGather, scale_buffer_shape
from quaver.torch.quantized_tensor import PIN_MEMORY, TO_COPY
from quaver.torch.state.history import amax
from quaver.torch.state.layer_state import graph_task_id

aten = torch.ops.aten
#: Operations whose result is again a Shard: those that fully_shard and nn.Module apply to parameters.
SHARD_OPS = {
    *(aten.empty_like.default, aten.new_zeros.default, aten.new_empty.default, aten.slice.Tensor, aten.copy_.default),
    *(aten.view.default, aten.as_strided.default, TO_COPY, PIN_MEMORY, aten.alias.default),
    *(aten.split.Tensor, aten.clone.default, aten.detach.default, aten.t.default, aten.reshape.default),
}
#: Operations that a gathered weight without values supports.
OF_NO_VALUES = {aten.as_strided.default, aten.detach.default, aten.alias.default, aten.view.default}


@torch.compiler.disable(reason="a compiler takes a weight that fully_shard gathers as codes for a constant")
def eagerly(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function without tracing by torch.compile, which would treat the gathered tensors as constants."""
    return function(*args)


class Shard(Tensor):
    """A weight, or one rank's rows of it, that fully_shard gathers as codes."""

    plain: Tensor
    weight_state: GatheredWeightState
    eagerly = staticmethod(eagerly)

    @staticmethod
    def __new__(cls, plain: Tensor, weight_state: GatheredWeightState) -> "Shard":
        shard: Shard = make_wrapper_subclass(
            cls,
            plain.size(),
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=cls.reported_dtype(plain, weight_state),
            layout=plain.layout,
            device=plain.device,
            requires_grad=plain.requires_grad,
        )
        shard.plain, shard.weight_state = plain, weight_state
        return shard

    def __init__(self, *_: object) -> None:
        pass

    @classmethod
    def reported_dtype(cls, plain: Tensor, weight_state: Any) -> torch.dtype:
        """Return the dtype that the tensor reports."""
        return plain.dtype

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Shard({self.weight_state.name}, {self.plain})"

    @property
    def amax_sync(self) -> Any:
        """The `ModelAmaxSync` of the weight's model; an optimizer step on this shard invalidates its amaxes."""
        return self.weight_state.amax_sync

    @property
    def data(self) -> Tensor:
        """The shard detached from autograd."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, values: Tensor) -> None:
        # nn.Module assigns `.data` to change dtype or device, and fully_shard to move to its mesh. Without this setter
        # only the wrapper would change.
        plain = getattr(values, "plain", values).detach()
        torch.Tensor.data.__set__(self, type(self)(plain, self.weight_state))  # type: ignore[attr-defined]
        self.plain = plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle as a plain tensor.
        return self.plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.plain.detach().clone()
        # A copied layer is not prepared for quantized gathers.
        return nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        weight_states: list[GatheredWeightState] = []

        def unwrapped(x: Any) -> Any:
            if isinstance(x, Shard):
                weight_states.append(x.weight_state)
                return x.plain
            return x

        plain_args, plain_kwargs = _each(unwrapped, (tuple(args), kwargs or {}))
        result = function(*plain_args, **plain_kwargs)
        if args and isinstance(args[0], Shard) and result is plain_args[0]:
            # An in-place operation.
            return args[0]
        if function not in SHARD_OPS:
            return result
        return _each(lambda x: cls(x, weight_states[0]) if isinstance(x, Tensor) else x, result)

    # Called by a layer whose weight was prepared but never gathered by fully_shard: both methods raise.

    def check_recipe(self, layer: nn.Module, recipe: Recipe | None) -> NoReturn:
        raise ValueError(
            f"{self.weight_state.name} was prepared by gather_quantized but is not managed by fully_shard: call "
            "fully_shard on the model, or on the module that contains this layer, before the first forward"
        )

    def quantized_operand(self, call: Any, side: str) -> NoReturn:
        self.check_recipe(call.layer, call.recipe)

    # FSDP extension hooks. With more than one argument, fully_shard would require shards of equal size and scales would
    # not fit.

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], "GatherMetadata"]:
        weight_state = self.weight_state
        weight_state.amax_sync.ensure_synced_amaxes(weight_state, mesh)
        fsdp_parameter = weight_state.fsdp_parameter
        if fsdp_parameter is not None:
            fsdp_parameter.check(weight_state.name)
        key, factor = weight_state.factor()
        gemms = _operands_to_gather(weight_state)
        operand_gathers = [weight_state.operand_gather(gemm, mesh, key, factor) for gemm in gemms]
        inputs = [
            t
            for operand_gather in operand_gathers
            for t in (operand_gather.local_shard.codes, operand_gather.local_shard.scales)
            if t is not None
        ]
        shapes = [t.shape for t in inputs]
        if fsdp_parameter is not None and shapes != weight_state.last_input_shapes:
            fsdp_parameter.forget_outputs()
        weight_state.last_input_shapes = shapes
        return tuple(inputs), GatherMetadata(operand_gathers, key, mesh, _current_pass(weight_state))

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: "GatherMetadata", dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        weight_state = self.weight_state
        x = weight_state.values()
        assert x is not None
        if dtype is not x.dtype:
            raise ValueError(
                f"{weight_state.name} is {x.dtype} and is computed in {dtype}, which this torch does not reveal "
                "before it is quantized: give fully_shard no MixedPrecisionPolicy(param_dtype=...), or "
                "convert the model's dtype"
            )
        gathered = list(outputs)
        if out is None:
            buffers = _scale_buffers(weight_state, metadata.mesh, x.device)
            wrapper = GatheredWeight(weight_state, dtype, x.device, GatheredOperands({}, metadata, buffers))
        else:
            wrapper = getattr(out, "_local_tensor", out)
        contents = wrapper.contents
        contents.operands.clear()
        contents.gather_metadata = metadata
        for operand_gather in metadata.operand_gathers:
            tensors = [
                t for t in (operand_gather.local_shard.codes, operand_gather.local_shard.scales) if t is not None
            ]
            if operand_gather.rows.ranks > 1:
                tensors = [gathered.pop(0) for _ in tensors]
            contents.operands[operand_gather.operand.gemm] = operand_gather.assemble(
                tensors, contents.buffers[operand_gather.operand.gemm]
            )
        if out is not None:
            return None
        return wrapper, tuple(buffer for buffer in contents.buffers.values() if buffer is not None)


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to every leaf of nested tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        return type(value)([_each(change, x) for x in value])
    if isinstance(value, dict):
        return {key: _each(change, x) for key, x in value.items()}
    return change(value)


class GatherMetadata(NamedTuple):
    """Data passed from `fsdp_pre_all_gather` to `fsdp_post_all_gather`."""

    operand_gathers: Sequence[OperandGather]
    #: Key that identifies the delayed-scaling factor used for these codes.
    factor_key: float
    mesh: Any
    #: The pass that reads this gather: "forward", "backward" or "recomputation"; see `_current_pass`.
    current_pass: str


class GatheredOperands:
    """Contents of a gathered weight: operands by GEMM, and scale buffers, which fully_shard frees with its own."""

    __slots__ = ("buffers", "gather_metadata", "operands")

    def __init__(
        self, operands: dict[str, Quantized], metadata: GatherMetadata, buffers: dict[str, Tensor | None]
    ) -> None:
        self.operands, self.gather_metadata, self.buffers = operands, metadata, buffers


class GatheredWeight(Tensor):
    """A gathered weight [N, K] without values, with whole operands; implements
    `quaver.torch.linear.general.PrequantizedWeight`.
    """

    weight_state: GatheredWeightState
    contents: GatheredOperands
    eagerly = staticmethod(eagerly)

    @staticmethod
    def __new__(cls, weight_state: Any, dtype: torch.dtype, device: torch.device, contents: Any) -> "GatheredWeight":
        wrapper: GatheredWeight = make_wrapper_subclass(cls, torch.Size(weight_state.shape), dtype=dtype, device=device)
        wrapper.weight_state, wrapper.contents = weight_state, contents
        return wrapper

    def __init__(self, *_: object) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.weight_state.name}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        wrapper = next(x for x in args if isinstance(x, GatheredWeight))
        if function in OF_NO_VALUES:
            return cls(wrapper.weight_state, wrapper.dtype, wrapper.device, wrapper.contents)
        if function is aten.zeros_like.default:
            # Zero gradient of a weight that did not contribute to the loss.
            return torch.zeros(wrapper.shape, dtype=wrapper.dtype, device=wrapper.device)
        raise ValueError(
            f"{function} reads the weight of {wrapper.weight_state.name}, which is gathered only as codes, so only "
            "the layer's own GEMMs can use it; leave the layer out with gather_quantized(model, skip=[...]), "
            "and revert no layer after gather_quantized"
        )

    def check_recipe(self, layer: nn.Module, recipe: Recipe | None) -> None:
        if recipe is not self.weight_state.recipe:
            under = "no recipe" if recipe is None else f"{recipe!r}"
            raise ValueError(
                f"{self.weight_state.name} runs under {under}, and its weight was gathered in the codes of "
                f"{self.weight_state.recipe!r}: use that recipe, or leave the layer out with "
                "gather_quantized(model, skip=[...])"
            )

    def quantized_operand(self, call: Any, side: str) -> Quantized:
        """Return the operand of a GEMM ("fprop" or "dgrad"). Gather it now if the last gather lacks it or used another
        factor.
        """
        weight_state, contents = self.weight_state, self.contents
        if side == "dgrad":
            weight_state.amax_sync.in_backward = True
        gemm = weight_state.operand(side).gemm
        factor_key: float = general.factor_key(call)
        if gemm not in contents.operands or contents.gather_metadata.factor_key != factor_key:
            self._gather_now(gemm, factor_key, call)
        q = contents.operands[gemm]
        if call.training and call.factors is not None and side == "fprop":
            amax.record(call.layer, amax.WEIGHT, q.amax)
        return q.T if side == "dgrad" and weight_state.fprop_serves_dgrad else q

    def _gather_now(self, gemm: str, factor_key: float, call: Any) -> None:
        weight_state, contents = self.weight_state, self.contents
        if gemm not in contents.operands:
            weight_state.passes_needing_both.add(contents.gather_metadata.current_pass)
        if contents.gather_metadata.factor_key != factor_key:
            contents.operands.clear()
        factor = None if call.factors is None else call.factors[1]
        operand_gather = weight_state.operand_gather(gemm, contents.gather_metadata.mesh, factor_key, factor)
        contents.gather_metadata = contents.gather_metadata._replace(factor_key=factor_key)
        with torch.no_grad():
            inputs = [t for t in (operand_gather.local_shard.codes, operand_gather.local_shard.scales) if t is not None]
            outputs = [_gather(t, contents.gather_metadata.mesh) for t in inputs]
            contents.operands[gemm] = operand_gather.assemble(outputs)


def _gather(t: Tensor, mesh: Any) -> Tensor:
    every, own = t.new_empty((mesh.size() * t.shape[0], *t.shape[1:])), t.contiguous()
    with count_collective("weights", "gather", own, mesh.get_group()):
        dist.all_gather_into_tensor(every, own, mesh.get_group())
    return every


def _current_pass(weight_state: GatheredWeightState) -> str:
    """Return the pass that needs the current gather: "forward", "backward" or "recomputation" of activations."""
    if weight_state.fsdp_parameter is not None and weight_state.fsdp_parameter.in_backward:
        return "backward"
    return "forward" if graph_task_id() == -1 else "recomputation"


def _operands_to_gather(weight_state: GatheredWeightState) -> list[str]:
    """Return the GEMMs whose operands the current gather sends: only one if its buffers are freed before another pass
    reads them.
    """
    if weight_state.fprop_serves_dgrad:
        return ["fprop"]
    current_pass = _current_pass(weight_state)
    if (
        weight_state.fsdp_parameter is None
        or not weight_state.fsdp_parameter.for_one_pass
        or current_pass in weight_state.passes_needing_both
    ):
        return ["fprop", "dgrad"]
    return ["dgrad" if current_pass == "backward" else "fprop"]


def _scale_buffers(weight_state: GatheredWeightState, mesh: Any, device: torch.device) -> dict[str, Tensor | None]:
    """Allocate buffers for the ordered scales of both operands, because a later gather may need the other one."""
    shapes = {
        operand.gemm: scale_buffer_shape(operand, weight_state.rows(mesh), weight_state.shape[1])
        for operand in weight_state.operands
    }
    return {
        name: None if shape is None else torch.empty(shape, dtype=torch.uint8, device=device)
        for name, shape in shapes.items()
    }
