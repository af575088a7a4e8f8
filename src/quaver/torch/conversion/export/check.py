"""Check of exported weights: read them from the files and compare the model's predictions with the trainer's.

    KL(p ‖ q) = Σ_v p(v) (log p(v) - log q(v)), in nats, for the next-token distribution at each token

p comes from the trainer's forward, q from a forward with the exported weights: once with the trainer's arithmetic,
which isolates the weights; once with inputs quantized as the format's readers do; once with 16-bit inputs. The kernels
of a serving library are not run.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quaver.recipes.spec import Delayed, GemmSpec, QuantSpec, Recipe
from quaver.torch.conversion.export.layouts import Inputs, Scheme
from quaver.torch.conversion.export.operands import Decoded, Reader, StoredOperand, is_stored_transposed
from quaver.torch.linear import stored_weight
from quaver.torch.linear.linear import Quantizable
from quaver.torch.numerics.quantized import pack, storage
from quaver.torch.numerics.rounding import encode
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.state import observer
from quaver.torch.state.buffers import STATE, create_state_buffers
from quaver.torch.state.history import amax
from quaver.torch.state.layer_state import LayerState, state_of


class Decoder(Protocol):
    """Source of decoded weights: a `Reader` of files, or tensors that were received."""

    def decoded(self, prefix: str) -> Decoded:
        """Decode the weight whose tensors have names with this prefix."""


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
    schemes = [scheme for _, scheme, _ in written]
    with with_exported_weights([one for one, _, _ in written], reader), restored(left):
        for layer in left:
            layer.recipe = HIGH_PRECISION
        same = log_probabilities(model, inputs)
        with with_recipes(written, [reader_recipe(one, scheme) for one, scheme, _ in written]):
            read = log_probabilities(model, inputs)
        with with_recipes(written, [HIGH_PRECISION] * len(written)):
            high = log_probabilities(model, inputs)
    # A factor of two-level scales is in the file, but this check measures it again.
    measured = [scheme.static and scheme.input is not None and scheme.input.two_level for scheme in schemes]
    texts = (scheme.reads + ", which is measured here" * m for scheme, m in zip(schemes, measured, strict=True))
    weight_divergence, input_divergence, high_divergence = (divergence(trained, other) for other in (same, read, high))
    return ExportCheck(
        weight_divergence, input_divergence, high_divergence, " or ".join(dict.fromkeys(texts)), trained.shape[0]
    )


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


class _InputAmaxes(observer.Observer):
    """Records the input amax of each quantized layer, by layer and parameter name."""

    def __init__(self) -> None:
        self.seen: dict[tuple[nn.Module, str], float] = {}

    def observe_operand(
        self, layer: nn.Module, recipe: Recipe, operand: str, x: Tensor, q: Any, parameter: str = "weight"
    ) -> None:
        if operand == "input" and x.numel():
            key = layer, parameter
            self.seen[key] = max(self.seen.get(key, 0.0), float(x.detach().abs().max()))


@contextmanager
def recording_input_amaxes(model: nn.Module) -> Iterator[dict[tuple[nn.Module, str], float]]:
    """Context that records the input amax of each quantized layer, by layer and parameter name."""
    amaxes = _InputAmaxes()
    with observer.observing(amaxes):
        yield amaxes.seen


# ---- exported weights in place of the model's ----


@contextmanager
def restored(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Context that restores parameters, buffers and attributes of layers on exit; inside, each layer has fresh
    state.
    """
    layers = list(dict.fromkeys(layers))
    places = [place for layer in layers for place in (layer.__dict__, layer._parameters, layer._buffers)]
    saved: list[dict[str, Any]] = [dict(place) for place in places]
    for layer in layers:
        state = state_of(layer)
        layer.__dict__["_state"] = LayerState(state.serial)
        state_of(layer).pieces = state.pieces
    try:
        yield
    finally:
        for place, values in zip(places, saved, strict=True):
            place.clear()
            place.update(values)


@contextmanager
def with_exported_weights(collected: Sequence[StoredOperand], reader: Decoder) -> Iterator[None]:
    """Context in which layers use the weights that a reader returns."""
    with restored([one.layer for one in collected]):
        store_exported_weights(collected, reader)
        yield


def store_exported_weights(collected: Sequence[StoredOperand], reader: Decoder) -> None:
    """Replace the weights of layers by those that a reader returns, as codes where torch has a dtype for them."""
    # Each parameter once, even if a layer has two names; a stack of experts has a part for each of them.
    parameters: dict[tuple[int, str], dict[int | None, StoredOperand]] = {}
    for one in collected:
        parameters.setdefault((id(one.layer), one.last), {}).setdefault(one.expert, one)
    for parts in parameters.values():
        one, *_ = parts.values()
        weights = [joined([reader.decoded(piece.prefix) for piece in part.pieces]) for part in parts.values()]
        if not one.of_experts and one.spec.format.name in stored_weight.CODE_DTYPES:
            _store_codes(one.layer, weights[0], one.spec)
        else:
            _store_values(one, [weight.dense() for weight in weights])


@contextmanager
def with_recipes(written: Sequence[Written], recipes: Sequence[Recipe]) -> Iterator[None]:
    """Context in which layers run other recipes, with the known static scales of their inputs."""
    with restored([one.layer for one, _, _ in written]):
        for (one, _, known), recipe in zip(written, recipes, strict=True):
            one.layer.recipe = recipe
            if recipe.delayed is not None:
                for name in STATE:
                    one.layer._buffers.pop(name, None)
                create_state_buffers(one.layer, recipe)
                assert known.static_scale is not None
                one.layer.get_buffer("factor")[amax.INPUT] = 1.0 / known.static_scale
        yield


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
