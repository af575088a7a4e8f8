"""Whether what is served is what is trained: exported weights, read again, in the trainer's own forward.

    KL(p ‖ q) = Σ_v p(v) (log p(v) - log q(v)), nats, of each token's next-token distribution

p is the trainer's, q that of the weights in the files: once under the trainer's arithmetic, where a difference would be
the weights', once with the inputs quantized as the format's readers do it, once with inputs in 16 bits. Kernels of a
server are not run here.
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
from quaver.torch.conversion.export.operands import Decoded, Reader, StoredOperand, lies_transposed
from quaver.torch.linear.linear import Quantizable
from quaver.torch.linear.stored_weight import CODE_DTYPES
from quaver.torch.numerics.quantized import pack
from quaver.torch.numerics.rounding import encode
from quaver.torch.state import counters
from quaver.torch.state.buffers import STATE, prepare
from quaver.torch.state.history import amax
from quaver.torch.state.layer_state import LayerState, state_of

#: What was written of a weight: it, how, and what was known of its inputs.
Written = tuple[StoredOperand, Scheme, Inputs]


@dataclass(frozen=True)
class Divergence:
    """The divergence of next-token distributions, over the tokens of the inputs that were given."""

    mean: float
    largest: float

    def __str__(self) -> str:
        return "0" if self.mean == self.largest == 0 else f"{self.mean:.2e} (largest {self.largest:.2e})"


@dataclass(frozen=True)
class Check:
    """What `quaver.torch.export(check=...)` saw: divergences from the trainer's forward, in nats a token."""

    #: Of the exported weights, all else being the trainer's.
    weights: Divergence
    #: With inputs quantized as the format's readers do, where each layer's is known.
    inputs: Divergence
    #: With inputs in 16 bits.
    high_inputs: Divergence
    #: What a reader does to inputs, in words.
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
) -> Check:
    """Run a model with the weights that a reader finds.

    Args:
        inputs: what its forward takes: a tensor, a tuple, or a dict of arguments by name.
        trained: its own `log_probabilities` of them.
        written: what was exported, and how.
        left: layers that were written in high precision.
    """
    held, schemes, known = zip(*written, strict=True)
    with served(held, reader), restored(left):
        for layer in left:
            layer.recipe = recipes.get(HIGH)
        same = log_probabilities(model, inputs)
        with under(held, [read_as(one, scheme) for one, scheme in zip(held, schemes, strict=True)], known):
            read = log_probabilities(model, inputs)
        with under(held, [HIGH] * len(held), known):
            high = log_probabilities(model, inputs)
    words = " or ".join(dict.fromkeys(map(_words, schemes)))
    of_weights, of_inputs, of_high = (divergence(trained, other) for other in (same, read, high))
    return Check(of_weights, of_inputs, of_high, words, trained.shape[0])


def _words(scheme: Scheme) -> str:
    """What is done here to inputs in a reader's place."""
    two_level = scheme.static and scheme.input is not None and scheme.input.two_level
    return scheme.reads + (", which is measured here" if two_level else "")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each module's own mode comes back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def run(model: nn.Module, inputs: Any) -> Any:
    """A forward of what `check` and `calibrate` take."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def log_probabilities(model: nn.Module, inputs: Any) -> Tensor:
    """float64 [tokens, vocabulary], in evaluation mode.

    Raises:
        ValueError: the model gives no logits.
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
    """Of log-probabilities [tokens, vocabulary]."""
    # Of what has no probability nothing is added, whatever its logarithm.
    each = torch.where(p.isinf(), 0.0, p.exp() * (p - q)).sum(-1)
    return Divergence(float(each.mean()), float(each.max()))


@contextmanager
def watching_inputs(model: nn.Module) -> Iterator[dict[tuple[nn.Module, str], float]]:
    """Inside, the largest magnitude of what each quantized layer multiplies by each of its parameters."""
    watch, before = _Inputs(), counters.active.counters
    counters.active.counters = watch  # type: ignore[assignment]
    try:
        yield watch.seen
    finally:
        counters.active.counters = before


class _Inputs:
    """Stands in the place of counters, which are shown each tensor that is quantized."""

    def __init__(self) -> None:
        self.seen: dict[tuple[nn.Module, str], float] = {}

    def note(self, layer: nn.Module, operand: str, x: Tensor, q: Any, parameter: str = "weight") -> None:
        if operand == "input" and x.numel():
            key = layer, parameter
            self.seen[key] = max(self.seen.get(key, 0.0), float(x.detach().abs().max()))


# The weights of the files in the places of the model's.

#: Attributes of a layer that another weight or recipe replaces.
ATTRIBUTES = ("_state", "recipe", "weight_spec", "weight_dtype", "keep_initial")


