"""Convert the MLP of a transformers layer to `MLP`, and a mixture of experts to `MoE`."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from quaver.torch.conversion.huggingface.call import MLP as MLP_ROLES
from quaver.torch.conversion.huggingface.call import ObservedCall, same
from quaver.torch.conversion.huggingface.roles import (
    CORRECTION,
    ROLES,
    Choices,
    activations_of,
    distance_of_most,
    fill,
    linear_of,
)
from quaver.torch.conversion.matchers.experts import is_stack, matrices
from quaver.torch.nn.mlp import MLP, ComposedBlock
from quaver.torch.nn.moe.layers import MixtureConfig, MoE

#: Roles of an MLP's matrices.
MLP_PARTS = ("gate_up", "gate", "up", "down")


def mlp_of(
    layer: nn.Module,
    roles: Mapping[str, str],
    config: Any,
    observed: ObservedCall,
    fused: bool | None,
    choices: Choices,
) -> tuple[dict[str, Any], nn.Module]:
    """Return the options and the module for the layer's MLP or mixture of experts, without a norm in front.

    Args:
        layer: the transformers layer.
        roles: module names by role, from `roles_of`.
        config: configuration of the model, or None for a layer without a mixture.
        observed: the observed call of the layer.
        fused: True for one gate-and-up matrix, False for two; None keeps the layer's form.
        choices: choices of earlier comparisons.
    """
    if "mixture" in roles:
        module = layer.get_submodule(roles["mixture"])
        mixtures: Any = (({"hidden": 1}, ours) for ours in (*_mixtures(module, config), NormThen(None, module)))
        return same(mixtures, observed, MLP_ROLES, "mixture", choices, "MLP", distance_of_most)
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

    return same(one_mlp(), observed, MLP_ROLES, "down", choices, "MLP")


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


# ---- mixtures of experts ----
#
# Router options that the module leaves open are tried, and the outputs are compared. The stacks are those described by
# transformers' decorator. A mixture without an equivalent, such as one with a norm after each expert, stays
# unconverted.

#: Config fields for the scaling factor of routing weights, and for dividing them by their sum.
SCALE, NORMALIZE = ("routed_scaling_factor", "router_scaling_factor"), ("norm_topk_prob",)


def _mixtures(module: nn.Module, config: Any) -> Iterator[MoE]:
    """Yield candidate `MoE` modules with the mixture's parameters, without a norm in front; none if it is unsupported.

    Args:
        module: the mixture of experts.
        config: configuration of the model.
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
        k=_number(config, module, "top_k", "num_experts_per_tok") or 1,
        router_bias=router._parameters.get("bias") is not None,
        balance_bias=read.correction is not None,
        shared=0 if mlp is None else linear_of(_module_in_role(mlp, "down"))[0].shape[1],
        shared_gate=read.gate is not None,
        shared_fused=mlp is not None and _module_in_role(mlp, "gate_up", optional=True) is not None,
        layout="kn" if transposed else "nk",
        interleaved=gated and not getattr(stack, "is_concatenated", True),
    )
    for (activation, options), choice in itertools.product(_activations(stack, module, gated), _choices(config, base)):
        try:
            choice.check()
        except ValueError:
            continue
        own: dict[str, Any] = {"activation_options": options, "bias": bool(stack.has_bias), "device": "meta"}
        ours: Any = MoE(dim, hidden, choice, activation, **own)
        _fill(ours, read)
        if mlp is not None:
            linears = {r: linear_of(m) for r in MLP_PARTS if (m := _module_in_role(mlp, r, optional=True)) is not None}
            _fill_mlp(ours.shared, linears, linears["down"][0].shape[1])
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
        elif "shared" in name and _module_in_role(child, "down", optional=True) is not None:
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


def _module_in_role(mlp: nn.Module, role: str, optional: bool = False) -> Any:
    """Return the matrix of an MLP for a role such as "down"."""
    for name, child in mlp.named_children():
        if ROLES[role].search(name):
            return child
    if optional:
        return None
    raise ValueError(f"{type(mlp).__name__} has no matrix by a known name for its {role!r}")


def _number(config: Any, module: nn.Module, *names: str) -> Any:
    """Return the first of these attributes that the module, its children or the configuration have."""
    for holder in (module, *module.children(), config):
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


def _choices(config: Any, base: MixtureConfig) -> Iterator[MixtureConfig]:
    """Yield the routing variants to try, those that match the configuration first."""
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
