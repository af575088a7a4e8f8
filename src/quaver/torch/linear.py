"""y = x @ weight.T + bias, with every operand of its three GEMMs quantized as a recipe says.

    fprop   output      [T, N] = input         [T, K] @ weight   [N, K].T
    dgrad   grad_input  [T, K] = grad_output   [T, N] @ weight.T [K, N].T
    wgrad   grad_weight [N, K] = grad_output.T [N, T] @ input.T  [K, T].T

`fprop`, `dgrad` and `wgrad` below are plain functions that other layers compose; `_Linear` ties them to autograd,
keeping for backward what the GEMM consumed (one byte an element or half of one) and the weight itself, never the input
in high precision unless the recipe asks for it.
"""

import itertools
import math
import warnings
import zlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from quaver import recipes
from quaver.core.spec import QuantSpec, Recipe
from quaver.torch import amax, counters, ops, weights
from quaver.torch.autocast import recipe_in_force
from quaver.torch.quantized import Quantized

Factors = Tensor | list[float] | None

_serials = itertools.count()


def fprop(x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Module, recipe: Recipe, call: "_Call") -> Tensor:
    """x [T, K] to [T, N]; what backward will need is left in `call`."""
    a, b = recipe.fprop.a, recipe.fprop.b
    if a is None or b is None:
        y = high_precision(x, weight, x.dtype, bias)
        xq: Tensor | Quantized = x
    else:
        xq = quantize(layer, amax.INPUT, "input", x, a, recipe, call)
        wq = quantized_weight(layer, weight, "fprop", b, recipe, call)
        y = call.matmul(xq, wq, x.dtype, bias)
    if call.keep_input:
        c = recipe.wgrad.b
        if c is None:
            call.kept = x
        elif call.plan.input:
            call.kept = xq
        else:
            call.kept = quantize(layer, amax.INPUT, "input.T", x.t(), c, recipe, call)
    return y


def dgrad(g: Tensor | Quantized, weight: Tensor, layer: nn.Module, recipe: Recipe, call: "_Call") -> Tensor:
    """grad_output [T, N], quantized already if the recipe says so, to grad_input [T, K]."""
    spec = recipe.dgrad.b
    if spec is None:
        assert isinstance(g, Tensor)
        return high_precision(g, weight.t(), call.dtype)
    assert isinstance(g, Quantized)
    return call.matmul(g, quantized_weight(layer, weight, "dgrad", spec, recipe, call), call.dtype, None)


def wgrad(g: Tensor | Quantized, kept: Tensor | Quantized, recipe: Recipe, call: "_Call", dtype: torch.dtype) -> Tensor:
    """grad_output.T [N, T] and what fprop kept of the input to grad_weight [N, K] in the parameter's dtype."""
    if isinstance(kept, Tensor):
        assert isinstance(g, Tensor)
        return high_precision(g, kept.t(), dtype)
    assert isinstance(g, Quantized)
    return call.matmul(g, kept.T if call.plan.input else kept, dtype, None)


class _Call:
    """What one forward of one layer decides, and what its backward needs besides tensors."""

    __slots__ = ("dtype", "factors", "keep_input", "kept", "matmul", "plan", "quantize", "record", "traced")

    def __init__(
        self, recipe: Recipe, x: Tensor, dtype: torch.dtype, keep_input: bool, record: bool, factors: Factors
    ) -> None:
        #: Of the activations.
        self.dtype = dtype
        self.keep_input = keep_input
        #: Whether delayed scaling notes the amaxes of this call.
        self.record = record
        #: Encode factors of input, weight and grad_output as the forward saw them; None without delayed scaling.
        self.factors = factors
        #: Whether torch.compile is looking: then operations are opaque and nothing is kept between calls.
        self.traced = torch.compiler.is_compiling()
        self.plan = recipe.plan
        if self.traced:
            self.quantize, self.matmul = ops.run_quantize, ops.run_matmul
        else:
            _, self.quantize, self.matmul = ops.resolve(recipe, x)
        #: The operand that wgrad will consume.
        self.kept: Tensor | Quantized | None = None


