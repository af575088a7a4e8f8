"""Check of exported weights: read them from the files and compare the model's predictions with the trainer's.

    KL(p ‖ q) = Σ_v p(v) (log p(v) - log q(v)), in nats, for the next-token distribution at each token

p comes from the trainer's forward, q from a forward with the exported weights: once with the trainer's arithmetic,
which isolates the weights; once with inputs quantized as the format's readers do; once with 16-bit inputs. The kernels
of a serving library are not run.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver import recipes
from quaver.recipes.spec import Delayed, GemmSpec, QuantSpec, Recipe
from quaver.torch.conversion.export.layouts import Inputs, Scheme
from quaver.torch.conversion.export.operands import Decoded, Reader, StoredOperand, is_stored_transposed
from quaver.torch.linear import stored_weight
from quaver.torch.linear.linear import Quantizable
from quaver.torch.numerics.quantized import pack, storage
from quaver.torch.numerics.rounding import encode
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.state import counters
from quaver.torch.state.buffers import STATE, create_state_buffers
from quaver.torch.state.history import amax
from quaver.torch.state.layer_state import LayerState, state_of

#: An exported weight, the scheme it was written in, and the known statistics of its layer's input.
Written = tuple[StoredOperand, Scheme, Inputs]


@dataclass(frozen=True)
class Divergence:
    """KL divergence of next-token distributions in nats: mean and maximum over all tokens."""

    mean: float
    largest: float

    def __str__(self) -> str:
        return "0" if self.mean == self.largest == 0 else f"{self.mean:.2e} (largest {self.largest:.2e})"


@dataclass(frozen=True)
class ExportCheck:
    """Result of `quaver.torch.export(check=...)`: KL divergences from the trainer's forward, in nats per token."""

    #: Divergence with the exported weights and the trainer's arithmetic.
    weights: Divergence
    #: Divergence with inputs also quantized as the format's readers do.
    inputs: Divergence
    #: Divergence with exported weights and 16-bit inputs.
    high_inputs: Divergence
    #: Text that says how readers of the format quantize inputs.
    reads: str
    tokens: int

    def __str__(self) -> str:
        return (
            f"KL of the next token from the trainer's, mean of {self.tokens} tokens in nats: {self.weights} from "
            f"weights, {self.inputs} with {self.reads}, {self.high_inputs} with 16-bit inputs; kernels are the server's"
        )


def compare(
    model: nn.Module,
    inputs: Any,
    trained: Tensor,
    written: Sequence[Written],
    left: Sequence[Quantizable],
    reader: Reader,
) -> ExportCheck:
    """Run a model with the weights read from an export, and compare its predictions with the trainer's.

    Args:
        model: the model that was exported.
        inputs: inputs of its forward: a tensor, a tuple, or a dict of arguments by name.
        trained: `log_probabilities` of the trainer's own forward on these inputs.
        written: the exported weights, with their schemes.
        left: quantized layers that were written in high precision.
        reader: reader of the exported folder.
    """
    collected, schemes, known = zip(*written, strict=True)
    with with_exported_weights(collected, reader), restored(left):
        for layer in left:
            layer.recipe = recipes.get(HIGH_PRECISION)
        same = log_probabilities(model, inputs)
        with with_recipes(
            collected, [reader_recipe(one, scheme) for one, scheme in zip(collected, schemes, strict=True)], known
        ):
            read = log_probabilities(model, inputs)
        with with_recipes(collected, [HIGH_PRECISION] * len(collected), known):
            high = log_probabilities(model, inputs)
    words = " or ".join(dict.fromkeys(map(_describe_inputs, schemes)))
    of_weights, of_inputs, of_high = (divergence(trained, other) for other in (same, read, high))
    return ExportCheck(of_weights, of_inputs, of_high, words, trained.shape[0])


