"""Convert transformers' Mamba-2 mixers to `Mamba2` or `Mamba2Layer`, and mixtures of experts to `MoE`."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.torch.conversion.huggingface.probe import LayerArguments, attribute
from quaver.torch.conversion.huggingface.roles import (
    CORRECTION,
    ROLES,
    Choices,
    activations_of,
    distance,
    fill,
    is_norm,
    linear_of,
    norm_of,
)
from quaver.torch.conversion.matchers.experts import is_stack, matrices
from quaver.torch.conversion.probe import first_of
from quaver.torch.conversion.replace import mlp as mlps
from quaver.torch.conversion.replace.mixer import FACTORS, MixerFormula, formula_of, is_mamba2
from quaver.torch.nn.mlp import MLP
from quaver.torch.nn.moe.layers import MixtureConfig, MoE
from quaver.torch.nn.ssm.mamba2 import Mamba2, Mamba2Layer

# ---- Mamba-2 mixers ----

#: Batch size and number of tokens of the input used for comparison.
SIZES = 2, 11


class ObservedMixer(NamedTuple):
    """A direct child of a layer (norm, mixer or MLP) that ran, with its input and output."""

    module: nn.Module
    input: Tensor
    output: Tensor


def holds_a_mixer(layer: nn.Module) -> bool:
    """Return True if the layer is a Mamba-2 mixer or has one as a direct child."""
    return any(map(is_mamba2, (layer, *layer.children())))


def read_mixer(layer: nn.Module, formula: MixerFormula, fused: bool | None, choices: Choices) -> Mamba2 | Mamba2Layer:
    """Build the `Mamba2` or `Mamba2Layer` for a layer, in evaluation mode.

    Args:
        layer: a Mamba-2 mixer, or a layer with one as a direct child.
        formula: formula of the mixer, from `formula_in`.
        fused: True for one gate-and-up matrix, False for two; None keeps the layer's form.
        choices: choices of earlier comparisons.
    Raises:
        ValueError: the norms or the MLP have no equivalent, or the outputs differ.
    """
    if is_mamba2(layer):
        block = _block(layer, formula)
        x = _input(layer)
        return _same(block, distance(block(x), first_of(_called(layer, x)[1])), x.dtype, layer, choices)
    mixer: Any = next(child for child in layer.children() if is_mamba2(child))
    x = _input(mixer)
    parts, output = _called(layer, x)
    norms = [ran for ran in parts if is_norm(ran.module)]
    others = [ran for ran in parts if ran not in norms and ran.module is not mixer]
    if len(norms) != 1 + len(others) or len(others) > 1:
        raise ValueError(
            f"{type(layer).__name__} runs {len(norms)} norms and {len(others)} other parts besides its mixer; a "
            "Mamba2Layer has one norm before the mixer, and one before an MLP"
        )
    passed: dict[str, Any] = _options(mixer, formula)
    mlp = _mlp(others[0], fused) if others else None
    if mlp is not None:
        passed |= {"hidden": mlp.down_proj.in_features, "activation": mlp.activation}
    passed["residual_scale"] = float(attribute(layer, "residual_multiplier", 1.0))
    passed["residual_in_fp32"] = bool(getattr(layer, "residual_in_fp32", False))
    ours: Any = Mamba2Layer(x.shape[-1], device="meta", **passed)
    ours.mixer = _block(mixer, formula)
    ours.mixer.register_module("norm", norm_of(norms[0].module, norms[0].input, choices))
    if mlp is not None:
        mlp.register_module("norm", norm_of(norms[1].module, norms[1].input, choices))
        ours.mlp = mlp
    taken: Mamba2Layer = _same(ours.eval(), distance(ours(x), output), x.dtype, layer, choices)
    return taken


def formula_in(layer: nn.Module) -> MixerFormula:
    """Return the formula that the layer's mixer computes.

    Raises:
        ValueError: `Mamba2` cannot compute it; the message gives the reason.
    """
    mixer = next(module for module in (layer, *layer.children()) if is_mamba2(module))
    formula, why = formula_of(mixer)
    if FACTORS in mixer._buffers:
        formula, why = None, f"it multiplies the output of in_proj by {FACTORS}"
    if formula is None:
        raise ValueError(f"Mamba2 cannot compute {type(mixer).__name__}: {why}")
    return formula


def _options(mixer: Any, formula: MixerFormula) -> dict[str, Any]:
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


def _block(mixer: Any, formula: MixerFormula) -> Mamba2:
    ours: Any = Mamba2(linear_of(mixer.in_proj)[0].shape[1], device="meta", **_options(mixer, formula))
    fill(ours.in_proj, [linear_of(mixer.in_proj)])
    fill(ours.out_proj, [linear_of(mixer.out_proj)])
    ours.conv1d._parameters.update(weight=mixer.conv1d.weight, bias=mixer.conv1d.bias)
    if formula.norm is not None:
        ours.gated_norm._parameters["weight"] = mixer.norm.weight
    ours._parameters.update({name: mixer._parameters[name] for name in ("dt_bias", "A_log", "D")})
    block: Mamba2 = ours.eval()
    return block


def _mlp(ran: ObservedMixer, fused: bool | None) -> MLP:
    formula, why = mlps.formula_of(ran.module, False) if mlps.is_mlp(ran.module) else (None, "it is not an MLP")
    if formula is None or formula.after or formula.inner:
        raise ValueError(f"Quaver's MLP cannot compute {type(ran.module).__name__}: {why or 'it has dropout'}")
    parts: Any = ran.module._modules
    first_projections, down = (
        [linear_of(parts[name]) for name in formula.first_projections],
        linear_of(parts[formula.down]),
    )
    joined = len(first_projections) == 1 if fused is None else fused
    dim, hidden = down[0].shape
    name, has_bias = formula.activated.name, down[1] is not None
    ours: Any = MLP(dim, hidden, name, fused=joined, bias=has_bias, device="meta")
    fill(ours.down_proj, [down])
    if "gate_up_proj" in ours._modules:
        fill(ours.gate_up_proj, first_projections)
    elif len(first_projections) == 2:
        for part, one in zip((ours.gate_proj, ours.up_proj), first_projections, strict=True):
            fill(part, [one])
    elif "gate_proj" in ours._modules:
        fill(ours.gate_proj, first_projections, lambda rows: rows[:hidden].clone())
        fill(ours.up_proj, first_projections, lambda rows: rows[hidden:].clone())
    else:
        fill(ours.up_proj, first_projections)
    mlp: MLP = ours.eval()
    return mlp


def _input(mixer: Any) -> Tensor:
    weight = linear_of(mixer.in_proj)[0]
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(*SIZES, weight.shape[1], generator=generator, dtype=torch.float32, device="cpu")
    return x.to(weight.device, weight.dtype)


def _called(layer: nn.Module, x: Tensor) -> tuple[list[ObservedMixer], Tensor]:
    """Call a layer in evaluation mode; return its direct children that ran, in order, and the output."""
    ran: list[ObservedMixer] = []

    def note(module: nn.Module, args: Any, options: Any, output: Any) -> None:
        passed = args[0] if args else next(iter(options.values()))
        ran.append(ObservedMixer(module, passed.clone(), first_of(output).clone()))

    modes = [(module, module.training) for module in layer.modules()]
    with ExitStack() as stack:
        for child in layer.children():
            stack.callback(child.register_forward_hook(note, with_kwargs=True).remove)
        stack.callback(lambda: [module.train(mode) for module, mode in reversed(modes)])
        output = first_of(layer.eval()(x))
    return ran, output


def _same(ours: Any, off: float, dtype: torch.dtype, layer: nn.Module, choices: Choices) -> Any:
    def one() -> Iterator[Any]:
        yield ours

    says = f"{type(layer).__name__} has other outputs than Quaver's layer with the same parts"
    return choices.first(one(), lambda _: off, dtype, says)


# ---- mixtures of experts ----
#
# Router options that the module leaves open are tried, and the outputs are compared. The stacks are those described by
# transformers' decorator. A mixture without an equivalent, such as one with a norm after each expert, stays
# unconverted.

#: Config fields for the scaling factor of routing weights, and for dividing them by their sum.
SCALE, NORMALIZE = ("routed_scaling_factor", "router_scaling_factor"), ("norm_topk_prob",)


def possible_mixtures(
    module: nn.Module, layer_context: LayerArguments, shared: Callable[[nn.Module, MLP], None]
) -> Iterator[MoE]:
    """Yield candidate `MoE` modules with the mixture's parameters, without a norm in front; none if it is unsupported.

    Args:
        module: the mixture of experts.
        layer_context: configuration of the layer.
        shared: function (their MLP, our MLP) that fills the shared expert's parameters.
    """
    read = _read(module)
    if read is None:
        return
    stack, router, mlp = read.stack, read.router, read.mlp
    experts, dim = stack.down_proj.shape[0], router.weight.shape[1]
    gated, transposed = bool(stack.has_gate), bool(stack.is_transposed)
    hidden = int(stack.down_proj.shape[-2 if transposed else -1])
    base = MixtureConfig(
        experts=experts,
        k=_number(layer_context, module, "top_k", "num_experts_per_tok") or 1,
        router_bias=router._parameters.get("bias") is not None,
        balance_bias=read.correction is not None,
        shared=0 if mlp is None else linear_of(_of_role(mlp, "down"))[0].shape[1],
        shared_gate=read.gate is not None,
        shared_fused=mlp is not None and _of_role(mlp, "gate_up", optional=True) is not None,
        layout="kn" if transposed else "nk",
        interleaved=gated and not getattr(stack, "is_concatenated", True),
    )
    for (activation, options), choice in itertools.product(
        _activations(stack, module, gated), _choices(layer_context, base)
    ):
        try:
            choice.check()
        except ValueError:
            continue
        own: dict[str, Any] = {"activation_options": options, "bias": bool(stack.has_bias), "device": "meta"}
        ours: Any = MoE(dim, hidden, choice, activation, **own)
        _fill(ours, read)
        if mlp is not None:
            shared(mlp, ours.shared)
        yield ours


@dataclass
class _MoESpec:
    """Parts of a mixture of experts."""

    #: Module with the experts' weight stacks, described by transformers' decorator.
    stack: Any = None
    #: Module with the router's weight [experts, dim].
    router: Any = None
    #: Bias [experts] that is added to scores only to select experts, or None.
    correction: Tensor | None = None
    #: The shared expert's MLP, and the module that computes the gate on its output; None if absent.
    mlp: nn.Module | None = None
    gate: Any = None


def _read(module: nn.Module) -> _MoESpec | None:
    """Return the parts of a mixture, or None if it has unknown parts or lacks a required one."""
    read = _MoESpec()
    for name, child in module.named_children():
        weight = getattr(child, "weight", None)
        shape = tuple(weight.shape) if isinstance(weight, Tensor) else ()
        if is_stack(child):
            if read.stack is not None or getattr(child, "has_post_expert_norm", False):
                return None
            read.stack = child
        elif "shared" in name and shape[:1] == (1,) and len(shape) == 2 and getattr(child, "bias", None) is None:
            read.gate = child
        elif "shared" in name and _of_role(child, "down", optional=True) is not None:
            read.mlp = child
        elif len(shape) == 2 and not list(child.children()):
            read.router = child
        elif any(True for _ in child.parameters()) or any(True for _ in child.buffers()):
            return None
    if read.stack is None or read.router is None or read.router.weight.shape[0] != read.stack.down_proj.shape[0]:
        return None
    for holder in (read.router, module):
        known = {name: b for name, b in holder._buffers.items() if b is not None}
        for name, buffer in known.items():
            if name not in CORRECTION or tuple(buffer.shape) != (read.stack.down_proj.shape[0],):
                return None
            read.correction = buffer
    if set(read.router._parameters) - {"weight", "bias"} or module._parameters:
        return None
    # Noise on the router's input is not supported.
    if any(getattr(module, name, 0) for name in ("jitter_noise", "router_jitter_noise")):
        return None
    return read


def _of_role(mlp: nn.Module, role: str, optional: bool = False) -> Any:
    """Return the matrix of an MLP for a role such as "down"."""
    for name, child in mlp.named_children():
        if ROLES[role].search(name):
            return child
    if optional:
        return None
    raise ValueError(f"{type(mlp).__name__} has no matrix by a known name for its {role!r}")


def _number(layer_context: LayerArguments, module: nn.Module, *names: str) -> Any:
    """Return the first of these attributes that the module, its children or the configuration have."""
    for holder in (module, *module.children(), layer_context.config):
        for name in names:
            value = getattr(holder, name, None)
            if value is not None and not isinstance(value, Tensor | nn.Module):
                return value
    return None


def _activations(stack: Any, module: nn.Module, gated: bool) -> list[tuple[str, dict[str, float]]]:
    """Return the activations to try for the experts, each with its options."""
    named: list[tuple[str, dict[str, float]]] = [(name, {}) for name in activations_of([stack, module], gated)]
    limit, alpha = getattr(stack, "limit", None), getattr(stack, "alpha", None)
    if gated and isinstance(limit, float | int) and isinstance(alpha, float | int):
        return [("clamped_swiglu", {"limit": float(limit), "alpha": float(alpha)})]
    return named


def _choices(layer_context: LayerArguments, base: MixtureConfig) -> Iterator[MixtureConfig]:
    """Yield the routing variants to try, those that match the configuration first."""
    config = layer_context.config
    scale = next((float(getattr(config, name)) for name in SCALE if getattr(config, name, None) is not None), 1.0)
    groups, top = getattr(config, "n_group", None), getattr(config, "topk_group", None)
    limited: list[dict[str, int]] = [{}]
    if groups and top and top < groups and base.experts % groups == 0:
        size = base.experts // groups
        limited = [{"groups": groups, "top_groups": top, "best_of_group": best} for best in (min(2, size), 1)]
    normalizes = next((getattr(config, name) for name in NORMALIZE if getattr(config, name, None) is not None), None)
    both = (True, False) if normalizes is None else (bool(normalizes), not normalizes)
    softmaxes: list[dict[str, Any]] = [{}] if base.balance_bias is False else []
    softmaxes += [{"softmax_first": True, "normalize": normalize} for normalize in both]
    others = [{"scores": scores, "normalize": n} for scores in ("sigmoid", "sqrtsoftplus") for n in both]
    kinds = [*others, *softmaxes] if base.balance_bias else [*softmaxes, *others]
    for kind, limits, factor in itertools.product(kinds, limited, dict.fromkeys((scale, 1.0))):
        yield replace(base, **kind, **limits, scale=factor)


def _fill(ours: Any, read: _MoESpec) -> None:
    """Share the mixture's parameters with Quaver's `MoE`."""
    stack, router = read.stack, read.router
    first, second = matrices(stack)
    for layer, name in (
        (ours.experts._modules[ours.experts._first_projections], first),
        (ours.experts.down_proj, second),
    ):
        layer._parameters["weight"] = stack._parameters[name]
        layer._parameters["bias"] = stack._parameters[f"{name}_bias"] if stack.has_bias else None
    ours.router._parameters.update(weight=router._parameters["weight"], bias=router._parameters.get("bias"))
    ours.router._buffers["balance"] = read.correction
    if read.gate is not None:
        ours.shared_gate._parameters["weight"] = read.gate._parameters["weight"]