def quantize(
    layer: nn.Module, column: int, operand: str, x: Tensor, spec: QuantSpec, recipe: Recipe, call: _Call
) -> Quantized:
    """Quantize one operand of a layer, with its history or its noise where the recipe has them."""
    if call.factors is not None:
        if call.traced and call.record and column == amax.GRAD_OUTPUT:
            return ops.quantize_opaquely(x, spec, None, call.factors[column], number=layer.__dict__["_number"])
        q = call.quantize(x, spec, None, call.factors[column])
        if call.record:
            amax.record(layer, column, q.amax)
    elif spec.rounding == "nearest":
        q = call.quantize(x, spec)
    else:
        q = _with_noise(layer, operand, x, spec)
    if counters.active.counters is not None:
        counters.active.counters.note(layer, operand, x, q)
    return q


def _with_noise(layer: nn.Module, operand: str, x: Tensor, spec: QuantSpec) -> Quantized:
    """Round at random; the count moves on, so that the next micro-batch draws other noise."""
    count = layer._buffers.get("count")
    if count is None:
        count = _fresh_count(layer)
    which = int(operand.endswith(".T"))
    seed: int = layer.__dict__.get("seed", 0)
    q = ops.run_quantize(x, spec, None, None, (seed, tensor_id(layer, operand), count[which].clone()))
    count[which] += 1
    return q


def tensor_id(layer: nn.Module, operand: str) -> int:
    """Which Philox stream: the crc32 of "module.operand" where convert knows the name, else the order of construction.
    """
    name = layer.__dict__.get("qualified_name")
    if name is not None:
        return zlib.crc32(f"{name}.{operand}".encode())
    return 2 * int(layer.__dict__.get("_serial", 0)) + operand.endswith(".T")


def quantized_weight(
    layer: nn.Module, weight: Tensor, side: str, spec: QuantSpec, recipe: Recipe, call: _Call
) -> Quantized:
    """The weight [N, K] for fprop, or its transpose [K, N] for dgrad; kept until the weight changes."""
    shared = side == "dgrad" and call.plan.weight
    if call.traced:
        if shared:
            return call.quantize(weight, spec, None, None if call.factors is None else call.factors[amax.WEIGHT]).T
        w, operand = (weight, "weight") if side == "fprop" else (weight.t(), "weight.T")
        return quantize(layer, amax.WEIGHT, operand, w, spec, recipe, call)
    factor = 0.0 if call.factors is None else float(call.factors[amax.WEIGHT])
    kept_as = "fprop" if shared else side
    q = weights.lookup(layer, kept_as, weight, spec, factor)
    if q is None:
        if shared:
            q = call.quantize(weight, spec, None, factor)
        else:
            w, operand = (weight, "weight") if side == "fprop" else (weight.t(), "weight.T")
            q = quantize(layer, amax.WEIGHT, operand, w, spec, recipe, call)
        weights.keep(layer, kept_as, weight, spec, factor, q)
    elif call.record and call.factors is not None and side == "fprop":
        amax.record(layer, amax.WEIGHT, q.amax)
    return q.T if shared else q


def high_precision(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [m, k] @ b [n, k].T unquantized, for operands that a recipe leaves alone."""
    if a.dtype is b.dtype is dtype:
        return F.linear(a, b, bias)
    y = a.to(torch.float32) @ b.to(torch.float32).t()
    return (y if bias is None else y + bias).to(dtype)


class _Linear(torch.autograd.Function):
    """Saves plain tensors only: no wrapper subclass is on the way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Module, recipe: Recipe, record: bool
    ) -> Tensor:
        need_input, need_weight, *_ = ctx.needs_input_grad
        factors = None if recipe.delayed is None else amax.saved_factors(layer)
        call = _Call(recipe, x, x.dtype, need_weight and record, record, factors)
        y = fprop(x if x.dim() == 2 else _matrix(x), weight, bias, layer, recipe, call)
        _save(ctx, call, weight if need_input else None)
        ctx.about = layer, recipe, x.shape, weight.dtype, None if bias is None else bias.dtype
        return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if torch.is_autocast_enabled("cpu" if g.is_cpu else g.device.type) and not torch.compiler.is_compiling():
            with ops.without_autocast(g.device.type):
                return _Linear.backward(ctx, g)
        if torch.is_grad_enabled():
            # create_graph=True: the gradients exist, only their own derivative does not.
            with torch.no_grad():
                grads = _backward(ctx, g)
            sources = g, ctx.saved_tensors[0], torch.empty(0, requires_grad=True)
            return tuple(None if t is None else _NoDoubleBackward.apply(t, *sources) for t in grads[:3]) + grads[3:]
        return _backward(ctx, g)


