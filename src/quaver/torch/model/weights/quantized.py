"""Models whose weights exist only in eight bits: made that way, or turned into it and back.

`quaver.torch.linear.stored.stored` says how such a weight lies in its layer and what the GEMMs take of it.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import ContextDecorator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quaver import recipes
from quaver.core.converting.rules import Rules, Skip
from quaver.core.spec import QuantSpec, Recipe
from quaver.core.text.given import instance
from quaver.torch.linear.grouped.layer import GroupedLinear
from quaver.torch.linear.layer import Linear, Quantizable
from quaver.torch.linear.stored import stored, storing
from quaver.torch.model.conversion import convert
from quaver.torch.model.reach.heads import wrappers
from quaver.torch.state import kept_weights
from quaver.torch.state.layer import state_of


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
        self._before.append(storing.construction.now)
        storing.construction.now = self.spec, self.keep_initial
        return self

    def __exit__(self, *_: object) -> None:
        storing.construction.now = self._before.pop()


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
        why = _unfit(layer, chosen, owners, read) or (MERGES if layer in merging else "")
        if why:
            saved.skipped[name] = why
            continue
        before, spec = _bytes(layer), _spec(chosen)
        if layer.weight_spec is not None and layer.weight_spec != spec:
            storing.restore(layer)
        if layer.weight_spec is None:
            storing.store(layer, spec)
            kept_weights.drop(layer)
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
        storing.restore(layer)
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
    spec = storing.weight_spec(recipe)
    if spec is None:
        raise ValueError(f"recipe {recipe} quantizes no weight; give one that does, such as 'mxfp8'")
    return spec


def _layer(weight: Tensor | nn.Module) -> nn.Module:
    if isinstance(weight, nn.Module):
        return weight
    layer = storing.owner(weight)
    if layer is None:
        raise ValueError(
            "this tensor is no weight of a layer made under quantized_init; give its parameter, or the layer"
        )
    return layer


def _unfit(layer: Linear | GroupedLinear, recipe: Recipe, owners: Counter[int], read: set[nn.Module]) -> str:
    """Why a layer's weight stays as it is, or ""."""
    weight = layer._parameters.get("weight")
    if recipe.fprop.b is None:
        return f"recipe {recipe} quantizes no weight"
    if recipe.fprop.b.format.name not in stored.CODE_DTYPES:
        return f"recipe {recipe} has weights in {recipe.fprop.b.format}, {storing.NO_DTYPE}"
    if weight is None:
        return "its weight is computed by a parametrization"
    if owners[id(weight)] > 1:
        return "its weight is shared with another module"
    if layer in read:
        return "nn.MultiheadAttention reads its weight without calling it where no recipe quantizes"
    if weight.dtype not in stored.WEIGHTS:
        return f"its weight is {weight.dtype}"
    return ""


def _bytes(layer: nn.Module) -> int:
    tensors: list[Any] = [layer._parameters["weight"], *(layer._buffers.get(name) for name in stored.SCALES)]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
