"""What modules of transformers hold, in our modules: parameters, norms, activations; shared, or copied in our order."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.blocks.prologues.activation import ACTIVATIONS
from quaver.torch.blocks.prologues.norm import NORMALIZATIONS, Norm, NormOfEachHead, NormOptions, named
from quaver.torch.model.huggingface.choices import Choices, distance
from quaver.torch.model.reach.transposed import is_transposed

#: What families call the number that a variance gets.
EPS = ("eps", "variance_epsilon", "epsilon")
#: What they call the function between an MLP's matrices.
ACTIVATION = ("act_fn", "act", "activation_fn", "activation", "intermediate_act_fn", "activation_function")

#: Rows of one matrix, to ours.
Rows = Callable[[Tensor], Tensor]


def linear_of(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Weight [out, in] and bias: the module's own parameters, or of a Conv1D a transposed copy."""
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    if weight is None:
        raise ValueError(f"{type(module).__name__} has no weight of its own")
    return (_parameter(weight.detach().t().contiguous(), weight) if is_transposed(module) else weight), bias


def fill(linear: Any, parts: Sequence[tuple[nn.Parameter, nn.Parameter | None]], rows: Rows | None = None) -> None:
    """Make these the parameters of one of our layers: the very same where there is one part in our order.

    Raises:
        ValueError: biases of some parts alone.
    """
    weights, biases = zip(*parts, strict=True)
    if len({bias is None for bias in biases}) > 1:
        raise ValueError("some of the matrices that would be one have a bias and some have none; give fused=False")
    linear._parameters["weight"] = _joined(weights, rows)
    linear._parameters["bias"] = None if biases[0] is None else _joined(biases, rows)


def norm_of(module: nn.Module, x: Tensor, choices: Choices) -> nn.Module:
    """Our norm that computes what a module does of x, with its parameters.

    Raises:
        ValueError: none does.
    """
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    weight, bias = parameters.get("weight"), parameters.get("bias")
    eps = next((getattr(module, name) for name in EPS if getattr(module, name, None) is not None), None)
    kind = type(module).__name__
    if eps is None or not set(parameters) <= {"weight", "bias"}:
        raise ValueError(
            f"{kind} has no eps by a known name, or other parameters than weight and bias; it is none of our norms"
        )
    tried = _inputs(x)
    theirs = [module(y) for y in tried]

    def off(ours: nn.Module) -> float:
        return max(distance(ours(y), z) for y, z in zip(tried, theirs, strict=True))

    says = f"{kind} gives other outputs than LayerNorm, RMSNorm and L2 with its parameters"
    return choices.first(_norms(float(eps), x.shape[-1], weight, bias), off, x.dtype, says)


def activations_of(modules: Sequence[nn.Module], gated: bool) -> list[str]:
    """Rows of `ACTIVATIONS` that an MLP may have: the one that an attribute of these modules computes, else all.

    Args:
        modules: those around the first matrix, the innermost first.
        gated: whether there is a gate.
    """
    rows = [name for name, row in ACTIVATIONS.items() if row.gated == gated and not row.options]
    functions = (getattr(m, name, None) for m in modules for name in ACTIVATION)
    function = next((f for f in functions if callable(f)), None)
    if function is None:
        return rows
    x = torch.linspace(-8, 8, 321, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        y = function(x.clone())
        ones = [torch.ones_like(x)] if gated else []
        return [name for name in rows if distance(ACTIVATIONS[name].forward(x.clone(), *ones), y) <= 1e-6]


def _norms(eps: float, dim: int, weight: nn.Parameter | None, bias: nn.Parameter | None) -> Iterator[nn.Module]:
    """Ours that have these parameters."""
    for kind, (centred, weighted) in NORMALIZATIONS.items():
        if weighted is not (weight is not None) or (bias is not None and not centred):
            continue
        for zero_centered in (False, True) if weighted else (False,):
            ours: Norm | NormOfEachHead
            if weight is not None and weight.dim() == 2:
                options = NormOptions(
                    normalization=kind,
                    eps=eps,
                    zero_centered=zero_centered,
                    norm_bias=bias is not None,
                    device="meta",
                )
                ours = NormOfEachHead(options, *weight.shape)
            else:
                ours = named(kind, dim, eps, zero_centered=zero_centered, bias=bias is not None, device="meta")
            ours._parameters.update({"weight": weight} | ({} if bias is None else {"bias": bias}) if weighted else {})
            yield ours


def _inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two that tell norms apart: off zero, and so small that eps matters."""
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randn(x.shape, generator=generator, dtype=torch.float32, device="cpu").to(x)
    return drawn + 0.5, drawn * 1e-3


def _joined(parts: Sequence[nn.Parameter], rows: Rows | None) -> nn.Parameter:
    if len(parts) == 1 and rows is None:
        return parts[0]
    whole = torch.cat([part.detach() for part in parts])
    return _parameter(whole if rows is None else rows(whole).contiguous(), parts[0])


def _parameter(values: Tensor, like: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=like.requires_grad)
