"""Linear layer y = x @ weight.T + bias whose three GEMMs quantize their operands by a recipe.

`Linear` is a drop-in replacement of `nn.Linear`. It resolves the recipe, checks its arguments, finds the `LinearPlan`
of its shapes and calls `quaver.torch.linear.autograd.LinearFunction`.
"""

import copy
import inspect
import itertools
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver import recipes
from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.backends.gpu import capture
from quaver.torch.backends.gpu import device as gpu
from quaver.torch.linear import general, plan_cpu, stored_weight
from quaver.torch.linear.autograd import IDENTITY_INPUT, LinearFunction, LinearSetup, apply, eager_apply
from quaver.torch.linear.general import is_prequantized
from quaver.torch.linear.plan import LinearCall, LinearPlan
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import operation, ops
from quaver.torch.operations.autograd import forward_level, refuse_transforms, transforms_active
from quaver.torch.operations.ops import MATMUL, QUANTIZE, any_autocast_enabled, without_autocast
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.state import layer_state, observer, selective_checkpoint, weight_cache
from quaver.torch.state.buffers import STATE, create_state_buffers, match_state, outlast, saving
from quaver.torch.state.context import active_context, in_force, record_compiled_layer
from quaver.torch.state.history import amax, scaling_step
from quaver.torch.state.layer_state import NEVER, LayerState, device_of, graph_task_id, state_of
from quaver.torch.state.noise import assign_number, fresh_count, name_streams

# ---- Linear ----


def recipe_of(layer: "Quantizable", compiling: bool) -> Recipe | None:
    """Return the recipe of this forward; a forward that runs inside backward gets the recipe of the layer's last
    forward.
    """
    recipe = in_force(layer.recipe)
    if not compiling:
        active_context.layer_ran = True
        state = layer._state
        # A forward inside backward is a recomputation. autocast has ended by then, so the recipe of the first forward
        # is reused.
        if graph_task_id() != -1:
            if layer_state.state.replay is not None:
                return recipe
            if state.last is not NEVER:
                recipe = state.last
        state.last = recipe
        if recipe is not None and recipe.stochastic:
            # Needed in each forward, because the layer reserves its number in this autocast. Without gradients too: a
            # reentrant checkpoint enables them only in backward, after autocast has ended.
            assign_number(layer)
    elif recipe is not None and recipe.quantizes and recipe.fprop.a is None:
        # The operators of a quantized fprop record this themselves.
        record_compiled_layer()
    return recipe


