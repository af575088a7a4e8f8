"""`from_huggingface`: convert a transformers decoder or encoder layer to a `TransformerLayer` with the same
parameters.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quaver.recipes.text import check_name
from quaver.reference.attention import MASKS
from quaver.torch.conversion.huggingface.attention import attentions
from quaver.torch.conversion.huggingface.mixers import formula_in, holds_a_mixer, possible_mixtures, read_mixer
from quaver.torch.conversion.huggingface.probe import (
    ATTENTION,
    LayerArguments,
    ObservedCall,
    arguments,
    attribute,
    surroundings,
    watched,
)
from quaver.torch.conversion.huggingface.probe import MLP as MLP_ROLES
from quaver.torch.conversion.huggingface.roles import (
    BOUNDS,
    ROLES,
    Choices,
    activations_of,
    distance,
    distance_of_most,
    fill,
    linear_of,
    norm_of,
    randomized,
    roles_of,
)
from quaver.torch.linear.linear import Quantizable
from quaver.torch.nn.mlp import MLP, ComposedBlock
from quaver.torch.nn.moe.layers import MoE
from quaver.torch.nn.ssm.mamba2 import Mamba2, Mamba2Layer
from quaver.torch.nn.transformer import TransformerLayer
from quaver.torch.state.context import autocast

#: Batch size and number of tokens of the input used for comparison.
SIZES = 2, 11
#: Roles of an MLP's matrices.
MLP_PARTS = ("gate_up", "gate", "up", "down")
#: Norm placements to try, by the order in which norms ("n"), attention ("a") and MLP ("m") run: `TransformerLayer`
#: options and the module path of each norm.
PLACES: dict[str, list[tuple[dict[str, Any], tuple[str, ...]]]] = {
    "nanm": [
        ({"norm_position": "pre"}, ("attention.norm", "mlp.norm")),
        ({"parallel": "two_norms"}, ("attention.norm", "mlp.norm")),
    ],
    "nnam": [
        ({"parallel": "two_norms"}, ("attention.norm", "mlp.norm")),
        ({"parallel": "two_norms"}, ("mlp.norm", "attention.norm")),
    ],
    "nam": [({"parallel": True}, ("norm",))],
    "anmn": [
        ({"norm_position": "res_post"}, ("attention_post_norm", "mlp_post_norm")),
        ({"norm_position": "post"}, ("attention_post_norm", "mlp_post_norm")),
    ],
    "nannmn": [
        (
            {"norm_position": "sandwich"},
            ("attention.norm", "attention_post_norm", "mlp.norm", "mlp_post_norm"),
        )
    ],
}


class NormThen(ComposedBlock):
    """A norm followed by the layer's own module, such as a mixture of experts; returns the module's first output."""

    def __init__(self, norm: nn.Module | None, module: nn.Module) -> None:
        super().__init__()
        self.register_module("norm", norm)
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        norm: Any = self._modules["norm"]
        y = self.module(x if norm is None else norm(x))
        first: Tensor = y[0] if isinstance(y, tuple | list) else y
        return first.reshape(x.shape)


def from_huggingface(
    layer: nn.Module,
    *,
    config: Any = None,
    fused: bool | None = None,
    mask_type: str | None = None,
    dropout: float | None = None,
    attention_dropout: float | None = None,
) -> TransformerLayer | Mamba2Layer | Mamba2:
    """Convert a transformers layer to a Quaver layer that computes the same.

    A decoder or encoder layer becomes a `TransformerLayer`, a layer around a Mamba-2 mixer a `Mamba2Layer`, and a mixer
    by itself a `Mamba2`.

    The layer is analyzed by its structure: it is called in evaluation mode on random input of its own dtype and device,
    and the modules that run are recorded. What structure and configuration leave open (norm placement, rope variant,
    row order in a fused matrix) is tried on a float32 copy with random weights, where every difference is visible. The
    result is then compared with the layer's own outputs. A mixture of experts becomes a `MoE`, or, if that cannot
    compute the same, stays its own module as `mlp.module`. The layer itself is unchanged.

    **Parameters are shared**: the new layer holds the same parameter objects wherever the storage matches. Copies are
    made for matrices that are joined by fused=True or split by fused=False, for matrices whose row order differs
    (GPT-NeoX's, some of Falcon's), and for a Conv1D's weight, which is transposed. Train only one of the two layers.

    Args:
        layer: an unconverted layer, such as `model.model.layers[0]`.
        config: the model's configuration, for layers that do not store it (MPT's).
        fused: True to join q, k and v, and gate and up, into one matrix each; False to split them; None to keep the
            layer's form.
        mask_type: "causal" or "none", plain or with padding; None reads from the layer if it is causal.
        dropout, attention_dropout: as for `TransformerLayer`; required if the layer has dropout.
    Returns:
        The new layer, in `layer`'s mode. It computes its own rotary embedding: pass `positions`, not cosines and sines.
    Raises:
        ValueError: the outputs differ (the message names the part and the difference); the layer is on meta, so that
            there are no outputs to compare; it has cross attention, was already converted, has dropout that was not
            passed, or has dropout inside the MLP.
    Bounded: relative to the largest output, 1e-5 with random weights; with the layer's own weights 3e-4 in float32 and
    4e-2 in bfloat16.
    """
    _check(layer, mask_type, dropout, attention_dropout)
    if holds_a_mixer(layer):
        return _state_space(layer, fused, mask_type)
    causal = None if mask_type is None else MASKS[mask_type][1]
    rates = {"dropout": dropout or 0.0, "attention_dropout": attention_dropout or 0.0}
    with autocast(enabled=False), torch.no_grad():
        choices = Choices()
        _read(randomized(layer), surroundings(layer, config, causal), fused, rates, choices)
        ours: Any = _read(layer, surroundings(layer, config, causal), fused, rates, Choices(choices))
    if mask_type is not None:
        ours.attention.core.mask_type = mask_type
    whole: TransformerLayer = ours.train(layer.training)
    return whole


def _state_space(layer: nn.Module, fused: bool | None, mask_type: str | None) -> Mamba2Layer | Mamba2:
    if mask_type not in (None, "causal"):
        raise ValueError(f"{type(layer).__name__} is a state-space layer, which is always causal: leave out mask_type")
    with autocast(enabled=False):
        # The formula of the mixer is found by comparing gradients, so this runs without no_grad.
        formula = formula_in(layer)
        with torch.no_grad():
            choices = Choices()
            read_mixer(randomized(layer), formula, fused, choices)
            ours = read_mixer(layer, formula, fused, Choices(choices))
    return ours.train(layer.training)


def _read(
    layer: nn.Module, layer_context: LayerArguments, fused: bool | None, rates: dict[str, float], choices: Choices
) -> TransformerLayer:
    """Build the `TransformerLayer` for a layer, in evaluation mode."""
    roles = roles_of(layer)
    x = _input(layer, roles)
    observed = watched(layer, roles, x, arguments(layer, layer_context, x))
    inside: Any = {event.name: event.module for event in observed.hidden_dropouts()}
    _check_inner_dropout(layer, {name: module.p for name, module in inside.items()}, rates["dropout"])
    candidates = attentions(layer, roles, layer_context, observed, fused, choices)
    options, attention = _same(candidates, observed, ATTENTION, "o", choices, "attention")
    mlp_options, mlp = _mlp(layer, roles, layer_context, observed, fused, choices)
    return _placed(layer, layer_context, observed, {**options, **mlp_options, **rates}, attention, mlp, choices)


def _check(layer: nn.Module, mask_type: str | None, dropout: float | None, attention_dropout: float | None) -> None:
    parameter = next(layer.parameters(), None)
    if parameter is None or parameter.is_meta or parameter.dtype not in BOUNDS:
        raise ValueError(
            f"{type(layer).__name__} has no parameter values, so its outputs cannot be compared; load its parameters "
            "first"
        )
    if any(isinstance(module, Quantizable) for module in layer.modules()):
        raise ValueError(
            f"{type(layer).__name__} is already converted; call quaver.torch.revert first, and convert the new layer"
        )
    if mask_type is not None:
        check_name("mask type", mask_type, MASKS)
        if mask_type == "arbitrary":
            raise ValueError(
                "mask_type 'arbitrary' does not determine if the layer is causal; create the layer first, then set it"
            )
    rates = {name: rate for name, rate in _dropouts(layer).items() if rate}
    if rates and (dropout is None or attention_dropout is None):
        said = ", ".join(f"{name} = {rate}" for name, rate in rates.items())
        raise ValueError(
            f"{type(layer).__name__} has dropout ({said}): pass dropout= (of each part's output) and "
            "attention_dropout= (of probabilities), 0.0 for none"
        )
    # A dropout rate that is used functionally in forward, as BART's, can only be recognized by its attribute name.
    _check_inner_dropout(
        layer, {name: rate for name, rate in rates.items() if "activation" in name.rpartition(".")[2]}, dropout
    )


def _check_inner_dropout(layer: nn.Module, rates: Mapping[str, float], dropout: float | None) -> None:
    """Raise if the layer has dropout between the matrices of its MLP and dropout is not 0."""
    for name, rate in rates.items():
        if rate and dropout:
            raise ValueError(
                f"{type(layer).__name__} has dropout between the matrices of its MLP ({name} = {rate}), which a "
                "TransformerLayer does not support: set it to 0.0 first, or pass dropout=0.0"
            )


def _dropouts(layer: nn.Module) -> dict[str, float]:
    """Return dropout probabilities by the name of the module or attribute."""
    rates: dict[str, float] = {}
    for name, module in layer.named_modules():
        if isinstance(module, nn.Dropout):
            rates[name] = module.p
        else:
            of_module = {k: v for k, v in vars(module).items() if "drop" in k and isinstance(v, float)}
            rates |= {f"{name}.{k}".lstrip("."): v for k, v in of_module.items()}
    return rates


def _input(layer: nn.Module, roles: Mapping[str, str]) -> Tensor:
    """Return a random input [B, S, dim] for the layer."""
    if "o" not in roles or not {"qkv", "q", "q_down"} & set(roles) or not {"up", "gate_up", "mixture"} & set(roles):
        raise ValueError(
            f"{type(layer).__name__} has no attention and MLP with known names of their matrices; create a "
            "TransformerLayer yourself, as docs/blocks/transformer.md shows"
        )
    weight = linear_of(layer.get_submodule(roles["o"]))[0]
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(*SIZES, weight.shape[0], generator=generator, dtype=torch.float32, device="cpu")
    return x.to(weight.device, weight.dtype)


def _same(
    candidates: Any,
    observed: ObservedCall,
    begin: tuple[str, ...],
    end: str,
    choices: Choices,
    part: str,
    off: Any = distance,
) -> tuple[dict[str, Any], Any]:
    """Return the first candidate that maps a part's recorded input to its recorded output, within the bound for
    `off`.
    """
    x, expected = observed.input_of(begin), observed.output_of(end)
    says = f"the layer's {part} has other outputs than Quaver's with any options"
    taken: tuple[dict[str, Any], Any]
    # Some mixtures return tokens [B * S, dim] without a sequence axis.
    expected = expected.reshape(*x.shape[:-1], -1)
    taken = choices.first(candidates, lambda c: off(c[1].eval()(x), expected), x.dtype, says)
    return taken


def _mlp(
    layer: nn.Module,
    roles: Mapping[str, str],
    layer_context: LayerArguments,
    observed: ObservedCall,
    fused: bool | None,
    choices: Choices,
) -> tuple[dict[str, Any], nn.Module]:
    """Return the options and the MLP module, without a norm in front."""
    if "mixture" in roles:
        theirs = _mixtures(layer.get_submodule(roles["mixture"]), layer_context)
        return _same(theirs, observed, MLP_ROLES, "mixture", choices, "MLP", distance_of_most)
    first = roles["gate_up" if "gate_up" in roles else "up"]
    names = first.split(".")
    holders = [layer.get_submodule(".".join(names[:i])) for i in range(len(names) - 1, -1, -1)]
    linears = {r: linear_of(layer.get_submodule(roles[r])) for r in MLP_PARTS if r in roles}
    gated = "up" not in linears or "gate" in linears
    joined = "gate_up" in linears if fused is None else fused
    dim, hidden = linears["down"][0].shape

    def one_mlp() -> Any:
        for activation in activations_of(holders, gated):
            has_bias = linears["down"][1] is not None
            options = {"hidden": hidden, "activation": activation, "mlp_bias": has_bias}
            ours = MLP(dim, hidden, activation, fused=joined, bias=has_bias, device="meta")
            _fill_mlp(ours, linears, hidden)
            yield options, ours

    return _same(one_mlp(), observed, MLP_ROLES, "down", choices, "MLP")


def _mixtures(module: nn.Module, layer_context: LayerArguments) -> Iterator[tuple[dict[str, Any], nn.Module]]:
    """Yield candidate `MoE` modules, and last the layer's own module."""

    def shared(mlp: nn.Module, ours: MLP) -> None:
        children = dict(mlp.named_children())
        roles = {role: [c for name, c in children.items() if ROLES[role].search(name)] for role in MLP_PARTS}
        linears = {role: linear_of(of_role[0]) for role, of_role in roles.items() if of_role}
        _fill_mlp(ours, linears, linears["down"][0].shape[1])

    for ours in possible_mixtures(module, layer_context, shared):
        yield {"hidden": 1}, ours
    yield {"hidden": 1}, NormThen(None, module)


