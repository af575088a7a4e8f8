"""Tensor subclasses by which fully_shard gathers a weight as codes; `codes` has those of weights stored in codes.

`Shard` holds one rank's rows in high precision. Optimizers, gradient clipping and checkpoints use it like any tensor.
fully_shard calls `fsdp_pre_all_gather` of the local tensor of a DTensor, and gathers the codes that it returns instead
of the rows. `GatheredWeight` is the parameter that the layer sees after the all-gather: it has no values, but quantized
operands for fprop and dgrad.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quaver.recipes.spec import Recipe
from quaver.torch.linear import general
from quaver.torch.numerics.quantized import Quantized, make_wrapper_subclass
from quaver.torch.parallel.comm import gather
from quaver.torch.parallel.fsdp.scales import GatheredOperands, GatheredWeightState, OperandShard
from quaver.torch.parallel.fsdp.torch_internals import local, set_local
from quaver.torch.quantized_tensor import PIN_MEMORY, TO_COPY
from quaver.torch.state.history import amax
from quaver.torch.state.layer_state import graph_task_id
from quaver.torch.state.selective_checkpoint import hide_from_policies

aten = torch.ops.aten
#: Operations whose result is again a Shard: those that fully_shard and nn.Module apply to parameters.
SHARD_OPS = {
    *(aten.empty_like.default, aten.new_zeros.default, aten.new_empty.default, aten.slice.Tensor, aten.copy_.default),
    *(aten.view.default, aten.as_strided.default, TO_COPY, PIN_MEMORY, aten.alias.default),
    *(aten.split.Tensor, aten.clone.default, aten.detach.default, aten.t.default, aten.reshape.default),
}
#: Operations that a `GatheredWeight` supports, which has no values.
GATHERED_WEIGHT_OPS = {aten.as_strided.default, aten.detach.default, aten.alias.default, aten.view.default}


@torch.compiler.disable(reason="a compiler takes a weight that fully_shard gathers as codes for a constant")
def eagerly(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function without tracing by torch.compile, which would treat the gathered tensors as constants."""
    return function(*args)


class Shard(Tensor):
    """A weight, or one rank's rows of it, that fully_shard gathers as codes."""

    plain: Tensor
    #: `GatheredWeightState`; of a `CodeShard` its `StoredShardInfo`.
    weight_state: Any
    eagerly = staticmethod(eagerly)

    @staticmethod
    def __new__(cls, plain: Tensor, weight_state: Any) -> "Shard":
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
    def why_high_precision(self) -> str:
        """Why fully_shard gathers the weight in high precision, or "" if it gathers codes; for `explain`."""
        if self.weight_state.mesh is None:
            self.weight_state.model.find_shards()
        return self.weight_state.why_high_precision

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
        weight_states: list[Any] = []

        def unwrapped(x: Any) -> Any:
            if isinstance(x, Shard):
                weight_states.append(x.weight_state)
                return x.plain
            return x

        plain_args, plain_kwargs = _each(unwrapped, (tuple(args), kwargs or {}))
        result = function(*plain_args, **plain_kwargs)
        for shard in _written(function, args, kwargs or {}):
            shard.weight_state.invalidate()
        if args and isinstance(args[0], Shard) and result is plain_args[0]:
            # An in-place operation.
            return args[0]
        # Writes to a view must be noticed, too.
        is_view = any(returned.alias_info is not None for returned in function._schema.returns)
        if function not in SHARD_OPS and not is_view:
            return result
        # A wrapper made in inference mode has no version counter, which torch needs for a view of it.
        with torch.inference_mode(False):
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

    # Hidden from selective checkpoints, because codes are cached: a recomputation runs other operations.
    @hide_from_policies
    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], "GatherMetadata | None"]:
        state = self.weight_state
        state.model.ensure_amaxes(state, mesh)
        if state.fsdp_parameter is not None:
            state.fsdp_parameter.check(state.name)
        if state.why_high_precision:
            rows = state.rows()
            assert rows is not None
            return (rows,), None
        if state.fsdp_parameter is not None:
            # Other operands than those of the last gather may have other sizes.
            state.fsdp_parameter.forget_outputs()
        key, factor = state.factor()
        shards = [state.shard(gemm, key, factor) for gemm in _operands_to_gather(state)]
        return tuple(t for shard in shards for t in shard.sent), GatherMetadata(shards, key, _current_pass(state))

    @hide_from_policies
    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: "GatherMetadata | None", dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        state = self.weight_state
        expected = (None if state.fsdp_parameter is None else state.fsdp_parameter.dtype) or self.dtype
        if dtype is not expected:
            raise ValueError(
                f"{state.name} is {expected} and is computed in {dtype}, which this torch does not reveal "
                "before it is quantized: give fully_shard no MixedPrecisionPolicy(param_dtype=...), or "
                "convert the model's dtype"
            )
        if metadata is None:
            # A view of the gathered rows, which fully_shard itself has written if there is one already.
            return None if out is not None else (outputs[0], ())
        state.gathered = GatheredOperands(metadata.factor_key, metadata.current_pass)
        arrived = list(outputs)
        for shard in metadata.shards:
            # fully_shard over one rank gathers only the first input.
            tensors = [arrived.pop(0) for _ in shard.sent] if state.mesh.size() > 1 else shard.sent
            state.gathered.by_gemm[shard.operand.gemm] = shard.assemble(tensors, state.shape[0])
        return None if out is not None else (GatheredWeight(state, dtype, self.device), ())


