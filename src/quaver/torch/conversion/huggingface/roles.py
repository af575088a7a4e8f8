"""Identify modules of transformers layers (projections, norms, activations) and find their Quaver equivalents.

Parameters are shared, or copied where the row order differs. What the structure leaves open is tried on a copy with
random weights.
"""

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quaver.torch.conversion.matchers.linears import is_transposed
from quaver.torch.conversion.replace.norm import formula_of
from quaver.torch.nn.activation import ACTIVATIONS
from quaver.torch.nn.norm import NormOfEachHead, NormOptions

# ---- candidates: tried on a copy with random weights, then applied to the layer's own ----
#
# A layer's own weights may hide a difference, for example if they are zero or in 16 bits.

#: Largest difference with random weights, relative to the largest output.
RANDOM_WEIGHTS_BOUND = 1e-5
#: The same with the layer's own weights, where attention scores may be arbitrarily large.
BOUNDS = {torch.float64: 3e-4, torch.float32: 3e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}

#: Buffer names of a router's bias that affects the selection of experts but not their weights; initially 0.
CORRECTION = ("e_score_correction_bias", "expert_bias")

T = TypeVar("T")


class Choices:
    """Records the index of the candidate chosen at each step; with an earlier record, repeats its choices.

    Without an earlier record, the layer compared has random weights (`randomized`).
    """

    def __init__(self, earlier: "Choices | None" = None) -> None:
        self.taken: list[int] = []
        self._earlier = None if earlier is None else iter(earlier.taken)

    def first(self, candidates: Iterable[T], distance: Callable[[T], float], dtype: torch.dtype, message: str) -> T:
        """Return the first candidate within the dtype's bound, or the one chosen in the earlier record.

        Args:
            candidates: the candidates in order of preference.
            distance: function that returns a candidate's relative difference.
            dtype: dtype of the layer, which sets the bound.
            message: start of the error message.
        Raises:
            ValueError: no candidate, or not the recorded one, is within the bound; gives the smallest difference.
        """
        wanted = None if self._earlier is None else next(self._earlier)
        nearest = float("inf")
        for number, candidate in enumerate(candidates):
            if wanted in (None, number):
                off = distance(candidate)
                if off <= (RANDOM_WEIGHTS_BOUND if self._earlier is None else BOUNDS[dtype]):
                    self.taken.append(number)
                    return candidate
                nearest = min(nearest, off)
        raise ValueError(f"{message}: they differ by {nearest:.1e} of the largest{_rounded()}")


def _rounded() -> str:
    """Return a hint for the error message if float32 matmuls may use TF32, else ""."""
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    if all(backend.fp32_precision in ("none", "ieee") for backend in backends):
        return ""
    return (
        ". This process lets float32 products round (TF32): call "
        "torch.set_float32_matmul_precision('highest') while the layer is read"
    )


def distance(a: Tensor, b: Tensor) -> float:
    """Return max |a - b| / max |b|; infinity if shapes or the positions of finite values differ."""
    if a.shape != b.shape:
        return float("inf")
    size = b.abs().max().item()
    return ((a.double() - b.double()).abs().max() / (size or 1.0)).nan_to_num(torch.inf).item()


def distance_of_most(a: Tensor, b: Tensor) -> float:
    """Return `distance` at the 75 % quantile over tokens for 16-bit dtypes, over all tokens for wider ones.

    With expert routing, 16-bit rounding sends some tokens to other experts.
    """
    if a.shape != b.shape or a.dtype.itemsize > 2:
        return distance(a, b)
    size = b.abs().max().item()
    off = (a.double() - b.double()).abs().amax(-1).flatten().nan_to_num(torch.inf) / (size or 1.0)
    return float(off.quantile(0.75))


def randomized(layer: nn.Module) -> nn.Module:
    """Return a float32 copy with random parameters, scaled so that activations stay near 1."""
    other = copy.deepcopy(layer)
    if next(layer.parameters()).dtype is not torch.float64:
        other = other.float()
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for p in other.parameters():
            generator = generators.setdefault(p.device, torch.Generator(p.device).manual_seed(0))
            p.normal_(generator=generator)
            if p.dim() > 1:
                p.mul_(p.shape[-1] ** -0.5)
            else:
                p.mul_(0.3).add_(1)
        for name, buffer in other.named_buffers():
            if name.rpartition(".")[2] in CORRECTION:
                generator = generators.setdefault(buffer.device, torch.Generator(buffer.device).manual_seed(0))
                buffer.normal_(std=0.1, generator=generator)
    return other


# ---- projections, norms and activations ----

#: Attribute names of the activation between an MLP's matrices.
ACTIVATION = ("act_fn", "act", "activation_fn", "activation", "intermediate_act_fn", "activation_function")

#: Function that reorders the rows of a matrix to Quaver's order.
Rows = Callable[[Tensor], Tensor]