NO_FORWARD_MODE = (
    "quantized layers have no forward-mode derivative; use reverse mode, or run them in high precision for this: "
    "with quaver.torch.autocast(enabled=False)"
)
NO_FUNCTORCH = (
    "quantized layers do not run under torch.func transforms such as vmap and grad; loop over the batch and use "
    "torch.autograd, or run them in high precision for this: with quaver.torch.autocast(enabled=False)"
)
NO_DOUBLE_BACKWARD = (
    "quantized layers have no second derivative: rounding has none. Compute the part that is differentiated twice in "
    "high precision: with quaver.torch.autocast(enabled=False)"
)


class _NoDoubleBackward(torch.autograd.Function):
    """A gradient as it is, tied to what it depends on: differentiating it once more is seen and not taken for 0."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise NotImplementedError(NO_DOUBLE_BACKWARD)


def _matrix(x: Tensor) -> Tensor:
    """[..., k] to [tokens, k]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _save(ctx: Any, call: _Call, weight: Tensor | None) -> None:
    """Tensors to autograd, the rest beside them."""
    kept, factors = call.kept, call.factors
    host_factors = device_factors = None
    if isinstance(factors, Tensor):
        device_factors = factors
    else:
        host_factors = factors
    if isinstance(kept, Quantized):
        host_scale, scale = (None, kept.scale) if isinstance(kept.scale, Tensor) else (kept.scale, None)
        ctx.save_for_backward(weight, device_factors, kept.data, scale, kept.tensor_factor)
        ctx.kept = (kept.spec, kept.shape, kept.turned, host_scale)
    else:
        ctx.save_for_backward(weight, device_factors, kept, None, None)
        ctx.kept = None
    ctx.call = (call.dtype, call.record, host_factors)


def _kept(ctx: Any, data: Any, scale: Any, tensor_factor: Any) -> Tensor | Quantized:
    """The operand that `_save` took apart."""
    if ctx.kept is None:
        return data
    spec, shape, turned, host_scale = ctx.kept
    return Quantized(data, host_scale if scale is None else scale, spec, shape, turned, tensor_factor)


def _backward(ctx: Any, g: Tensor) -> Any:
    need_input, need_weight, need_bias, *_ = ctx.needs_input_grad
    weight, factors, data, scale, tensor_factor = ctx.saved_tensors
    dtype, record, host_factors = ctx.call
    layer, recipe, shape, weight_dtype, bias_dtype = ctx.about
    call = _Call(recipe, g, dtype, need_weight, record, host_factors if factors is None else factors)
    g2 = g if g.dim() == 2 else _matrix(g)
    grad_input = grad_weight = grad_bias = None
    gq: Tensor | Quantized = g2
    if recipe.dgrad.a is not None and (need_input or (need_weight and call.plan.grad_output)):
        gq = quantize(layer, amax.GRAD_OUTPUT, "grad_output", g2, recipe.dgrad.a, recipe, call)
    if need_input:
        grad_input = dgrad(gq, weight, layer, recipe, call)
        if g.dim() != 2:
            grad_input = grad_input.view(shape)
    if need_weight:
        if recipe.wgrad.a is None:
            gt: Tensor | Quantized = g2.t()
        elif call.plan.grad_output:
            gt = gq.T
        else:
            gt = quantize(layer, amax.GRAD_OUTPUT, "grad_output.T", g2.t(), recipe.wgrad.a, recipe, call)
        grad_weight = wgrad(gt, _kept(ctx, data, scale, tensor_factor), recipe, call, weight_dtype)
    if need_bias:
        grad_bias = g2.sum(0, dtype=torch.float32).to(bias_dtype)
    return grad_input, grad_weight, grad_bias, None, None, None