def _fill_mlp(ours: Any, linears: Mapping[str, Any], hidden: int) -> None:
    fill(ours.down_proj, [linears["down"]])
    parts = ours._modules
    if "gate_up_proj" in parts:
        fill(ours.gate_up_proj, [linears["gate_up"]] if "gate_up" in linears else [linears["gate"], linears["up"]])
    elif "gate_up" in linears:
        fill(ours.gate_proj, [linears["gate_up"]], lambda rows: rows[:hidden].clone())
        fill(ours.up_proj, [linears["gate_up"]], lambda rows: rows[hidden:].clone())
    else:
        for role in ("gate", "up"):
            if role in linears:
                fill(parts[f"{role}_proj"], [linears[role]])


def _placed(
    layer: nn.Module,
    layer_context: LayerArguments,
    observed: ObservedCall,
    options: Mapping[str, Any],
    attention: Any,
    mlp: nn.Module,
    choices: Choices,
) -> TransformerLayer:
    """Build the layer with the norm placement that reproduces the output."""
    order, x = observed.order(), observed.input
    if order not in PLACES:
        raise ValueError(
            f"norms (n), attention (a) and MLP (m) run in the order {order!r}, but only {', '.join(PLACES)} are "
            "supported"
        )
    norms = [norm_of(event.module, event.input, choices) for event in observed.stream_norms()]
    attention.core.dropout = options["attention_dropout"]
    scale = float(attribute(layer, "residual_multiplier", 1.0))

    def candidates() -> Any:
        for place, names in PLACES[order]:
            layer_options = {**options, **place, "normalization": "RMSNorm", "residual_scale": scale, "device": "meta"}
            ours: Any = TransformerLayer(x.shape[-1], layer_context.config.num_attention_heads, **layer_options)
            ours.attention, ours.mlp = attention, mlp
            for part in (attention, mlp):
                part.register_module("norm", None)
            for name, norm in zip(names, norms, strict=True):
                ours.get_submodule(name.rpartition(".")[0]).register_module(name.rpartition(".")[2], norm)
            yield ours.eval()

    says = "attention, MLP and norms match, but the layer has other outputs for every placement of the norms"
    off = distance_of_most if isinstance(mlp, MoE) else distance
    taken: TransformerLayer = choices.first(candidates(), lambda ours: off(ours(x), observed.output), x.dtype, says)
    return taken
