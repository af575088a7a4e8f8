"""The kinds of modules that `convert` reaches, one row each: what stands above the class, and what it multiplies by."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from quaver.torch.linear.grouped.layer import GroupedLinear
from quaver.torch.linear.layer import Linear, Quantizable, is_foreign
from quaver.torch.model.matrices import gemm_parameters
from quaver.torch.model.reach import experts, packed, stacks, transposed
from quaver.torch.model.reach.same import computes_a_linear
from quaver.torch.state.buffers import STATE


class Kind(NamedTuple):
    """One kind of modules: functions of a module of it."""

    name: str
    #: Whether a module is of it.
    takes: Callable[[Any], bool]
    #: What stands above the class.
    over: Callable[[Any], type[Quantizable]]
    #: The parameters that are multiplied by; of a parametrized one those that the weight is made of.
    weights: Callable[[Any], Sequence[nn.Parameter]]
    #: Features of the input and of the output of the first product, as rules see them.
    sizes: Callable[[Any], tuple[int, int]]
    #: Features of each input that is multiplied.
    inputs: Callable[[Any], Sequence[int]]
    #: Why this one cannot be converted, or "".
    why_not: Callable[[Any], str]
    #: How many experts; 0 where the weights are no stacks.
    experts: Callable[[Any], int] = lambda module: 0
    #: The names of the stacks, each of whose matrices is a member of the state; none of a module that knows its
    #: members.
    stacks: Callable[[Any], Sequence[str]] = lambda module: ()


def _linear_why_not(module: nn.Linear) -> str:
    if isinstance(module, Linear) or computes_a_linear(module):
        return ""
    if hasattr(module._parameters.get("weight"), "device_mesh"):
        return "its weight lies in parts already: call convert before parallelize_module"
    return f"{type(module).__name__} has a forward of its own"


def _own(module: nn.Module, *names: str) -> list[nn.Parameter]:
    """A module's parameters of these names, where it has them; of a parametrized one what makes them."""
    weights: list[nn.Parameter] = []
    for name in names:
        *inside, last = name.split(".")
        holder = module.get_submodule(".".join(inside))
        if is_parametrized(holder, last):
            weights += [p for p in holder.parametrizations[last].parameters() if p.dim() > 1]  # type: ignore[index, union-attr]
        else:
            # Older kinds of normalization make it of `weight_g` and `weight_v`.
            named = [
                p for n, p in holder._parameters.items() if p is not None and n in (last, f"{last}_g", f"{last}_v")
            ]
            weights += [p for p in named if p.dim() > 1]
    return weights


_LINEAR = Kind(
    "nn.Linear",
    takes=lambda m: isinstance(m, nn.Linear),
    over=lambda m: Linear,
    weights=lambda m: list(gemm_parameters(m)),
    sizes=lambda m: (m.in_features, m.out_features),
    inputs=lambda m: (m.in_features,),
    why_not=_linear_why_not,
)
_GROUPED = Kind(
    "GroupedLinear",
    takes=lambda m: isinstance(m, GroupedLinear),
    over=lambda m: GroupedLinear,
    weights=lambda m: _own(m, "weight"),
    sizes=lambda m: (m.in_features, m.out_features),
    inputs=lambda m: (m.in_features,),
    why_not=lambda m: "",
    experts=lambda m: int(m.groups),
)
_CONV1D = Kind(
    "Conv1D",
    takes=transposed.is_transposed,
    over=lambda m: transposed.Transposed,
    weights=lambda m: _own(m, "weight"),
    sizes=lambda m: (m.nx, m.nf),
    inputs=lambda m: (m.nx,),
    why_not=transposed.why_not,
)
_PACKED = Kind(
    "nn.MultiheadAttention",
    takes=lambda m: isinstance(m, nn.MultiheadAttention),
    over=lambda m: packed.Packed,
    weights=lambda m: _own(m, "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    sizes=lambda m: (m.embed_dim, 3 * m.embed_dim),
    # Of self-attention; it keeps three where its inputs are three.
    inputs=lambda m: (m.embed_dim,) if m._qkv_same_embed_dim else (m.embed_dim, m.kdim, m.vdim),
    why_not=packed.why_not,
)
_EXPERTS = Kind(
    "experts",
    takes=experts.is_stack,
    over=lambda m: experts.Experts,
    weights=lambda m: _own(m, *experts.matrices(m)),
    sizes=experts.sizes,
    inputs=lambda m: (experts.sizes(m)[0], experts.inner(m)),
    why_not=experts.why_not,
    experts=lambda m: int(m.down_proj.shape[0]),
    stacks=experts.matrices,
)


def _of_class(module: nn.Module) -> stacks.Stack | None:
    """The row of a class of experts that the decorator does not describe."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("transformers.models.") and kind.__name__ in stacks.CLASSES:
            return stacks.CLASSES[kind.__name__]
    return None


def _row_of(module: nn.Module) -> stacks.Stack:
    row = _of_class(module)
    assert row is not None
    return row


_STACKS = Kind(
    "experts",
    takes=lambda m: _of_class(m) is not None,
    over=lambda m: _row_of(m).over,
    weights=lambda m: _own(m, *_row_of(m).weights),
    sizes=lambda m: _row_of(m).sizes(m),
    inputs=lambda m: _row_of(m).inputs(m),
    why_not=lambda m: "",
    experts=lambda m: _row_of(m).experts(m),
    stacks=lambda m: _row_of(m).weights,
)
KINDS = (_LINEAR, _GROUPED, _CONV1D, _PACKED, _EXPERTS, _STACKS)


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of a module, or None for one that `convert` does not reach."""
    return next((kind for kind in KINDS if kind.takes(module)), None)


def members(module: nn.Module, kind: Kind) -> tuple[str, ...]:
    """The names of a module's members, by which each has state of its own; none where the module has one state."""
    return experts.members(kind.stacks(module), kind.experts(module))


def why_not(module: nn.Module, kind: Kind) -> str:
    """Why a module cannot be converted, whatever the recipe, or ""."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    why = kind.why_not(module)
    if why:
        return why
    taken = [name for name in STATE if name in module._buffers]
    if taken and not isinstance(module, Quantizable):
        return f"it has a buffer {taken[0]!r} of its own"
    for weight in (module._parameters.get("weight"), *kind.weights(module)):
        if weight is not None and nn.parameter.is_lazy(weight):
            return "its weight has no shape yet; run one forward first"
        if weight is not None and is_foreign(weight):
            return f"its weight is a {type(weight).__name__}, quantized by another library"
    return ""


#: What configs call the number of experts that a token visits.
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


def active(module: nn.Module, kind: Kind, config: Any) -> float:
    """The part of a module's weights that one token is multiplied by: 1, or of experts those that it visits."""
    count = kind.experts(module)
    if not count or (kind is _STACKS and _row_of(module).over is stacks.Alike):
        # Of Llama 4's experts each sees every token.
        return 1.0
    configs = [getattr(module, "config", None), config, getattr(config, "text_config", None)]
    numbers = (getattr(c, name, None) for c in configs for name in CHOSEN)
    return min(1.0, next((n for n in numbers if isinstance(n, int)), count) / count)