class Linear(nn.Linear):
    """`nn.Linear` whose GEMMs follow a recipe: its own, else the innermost `autocast`'s, else none.

    Args:
        in_features, out_features, bias, device, dtype: as `nn.Linear`; the state dict is the same too. Delayed scaling
            adds buffers `history` [length, 3] and `factor` [3], stochastic rounding `count` [3] (quantizations of
            grad_output, of its transpose, and the number of the noise's stream); all are ordinary state.
        recipe: a name or Recipe that this layer always uses. A delayed recipe rolls its history when the outermost
            autocast is entered, or at the forward of a converted model: run the model in one of them.
        seed: of stochastic rounding.
    Input [..., in_features] in float32, bfloat16 or float16, of the weight's dtype or under torch.autocast; any number
    of tokens, none included. float64 runs unquantized, with a warning.
    Exact: all codes and scales. Bounded: outputs and gradients, relative RMS 1e-6 in float32 of the same products in
    float64.
    """

    #: The layer's own recipe; None takes the ambient one.
    recipe: Recipe | None = None
    seed: int = 0

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
        super().__init__(in_features, out_features, bias, device, dtype)
        self.__dict__["_serial"] = next(_serials)
        self.seed = seed
        amax.register(self)
        if recipe is not None:
            self.recipe = recipes.get(recipe)
            prepare(self, self.recipe)

    def forward(self, input: Tensor) -> Tensor:
        recipe = recipe_in_force(self.recipe)
        compiling = torch.compiler.is_compiling()
        training = torch.is_grad_enabled()
        mine = self.__dict__
        if not compiling:
            # Inside backward this is a recomputation, after autocast has ended: what the first pass used holds.
            if torch._C._current_graph_task_id() != -1 and "_last" in mine:
                recipe = mine["_last"]
            mine["_last"] = recipe
        parameters = self._parameters
        # Parametrizations make attributes of them; module.__getattr__ takes as long as a small operation.
        weight: Tensor = parameters["weight"] if "weight" in parameters else self.weight  # type: ignore[assignment] # noqa: SIM401
        bias: Tensor | None = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        if recipe is None or (recipe.fprop.a is None and not recipe.quantizes):
            return F.linear(input, weight, bias)
        if training and mine.get("_prepared") is not recipe:
            prepare(self, recipe)
        device = "cpu" if input.is_cpu else input.device.type
        casting = torch.is_autocast_enabled(device) and input.dtype in ops.DTYPES and weight.dtype in ops.DTYPES
        x = input.to(torch.get_autocast_dtype(device)) if casting else input
        if x.dtype is not weight.dtype and not casting:
            raise ValueError(_dtype_sentence(self, x.dtype))
        if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
            raise ValueError(
                f"Linear({self.in_features} → {self.out_features}) got an input of shape {tuple(x.shape)}; "
                f"its last axis must be {self.in_features}"
            )
        if x.dtype not in ops.DTYPES:
            return _unquantized(x, weight, bias)
        if compiling:
            return _Linear.apply(x, weight, bias, self, recipe, training)
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(NO_FUNCTORCH)
        if forward_ad._current_level >= 0 and any(
            forward_ad.unpack_dual(t).tangent is not None for t in (x, weight, bias) if t is not None
        ):
            raise NotImplementedError(NO_FORWARD_MODE)
        if not casting:
            return _Linear.apply(x, weight, bias, self, recipe, training)
        with ops.without_autocast(device):
            return _Linear.apply(x, weight, bias, self, recipe, training)

    def extra_repr(self) -> str:
        own = "" if self.recipe is None else f", recipe={self.recipe}"
        return super().extra_repr() + own

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move and cast, but leave the histories and counts their dtype and, unless they were on meta, their values."""
        held = {name: self._buffers.pop(name) for name in STATE if name in self._buffers}
        super()._apply(fn, recurse)
        # Casting there and back may bring other values to the same address.
        self.__dict__.pop("_weights", None)
        for name, buffer in held.items():
            assert buffer is not None
            device = self.weight.device
            self._buffers[name] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: everything but what can be made again."""
        return {k: v for k, v in self.__dict__.items() if k not in TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in ("recipe", "_delayed"):
            if self.__dict__.get(name) is not None:
                self.__dict__[name] = recipes.get(self.__dict__[name])
        if self._buffers.get("history") is not None:
            self.__dict__["_copied"] = True
        amax.register(self)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *args: Any
    ) -> None:
        _match_state(self, state_dict, prefix, missing)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *args)