def _describe_inputs(scheme: Scheme) -> str:
    """Describe how this check quantizes inputs in place of a reader."""
    two_level = scheme.static and scheme.input is not None and scheme.input.two_level
    return scheme.reads + (", which is measured here" if two_level else "")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context that sets evaluation mode without gradients and restores each module's own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def run(model: nn.Module, inputs: Any) -> Any:
    """Run a forward on inputs in the form that `check` and `calibrate` accept."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def log_probabilities(model: nn.Module, inputs: Any) -> Tensor:
    """Return float64 log-probabilities [tokens, vocabulary] of a forward in evaluation mode.

    Raises:
        ValueError: the model returns no logits.
    """
    with evaluating(model):
        result = run(model, inputs)
    logits = getattr(result, "logits", result[0] if isinstance(result, tuple) else result)
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        raise ValueError(
            "check needs a model that gives logits [..., vocabulary], as a tensor, as the first of a tuple, or as "
            f"`.logits`; this one gave {type(result).__name__}"
        )
    return torch.log_softmax(logits.flatten(0, -2).double(), -1)


def divergence(p: Tensor, q: Tensor) -> Divergence:
    """Return the KL divergence of log-probabilities p and q [tokens, vocabulary]."""
    # A token with probability 0 contributes 0, although its logarithm is infinite.
    each = torch.where(p.isinf(), 0.0, p.exp() * (p - q)).sum(-1)
    return Divergence(float(each.mean()), float(each.max()))


@contextmanager
def recording_input_amaxes(model: nn.Module) -> Iterator[dict[tuple[nn.Module, str], float]]:
    """Context that records the input amax of each quantized layer, by layer and parameter name."""
    watch, before = _RecordedInputs(), counters.active.counters
    counters.active.counters = watch  # type: ignore[assignment]
    try:
        yield watch.seen
    finally:
        counters.active.counters = before


class _RecordedInputs:
    """Records input amaxes through the counters' hook, which sees each tensor that is quantized."""

    def __init__(self) -> None:
        self.seen: dict[tuple[nn.Module, str], float] = {}

    def count(self, layer: nn.Module, operand: str, x: Tensor, q: Any, parameter: str = "weight") -> None:
        if operand == "input" and x.numel():
            key = layer, parameter
            self.seen[key] = max(self.seen.get(key, 0.0), float(x.detach().abs().max()))


# ---- exported weights in place of the model's ----

#: Attributes that change when a layer gets another weight or recipe.
ATTRIBUTES = ("_state", "recipe", "weight_spec", "weight_dtype", "keep_initial")