def _written(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shard]:
    """Return the shards that an operation writes to."""
    schema = function._schema.arguments
    values = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(schema)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    flat = [x for value in values for x in (value if isinstance(value, list | tuple) else [value])]
    return [x for x in flat if isinstance(x, Shard)]


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to every leaf of nested tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        return type(value)([_each(change, x) for x in value])
    if isinstance(value, dict):
        return {key: _each(change, x) for key, x in value.items()}
    return change(value)


class GatherMetadata(NamedTuple):
    """Data passed from `fsdp_pre_all_gather` to `fsdp_post_all_gather`."""

    shards: Sequence[OperandShard]
    #: Key that identifies the delayed-scaling factor used for these codes.
    factor_key: float
    #: The pass that reads this gather: "forward", "backward" or "recomputation"; see `_current_pass`.
    current_pass: str


class GatheredWeight(Tensor):
    """A gathered weight [N, K] without values, whose operands are in its state; implements
    `quaver.torch.linear.general.PrequantizedWeight`.
    """

    weight_state: GatheredWeightState
    eagerly = staticmethod(eagerly)

    @staticmethod
    def __new__(cls, weight_state: Any, dtype: torch.dtype, device: torch.device) -> "GatheredWeight":
        wrapper: GatheredWeight = make_wrapper_subclass(cls, torch.Size(weight_state.shape), dtype=dtype, device=device)
        wrapper.weight_state = weight_state
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
        if function in GATHERED_WEIGHT_OPS:
            return cls(wrapper.weight_state, wrapper.dtype, wrapper.device)
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
        state = self.weight_state
        gemm, factor_key = state.operand(side).gemm, general.factor_key(call)
        if gemm not in state.gathered.by_gemm:
            state.passes_needing_both.add(state.gathered.for_pass)
        if state.gathered.factor_key != factor_key:
            state.gathered = GatheredOperands(factor_key, state.gathered.for_pass)
        operands = state.gathered.by_gemm
        if gemm not in operands:
            shard = state.shard(gemm, factor_key, None if call.factors is None else call.factors[1])
            with torch.no_grad():
                waits = [gather(t, 0, state.mesh.get_group(), kind="weights") for t in shard.sent]
                operands[gemm] = shard.assemble([wait() for wait in waits], state.shape[0])
        q = operands[gemm]
        if call.training and call.factors is not None and side == "fprop":
            amax.record(call.layer, amax.WEIGHT, q.amax)
        return q.T if side == "dgrad" and len(state.operands) == 1 else q


def _current_pass(state: GatheredWeightState) -> str:
    """Return the pass that needs the current gather: "forward", "backward" or "recomputation" of activations."""
    if state.fsdp_parameter is not None and state.fsdp_parameter.in_backward:
        return "backward"
    return "forward" if graph_task_id() == -1 else "recomputation"


def _operands_to_gather(state: GatheredWeightState) -> list[str]:
    """Return the GEMMs whose operands the current gather sends: only one if its buffers are freed before another pass
    reads them.
    """
    if len(state.operands) == 1:
        return ["fprop"]
    current_pass = _current_pass(state)
    for_one_pass = state.fsdp_parameter is not None and state.fsdp_parameter.for_one_pass
    if not for_one_pass or current_pass in state.passes_needing_both:
        return ["fprop", "dgrad"]
    return ["dgrad" if current_pass == "backward" else "fprop"]


# ---- wrapped parameters ----

#: Class and state of the shard of each prepared layer; the state is None if its weight is no longer gathered as codes.
_wrapped: "weakref.WeakKeyDictionary[nn.Module, tuple[type[Shard], Any]]" = weakref.WeakKeyDictionary()


def wrap(layer: nn.Module, kind: type[Shard], state: Any) -> None:
    """Make a layer's weight, or its shard, a `kind` with this state; a plain tensor if the state is None."""
    if layer not in _wrapped:
        layer.register_state_dict_post_hook(_write_plain)
        layer.register_load_state_dict_post_hook(_wrap_again)
    _wrapped[layer] = kind, state
    parameter: Any = layer._parameters["weight"]
    shard = local(parameter)
    if shard is not None:
        # fully_shard's shard, or a tensor-parallel shard that fully_shard will shard again.
        set_local(parameter, getattr(shard, "plain", shard).detach())
    _wrap_again(layer)


def _wrap_again(layer: nn.Module, _: object = None) -> None:
    """Wrap the weight if it is plain, as after load_state_dict with assign=True."""
    (kind, state), parameter = _wrapped.get(layer, (Shard, None)), layer._parameters.get("weight")
    shard = local(parameter)
    if parameter is None or state is None or isinstance(parameter if shard is None else shard, Shard):
        return
    if shard is None:
        layer._parameters["weight"] = nn.Parameter(kind(parameter.detach(), state), parameter.requires_grad)
    else:
        set_local(parameter, kind(shard, state))


def _write_plain(layer: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replace a Shard in a state dict by the plain tensor with the same memory."""
    value: Any = state_dict.get(prefix + "weight")
    shard: Any = value if isinstance(value, Shard) else local(value)
    if not isinstance(shard, Shard) or value.requires_grad:
        return
    own: Any = layer._parameters["weight"]
    # Writes to this tensor change the version of the layer's.
    plain = getattr(own if local(own) is None else local(own), "plain", shard.plain).detach()
    if value is not shard:
        mesh, placements = value.device_mesh, value.placements
        plain = DTensor.from_local(plain, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())
    state_dict[prefix + "weight"] = plain