@contextmanager
def restored(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Gives layers back the parameters, buffers and attributes that they had; inside, they remember nothing."""
    kept = [
        (
            layer,
            dict(layer._parameters),
            dict(layer._buffers),
            {a: layer.__dict__[a] for a in ATTRIBUTES if a in layer.__dict__},
        )
        for layer in dict.fromkeys(layers)
    ]
    for layer, *_ in kept:
        state = state_of(layer)
        layer.__dict__["_state"] = LayerState(state.serial)
        state_of(layer).pieces = state.pieces
    try:
        yield
    finally:
        for layer, parameters, buffers, attributes in kept:
            for place, values in ((layer._parameters, parameters), (layer._buffers, buffers)):
                place.clear()
                place.update(values)  # type: ignore[arg-type]
            for name in ATTRIBUTES:
                layer.__dict__.pop(name, None)
            layer.__dict__.update(attributes)


@contextmanager
def served(held: Sequence[StoredOperand], reader: Reader) -> Iterator[None]:
    """Inside, layers multiply by the weights that a reader finds."""
    with restored([one.layer for one in held]):
        for each in _by_parameter(held):
            one = each[0]
            weights = [joined([reader.decoded(piece.prefix) for piece in part.pieces]) for part in each]
            spec = one.spec
            if not one.of_experts and spec.format.name in CODE_DTYPES:
                _put_codes(one.layer, weights[0], spec)
            else:
                _put_values(one, [weight.dense() for weight in weights])
        yield


@contextmanager
def under(held: Sequence[StoredOperand], recipes_of: Sequence[Recipe], inputs: Sequence[Inputs]) -> Iterator[None]:
    """Inside, layers follow other recipes, with what their inputs' scales are known to be."""
    with restored([one.layer for one in held]):
        for one, recipe, known in zip(held, recipes_of, inputs, strict=True):
            one.layer.recipe = recipes.get(recipe)
            if recipe.delayed is not None:
                for name in STATE:
                    one.layer._buffers.pop(name, None)
                prepare(one.layer, one.layer.recipe)
                assert known.static_scale is not None
                one.layer.get_buffer("factor")[amax.INPUT] = 1.0 / known.static_scale
        yield


def _by_parameter(held: Sequence[StoredOperand]) -> list[list[StoredOperand]]:
    """What is held of each parameter; a layer with two names is put in place once."""
    each: dict[tuple[int, str], dict[int | None, StoredOperand]] = {}
    for one in held:
        each.setdefault((id(one.layer), one.last), {}).setdefault(one.expert, one)
    return [list(parts.values()) for parts in each.values()]


def joined(parts: Sequence[Decoded]) -> Decoded:
    """A weight whose rows a checkpoint has apart."""
    if len(parts) == 1:
        return parts[0]
    values = torch.cat([part.values for part in parts])
    alike = all(part.scales.shape[0] == 1 for part in parts)
    scales = parts[0].scales if alike else torch.cat([part.scales for part in parts])
    stored = None if parts[0].stored is None else torch.cat([part.stored for part in parts])  # type: ignore[misc]
    return Decoded(values, scales, stored, parts[0].factor)


def _put_codes(layer: Any, weight: Decoded, spec: QuantSpec) -> None:
    """Have a layer's weight be codes and scales, as `quaver.torch.quantized_init` has them."""
    given = layer._parameters["weight"]
    codes = encode(weight.values.to(given.device), spec, None)
    codes = (pack(codes) if spec.format.packed else codes).view(CODE_DTYPES[spec.format.name])
    scale = weight.scales if weight.stored is None else weight.stored.view(torch.uint8)
    counts = spec.blocks(*weight.values.shape)
    # A format may repeat what is one scale to us.
    scale = scale[:: -(-scale.shape[0] // counts[0]), :: -(-scale.shape[1] // counts[1])]
    layer.__dict__.update(weight_spec=spec, weight_dtype=layer.weight_dtype or given.dtype, keep_initial=False)
    layer._parameters["weight"] = nn.Parameter(codes, requires_grad=False)
    layer._buffers["weight_scale"] = scale.contiguous().to(given.device)
    if weight.factor is not None:
        layer._buffers["weight_factor"] = weight.factor.reshape(1, 1).to(given.device)


def _put_values(one: StoredOperand, dense: Sequence[Tensor]) -> None:
    """Have a layer's weight be the values of codes, which quantize to themselves."""
    given = one.layer._parameters[one.last]
    assert given is not None
    value = torch.cat(list(dense))
    if one.of_experts:
        value = value.unflatten(0, (-1, one.rows))
        value = value.transpose(1, 2).contiguous() if lies_transposed(one.layer) else value
    one.layer._parameters[one.last] = nn.Parameter(value.to(given.device, given.dtype), requires_grad=False)


_NOTHING = GemmSpec(None, None)
HIGH = Recipe("16-bit inputs", _NOTHING, _NOTHING, _NOTHING)


def read_as(one: StoredOperand, scheme: Scheme) -> Recipe:
    """A recipe whose fprop is what a reader computes."""
    reads = scheme.input
    if reads is None:
        return HIGH
    fprop = GemmSpec(reads, scheme.weight)
    if scheme.static and reads.per_tensor and not one.of_experts:
        backward = GemmSpec(reads, reads)
        return Recipe(f"read as {scheme.name}", fprop, fprop, backward, delayed=Delayed(length=1))
    return Recipe(f"read as {scheme.name}", fprop, _NOTHING, _NOTHING)