@contextmanager
def restored(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Context that restores parameters, buffers and attributes of layers on exit; inside, each layer has fresh
    state.
    """
    saved = [
        (
            layer,
            dict(layer._parameters),
            dict(layer._buffers),
            {a: layer.__dict__[a] for a in ATTRIBUTES if a in layer.__dict__},
        )
        for layer in dict.fromkeys(layers)
    ]
    for layer, *_ in saved:
        state = state_of(layer)
        layer.__dict__["_state"] = LayerState(state.serial)
        state_of(layer).pieces = state.pieces
    try:
        yield
    finally:
        for layer, parameters, buffers, attributes in saved:
            for place, values in ((layer._parameters, parameters), (layer._buffers, buffers)):
                place.clear()
                place.update(values)  # type: ignore[arg-type]
            for name in ATTRIBUTES:
                layer.__dict__.pop(name, None)
            layer.__dict__.update(attributes)


@contextmanager
def with_exported_weights(collected: Sequence[StoredOperand], reader: Reader) -> Iterator[None]:
    """Context in which layers use the weights that a reader returns."""
    with restored([one.layer for one in collected]):
        for each in _group_by_parameter(collected):
            one = each[0]
            weights = [joined([reader.decoded(piece.prefix) for piece in part.pieces]) for part in each]
            spec = one.spec
            if not one.of_experts and spec.format.name in stored_weight.CODE_DTYPES:
                _store_codes(one.layer, weights[0], spec)
            else:
                _store_values(one, [weight.dense() for weight in weights])
        yield


@contextmanager
def with_recipes(
    collected: Sequence[StoredOperand], recipes_of: Sequence[Recipe], inputs: Sequence[Inputs]
) -> Iterator[None]:
    """Context in which layers run other recipes, with the known static scales of their inputs."""
    with restored([one.layer for one in collected]):
        for one, recipe, known in zip(collected, recipes_of, inputs, strict=True):
            one.layer.recipe = recipes.get(recipe)
            if recipe.delayed is not None:
                for name in STATE:
                    one.layer._buffers.pop(name, None)
                create_state_buffers(one.layer, one.layer.recipe)
                assert known.static_scale is not None
                one.layer.get_buffer("factor")[amax.INPUT] = 1.0 / known.static_scale
        yield


def _group_by_parameter(collected: Sequence[StoredOperand]) -> list[list[StoredOperand]]:
    """Group the weights by parameter, each once, even if a layer has two names."""
    each: dict[tuple[int, str], dict[int | None, StoredOperand]] = {}
    for one in collected:
        each.setdefault((id(one.layer), one.last), {}).setdefault(one.expert, one)
    return [list(parts.values()) for parts in each.values()]


def joined(parts: Sequence[Decoded]) -> Decoded:
    """Concatenate the row pieces of a weight that a checkpoint stores as separate tensors."""
    if len(parts) == 1:
        return parts[0]
    values = torch.cat([part.values for part in parts])
    one_scale = all(part.scales.shape[0] == 1 for part in parts)
    scales = parts[0].scales if one_scale else torch.cat([part.scales for part in parts])
    stored = None if parts[0].stored is None else torch.cat([part.stored for part in parts])  # type: ignore[misc]
    return Decoded(values, scales, stored, parts[0].factor)


def _store_codes(layer: Any, weight: Decoded, spec: QuantSpec) -> None:
    """Replace a layer's weight by codes and scales, stored as by `quaver.torch.quantized_init`."""
    current = layer._parameters["weight"]
    codes = encode(weight.values.to(current.device), spec, None)
    codes = (pack(codes) if spec.format.packed else codes).view(storage(spec.format))
    scale = weight.scales if weight.stored is None else weight.stored.view(torch.uint8)
    counts = spec.blocks(*weight.values.shape)
    # A file format may repeat a scale per row where Quaver stores it once per block.
    scale = scale[:: -(-scale.shape[0] // counts[0]), :: -(-scale.shape[1] // counts[1])]
    dtype = layer.weight_dtype or current.dtype
    factor = None if weight.factor is None else weight.factor.reshape(1, 1).to(current.device)
    stored = QuantizedTensor(
        codes, scale.contiguous().to(current.device), spec, factor=factor, dtype=dtype, columns=weight.values.shape[1]
    )
    layer.weight = nn.Parameter(stored, requires_grad=False)


def _store_values(one: StoredOperand, dense: Sequence[Tensor]) -> None:
    """Replace a layer's weight by dequantized values; quantizing them again yields the same codes."""
    current = one.layer._parameters[one.last]
    assert current is not None
    value = torch.cat(list(dense))
    if one.of_experts:
        value = value.unflatten(0, (-1, one.rows))
        value = value.transpose(1, 2).contiguous() if is_stored_transposed(one.layer) else value
    one.layer._parameters[one.last] = nn.Parameter(value.to(current.device, current.dtype), requires_grad=False)


_NOTHING = GemmSpec(None, None)
HIGH_PRECISION = Recipe("16-bit inputs", _NOTHING, _NOTHING, _NOTHING)


def reader_recipe(one: StoredOperand, scheme: Scheme) -> Recipe:
    """Return a recipe whose fprop quantizes inputs and weights as a reader of the scheme does."""
    reads = scheme.input
    if reads is None:
        return HIGH_PRECISION
    fprop = GemmSpec(reads, scheme.weight)
    if scheme.static and reads.per_tensor and not one.of_experts:
        backward = GemmSpec(reads, reads)
        return Recipe(f"read as {scheme.name}", fprop, fprop, backward, delayed=Delayed(length=1))
    return Recipe(f"read as {scheme.name}", fprop, _NOTHING, _NOTHING)
