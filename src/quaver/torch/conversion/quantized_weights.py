"""Models whose weights exist only in eight bits: made that way, or turned into it and back.

`quaver.torch.linear.stored_weight` says how such a weight lies in its layer and what the GEMMs take of it.
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
from quaver.recipes.spec import QuantSpec, Recipe
from quaver.recipes.text import instance
from quaver.torch.conversion.convert import convert
from quaver.torch.conversion.matchers.linears import wrappers
from quaver.torch.linear import store_weight, stored_weight
from quaver.torch.linear.grouped.layer import GroupedLinear
from quaver.torch.linear.linear import Linear, Quantizable
from quaver.torch.linear.stored_weight import SCALES
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.state import weight_cache
from quaver.torch.state.buffers import STATE, saving
from quaver.torch.state.layer_state import state_of

# ---- quantized -------------------------------------------------------------------------------------------


class quantized_init(ContextDecorator):
    """Every `Linear` and `GroupedLinear` made inside has a weight that exists only in eight (or four) bits.

    Args:
        recipe: whose weight operand of fprop says how. It is not the recipe that the layers run under.
        keep_initial: "cpu" keeps the initial values in high precision on the CPU, for an optimizer to take with
            `initial_value` and to free with `drop_initial_value`.
    Raises:
        ValueError: an unknown recipe, one that quantizes no weight, or another place to keep values in.
    Exact: the codes of `quaver.torch.quantize`, of nn.Linear's initial values under the same seed.
    """

    def __init__(self, recipe: str | Recipe, *, keep_initial: str | None = None) -> None:
        if keep_initial not in (None, "cpu"):
            raise ValueError(f"keep_initial is {keep_initial!r}; give 'cpu', or None to keep nothing")
        self.spec = _spec(recipe)
        self.keep_initial = keep_initial is not None
        self._before: list[tuple[QuantSpec, bool] | None] = []

    def __enter__(self) -> "quantized_init":
        self._before.append(store_weight.construction.now)
        store_weight.construction.now = self.spec, self.keep_initial
        return self

    def __exit__(self, *_: object) -> None:
        store_weight.construction.now = self._before.pop()


def initial_value(weight: Tensor | nn.Module) -> Tensor | None:
    """The initial value of a weight, or of a layer's, on the CPU in high precision; None where none is kept."""
    return state_of(_layer(weight)).initial


def drop_initial_value(weight: Tensor | nn.Module) -> None:
    """Free the initial value of a weight or layer, or of every layer of a model."""
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
    """Convert a model and turn its layers' weights into eight (or four) bits, in place: for inference.

    Args:
        model: any module; its nn.Linear layers are converted as `convert` does.
        recipe: what `convert` takes; a layer's weight is kept as its recipe's fprop consumes it.
        skip: patterns of names to leave alone, and filters, as of `convert`.
        head: True for output heads too, as of `convert`.
    Returns:
        What that saved; printing it says so. A weight that another module shares is left alone.
    """
    instance("quantize_weights", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
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
                f"{type(layer).__name__} computes in eight bits, and only weights of nn.Linear and GroupedLinear are "
                "kept so"
            )
            continue
        why = _unsupported(layer, chosen, owners, read) or (MERGES if layer in merging else "")
        if why:
            saved.skipped[name] = why
            continue
        before, spec = _bytes(layer), _spec(chosen)
        if layer.weight_spec is not None and layer.weight_spec != spec:
            store_weight.restore(layer)
        if layer.weight_spec is None:
            store_weight.store(layer, spec)
            weight_cache.drop(layer)
        saved.before += before
        saved.after += _bytes(layer)
        saved.layers.append(name)
    return saved


MERGES = (
    "an adapter of PEFT would add its weights to codes; quantize before get_peft_model(model, "
    "quaver.integrations.peft.over_codes(config))"
)