def weight_and_bias(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias, ten times faster than `module.__getattr__`; parametrized ones are attributes."""
    parameters = layer._parameters
    weight: Tensor = parameters["weight"] if "weight" in parameters else layer.weight  # type: ignore[assignment] # noqa: SIM401
    bias: Tensor | None = parameters["bias"] if "bias" in parameters else layer.bias  # noqa: SIM401
    return weight, bias


class Quantizable(nn.Module):
    """Base class of modules whose GEMMs follow a recipe; it holds the recipe and state that survives moves, copies,
    loads.
    """

    #: Recipe of this layer, or None to use the recipe of the surrounding `autocast`.
    recipe: Recipe | None = None
    seed: int = 0
    #: State of the layer, the object that `state_of` returns, read here without a call.
    _state: LayerState
    #: Spec of a weight that is stored quantized (`quaver.torch.quantized_init`), or None for an ordinary weight.
    weight_spec: QuantSpec | None = None
    #: dtype that a stored quantized weight dequantizes to.
    weight_dtype: torch.dtype | None = None
    #: True if compiled training graphs read the weight cache: see `quaver.torch.cache_compiled_weights`.
    cache_compiled_weight: bool = False

    @property
    def compute_dtype(self) -> torch.dtype:
        """`weight_dtype` of a weight that is stored as codes; other layers raise AttributeError.

        PEFT reads this attribute where it would otherwise cast its own parameters to the dtype of the codes. Reads from
        PEFT warn, because PEFT does not support stored codes; use LoRA from `quaver.integrations.peft.over_codes`,
        which does not read the attribute. Other readers, such as `inspect.getmembers`, do not warn.
        """
        if self.weight_spec is None:
            raise AttributeError(f"{type(self).__name__} has no compute_dtype: its weight is in high precision")
        frame = inspect.currentframe()
        reader = None if frame is None else frame.f_back
        if reader is not None and reader.f_globals.get("__name__", "").partition(".")[0] == "peft":
            warnings.warn(stored_weight.ADAPTED, stacklevel=2)
        dtype: torch.dtype = self.__dict__["weight_dtype"]
        return dtype

    def cached_operand(self, weight: Tensor, recipe: Recipe, transposed: bool) -> Quantized | None:
        """Return the weight's operand for an operator of a compiled graph; see `general.cached_operand`."""
        return general.cached_operand(self, weight, recipe, transposed)

    def __getattr__(self, name: str) -> Any:
        # torch.distributed.checkpoint looks up each key of a state dict as an attribute.
        if name in stored_weight.SCALES:
            scales = stored_weight.scales_of(self)
            if name in scales:
                return scales[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            # FSDP2 sets the same parameter object after each all-gather, so neither identity nor version shows new
            # values.
            weight_cache.free(self)
        super().__setattr__(name, value)
        if name == "weight" and isinstance(value, QuantizedTensor) and not stored_weight.is_prepared(self):
            self.__dict__.update(weight_spec=value.spec, weight_dtype=value.dtype)
            self.__dict__.setdefault("keep_initial", False)
            stored_weight.register_stored_weight(self)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move and cast the parameters; histories and counts keep their dtype and, unless they were on meta, their
        values.
        """
        moved_buffers = {
            name: self._buffers.pop(name) for name in (*STATE, *stored_weight.SCALES) if name in self._buffers
        }
        try:
            if self.weight_spec is None:
                super()._apply(fn, recurse)
            else:
                stored_weight.moved(self, fn, super()._apply)
        finally:
            # Restore the buffers even if the move raises.
            self._buffers.update(moved_buffers)
            # Casting there and back can put other values at the same address, so the cached weight is invalid.
            weight_cache.drop(self)
        for name, buffer in moved_buffers.items():
            assert buffer is not None
            device = device_of(self)
            if not buffer.is_meta or device.type == "meta":
                self._buffers[name] = buffer.to(device)
            else:
                self._buffers[name] = fresh_count(self) if name == "count" else torch.zeros_like(buffer, device=device)
        outlast(self)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return stored_weight.copyable_state(self, {**self.__dict__, "_state": copy.copy(state_of(self))})

    def __deepcopy__(self, memo: dict[int, Any]) -> "Quantizable":
        # A parametrized module has its own `__deepcopy__`, which would share this layer's private state.
        copied: Quantizable = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(Quantizable.__getstate__(self), memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.recipe is not None:
            self.recipe = recipes.get(self.recipe)
        if self.weight_spec is not None:
            stored_weight.register_stored_weight(self)
        outlast(self)
        amax.register(self)
        name_streams(self)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if saving.decoded is not None:
            for name in STATE:
                destination.pop(prefix + name, None)
            if self.weight_spec is not None:
                stored_weight.decode(self, destination, prefix, saving.decoded)
            return
        stored_weight.codes_to_bytes(destination, prefix + "weight")
        key = prefix + "history"
        if key in destination:
            warn_unsynchronized_history(self)
            # The history is stored column-major; safetensors accepts contiguous tensors only.
            destination[key] = destination[key].contiguous()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *args: Any
    ) -> None:
        _concatenate_pieces(self, state_dict, prefix)
        match_state(self, state_dict, prefix, missing)
        stored_weight.adapt(self, state_dict, prefix, missing, args[-1])
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *args)
        outlast(self)
        if self.weight_spec is not None:
            stored_weight.register_stored_weight(self)


def _concatenate_pieces(layer: nn.Module, state_dict: Any, prefix: str) -> None:
    """Concatenate the pieces of a weight and bias in a state dict into the single tensors that this layer has.

    `quaver.torch.parallel.ColwiseParallel` saves the pieces, such as q, k and v, as `weight.<name>`; pieces without
    names are numbered.
    """
    pieces = state_of(layer).pieces
    for name in ("weight", "bias"):
        keys = [f"{prefix}{name}.{piece}" for piece in pieces]
        if not keys:
            numbered = map(f"{prefix}{name}.{{}}".format, itertools.count())
            keys = [*itertools.takewhile(state_dict.__contains__, numbered)]
        if keys and name in layer._parameters and all(key in state_dict for key in keys):
            parts = [state_dict.pop(key) for key in keys]
            state_dict[prefix + name] = torch.cat([p.full_tensor() if hasattr(p, "full_tensor") else p for p in parts])


class Linear(Quantizable, nn.Linear):
    """`nn.Linear` whose GEMMs follow a recipe: the layer's own, else that of the innermost `autocast`, else none.

    Args:
        in_features, out_features, bias, device, dtype: as in `nn.Linear`. The state dict is the same too. Delayed
            scaling adds the buffers `history` [length, 3] and `factor` [3]. Stochastic rounding adds `count` [3]:
            quantizations of grad_output, quantizations of its transpose, and the number of the noise stream.
        recipe: name or Recipe that this layer always uses. A delayed recipe updates its scaling history when the
            outermost autocast is entered, or in the forward of a converted model, so run the model in one of them.
        seed: seed of stochastic rounding.

    The input is [..., in_features] in float32, bfloat16 or float16. It has the weight's dtype, unless torch.autocast is
    active or the weight is stored in eight bits. Any number of tokens is accepted, including zero. float64 runs
    unquantized, with a warning.

    Codes and scales equal those of `quaver.reference` bit for bit. Outputs and gradients in float32 have a relative RMS
    error of at most 1e-6 against the same products in float64.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe | None = None,
        seed: int = 0,
    ) -> None:
        self.__dict__["_state"] = LayerState()
        super().__init__(in_features, out_features, bias, device, dtype)
        self.seed = seed
        amax.register(self)
        if recipe is not None:
            self.recipe = recipes.get(recipe)
            create_state_buffers(self, self.recipe)
        stored_weight.store_if_quantized_init(self)
        operation.register_flop_formulas()

    def reset_parameters(self) -> None:
        """Initialize weight and bias as nn.Linear does."""
        if self.weight_spec is None:
            super().reset_parameters()
        else:
            stored_weight.reset(self)

    def set_weight(self, value: Tensor) -> None:
        """Overwrite the weight in place with `value` [out_features, in_features]; a stored quantized weight is
        quantized again.
        """
        stored_weight.write(self, value)

    def forward(self, input: Tensor) -> Tensor:
        compiling = is_tracing()
        training = torch.is_grad_enabled()
        recipe = recipe_of(self, compiling)
        weight, bias = weight_and_bias(self)
        is_parameter = weight.__class__ is nn.Parameter
        prequantized = not is_parameter and is_prequantized(weight)
        if self.weight_spec is not None and not prequantized:
            stored_weight.check_stored(self, weight)
        if prequantized:
            if compiling:
                eager: Tensor = weight.__class__.eagerly(Linear.forward, self, input)  # type: ignore[attr-defined]
                return eager
            weight.check_recipe(self, recipe)  # type: ignore[attr-defined]
        if recipe is None or (recipe.fprop.a is None and not recipe.quantizes):
            if isinstance(weight, QuantizedTensor):
                return stored_weight.linear(input, weight, bias, self)
            if training and not compiling and self._state.weights is not None:
                weight_cache.expire(self, weight)
            if not active_context.captures_wgrad or compiling or not training or input.dtype not in ops.DTYPES:
                return F.linear(input, weight, bias)
            recipe = recipes.get("bf16")
        if not is_parameter and not compiling:
            check_weight(self, weight)
        plan: LinearPlan | None = None
        plannable = not prequantized and self.weight_spec is None
        plannable = plannable and not compiling and (training or may_have_kernels(input))
        if plannable:
            key = plan_key(input.shape, input, weight, bias, recipe)
            plan = plans.get(key)
            call = begin_fast_call(plan, input, weight, self, training)
        if not compiling and not (training and plannable):
            self._state.is_observed = None
        if plannable and call is not None:
            return _run_one(call, input, weight, bias)
        if training and self._state.buffers_recipe is not recipe:
            create_state_buffers(self, recipe)
        x, casting = input, False
        if compiling or any_autocast_enabled():
            device = ops.autocast_device(input)
            casting = torch.is_autocast_enabled(device) and input.dtype in ops.DTYPES and weight.dtype in ops.DTYPES
            x = input.to(torch.get_autocast_dtype(device)) if casting else input
        if isinstance(weight, QuantizedTensor):
            stored_weight.check_gradient(weight)
        elif x.dtype is not weight.dtype and not casting:
            raise ValueError(dtype_sentence(self, x.dtype))
        if x.dim() == 0 or x.size(-1) != weight.size(-1):
            raise ValueError(
                f"Linear({self.in_features} → {self.out_features}) got an input of shape {tuple(x.shape)}; "
                f"its last axis must be {self.in_features}"
            )
        if x.dtype not in ops.DTYPES:
            return _unquantized(self, x, weight, bias)
        if compiling:
            setup = LinearSetup(IDENTITY_INPUT, (self,), recipe, x.dtype, training)
            return LinearFunction.apply(setup, x, weight, bias)[0]
        if transforms_active() or forward_level() >= 0:
            refuse_transforms(x, weight, bias)
        # Inputs cast by autocast and weights stored as codes have no plan of their own.
        if plan is None and plannable and not casting and x.dtype is weight.dtype:
            plan = make_plan(key, x, weight, bias, recipe, self)
            call = begin_fast_call(plan, x, weight, self, training)
            if not training:
                self._state.is_observed = None
            if call is not None:
                return _run_one(call, x, weight, bias)
        call = general.begin(self, recipe, x, x.dtype, training)
        if not casting:
            return _run_one(call, x, weight, bias)
        if x is not input:
            call.source = weakref.ref(input)
        with ops.without_autocast(device):
            return _run_one(call, x, weight, bias)

    def extra_repr(self) -> str:
        own = "" if self.recipe is None else f", recipe={self.recipe}"
        own += "" if self.weight_spec is None else f", weight={self.weight_spec}"
        return super().extra_repr() + own


def _run_one(call: LinearCall, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run `LinearFunction`, or what stands in for it where the backward is split or weight gradients are taken away."""
    run = apply if active_context.apply_override is None else eager_apply()
    try:
        y: Tensor = run(call, x, weight, bias)
    except torch.OutOfMemoryError as error:
        raise gpu.out_of_memory(x, 2) from error
    return y


def dtype_sentence(layer: Linear, dtype: torch.dtype) -> str:
    return (
        f"Linear({layer.in_features} → {layer.out_features}) has {layer.weight.dtype} weights and got a {dtype} input; "
        "convert the input, or enter torch.autocast"
    )


def check_weight(layer: Linear, weight: Tensor) -> None:
    """Raise a ValueError if the weight is a tensor subclass of another library, or is sharded."""
    if is_foreign(weight):
        raise ValueError(foreign_sentence(layer, weight))
    check_not_sharded(layer, weight)


def is_foreign(weight: Tensor) -> bool:
    """Return True if the weight is a tensor subclass of another library, such as torchao's `quantize_` installs."""
    return weight.__class__.__module__.partition(".")[0] not in ("torch", "quaver")


def foreign_sentence(layer: Linear, weight: Tensor) -> str:
    return (
        f"Linear({layer.in_features} → {layer.out_features}) has a weight of class {type(weight).__name__}, which "
        "another library quantizes (torchao's quantize_ does so); call quaver.torch.revert(model) before it, since one "
        "of the two can quantize a layer, not both"
    )


def check_not_sharded(layer: nn.Module, weight: Tensor) -> None:
    """Raise if the weight is still sharded when the layer multiplies by it.

    Raises:
        ValueError: the weight is a DTensor; the message lists the ways to fix it.
    """
    mesh = getattr(weight, "device_mesh", None)
    if mesh is not None:
        name = layer.__dict__.get("qualified_name") or type(layer).__name__
        raise ValueError(
            f"{name} has a weight that is sharded over {mesh}, and recipes quantize whole weights: use "
            "ColwiseParallel() or RowwiseParallel() of quaver.torch.parallel instead of torch's styles, leave the "
            "layer out with convert(skip=[...]), or wrap it with fully_shard, which gathers the weight first"
        )


_warned: set[str] = set()


def warn_unsynchronized_history(layer: nn.Module) -> None:
    """Warn once if the history in a state dict contains amaxes that only this rank has recorded."""
    if "history" not in _warned and not scaling_step.is_agreed(layer):
        _warned.add("history")
        warnings.warn(
            "the newest row of delayed scaling's histories contains amaxes of this rank only: call "
            "quaver.torch.parallel.sync_amax_histories(model) on all ranks before taking the state dict, or save with "
            "quaver.torch.parallel.Checkpoint; otherwise a run resumed from it may have other scales",
            stacklevel=3,
        )


def _unquantized(layer: Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if "float64" not in _warned:
        _warned.add("float64")
        warnings.warn(
            f"{x.dtype} is computed in high precision: recipes quantize float32, bfloat16 and float16", stacklevel=3
        )
    return (
        stored_weight.linear(x, weight, bias, layer)
        if isinstance(weight, QuantizedTensor)
        else F.linear(x, weight, bias)
    )


# ---- choice of a plan ----

#: Key of a plan: recipe (by identity), shapes, dtypes, devices, and dtype and requires_grad of the bias.
PlanKey = tuple[
    int, torch.Size, torch.dtype, torch.device, torch.Size, torch.dtype, torch.device, tuple[torch.dtype, bool] | None
]


#: Maximum number of cached plans; the oldest are dropped first, so alternating sequence lengths keep their plans.
MAX_PLANS = 1024
#: Plans by key, shared by all layers: a new sequence length is planned once per weight shape, not once per layer. The
#: general plan where there is no fast one. A plan references its recipe, so that the id in the key is not reused.
plans: dict[PlanKey, LinearPlan] = {}
gpu.tables.append(plans)


def plan_key(shape: torch.Size, like: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> PlanKey:
    """Return the key of the plan for inputs of `shape` with the dtype and device of `like`."""
    bias_facts = None if bias is None else (bias.dtype, bias.requires_grad)
    return id(recipe), shape, like.dtype, like.device, weight.shape, weight.dtype, weight.device, bias_facts


def make_plan(
    key: PlanKey, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, layer: nn.Module
) -> LinearPlan | None:
    """Choose a plan for inputs like x [..., k] and cache the choice; None if it cannot be made now."""
    if needs_general_plan(layer) or capture.capturing(x.device):
        return None
    plan = _build(x, weight, bias, recipe) or general.plan_for(recipe, x)
    if plan.training_only and capture.is_captured_or_rehearsed(x.device):
        return None
    for oldest in list(plans)[: max(0, len(plans) + 1 - MAX_PLANS)]:
        # Another thread may have removed it already.
        plans.pop(oldest, None)
    plans[key] = plan
    return plan


def _build(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> LinearPlan | None:
    # A kernel launch would read addresses of the wrong device; torch's own GEMM raises the right error. Planned kernels
    # cannot multiply a quantized operand by an unquantized one.
    if x.device != weight.device or recipe.dequantized_backward:
        return None
    plan = None
    if x.is_cuda or gpu.forced_implementations:
        # Triton and the kernels' modules are imported only if there is a GPU.
        if not gpu.why_no_fp8(x.device, "native"):
            from quaver.torch.linear import plan_gpu

            plan = plan_gpu.build(x, weight, bias, recipe)
        if plan is None and not ops.no_kernels(x):
            from quaver.torch.linear import plan_emulated

            plan = plan_emulated.build(x, weight, recipe)
    elif x.is_cpu:
        plan = plan_cpu.build(x, weight, recipe)
    return plan


def fast_plan(
    shape: torch.Size, like: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, layer: nn.Module
) -> LinearPlan | None:
    """Return the fast plan for inputs of `shape` with dtype and device of `like`, made if necessary."""
    key = plan_key(shape, like, weight, bias, recipe)
    plan = plans.get(key) or make_plan(key, like.new_empty(shape), weight, bias, recipe, layer)
    return None if plan is None or plan.operations is not None else plan


def may_have_kernels(x: Tensor) -> bool:
    """Return True unless x is on a CPU, where no plan runs forwards without gradients."""
    return not x.is_cpu or bool(gpu.forced_implementations)


def begin_call(plan: LinearPlan, layer: nn.Module, x: Tensor, training: bool = True) -> LinearCall | None:
    """Begin a call by a fast plan, or return None if the layer's scaling state requires the general plan."""
    call = LinearCall(plan, layer, training, x.dtype)
    if plan.factors is not None:
        if layer._state.buffers_recipe is not plan.recipe:  # type: ignore[union-attr]
            return None
        call.factors = plan.factors(layer, x)
        if call.factors is None:
            return None
        call.pending = scaling_step.pending(layer)
    return call


def begin_fast_call(
    plan: LinearPlan | None, x: Tensor, weight: Tensor, layer: nn.Module, training: bool
) -> LinearCall | None:
    """Begin a call by a fast plan on an unchecked input, or return None if it needs the general plan."""
    if (
        plan is None
        or plan.operations is not None
        or (plan.training_only and not (training and x.requires_grad and weight.requires_grad))
        or not (x.is_contiguous() and weight.is_contiguous())
        or needs_general_plan(layer)
        # The recipe was set after construction, so the noise counter is missing; `create_state_buffers` creates it.
        or (training and plan.recipe.stochastic and layer._buffers.get("count") is None)
        or (plan.aligned and x.data_ptr() & 15)
        or (plan.aligned and plan.training_only and capture.is_captured_or_rehearsed(x.device))
    ):
        return None
    return begin_call(plan, layer, x, training)


def needs_general_plan(layer: nn.Module) -> bool:
    """Return True if a training forward of the layer needs the general plan.

    True if the layer is observed (see `is_observed`), or while `only`, torch.autocast, torch.func or forward mode is
    active.
    """
    return (
        is_observed(layer)
        or QUANTIZE.enabled is not QUANTIZE.implementations
        or MATMUL.enabled is not MATMUL.implementations
        or any_autocast_enabled()
        or transforms_active()
        or forward_level() >= 0
    )


def is_observed(layer: nn.Module) -> bool:
    """Return True if something observes or changes this layer's forward so that only the general plan can run it.

    Observers are the active one of `quaver.torch.state.observer`, recomputation and selective checkpoints; the others
    are taking weight gradients away and splitting the backward on a GPU, whose kernels reuse their buffers. Inside
    backward returns the result of the layer's last forward, because a recomputation must save the same tensors.
    """
    # Reads the state directly; `state_of` would cost a call.
    logs = layer_state.state
    state: Any = layer._state
    if logs.replay is None:
        if graph_task_id() != -1 and state.is_observed is not None:
            known: bool = state.is_observed
            return known
        now: bool = (
            observer.active.observers != ()
            or logs.writing != ()
            or (active_context.apply_override is not None and _wgrad_needs_general_plan(layer))
            or (selective_checkpoint.dispatch_mode_depth() != 0 and selective_checkpoint.is_active())
        )
    else:
        now = True
    state.is_observed = now
    return now


def _wgrad_needs_general_plan(layer: nn.Module) -> bool:
    """Return True if wgrad is delayed or taken away in a way that fast plans do not support."""
    return active_context.captures_wgrad or bool(gpu.forced_implementations) or device_of(layer).type != "cpu"


# ---- weights split into several parameters ----

#: Rows of each parameter by name, or names of parameters with equal numbers of rows; None keeps one weight.
Split = Mapping[str, int] | Iterable[str] | None


class ConcatenatedWeight(Linear):
    """`Linear` whose weight and bias are concatenated from several parameters in each forward; made by `divide`."""

    #: Class that this layer behaves like, for code that compares classes.
    _over = Linear

    def _put_together(self, kind: str) -> Any:
        parts: Any = [p for name, p in self._parameters.items() if name.endswith(f"_{kind}") and p is not None]
        if not parts:
            return None
        # torch.autocast to float16 cannot concatenate bfloat16 tensors.
        with without_autocast(parts[0].device.type):
            return torch.cat(parts)

    weight = property(lambda self: self._put_together("weight"))
    bias = property(lambda self: self._put_together("bias"))

    def reset_parameters(self) -> None:
        """Do nothing: the module that contains this layer initializes the parameters."""


def divide(layer: Linear, parameters_split: Split) -> list[str]:
    """Split a layer's weight and bias by rows into several parameters, and return the names of the parameters.

    Args:
        parameters_split: rows by name, for example {"q": 64, "k": 64}; names alone get equal numbers of rows. None
            keeps the weight whole.

    Raises:
        ValueError: the rows do not add up to `out_features`, or the weight is stored as codes.
    """
    if parameters_split is None:
        return ["weight", "bias"]
    names = [name.removesuffix("_") for name in parameters_split]
    rows = [layer.out_features // len(names)] * len(names)
    if isinstance(parameters_split, Mapping):
        rows = list(parameters_split.values())
    if sum(rows) != layer.out_features:
        raise ValueError(f"parameters_split has {sum(rows)} rows and the weight {layer.out_features}")
    if layer.weight_spec is not None:
        raise ValueError("a weight that is stored as codes is one parameter: leave parameters_split out")
    for kind in ("weight", "bias"):
        whole = layer._parameters.pop(kind)
        for name, part in zip(names, (None,) * len(names) if whole is None else whole.split(rows), strict=True):
            own = None if part is None else nn.Parameter(part.detach().clone())
            layer.register_parameter(f"{name}_{kind}", own)
    layer.__class__ = ConcatenatedWeight
    return list(layer._parameters)