def linear_of(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return weight [out, in] and bias: the module's own parameters, or a transposed copy of a Conv1D's weight."""
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    if weight is None:
        raise ValueError(f"{type(module).__name__} has no parameter named weight")
    return (_parameter(weight.detach().t().contiguous(), weight) if is_transposed(module) else weight), bias


def fill(linear: Any, parts: Sequence[tuple[nn.Parameter, nn.Parameter | None]], rows: Rows | None = None) -> None:
    """Set the parameters of a Quaver layer: shares the object if there is one part in matching order, else copies.

    Args:
        linear: the Quaver layer.
        parts: (weight, bias) pairs to concatenate along the rows.
        rows: function that reorders the rows, or None.
    Raises:
        ValueError: only some parts have a bias.
    """
    weights, biases = zip(*parts, strict=True)
    if len({bias is None for bias in biases}) > 1:
        raise ValueError("only some of the matrices to join have a bias; give fused=False")
    linear._parameters["weight"] = _joined(weights, rows)
    linear._parameters["bias"] = None if biases[0] is None else _joined(biases, rows)


def norm_of(module: nn.Module, dim: int) -> nn.Module:
    """Return the Quaver norm over dim features that computes the same as a module, with its parameters.

    Raises:
        ValueError: no norm computes the same.
    """
    formula, why = formula_of(module)
    if formula is None:
        raise ValueError(
            f"{type(module).__name__} has other outputs than LayerNorm, RMSNorm and L2 with its parameters: {why}"
        )
    n, parameters = formula.normalization, module._parameters
    weight = None if formula.weight is None else parameters[formula.weight]
    bias = None if formula.bias is None else parameters[formula.bias]
    options = NormOptions(
        normalization=n.normalization,
        eps=n.eps,
        zero_centered=n.zero_centered,
        norm_bias=bias is not None,
        device="meta",
    )
    each_head = weight is not None and weight.dim() == 2
    ours: Any = NormOfEachHead(options, *weight.shape) if each_head else options.norm(dim)  # type: ignore[union-attr]
    ours._parameters.update(weight=weight, bias=bias)
    return ours


def activations_of(modules: Sequence[nn.Module], gated: bool) -> list[str]:
    """Return the names in `ACTIVATIONS` that an MLP may use: the one that matches its activation function, else all.

    Args:
        modules: modules around the first matrix, innermost first.
        gated: True if the MLP has a gate.
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


def _joined(parts: Sequence[nn.Parameter], rows: Rows | None) -> nn.Parameter:
    if len(parts) == 1 and rows is None:
        return parts[0]
    whole = torch.cat([part.detach() for part in parts])
    return _parameter(whole if rows is None else rows(whole).contiguous(), parts[0])


def _parameter(values: Tensor, like: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=like.requires_grad)


# ---- roles: which module does what, by transformers' naming ----

#: Patterns for the end of a module's path in the layer; the first match wins.
ROLES: dict[str, re.Pattern[str]] = {
    role: re.compile(rf"(?:^|\.)(?:{names})$")
    for role, names in {
        "qkv": "qkv_proj|query_key_value|Wqkv|c_attn|qkv",
        "q": "q_proj|query|q_lin|q",
        "k": "k_proj|key|k_lin|k",
        "v": "v_proj|value|v_lin|v",
        "o": r"o_proj|out_proj|out_lin|SelfAttention\.o|attn\.c_proj|attention\.output\.dense"
        r"|(?:self_|)att(?:ention|n)\.dense",
        "q_down": "q_a_proj",
        "q_up": "q_b_proj",
        "kv_down": "kv_a_proj_with_mqa|kv_a_proj",
        "kv_up": "kv_b_proj",
        "gate_up": "gate_up_proj",
        "gate": "gate_proj|wi_0",
        "up": r"up_proj|wi_1|wi|fc1|fc_in|lin1|mlp\.c_fc|dense_h_to_4h|intermediate\.dense",
        "down": r"down_proj|wo|fc2|fc_out|lin2|mlp\.c_proj|dense_4h_to_h|output\.dense",
    }.items()
}
#: Pattern of module paths of cross attention.
CROSS = re.compile(r"(^|\.)(encoder_attn|crossattention|cross_attn|EncDecAttention)(\.|$)")
#: Pattern of the name of a child that is the MLP or a mixture of experts.
MLPS = re.compile(r"^(mlp|feed_forward|ffn|moe|block_sparse_moe)$")
#: Pattern of the children's names that identify a mixture of experts.
EXPERTS = re.compile(r"expert|router", re.IGNORECASE)


def roles_of(layer: nn.Module) -> dict[str, str]:
    """Return the module name for each role found; "mixture" is a mixture of experts.

    Raises:
        ValueError: the layer has cross attention, or two modules for one role.
    """
    roles: dict[str, str] = {}
    mixture = next((name for name, child in layer.named_children() if MLPS.match(name) and _has_experts(child)), None)
    for name, module in layer.named_modules():
        if CROSS.search(name):
            raise ValueError(
                f"{name} is cross attention, which is not supported yet; create a TransformerLayer yourself"
            )
        if mixture is not None and f"{name}.".startswith(f"{mixture}."):
            continue
        if not isinstance(module, nn.Linear) and not is_transposed(module):
            continue
        role = next((role for role, names in ROLES.items() if names.search(name)), None)
        if role is None:
            continue
        if role in roles:
            raise ValueError(
                f"{roles[role]} and {name} both look like the layer's {role!r}; create a TransformerLayer yourself"
            )
        roles[role] = name
    return roles if mixture is None else roles | {"mixture": mixture}


def is_norm(module: nn.Module) -> bool:
    """Return True if the class name says it is a norm and it has no children."""
    return "norm" in type(module).__name__.lower() and not module._modules


def _has_experts(module: nn.Module) -> bool:
    return any(EXPERTS.search(name) for name, _ in module.named_children())
