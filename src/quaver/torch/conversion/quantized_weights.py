"""Models whose weights exist only in 8 or 4 bits: construct them so, or convert them and back.

The storage format and what the GEMMs read are documented in `quaver.torch.linear.stored_weight`.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ContextDecorator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from quaver import recipes
from quaver.recipes.conversion import Rules, Skip
from quaver.recipes.spec import QuantSpec, Recipe, check_flags
from quaver.recipes.text import check_instance
from quaver.torch.conversion.convert import convert
from quaver.torch.conversion.matchers.linears import wrappers
from quaver.torch.linear import stored_weight
from quaver.torch.linear.grouped.layer import GroupedLinear
from quaver.torch.linear.linear import Linear, Quantizable
from quaver.torch.linear.stored_weight import SCALES
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.state import weight_cache
from quaver.torch.state.buffers import STATE, saving
from quaver.torch.state.layer_state import state_of

# ---- weights stored quantized ----


class quantized_init(ContextDecorator):
    """Context in which every new `Linear` and `GroupedLinear` gets a weight that exists only in 8 (or 4) bits.

    Args:
        recipe: recipe whose fprop weight spec says how to quantize. The layers do not run under it unless you also set
            it.
        keep_initial: "cpu" keeps the initial values in high precision on the CPU. An optimizer reads them with
            `initial_value` and frees them with `drop_initial_value`.
    Raises:
        ValueError: the recipe is unknown or quantizes no weight, or keep_initial is neither "cpu" nor None.
    Exact: the codes equal `quaver.torch.quantize` of nn.Linear's initial values under the same seed.
    """

    def __init__(self, recipe: str | Recipe, *, keep_initial: str | None = None) -> None:
        if keep_initial not in (None, "cpu"):
            raise ValueError(f"keep_initial is {keep_initial!r}; give 'cpu', or None to keep nothing")
        self.spec = _spec(recipe)
        self.keep_initial = keep_initial is not None
        self._before: list[tuple[QuantSpec, bool] | None] = []

    def __enter__(self) -> "quantized_init":
        self._before.append(stored_weight.construction.now)
        stored_weight.construction.now = self.spec, self.keep_initial
        return self

    def __exit__(self, *_: object) -> None:
        stored_weight.construction.now = self._before.pop()


def initial_value(weight: Tensor | nn.Module) -> Tensor | None:
    """Return the initial value of a weight or a layer's weight, on the CPU in high precision, or None if not saved."""
    return state_of(_layer(weight)).initial


def drop_initial_value(weight: Tensor | nn.Module) -> None:
    """Free the saved initial value of a weight or a layer, or of every layer of a model."""
    if isinstance(weight, Tensor):
        weight = _layer(weight)
    for module in weight.modules():
        if isinstance(module, Quantizable):
            state_of(module).initial = None