def dequantize_weights(model: nn.Module) -> list[str]:
    """Give layers whose weight is codes a weight of their own dtype again, in place. Returns their names."""
    instance("dequantize_weights", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    stored = [
        (name, m) for name, m in model.named_modules() if isinstance(m, Quantizable) and m.weight_spec is not None
    ]
    for _, layer in stored:
        store_weight.restore(layer)
    return [name for name, _ in stored]


@dataclass
class Saved:
    """The result of `quantize_weights`."""

    #: Names of the layers whose weights are codes now.
    layers: list[str] = field(default_factory=list)
    #: Bytes of their weights, and of their codes and scales.
    before: int = 0
    after: int = 0
    #: Name of each linear layer left alone, and the reason.
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        share = f" ({self.after / self.before:.1%})" if self.before else ""
        head = f"{len(self.layers)} weights: {self.before:,} bytes became {self.after:,}{share}"
        return "\n".join([head, *(f"  left alone: {name or '(root)'} ({why})" for name, why in self.skipped.items())])


def _spec(recipe: str | Recipe) -> QuantSpec:
    recipe = recipes.get(recipe)
    spec = store_weight.weight_spec(recipe)
    if spec is None:
        raise ValueError(f"recipe {recipe} quantizes no weight; give one that does, such as 'mxfp8'")
    return spec


def _layer(weight: Tensor | nn.Module) -> nn.Module:
    if isinstance(weight, nn.Module):
        return weight
    layer = store_weight.owner(weight)
    if layer is None:
        raise ValueError(
            "this tensor is no weight of a layer made under quantized_init; give its parameter, or the layer"
        )
    return layer


def _unsupported(layer: Linear | GroupedLinear, recipe: Recipe, owners: Counter[int], read: set[nn.Module]) -> str:
    """Why a layer's weight stays as it is, or ""."""
    weight = layer._parameters.get("weight")
    if recipe.fprop.b is None:
        return f"recipe {recipe} quantizes no weight"
    if recipe.fprop.b.format.name not in stored_weight.CODE_DTYPES:
        return f"recipe {recipe} has weights in {recipe.fprop.b.format}, {store_weight.NO_DTYPE}"
    if weight is None:
        return "its weight is computed by a parametrization"
    if owners[id(weight)] > 1:
        return "its weight is shared with another module"
    if layer in read:
        return "nn.MultiheadAttention reads its weight without calling it where no recipe quantizes"
    if weight.dtype not in stored_weight.WEIGHTS:
        return f"its weight is {weight.dtype}"
    return ""


def _bytes(layer: nn.Module) -> int:
    tensors: list[Any] = [layer._parameters["weight"], *(layer._buffers.get(name) for name in stored_weight.SCALES)]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


# ---- freezing --------------------------------------------------------------------------------------------
# Weights that hold still: quantized once for many forwards without gradients, and over the steps of other weights.


class frozen(ContextDecorator):
    """Inside, each layer of a module quantizes its weight once, with or without gradients and in inference mode.

        with torch.no_grad(), qt.frozen(model):
            for batch in batches:
                model(batch)

    It decorates a function, too: `@qt.frozen(model)` holds the weights during each call.

    For evaluation and generation, where a forward without gradients would quantize every weight anew, and for the base
    of a model whose adapters train. It may be nested and entered again, by several threads too; while one of them is
    inside, it serves all that call the module. Other modules are not served. At its end what it kept is dropped.

    A write that shows on the weight (its version, address or storage) is still seen inside; call
    `quaver.torch.refresh(module)` after others. Compiled code quantizes weights in every forward: `frozen` does nothing
    there, neither around a compiled module nor inside one.

    Args:
        module: any module; its `quaver.torch.Linear` and converted layers at the time of entering are held.
    Raises:
        TypeError: something else than a module.
        ValueError: from an optimizer that would step one of the weights inside.
    Exact: results are those without it.
    """

    def __init__(self, module: nn.Module) -> None:
        if not is_tracing() and not isinstance(module, nn.Module):
            raise TypeError(f"frozen holds the weights of a module still, and was given a {type(module).__name__}")
        self.module = module
        self._entered: list[list[Quantizable]] = []

    def _recreate_cm(self) -> "frozen":
        # A decorated function may run in several threads at once, each with the layers of its own entry.
        return frozen(self.module)

    def __enter__(self) -> "frozen":
        if is_tracing():
            return self
        layers = [module for module in self.module.modules() if isinstance(module, Quantizable)]
        for layer in layers:
            weight_cache.freeze(layer)
        with _lock:
            if not _hooked:
                _hooked.append(register_optimizer_step_pre_hook(_refuse_step))
            _held.append(layers)
            self._entered.append(layers)
        return self

    def __exit__(self, *_: object) -> None:
        if is_tracing():
            return
        with _lock:
            layers = self._entered.pop()
            # By identity: equal lists are those of another thread.
            at = next(i for i, held in enumerate(_held) if held is layers)
            del _held[at]
        for layer in layers:
            # One that was reverted meanwhile keeps nothing.
            if "_state" in layer.__dict__:
                weight_cache.thaw(layer)


_lock = threading.Lock()
#: The layers of each `frozen` that is open.
_held: list[list[Quantizable]] = []
_hooked: list[Any] = []


def _refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer must not step what is said to hold still."""
    if not _held:
        return
    with _lock:
        held = {
            id(p): layer
            for layers in _held
            for layer in layers
            for p in layer._parameters.values()
            if p is not None and p.dim() > 1
        }
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and id(p) in held:
                layer = held[id(p)]
                raise ValueError(
                    f"{type(optimizer).__name__} would step the weight of {_described(layer)}, which "
                    "quaver.torch.frozen holds still; step outside of it, or hold only the modules that do not train"
                )


def _described(layer: Quantizable) -> str:
    if isinstance(layer, nn.Linear):
        return f"Linear({layer.in_features} → {layer.out_features})"
    return layer.__dict__.get("qualified_name") or type(layer).__name__


# ---- filling ---------------------------------------------------------------------------------------------
# First values of a linear layer by a function, as Megatron-LM's `init_method` gives them.


@torch.no_grad()
def fill(layer: Linear | GroupedLinear, function: Callable[[Tensor], Any]) -> None:
    """Give a layer its first values: its weight by a function, which writes into what it is given; its bias 0.

    Args:
        layer: whose weight may exist only as codes; the function fills what they are made of, and what is kept of it
            is made anew.
        function: such as one of torch.nn.init; of matrices, one by one in a stack of them.
    """
    for name, p in layer._parameters.items():
        if p is None:
            continue
        if name.rstrip("0123456789").endswith("bias"):
            nn.init.zeros_(p)
            continue
        value = p if layer.weight_spec is None else torch.empty_like(p, dtype=layer.weight_dtype)
        for matrix in (value,) if isinstance(layer, Linear) else layer.matrices(value):
            function(matrix)
        if value is not p and not value.is_meta:
            layer.set_weight(value)
            if state_of(layer).initial is not None:
                state_of(layer).initial = value.cpu()


# ---- state dicts -----------------------------------------------------------------------------------------
# A converted model's state dict in two parts: what the unconverted model has, and what recipes add to that.
#
#     model.state_dict() == {**plain_state_dict(model), **scaling_state_dict(model)}
#
# bit for bit. The parts come from torch's own walk over the model, so that what wrappers and hooks do to names holds
# for both.

#: Last names of what recipes add. A weight is among them where it is codes, which have their scales beside them.
ADDED = (*STATE, *SCALES)


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the unconverted model: its keys, shapes and dtypes.

    It loads strictly into the unconverted model, and into the converted one without a warning: histories and counts
    start fresh there, since what they hold is of other weights, and weights that are codes are quantized anew. To go on
    with what was recorded, and with the very codes, load `scaling_state_dict` after it.

    Args:
        model: any module; layers inside of it that are `quaver.torch.Linear` from the beginning give nn.Linear's.
    Returns:
        As `model.state_dict()`, sharing its memory, without histories, factors, counts and scales. Weights that exist
        only in eight or four bits are tensors of their own, in the dtype that they had. Names of tied weights stay
        both. Sharded parameters are what `model.state_dict()` has for them, each rank's part.
    Raises:
        ValueError: codes that are sharded; no rank can decode its part alone.
    Exact: the numbers that GEMMs see, rounded once to the weight's dtype.
    """
    instance("plain_state_dict", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    before, saving.decoded = saving.decoded, {}
    try:
        state: dict[str, Tensor] = model.state_dict()
    finally:
        saving.decoded = before
    return state


def scaling_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """What `plain_state_dict` leaves out: histories, factors and counts, and codes and scales of stored weights.

    It has the names that `model.state_dict()` has for them, and is empty where the recipe keeps no state. Save it
    beside a plain checkpoint to resume with the very bits of an uninterrupted run.
    """
    instance("scaling_state_dict", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    plain = plain_state_dict(model)
    whole: dict[str, Tensor] = model.state_dict()
    return {name: value for name, value in whole.items() if name not in plain or _differs(value, plain[name])}


def load_scaling_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `scaling_state_dict` gave into a model that is converted the same way; parameters stay as they are.

    Args:
        model: converted with the recipe of the state; stored weights are stored as they were.
        state: of the whole model. A layer whose state is not in it starts fresh, as after a plain checkpoint.
    Raises:
        ValueError: names that the model has no layer for, and parameters, before anything is loaded.
        RuntimeError: codes of another recipe, or of a weight that is not stored in few bits here; the sentence says
            what to do.
    """
    instance("load_scaling_state_dict", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    layers = {name.rpartition(".")[0] for name in model.state_dict()}
    unknown = [name for name in state if name.rpartition(".")[0] not in layers or not _is_added(name, state)]
    if unknown:
        others = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ValueError(
            f"this model has no layer for {unknown[0]!r}{others}, or that is no scaling state; give what "
            "scaling_state_dict gave for a model of the same layers, and load weights by model.load_state_dict"
        )
    if state and not any(isinstance(module, Quantizable) for module in model.modules()):
        raise ValueError("no layer of this model is converted; call quaver.torch.convert(model, recipe) before loading")
    model.load_state_dict(dict(state), strict=False)


def _is_added(name: str, state: Mapping[str, Any]) -> bool:
    """Whether recipes add a name of a state: of buffers, and of codes."""
    layer, dot, last = name.rpartition(".")
    return last in ADDED or (last == "weight" and any(f"{layer}{dot}{scale}" in state for scale in SCALES))


def _differs(value: Any, plain: Any) -> bool:
    """Whether a value is codes, and the plain one what they are of."""
    return isinstance(value, Tensor) and value.dtype is not plain.dtype
