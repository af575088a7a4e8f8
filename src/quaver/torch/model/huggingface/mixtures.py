"""The mixture of experts of a layer, in ours: what its router leaves open is tried, and its output decides.

Its stacks of matrices are those that transformers describes by a decorator. What is none of ours (another router, a
norm behind each expert) stays the module that it is.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from quaver.torch.blocks.experts.mixture import Mixture, MoE
from quaver.torch.blocks.mlp import MLP
from quaver.torch.model.huggingface.calling import Surroundings
from quaver.torch.model.huggingface.choices import CORRECTION
from quaver.torch.model.huggingface.parts import activations_of, linear_of
from quaver.torch.model.huggingface.roles import ROLES
from quaver.torch.model.reach.experts import is_stack, matrices

#: What they call the factor of the weights, and whether those are divided by their sum.
SCALE, NORMALIZE = ("routed_scaling_factor", "router_scaling_factor"), ("norm_topk_prob",)


def possible_mixtures(
    module: nn.Module, around: Surroundings, shared: Callable[[nn.Module, MLP], None]
) -> Iterator[MoE]:
    """Ours that a layer's mixture may be, with its parameters and without a norm before it; none where it has what ours
    has not.

    Args:
        shared: fills ours with the parameters of its shared MLP.
    """
    read = _read(module)
    if read is None:
        return
    stack, router, mlp = read.stack, read.router, read.mlp
    experts, dim = stack.down_proj.shape[0], router.weight.shape[1]
    gated, turned = bool(stack.has_gate), bool(stack.is_transposed)
    hidden = int(stack.down_proj.shape[-2 if turned else -1])
    base = Mixture(
        experts=experts,
        k=_number(around, module, "top_k", "num_experts_per_tok") or 1,
        router_bias=router._parameters.get("bias") is not None,
        balance_bias=read.correction is not None,
        shared=0 if mlp is None else linear_of(_of_role(mlp, "down"))[0].shape[1],
        shared_gate=read.gate is not None,
        shared_fused=mlp is not None and _of_role(mlp, "gate_up", optional=True) is not None,
        layout="kn" if turned else "nk",
        interleaved=gated and not getattr(stack, "is_concatenated", True),
    )
    for (activation, options), choice in itertools.product(_activations(stack, module, gated), _choices(around, base)):
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
class _Read:
    """What a mixture is made of."""

    #: Of matrices, a module that transformers' decorator describes.
    stack: Any = None
    #: With a weight [experts, dim].
    router: Any = None
    #: Added to scores where experts are chosen.
    correction: Tensor | None = None
    #: The shared one, and what its output is multiplied by.
    mlp: nn.Module | None = None
    gate: Any = None


def _read(module: nn.Module) -> _Read | None:
    """A mixture's parts; None if there is something else, or not what there must."""
    read = _Read()
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
    # Noise on the input of a router, which ours has not.
    if any(getattr(module, name, 0) for name in ("jitter_noise", "router_jitter_noise")):
        return None
    return read


def _of_role(mlp: nn.Module, role: str, optional: bool = False) -> Any:
    """The matrix of an MLP for a role."""
    for name, child in mlp.named_children():
        if ROLES[role].search(name):
            return child
    if optional:
        return None
    raise ValueError(f"{type(mlp).__name__} has no matrix by a known name for its {role!r}")


def _number(around: Surroundings, module: nn.Module, *names: str) -> Any:
    """What the module, one in it or the configuration calls so."""
    for holder in (module, *module.children(), around.config):
        for name in names:
            value = getattr(holder, name, None)
            if value is not None and not isinstance(value, Tensor | nn.Module):
                return value
    return None


def _activations(stack: Any, module: nn.Module, gated: bool) -> list[tuple[str, dict[str, float]]]:
    """Activations that experts may have, with their options."""
    named: list[tuple[str, dict[str, float]]] = [(name, {}) for name in activations_of([stack, module], gated)]
    limit, alpha = getattr(stack, "limit", None), getattr(stack, "alpha", None)
    if gated and isinstance(limit, float | int) and isinstance(alpha, float | int):
        return [("clamped_swiglu", {"limit": float(limit), "alpha": float(alpha)})]
    return named


def _choices(around: Surroundings, base: Mixture) -> Iterator[Mixture]:
    """Ways in which tokens may choose, those that the configuration speaks of first."""
    config = around.config
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


def _fill(ours: Any, read: _Read) -> None:
    """Their very parameters in ours."""
    stack, router = read.stack, read.router
    first, second = matrices(stack)
    for layer, name in ((ours.experts._modules[ours.experts._entrance], first), (ours.experts.down_proj, second)):
        layer._parameters["weight"] = stack._parameters[name]
        layer._parameters["bias"] = stack._parameters[f"{name}_bias"] if stack.has_bias else None
    ours.router._parameters.update(weight=router._parameters["weight"], bias=router._parameters.get("bias"))
    ours.router._buffers["balance"] = read.correction
    if read.gate is not None:
        ours.shared_gate._parameters["weight"] = read.gate._parameters["weight"]
