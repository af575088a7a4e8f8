"""A mixer of transformers' as a `Mamba2`, and a layer around one as a `Mamba2Layer`, of the same parameters."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.torch.blocks.mlp import MLP
from quaver.torch.blocks.state_space.layer import Mamba2Layer
from quaver.torch.blocks.state_space.mamba2 import Mamba2
from quaver.torch.model.fusing import mlps
from quaver.torch.model.fusing.mixers.formula import FACTORS, MixerFormula, formula_of, is_mamba2
from quaver.torch.model.huggingface.calling import attribute
from quaver.torch.model.huggingface.choices import Choices, distance
from quaver.torch.model.huggingface.parts import fill, linear_of, norm_of
from quaver.torch.model.huggingface.roles import is_norm
from quaver.torch.model.reach.same import first_of

#: What is tried on: batch and tokens.
SIZES = 2, 11


class Ran(NamedTuple):
    """A part right in a layer that ran."""

    module: nn.Module
    input: Tensor
    output: Tensor


def holds_a_mixer(layer: nn.Module) -> bool:
    """True for a Mamba-2 mixer, and for a layer with one right in it."""
    return any(map(is_mamba2, (layer, *layer.children())))


def read_mixer(layer: nn.Module, formula: MixerFormula, fused: bool | None, choices: Choices) -> Mamba2 | Mamba2Layer:
    """Ours, in evaluation mode.

    Args:
        formula: of the mixer.
        fused: whether gate and up are one matrix; None leaves both as the layer has them.
    Raises:
        ValueError: norms or an MLP that are none of ours, outputs that differ.
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
            f"{type(layer).__name__} runs {len(norms)} norms and {len(others)} parts beside its mixer; a Mamba2Layer "
            "has one norm before the mixer, and one before an MLP"
        )
    given: dict[str, Any] = _options(mixer, formula)
    mlp = _mlp(others[0], fused) if others else None
    if mlp is not None:
        given |= {"hidden": mlp.down_proj.in_features, "activation": mlp.activation}
    given["residual_scale"] = float(attribute(layer, "residual_multiplier", 1.0))
    given["residual_in_fp32"] = bool(getattr(layer, "residual_in_fp32", False))
    ours: Any = Mamba2Layer(x.shape[-1], device="meta", **given)
    ours.mixer = _block(mixer, formula)
    ours.mixer.register_module("norm", norm_of(norms[0].module, norms[0].input, choices))
    if mlp is not None:
        mlp.register_module("norm", norm_of(norms[1].module, norms[1].input, choices))
        ours.mlp = mlp
    taken: Mamba2Layer = _same(ours.eval(), distance(ours(x), output), x.dtype, layer, choices)
    return taken


def formula_in(layer: nn.Module) -> MixerFormula:
    """What the mixer of a layer computes.

    Raises:
        ValueError: it is no Mamba-2 of ours, with the reason.
    """
    mixer = next(module for module in (layer, *layer.children()) if is_mamba2(module))
    formula, why = formula_of(mixer)
    if FACTORS in mixer._buffers:
        formula, why = None, f"it multiplies what in_proj gives by {FACTORS}"
    if formula is None:
        raise ValueError(f"{type(mixer).__name__} computes nothing that a Mamba2 does: {why}")
    return formula


def _options(mixer: Any, formula: MixerFormula) -> dict[str, Any]:
    """Of a `Mamba2`, without a norm before it."""
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


def _mlp(ran: Ran, fused: bool | None) -> MLP:
    formula, why = mlps.formula_of(ran.module, False) if mlps.is_mlp(ran.module) else (None, "it is no MLP")
    if formula is None or formula.after or formula.inner:
        raise ValueError(f"{type(ran.module).__name__} is none of our MLPs: {why or 'it drops at random'}")
    parts: Any = ran.module._modules
    entrance, down = [linear_of(parts[name]) for name in formula.entrance], linear_of(parts[formula.down])
    joined = len(entrance) == 1 if fused is None else fused
    dim, hidden = down[0].shape
    name, has_bias = formula.activated.name, down[1] is not None
    ours: Any = MLP(dim, hidden, name, fused=joined, bias=has_bias, device="meta")
    fill(ours.down_proj, [down])
    if "gate_up_proj" in ours._modules:
        fill(ours.gate_up_proj, entrance)
    elif len(entrance) == 2:
        for part, one in zip((ours.gate_proj, ours.up_proj), entrance, strict=True):
            fill(part, [one])
    elif "gate_proj" in ours._modules:
        fill(ours.gate_proj, entrance, lambda rows: rows[:hidden].clone())
        fill(ours.up_proj, entrance, lambda rows: rows[hidden:].clone())
    else:
        fill(ours.up_proj, entrance)
    mlp: MLP = ours.eval()
    return mlp


def _input(mixer: Any) -> Tensor:
    weight = linear_of(mixer.in_proj)[0]
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(*SIZES, weight.shape[1], generator=generator, dtype=torch.float32, device="cpu")
    return x.to(weight.device, weight.dtype)


def _called(layer: nn.Module, x: Tensor) -> tuple[list[Ran], Tensor]:
    """The parts right in a layer that a call runs, in their order, and what the layer gives, in evaluation mode."""
    ran: list[Ran] = []

    def note(module: nn.Module, args: Any, options: Any, output: Any) -> None:
        given = args[0] if args else next(iter(options.values()))
        ran.append(Ran(module, given.clone(), first_of(output).clone()))

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

    says = f"{type(layer).__name__} gives other outputs than ours does of the same parts"
    return choices.first(one(), lambda _: off, dtype, says)