def quantize_weights(
    model: nn.Module,
    recipe: str | Recipe | Rules | Mapping[str, Recipe | str | None],
    *,
    skip: Skip = (),
    head: bool = False,
) -> "Saved":
    """Convert a model for inference and replace its layers' weights by 8-bit (or 4-bit) codes, in place.

    Args:
        model: any module; its nn.Linear layers are converted as by `convert`.
        recipe: as for `convert`; a layer's weight is stored in the format that its recipe's fprop consumes.
        skip: name patterns to leave alone, and filters of layers, as for `convert`.
        head: True also quantizes output heads, as for `convert`.
    Returns:
        The bytes saved and the layers left alone; print it to see them. A weight that another module shares is left
        alone.
    """
    check_instance("quantize_weights", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    report = convert(model, recipe, skip=skip, head=head)
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    read: set[nn.Module] = {module.out_proj for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    merging = {wrapper.base_layer: wrapper for wrapper in wrappers(model) if not hasattr(wrapper, "merges_codes")}
    saved = Saved(skipped=dict(report.skipped))
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, chosen in report.converted.items():
        layer = modules[name]
        if not isinstance(layer, Linear | GroupedLinear):
            saved.skipped[name] = (
                f"{type(layer).__name__} computes quantized, but only weights of nn.Linear and GroupedLinear can "
                "be stored so"
            )
            continue
        why = _unsupported(layer, chosen, owners, read) or (MERGES if layer in merging else "")
        if why:
            saved.skipped[name] = why
            continue
        before, spec = _bytes(layer), _spec(chosen)
        if layer.weight_spec is not None and layer.weight_spec != spec:
            stored_weight.restore(layer)
        if layer.weight_spec is None:
            stored_weight.store(layer, spec)
            weight_cache.drop(layer)
        saved.before += before
        saved.after += _bytes(layer)
        saved.layers.append(name)
    return saved


MERGES = (
    "a PEFT adapter would merge its weights into codes; quantize before get_peft_model(model, "
    "quaver.integrations.peft.over_codes(config))"
)


def dequantize_weights(model: nn.Module) -> list[str]:
    """Replace stored codes by a weight in the layer's own dtype, in place. Return the names of these layers."""
    check_instance("dequantize_weights", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    stored = [
        (name, m) for name, m in model.named_modules() if isinstance(m, Quantizable) and m.weight_spec is not None
    ]
    for _, layer in stored:
        stored_weight.restore(layer)
    return [name for name, _ in stored]


@dataclass
class Saved:
    """Result of `quantize_weights`."""

    #: Names of the layers whose weights are now stored as codes.
    layers: list[str] = field(default_factory=list)
    #: Bytes of these weights before, and of their codes and scales after.
    before: int = 0
    after: int = 0
    #: Reason for each linear layer that was left alone, by name.
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        share = f" ({self.after / self.before:.1%})" if self.before else ""
        head = f"{len(self.layers)} weights: {self.before:,} bytes became {self.after:,}{share}"
        return "\n".join([head, *(f"  left alone: {name or '(root)'} ({why})" for name, why in self.skipped.items())])


def _spec(recipe: str | Recipe) -> QuantSpec:
    recipe = recipes.get(recipe)
    spec = stored_weight.weight_spec(recipe)
    if spec is None:
        raise ValueError(f"recipe {recipe} quantizes no weight; give one that does, such as 'mxfp8'")
    return spec


def _layer(weight: Tensor | nn.Module) -> nn.Module:
    if isinstance(weight, nn.Module):
        return weight
    layer = stored_weight.owner(weight)
    if layer is None:
        raise ValueError(
            "this tensor is not the weight of a layer created under quantized_init; give its parameter, or the layer"
        )
    return layer


def _unsupported(layer: Linear | GroupedLinear, recipe: Recipe, owners: Counter[int], read: set[nn.Module]) -> str:
    """Return why a layer's weight cannot be stored quantized, or ""."""
    weight = layer._parameters.get("weight")
    if recipe.fprop.b is None:
        return f"recipe {recipe} quantizes no weight"
    if recipe.fprop.b.format.name not in stored_weight.CODE_DTYPES:
        return f"recipe {recipe} has weights in {recipe.fprop.b.format}, {stored_weight.NO_DTYPE}"
    if weight is None:
        return "its weight is computed by a parametrization"
    if owners[id(weight)] > 1:
        return "its weight is shared with another module"
    if layer in read:
        return "nn.MultiheadAttention reads its weight without calling it where no recipe quantizes"
    if weight.dtype not in ops.DTYPES:
        return f"its weight is {weight.dtype}"
    return ""


def _bytes(layer: nn.Module) -> int:
    weight: Any = layer._parameters["weight"]
    tensors = weight.tensors() if isinstance(weight, QuantizedTensor) else [weight]
    return sum(t.numel() * t.element_size() for t in tensors)


# ---- compiled layers: weights quantized once per optimizer step ----


def cache_compiled_weights(model: nn.Module, enabled: bool = True) -> list[str]:
    """Let compiled training graphs quantize each weight once per optimizer step, as eager layers do.

        qt.convert(model, "tensorwise")
        qt.cache_compiled_weights(model)
        step = torch.compile(model)

    By default a compiled graph quantizes every weight in each forward and again in each backward. With this option its
    GEMMs find the codes in the layers' weight cache, which stay in memory from step to step: one or two bytes an
    element (half of it in four bits). Results are the same bits. Call it before or after `torch.compile`; the layers
    are compiled again. It has no effect under delayed scaling and recipes that the GPU emulates, on `GroupedLinear`, in
    forwards without gradients, in exported programs, and in a `CapturedStep`, which quantizes in each replay.

    A weight without a gradient is quantized again in each forward, so a write between `zero_grad()` and the first
    micro-batch needs no trace. Steps of optimizers, in-place writes, loads and new memory are noticed at any time.
    After any other write, such as through `.data` between two micro-batches, call `quaver.torch.refresh(model)`.

    Args:
        model: any module.
        enabled: False turns the option off again.
    Returns:
        The names of the layers concerned.
    Raises:
        ValueError: the model has no layer that can cache its weight.
    """
    check_instance("cache_compiled_weights", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    check_flags(enabled=enabled)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Quantizable) and not isinstance(m, GroupedLinear)}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no quantizable linear layer, so no compiled graph would cache a weight; call "
            "quaver.torch.convert(model, recipe) first"
        )
    for layer in layers.values():
        layer.cache_compiled_weight = enabled
        if not enabled:
            weight_cache.drop(layer)
    return list(layers)


# ---- frozen weights: quantized once for many forwards ----


class frozen(ContextDecorator):
    """Context in which each layer of a module quantizes its weight once, also without gradients and in inference mode.

        with torch.no_grad(), qt.frozen(model):
            for batch in batches:
                model(batch)

    It is also a decorator: `@qt.frozen(model)` freezes the weights during each call.

    Use it for evaluation and generation, where a forward without gradients would quantize every weight again, and for
    the frozen base model when only adapters train. It may be nested and re-entered, also by several threads. While one
    of them is inside, all callers of the module use the cached codes. Other modules are unaffected. The codes are
    dropped on exit.

    A write that changes the weight's version, address or storage is detected inside; after any other write call
    `quaver.torch.refresh(module)`. Compiled code quantizes weights in every forward, so `frozen` has no effect on it,
    neither around a compiled module nor inside one.

    Args:
        module: any module; covers its `quaver.torch.Linear` and converted layers at the time of entry.
    Raises:
        TypeError: the argument is not a module.
        ValueError: an optimizer tries to step one of the weights inside the context.
    Exact: results are the same as without it.
    """

    def __init__(self, module: nn.Module) -> None:
        if not is_tracing() and not isinstance(module, nn.Module):
            raise TypeError(f"frozen takes a module, not a {type(module).__name__}")
        self.module = module
        self._entered: list[list[Quantizable]] = []

    def _recreate_cm(self) -> "frozen":
        # A decorated function may run in several threads at once; each call needs its own list of layers.
        return frozen(self.module)

    def __enter__(self) -> "frozen":
        if is_tracing():
            return self
        layers = [module for module in self.module.modules() if isinstance(module, Quantizable)]
        for layer in layers:
            weight_cache.freeze(layer)
        with _lock:
            if not _hooked:
                _hooked.append(register_optimizer_step_pre_hook(_check_step))
            _frozen_layers.append(layers)
            self._entered.append(layers)
        return self

    def __exit__(self, *_: object) -> None:
        if is_tracing():
            return
        with _lock:
            layers = self._entered.pop()
            # Compare by identity: an equal list may belong to another thread.
            at = next(i for i, frozen_layers in enumerate(_frozen_layers) if frozen_layers is layers)
            del _frozen_layers[at]
        for layer in layers:
            # A layer that was reverted in the meantime has no cache.
            if "_state" in layer.__dict__:
                weight_cache.thaw(layer)


_lock = threading.Lock()
#: Layers of each open `frozen` context.
_frozen_layers: list[list[Quantizable]] = []
_hooked: list[Any] = []


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise if an optimizer steps a weight of an open `frozen` context."""
    if not _frozen_layers:
        return
    with _lock:
        frozen_layers = {
            id(p): layer
            for layers in _frozen_layers
            for layer in layers
            for p in layer._parameters.values()
            if p is not None and p.dim() > 1
        }
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and id(p) in frozen_layers:
                layer = frozen_layers[id(p)]
                raise ValueError(
                    f"{type(optimizer).__name__} would step the weight of {_describe_layer(layer)}, which is inside "
                    "quaver.torch.frozen; step outside of the context, or freeze only the modules that do not "
                    "train"
                )


def _describe_layer(layer: Quantizable) -> str:
    if isinstance(layer, nn.Linear):
        return f"Linear({layer.in_features} → {layer.out_features})"
    return layer.__dict__.get("qualified_name") or type(layer).__name__


# ---- initialization of weights by a function, such as Megatron-LM's `init_method` ----


@torch.no_grad()
def fill(layer: Linear | GroupedLinear, function: Callable[[Tensor], Any]) -> None:
    """Initialize a layer: apply a function to its weight in place and set its bias to 0.

    Args:
        layer: a linear layer. If its weight is stored quantized, the function fills a high-precision tensor, from which
            codes and the saved initial value are made again.
        function: an in-place initializer such as those of torch.nn.init; called on each matrix of a stack in turn.
    """
    for name, p in layer._parameters.items():
        if p is None:
            continue
        if name.rstrip("0123456789").endswith("bias"):
            nn.init.zeros_(p)
            continue
        value = (
            p
            if layer.weight_spec is None
            else torch.empty(stored_weight.shape_of(layer), dtype=layer.weight_dtype, device=p.device)
        )
        for matrix in (value,) if isinstance(layer, Linear) else layer.matrices(value):
            function(matrix)
        if value is not p and not value.is_meta:
            layer.set_weight(value)
            if state_of(layer).initial is not None:
                state_of(layer).initial = value.cpu()


# ---- a converted model's state dict in two parts ----
#
#     model.state_dict() == {**plain_state_dict(model), **scaling_state_dict(model)}
#
# holds bit for bit. Both parts come from torch's own `state_dict`, so key changes by wrappers and hooks apply to both.

#: Last parts of the keys that recipes add. A weight stored as codes also counts, if its scales are in the dict.
ADDED = (*STATE, *SCALES)


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the unconverted model: its keys, shapes and dtypes.

    It loads strictly into the unconverted model, and without a warning into the converted one. There, histories and
    counts start fresh, since the recorded ones belong to other weights, and stored weights are quantized again. To
    restore the recorded state and the identical codes, load `scaling_state_dict` after it.

    Args:
        model: any module; layers that were constructed as `quaver.torch.Linear` yield nn.Linear's keys.
    Returns:
        `model.state_dict()` without histories, factors, counts and scales, sharing the model's memory. A weight stored
        in 8 or 4 bits is dequantized to a new tensor in its original dtype. Tied weights appear under each name.
        Sharded parameters are each rank's shard, as in `model.state_dict()`.
    Raises:
        ValueError: codes are sharded; a rank cannot decode its shard alone.
    Exact: the numbers that GEMMs see, rounded once to the weight's dtype.
    """
    check_instance("plain_state_dict", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    before, saving.decoded = saving.decoded, {}
    try:
        state: dict[str, Tensor] = model.state_dict()
    finally:
        saving.decoded = before
    return state


def scaling_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return what `plain_state_dict` omits: histories, factors, counts, and codes and scales of stored weights.

    Keys are those of `model.state_dict()`. The dict is empty if the recipe has no state. Save it with a plain
    checkpoint to resume with the same bits as an uninterrupted run.
    """
    check_instance("scaling_state_dict", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    plain = plain_state_dict(model)
    whole: dict[str, Tensor] = model.state_dict()
    return {name: value for name, value in whole.items() if name not in plain or _is_codes(value, plain[name])}


def load_scaling_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the result of `scaling_state_dict` into a model that is converted the same way; parameters stay unchanged.

    Args:
        model: converted with the same recipe; the same weights are stored quantized.
        state: state of the whole model. A layer without an entry starts fresh, as after loading a plain checkpoint.
    Raises:
        ValueError: the model has no layer for a key, or a key is a parameter; raised before anything is loaded.
        RuntimeError: codes belong to another recipe, or to a weight that is not stored quantized in this model; the
            message says what to do.
    """
    check_instance("load_scaling_state_dict", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    layers = {name.rpartition(".")[0] for name in model.state_dict()}
    unknown = [name for name in state if name.rpartition(".")[0] not in layers or not _is_added(name, state)]
    if unknown:
        others = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ValueError(
            f"this model has no layer for {unknown[0]!r}{others}, or it is not scaling state; give the result of "
            "scaling_state_dict for a model with the same layers, and load weights with model.load_state_dict"
        )
    if state and not any(isinstance(module, Quantizable) for module in model.modules()):
        raise ValueError("no layer of this model is converted; call quaver.torch.convert(model, recipe) before loading")
    model.load_state_dict(dict(state), strict=False)


def _is_added(name: str, state: Mapping[str, Any]) -> bool:
    """Return True if recipes add this key: a state buffer, or a weight with scales."""
    layer, dot, last = name.rpartition(".")
    return last in ADDED or (last == "weight" and any(f"{layer}{dot}{scale}" in state for scale in SCALES))


def _is_codes(value: Any, plain: Any) -> bool:
    """Return True if a value is codes, that is if its dtype differs from the plain value's."""
    return isinstance(value, Tensor) and value.dtype is not plain.dtype
