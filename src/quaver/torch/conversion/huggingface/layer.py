"""`from_huggingface`: convert a transformers decoder or encoder layer to a `TransformerLayer` with the same
parameters.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quaver.recipes.text import check_name
from quaver.reference.attention import MASKS
from quaver.torch.conversion.huggingface.attention import attentions
from quaver.torch.conversion.huggingface.call import (
    ATTENTION,
    LayerArguments,
    ObservedCall,
    arguments,
    attribute,
    random_input,
    same,
    surroundings,
    watched,
)
from quaver.torch.conversion.huggingface.call import MLP as MLP_ROLES
from quaver.torch.conversion.huggingface.mlp import mlp_of
from quaver.torch.conversion.huggingface.roles import (
    BOUNDS,
    Choices,
    distance,
    distance_of_most,
    fill,
    linear_of,
    norm_of,
    randomized,
    roles_of,
)
from quaver.torch.conversion.replace.mixer import FACTORS, MixerFormula, formula_of, is_mamba2
from quaver.torch.linear.linear import Quantizable
from quaver.torch.nn.moe.layers import MoE
from quaver.torch.nn.ssm.mamba2 import Mamba2, Mamba2Layer
from quaver.torch.nn.transformer import TransformerLayer
from quaver.torch.state.context import autocast

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
    if (mixer := _mixer_in(layer)) is not None:
        with autocast(enabled=False), torch.no_grad():
            return _state_space(layer, mixer, fused, mask_type).train(layer.training)
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


def _read(
    layer: nn.Module, layer_context: LayerArguments, fused: bool | None, rates: dict[str, float], choices: Choices
) -> TransformerLayer:
    """Build the `TransformerLayer` for a layer, in evaluation mode."""
    roles = roles_of(layer)
    if "o" not in roles or not {"qkv", "q", "q_down"} & set(roles) or not {"up", "gate_up", "mixture"} & set(roles):
        raise ValueError(
            f"{type(layer).__name__} has no attention and MLP with known names of their matrices; create a "
            "TransformerLayer yourself, as docs/blocks/transformer.md shows"
        )
    x = random_input(layer.get_submodule(roles["o"]), inputs=False)
    observed = watched(layer, roles, x, arguments(layer, layer_context, x))
    inside: Any = {event.name: event.module for event in observed.hidden_dropouts()}
    _check_inner_dropout(layer, {name: module.p for name, module in inside.items()}, rates["dropout"])
    candidates = attentions(layer, roles, layer_context, observed, fused)
    options, attention = same(candidates, observed, ATTENTION, "o", choices, "attention")
    mlp_options, mlp = mlp_of(layer, roles, layer_context.config, observed, fused, choices)
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
        rates_text = ", ".join(f"{name} = {rate}" for name, rate in rates.items())
        raise ValueError(
            f"{type(layer).__name__} has dropout ({rates_text}): pass dropout= (of each part's output) and "
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
            module_rates = {k: v for k, v in vars(module).items() if "drop" in k and isinstance(v, float)}
            rates |= {f"{name}.{k}".lstrip("."): v for k, v in module_rates.items()}
    return rates


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
    norms = [norm_of(event.module, event.input.shape[-1]) for event in observed.stream_norms()]
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

    message = "attention, MLP and norms match, but the layer has other outputs for every placement of the norms"
    off = distance_of_most if isinstance(mlp, MoE) else distance
    taken: TransformerLayer = choices.first(candidates(), lambda ours: off(ours(x), observed.output), x.dtype, message)
    return taken


# ---- Mamba-2 ----


def _state_space(layer: nn.Module, mixer: nn.Module, fused: bool | None, mask_type: str | None) -> Mamba2Layer | Mamba2:
    if mask_type not in (None, "causal"):
        raise ValueError(f"{type(layer).__name__} is a state-space layer, which is always causal: leave out mask_type")
    formula = _formula_of(mixer)
    choices = Choices()
    _read_mixer(randomized(layer), formula, fused, choices)
    return _read_mixer(layer, formula, fused, Choices(choices))


def _read_mixer(layer: nn.Module, formula: MixerFormula, fused: bool | None, choices: Choices) -> Mamba2 | Mamba2Layer:
    """Build the `Mamba2` or `Mamba2Layer` for a mixer, or a layer with one as a direct child, in evaluation mode."""
    mixer: Any = _mixer_in(layer)
    roles = {role: name for role, name in roles_of(layer).items() if role in (*MLP_ROLES, "down")}
    observed = watched(layer, roles, random_input(mixer.in_proj, inputs=True), {})
    ours: Any = _mixer(mixer, formula)
    if any(event.role == "dropout" for event in observed.events):
        raise ValueError(f"Quaver's Mamba2Layer cannot compute {type(layer).__name__}: it has dropout")
    if mixer is not layer:
        inside = {id(part) for part in mixer.modules()}
        norms = [e for e in observed.events if e.role == "norm" and id(e.module) not in inside]
        if len(norms) != (2 if roles else 1) or "mixture" in roles:
            raise ValueError(
                f"{type(layer).__name__} runs {len(norms)} norms beside its mixer; a Mamba2Layer has one norm before "
                "the mixer, and one before an MLP"
            )
        options, mlp = mlp_of(layer, roles, None, observed, fused, choices) if roles else ({}, None)
        whole: Any = Mamba2Layer(
            observed.input.shape[-1],
            residual_scale=float(attribute(layer, "residual_multiplier", 1.0)),
            residual_in_fp32=bool(getattr(layer, "residual_in_fp32", False)),
            device="meta",
            **_mixer_options(mixer, formula),
            **{name: options[name] for name in ("hidden", "activation") if name in options},
        )
        whole.mixer = ours
        for part, norm in zip((ours, mlp), norms, strict=False):
            part.register_module("norm", norm_of(norm.module, norm.input.shape[-1]))
        if mlp is not None:
            whole.mlp = mlp
        ours = whole
    message = f"{type(layer).__name__} has other outputs than Quaver's layer with the same parts"
    taken: Mamba2 | Mamba2Layer = choices.first(
        [ours.eval()], lambda one: distance(one(observed.input), observed.output), observed.input.dtype, message
    )
    return taken


def _mixer_in(layer: nn.Module) -> nn.Module | None:
    """Return the layer if it is a Mamba-2 mixer, else its direct child that is one, or None."""
    return next((module for module in (layer, *layer.children()) if is_mamba2(module)), None)


def _formula_of(mixer: nn.Module) -> MixerFormula:
    """Return the formula that a Mamba-2 mixer computes.

    Raises:
        ValueError: `Mamba2` cannot compute it; the message gives the reason.
    """
    formula, why = formula_of(mixer)
    if FACTORS in mixer._buffers:
        formula, why = None, f"it multiplies the output of in_proj by {FACTORS}"
    if formula is None:
        raise ValueError(f"Mamba2 cannot compute {type(mixer).__name__}: {why}")
    return formula


def _mixer_options(mixer: Any, formula: MixerFormula) -> dict[str, Any]:
    """Return the `Mamba2` options for a mixer, without a norm in front."""
    sizes, norm, conv = formula.sizes, formula.norm, mixer.conv1d
    gate = "no_norm" if norm is None else "norm_first" if norm.norm_before_gate else "gate_first"
    return {
        "inner": sizes.heads * sizes.head_dim,
        "head_dim": sizes.head_dim,
        "state": sizes.state,
        "groups": sizes.groups,
        "taps": conv.weight.shape[-1],
        "conv_bias": conv.bias is not None,
        "conv_activation": formula.activation,
        "bias": linear_of(mixer.in_proj)[1] is not None,
        "out_bias": linear_of(mixer.out_proj)[1] is not None,
        "gate": gate,
        "gate_groups": None if norm is None else norm.groups,
        "gate_eps": None if norm is None else norm.eps,
        "dt_limit": formula.dt_limit,
    }


def _mixer(mixer: Any, formula: MixerFormula) -> Mamba2:
    ours: Any = Mamba2(linear_of(mixer.in_proj)[0].shape[1], device="meta", **_mixer_options(mixer, formula))
    fill(ours.in_proj, [linear_of(mixer.in_proj)])
    fill(ours.out_proj, [linear_of(mixer.out_proj)])
    ours.conv1d._parameters.update(weight=mixer.conv1d.weight, bias=mixer.conv1d.bias)
    if formula.norm is not None:
        ours.gated_norm._parameters["weight"] = mixer.norm.weight
    ours._parameters.update({name: mixer._parameters[name] for name in ("dt_bias", "A_log", "D")})
    block: Mamba2 = ours.eval()
    return block