#: Attributes that are made again when they are missing.
TRANSIENT = ("_number", "_weights", "_views", "_last", "_prepared", "_copied")
#: Buffers that recipes add.
STATE = ("history", "factor", "count")


def prepare(layer: nn.Module, recipe: Recipe) -> None:
    """Give a layer the buffers that a recipe keeps state in: for training, nothing else writes them."""
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return prepare(layer, recipe)
    if recipe.delayed is not None:
        amax.prepare(layer, recipe)
    if recipe.stochastic and layer._buffers.get("count") is None:
        layer.register_buffer("count", _fresh_count(layer))
    layer.__dict__["_prepared"] = recipe


def _fresh_count(layer: nn.Module) -> Tensor:
    device: Any = layer.weight.device
    return torch.tensor([0, 0, layer.__dict__.get("_serial", 0)], device=device)


def _match_state(layer: Linear, state_dict: Any, prefix: str, load: object) -> None:
    """Make a checkpoint of any recipe fit: adopt state that the layer may yet need, drop what its recipe does not use."""
    for name in STATE:
        key = prefix + name
        mine, given = layer._buffers.get(name), state_dict.get(key)
        if given is None:
            if mine is not None and name != "factor":
                _warn_once(load, f"{key} is not in the checkpoint (another recipe wrote it): it starts fresh")
                _start_fresh(layer, name, state_dict, prefix)
        elif mine is None and layer.recipe is not None:
            del state_dict[key]
        elif mine is None:
            layer.register_buffer(name, given.detach().clone().to(layer.weight.device))
        elif mine.shape != given.shape:
            _warn_once(
                load,
                f"{key} has shape {tuple(given.shape)} in the checkpoint and {tuple(mine.shape)} here (another history "
                "length): it starts fresh",
            )
            _start_fresh(layer, name, state_dict, prefix)
        else:
            state_dict[key] = given.to(mine.dtype)
    if prefix + "count" in state_dict:
        layer.__dict__["_serial"] = int(state_dict[prefix + "count"][2])


def _start_fresh(layer: Linear, name: str, state_dict: Any, prefix: str) -> None:
    if name == "count":
        state_dict[prefix + name] = _fresh_count(layer)
        return
    for buffer in ("history", "factor"):
        state_dict[prefix + buffer] = torch.zeros_like(layer._buffers[buffer])  # type: ignore[arg-type]


class _Load:
    """The load_state_dict that warned last, known by the list it collects missing keys in."""

    current: object = None


def _warn_once(load: object, sentence: str) -> None:
    """Warn for the first layer of a load; the others say the same."""
    if _Load.current is not load:
        _Load.current = load
        warnings.warn(sentence + ", and so does what other layers lack", stacklevel=2)


def _dtype_sentence(layer: Linear, dtype: torch.dtype) -> str:
    return (
        f"Linear({layer.in_features} → {layer.out_features}) has {layer.weight.dtype} weights and got a {dtype} input; "
        "convert the input, or enter torch.autocast"
    )


_warned: set[str] = set()


def _unquantized(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if "float64" not in _warned:
        _warned.add("float64")
        warnings.warn(
            f"{x.dtype} is computed in high precision: recipes quantize float32, bfloat16 and float16", stacklevel=3
        )
    return F.linear(x, weight, bias)
