"""What modules of transformers hold, in our modules: parameters, norms, activations; shared, or copied in our order."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quaver.torch.conversion.matchers.linears import is_transposed
from quaver.torch.nn.activation import ACTIVATIONS
from quaver.torch.nn.norm import NORMALIZATIONS, NormKind, NormOfEachHead, NormOptions, named

# ---- choices ---------------------------------------------------------------------------------------------
# What a layer's structure leaves open: tried on a copy with drawn weights, where outputs tell, then taken.
#
# A layer's own weights may hide a difference: zeros do, and so do 16 bits.

#: By how much numbers of drawn weights may differ, in units of the largest.
DRAWN = 1e-5
#: The same of a layer's own weights, of which scores may be as large as they like.
BOUNDS = {torch.float64: 3e-4, torch.float32: 3e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}

#: What families call a bias that chooses experts and weighs none: a buffer, 0 at first.
CORRECTION = ("e_score_correction_bias", "expert_bias")

T = TypeVar("T")


class Choices:
    """Which candidate was taken each time, in the order in which it was asked; given some, those are taken again.

    Without any the weights are `drawn`.
    """

    def __init__(self, given: "Choices | None" = None) -> None:
        self.taken: list[int] = []
        self._given = None if given is None else iter(given.taken)

    def first(self, candidates: Iterable[T], distance: Callable[[T], float], dtype: torch.dtype, says: str) -> T:
        """The first candidate within the bound of a dtype, or the one that was taken before.

        Raises:
            ValueError: `says`, with the smallest distance, if none is, or if the one taken before is not.
        """
        wanted = None if self._given is None else next(self._given)
        nearest = float("inf")
        for number, candidate in enumerate(candidates):
            if wanted in (None, number):
                off = distance(candidate)
                if off <= (DRAWN if self._given is None else BOUNDS[dtype]):
                    self.taken.append(number)
                    return candidate
                nearest = min(nearest, off)
        raise ValueError(f"{says}: they differ by {nearest:.1e} of the largest{_rounded()}")


def _rounded() -> str:
    """A sentence on settings by which float32 products are not float32's, "" where there are none."""
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    if all(backend.fp32_precision in ("none", "ieee") for backend in backends):
        return ""
    return (
        ". This process lets float32 products round (TF32): call "
        "torch.set_float32_matmul_precision('highest') while the layer is read"
    )


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, in units of the largest number of b; infinite where shapes or what is finite differ."""
    if a.shape != b.shape:
        return float("inf")
    size = b.abs().max().item()
    return ((a.double() - b.double()).abs().max() / (size or 1.0)).nan_to_num(torch.inf).item()


def distance_of_most(a: Tensor, b: Tensor) -> float:
    """`distance` of the nearer three quarters of the tokens in 16 bits, of all in wider dtypes.

    Where tokens choose experts a rounding of 16 bits sends some to others.
    """
    if a.shape != b.shape or a.dtype.itemsize > 2:
        return distance(a, b)
    size = b.abs().max().item()
    off = (a.double() - b.double()).abs().amax(-1).flatten().nan_to_num(torch.inf) / (size or 1.0)
    return float(off.quantile(0.75))


def drawn(layer: nn.Module) -> nn.Module:
    """A copy in float32 whose parameters are random, of a size that keeps numbers about 1."""
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


# ---- parts -----------------------------------------------------------------------------------------------

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
            ours: NormKind | NormOfEachHead
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


# ---- roles -----------------------------------------------------------------------------------------------
# Which module of a layer does what, by the names that families of transformers give them.

#: Ends of a path inside of a layer; the first that fits decides.
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
#: Where a layer attends to something else than its input.
CROSS = re.compile(r"(^|\.)(encoder_attn|crossattention|cross_attn|EncDecAttention)(\.|$)")
#: What stands where an MLP would.
MLPS = re.compile(r"^(mlp|feed_forward|ffn|moe|block_sparse_moe)$")
#: What a mixture of experts holds.
EXPERTS = re.compile(r"expert|router", re.IGNORECASE)


def roles_of(layer: nn.Module) -> dict[str, str]:
    """The name of the module for each role there is; "mixture" is a mixture of experts.

    Raises:
        ValueError: cross attention, or two modules of one role.
    """
    roles: dict[str, str] = {}
    mixture = next((name for name, child in layer.named_children() if MLPS.match(name) and _has_experts(child)), None)
    for name, module in layer.named_modules():
        if CROSS.search(name):
            raise ValueError(f"{name} attends to a memory, which is not read yet; make a TransformerLayer by hand")
        if mixture is not None and f"{name}.".startswith(f"{mixture}."):
            continue
        if not isinstance(module, nn.Linear) and not is_transposed(module):
            continue
        role = next((role for role, names in ROLES.items() if names.search(name)), None)
        if role is None:
            continue
        if role in roles:
            raise ValueError(
                f"{roles[role]} and {name} both look like a layer's {role!r}; make a TransformerLayer by hand"
            )
        roles[role] = name
    return roles if mixture is None else roles | {"mixture": mixture}


def is_norm(module: nn.Module) -> bool:
    """True for what is a norm by its class's name."""
    return "norm" in type(module).__name__.lower() and not module._modules


def _has_experts(module: nn.Module) -> bool:
    return any(EXPERTS.search(name) for name, _ in module.named_children())
