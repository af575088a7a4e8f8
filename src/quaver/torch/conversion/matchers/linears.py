"""The module kinds that `convert` supports, one `LinearMatcher` each: the replacement class, the weights and the
sizes.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from quaver.recipes.conversion import HEAD_NAMES
from quaver.recipes.spec import Recipe
from quaver.torch.conversion.matchers import experts
from quaver.torch.conversion.matchers.experts import product
from quaver.torch.conversion.probe import bare_copy, differs, random_tensor, rows
from quaver.torch.conversion.replace.fused_module import class_key
from quaver.torch.linear.grouped.layer import GroupedLinear
from quaver.torch.linear.linear import Linear, Quantizable, is_foreign, recipe_of
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.state.buffers import STATE

# ---- nn.MultiheadAttention ----
#
# q, k and v are linear layers of rows of `in_proj_weight`, or of three weights if keys have other features. The output
# projection is called as the module that it is. The attention itself stays in high precision.


class QuantizedMultiheadAttention(Quantizable, nn.MultiheadAttention):
    """Mixin above nn.MultiheadAttention and its subclasses that do not override forward; quantizes the projections."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        recipe = recipe_of(self, is_tracing())
        if recipe is None or not recipe.quantizes or query.is_nested:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True only describes attn_mask, and attn_mask is None; give both")
        batched, first = query.dim() == 3, self.batch_first and query.dim() == 3
        # [length, batch, features]; one object stays one object, so that it is quantized once.
        put = {id(x): x.transpose(0, 1) if first else x if batched else x.unsqueeze(1) for x in (query, key, value)}
        q, k, v = (put[id(x)] for x in (query, key, value))
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        y, weights = self._attend(recipe, (q, k, v), key_padding_mask, attn_mask, need_weights, is_causal)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return y.squeeze(1), None if weights is None else weights.squeeze(0)
        return y.transpose(0, 1) if first else y, weights

    def _attend(
        self,
        recipe: Recipe,
        inputs: tuple[Tensor, Tensor, Tensor],
        padding: Tensor | None,
        mask: Tensor | None,
        need_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with inputs [length, batch, features].

        Returns:
            The output [L, B, features], and the attention weights [B, H, L, S] or None.
        """
        length, batch, _ = inputs[0].shape
        heads, size, keys = self.num_heads, self.head_dim, inputs[1].shape[0]
        q, *kv = self._projections(recipe, *inputs)
        # As in torch, is_causal replaces the mask only if there is no padding and no weights are returned.
        hinted = is_causal and padding is None and not need_weights
        if not hinted:
            _check("attn_mask", mask, [length, keys], [batch * heads, length, keys])
            _check("key_padding_mask", padding, [batch, keys])
        joined = None if hinted else _joined(mask, padding, batch, heads, q.dtype)
        if self.bias_k is not None and self.bias_v is not None:
            kv = [
                torch.cat([t, b.to(t.dtype).repeat(1, batch, 1)])
                for t, b in zip(kv, (self.bias_k, self.bias_v), strict=True)
            ]
            joined = _seen(joined)
        if self.add_zero_attn:
            kv = [torch.cat([t, t.new_zeros((1, *t.shape[1:]))]) for t in kv]
            joined = _seen(joined)
        # q, k, v: [B, H, L, D]
        q, k, v = (t.reshape(t.shape[0], batch, heads, size).permute(1, 2, 0, 3) for t in (q, *kv))
        dropped = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = (q * math.sqrt(1.0 / size)) @ k.transpose(-2, -1)
            weights = F.dropout((scores if joined is None else scores + joined).softmax(-1), dropped)
            y = weights @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, joined, dropped, hinted)
        y = y.permute(2, 0, 1, 3).reshape(length, batch, heads * size)
        return self.out_proj(y), weights

    def _projections(self, recipe: Recipe, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return q, k and v; projections with the same input share one GEMM."""
        weight, bias, n = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        if weight is None:
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            each = zip(
                (query, key, value), (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight), biases, strict=True
            )
            return [product(self, x, w, b, recipe) for x, w, b in each]
        parts = [(query, 0, 3)] if query is key is value else [(query, 0, 1), (key, 1, 3)]
        if key is not value:
            parts = [(query, 0, 1), (key, 1, 2), (value, 2, 3)]
        outputs: list[Tensor] = []
        for x, start, end in parts:
            rows = slice(start * n, end * n)
            whole = end - start == 3
            w, b = (weight, bias) if whole else (weight[rows], None if bias is None else bias[rows])
            outputs += product(self, x, w, b, recipe).chunk(end - start, -1)
        return outputs


def _check(name: str, mask: Tensor | None, *shapes: list[int]) -> None:
    """Raise ValueError for a mask that torch would reject; adding it would silently give wrong results."""
    if mask is None:
        return
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} is {mask.dtype}; give bool, True where nothing is seen, or a float that is added")
    if list(mask.shape) not in shapes:
        raise ValueError(f"{name} is {list(mask.shape)}; give {' or '.join(map(str, shapes))}")


def _joined(mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, dtype: torch.dtype) -> Tensor | None:
    """Combine a mask [L, S] or [B * H, L, S] and key padding [B, S] into an additive mask for scores [B, H, L, S]."""
    joined = None
    if mask is not None:
        joined = _added(mask, dtype)
        joined = joined[None, None] if mask.dim() == 2 else joined.view(batch, heads, *mask.shape[1:])
    if padding is not None:
        hidden = _added(padding, dtype)[:, None, None]
        joined = hidden if joined is None else joined + hidden
    return joined


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask (True means hidden) to an additive one."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def _seen(mask: Tensor | None) -> Tensor | None:
    """Extend the mask by one key that is visible."""
    return None if mask is None else F.pad(mask, (0, 1))


# ---- layers with weight [in, out], such as transformers' Conv1D in GPT-2 ----
#
# They run as linear layers of the transposed view. The weight cache is keyed by the parameter, not by the view.

#: Module and name of the class; a name, because transformers may not be installed.
CONV1D = "transformers.pytorch_utils", "Conv1D"


class QuantizedConv1D(Quantizable):
    """Mixin above a class whose forward is x [..., in] @ weight [in, out] + bias."""

    weight: Tensor
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[0])

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        recipe = recipe_of(self, is_tracing())
        if recipe is None or not recipe.quantizes:
            unquantized: Tensor = super().forward(x)
            return unquantized
        return product(self, x, self.weight.t(), self.bias, recipe)


def is_transposed(module: nn.Module) -> bool:
    """Return True for transformers' Conv1D and its subclasses."""
    return _conv1d(module) is not None


def _conv1d(module: nn.Module) -> type | None:
    return next((kind for kind in type(module).__mro__ if (kind.__module__, kind.__name__) == CONV1D), None)


# ---- which parameters of a model GEMMs read ----
#
# torch does not record this. A parameter counts if it is a matrix, or a stack of matrices as experts have, that belongs
# to no embedding, convolution or norm and is not named like a table or a bias.

#: A matrix with a smaller side is a gate, a low-rank factor or a table.
SMALLEST_SIDE = 16
#: Class-name patterns of modules whose matrices are not GEMM operands.
OTHER_CLASSES = re.compile("embedding|conv[123]d$|convtranspose|norm", re.IGNORECASE)
OTHER_NAMES = re.compile("bias|embed|position|token|table|query_tokens|latent|norm|scale|_log", re.IGNORECASE)
#: Classes named like a convolution that are linear layers [in, out]: transformers' Conv1D in GPT-2.
LINEAR_CLASSES = {"Conv1D"}


def gemm_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield a module's own parameters that GEMMs read; for a parametrized nn.Linear those that make its weight."""
    if isinstance(module, nn.Linear):
        weight = module._parameters.get("weight")
        parts = module.parameters() if weight is None else [weight]
        yield from (p for p in parts if not nn.parameter.is_lazy(p) and p.dim() == 2)
        return
    if isinstance(module, ParametrizationList):
        return
    kind = type(module).__name__
    if kind not in LINEAR_CLASSES and OTHER_CLASSES.search(kind):
        return
    for name, parameter in module.named_parameters(recurse=False):
        if not nn.parameter.is_lazy(parameter) and not OTHER_NAMES.search(name) and _is_operand(parameter):
            yield parameter


def _is_operand(parameter: torch.Tensor) -> bool:
    if parameter.dim() == 3 and parameter.shape[0] == 1:
        # One matrix shared by the batch, such as learned positions.
        return False
    return parameter.dim() in (2, 3) and min(parameter.shape[-2:]) >= SMALLEST_SIDE


# ---- module kinds ----


class LinearMatcher(NamedTuple):
    """Description of one kind of module; the callables take a module of that kind."""

    #: Return True if a module is of this kind.
    takes: Callable[[Any], bool]
    #: Class that is put above the module's own.
    over: type[Quantizable]
    #: Parameter names of its GEMMs' weights.
    names: Callable[[Any], Sequence[str]]
    #: Input and output features of each GEMM; rules check the first.
    features: Callable[[Any], Sequence[tuple[int, int]]]
    #: Return True if the class's forward is the one that `over` replaces.
    computes_alike: Callable[[Any], bool] = lambda module: True
    #: Number of experts; 0 if the weights are not stacks.
    experts: Callable[[Any], int] = lambda module: 0

    def sizes(self, module: nn.Module) -> tuple[int, int]:
        """Return the input and output features of the first GEMM."""
        return self.features(module)[0]

    def weights(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the weights of the module's GEMMs; for a parametrized weight the parameters that make it."""
        return list(gemm_parameters(module)) if isinstance(module, nn.Linear) else _own(module, *self.names(module))

    def stacks(self, module: nn.Module) -> Sequence[str]:
        """Return the parameter names of stacks whose matrices become members of the module's state; a `GroupedLinear`
        names its members itself.
        """
        return self.names(module) if self.experts(module) and self.over is not GroupedLinear else ()


def _own(module: nn.Module, *names: str) -> list[nn.Parameter]:
    """Return a module's matrices with these parameter names, or the parameters that make them if parametrized."""
    weights: list[nn.Parameter] = []
    for name in names:
        *inside, last = name.split(".")
        holder = module.get_submodule(".".join(inside))
        if is_parametrized(holder, last):
            weights += [p for p in holder.parametrizations[last].parameters() if p.dim() > 1]  # type: ignore[index, union-attr]
        else:
            # torch's older weight_norm makes the weight from `weight_g` and `weight_v`.
            named = [
                p for n, p in holder._parameters.items() if p is not None and n in (last, f"{last}_g", f"{last}_v")
            ]
            weights += [p for p in named if p.dim() > 1]
    return weights


def _is_class(name: str) -> Callable[[nn.Module], bool]:
    """Return a function that returns True for a module of this class of transformers."""

    def takes(module: nn.Module) -> bool:
        return any(k.__name__ == name and k.__module__.startswith("transformers.models.") for k in type(module).__mro__)

    return takes


_LINEAR = LinearMatcher(
    takes=lambda m: isinstance(m, nn.Linear),
    over=Linear,
    names=lambda m: ("weight",),
    features=lambda m: ((m.in_features, m.out_features),),
    computes_alike=lambda m: type(m).forward is nn.Linear.forward,
)
_GROUPED = LinearMatcher(
    takes=lambda m: isinstance(m, GroupedLinear),
    over=GroupedLinear,
    names=lambda m: ("weight",),
    features=lambda m: ((m.in_features, m.out_features),),
    experts=lambda m: int(m.groups),
)
_CONV1D = LinearMatcher(
    takes=is_transposed,
    over=QuantizedConv1D,
    names=lambda m: ("weight",),
    features=lambda m: ((m.nx, m.nf),),
    computes_alike=lambda m: type(m).forward is _conv1d(m).forward,  # type: ignore[union-attr]
)
_PACKED = LinearMatcher(
    takes=lambda m: isinstance(m, nn.MultiheadAttention),
    over=QuantizedMultiheadAttention,
    names=lambda m: ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    # For self-attention q, k and v are one GEMM; with three different inputs it saves three.
    features=lambda m: tuple(
        (k, 3 * m.embed_dim) for k in ((m.embed_dim,) if m._qkv_same_embed_dim else (m.embed_dim, m.kdim, m.vdim))
    ),
    computes_alike=lambda m: type(m).forward is nn.MultiheadAttention.forward,
)
_EXPERTS = LinearMatcher(
    takes=experts.is_stack,
    over=experts.StackedExperts,
    names=experts.matrices,
    features=experts.features,
    computes_alike=lambda m: hasattr(type(m).forward, "__wrapped__"),
    experts=lambda m: int(m.down_proj.shape[0]),
)
_LLAMA4 = LinearMatcher(
    takes=_is_class("Llama4TextExperts"),
    over=experts.QuantizedLlama4Experts,
    names=lambda m: experts.LLAMA4,
    features=lambda m: (tuple(m.gate_up_proj.shape[1:]), tuple(m.down_proj.shape[1:])),
    experts=lambda m: int(m.gate_up_proj.shape[0]),
)
_JETMOE = LinearMatcher(
    takes=_is_class("JetMoeParallelExperts"),
    over=experts.QuantizedJetMoeExperts,
    names=lambda m: experts.JETMOE,
    features=lambda m: (tuple(m.weight.shape[:0:-1]),),
    experts=lambda m: int(m.weight.shape[0]),
)
_DBRX = LinearMatcher(
    takes=_is_class("DbrxExperts"),
    over=experts.QuantizedDbrxExperts,
    names=lambda m: experts.DBRX,
    features=lambda m: ((m.mlp.hidden_size, m.mlp.ffn_hidden_size), (m.mlp.ffn_hidden_size, m.mlp.hidden_size)),
    experts=lambda m: int(m.mlp.w1.shape[0] // m.mlp.ffn_hidden_size),
)
KINDS = (_LINEAR, _GROUPED, _CONV1D, _PACKED, _EXPERTS, _LLAMA4, _JETMOE, _DBRX)


def kind_of(module: nn.Module) -> LinearMatcher | None:
    """Return the kind of a module, or None if `convert` does not support it."""
    return next((kind for kind in KINDS if kind.takes(module)), None)


def members(module: nn.Module, kind: LinearMatcher) -> tuple[str, ...]:
    """Return the names of a module's members, each with state of its own; empty if the module has a single state."""
    return experts.members(kind.stacks(module), kind.experts(module))


def reason_unsupported(module: nn.Module, kind: LinearMatcher, known: dict[Any, bool]) -> str:
    """Return why a module cannot be converted under any recipe, or "".

    Args:
        module: the module.
        kind: its kind.
        known: results of earlier probes, which this adds to.
    """
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    convertible = isinstance(module, Quantizable) or kind.computes_alike(module)
    if not convertible and not (kind is _LINEAR and _computes_a_linear(module, known)):
        if kind is _LINEAR and hasattr(module._parameters.get("weight"), "device_mesh"):
            return "its weight is already sharded: call convert before parallelize_module"
        return f"{type(module).__name__} overrides forward"
    existing_names = [name for name in STATE if name in module._buffers]
    if existing_names and not isinstance(module, Quantizable):
        return f"it already has a buffer named {existing_names[0]!r}"
    for weight in (module._parameters.get("weight"), *kind.weights(module)):
        if weight is not None and nn.parameter.is_lazy(weight):
            return "its weight has no shape yet; run one forward first"
        if weight is not None and is_foreign(weight):
            return f"its weight is a {type(weight).__name__}, quantized by another library"
    return ""


#: Input and output features of the copy of an nn.Linear subclass that is probed.
SMALL = 8, 5


def _computes_a_linear(module: nn.Module, known: dict[Any, bool]) -> bool:
    """Return True if the forward of an nn.Linear subclass computes what nn.Linear's does.

    A layer with parameters, buffers or modules besides weight and bias is never accepted, since they may matter later
    (LoRA's start at zero). Falcon's layers pass.
    """
    if set(module._parameters) - {"weight", "bias"} or module._modules or module._buffers:
        return False

    def build_copy(dtype: torch.dtype) -> nn.Module:
        shapes = {"weight": SMALL[::-1], "bias": SMALL[1:]}
        names = [name for name, p in module._parameters.items() if p is not None]
        copied: Any = bare_copy(module, {}, {name: random_tensor(shapes[name], dtype, len(name)) for name in names})
        copied.in_features, copied.out_features = SMALL
        return copied

    key = class_key(module)
    if key not in known:
        known[key] = not differs(
            build_copy,
            lambda layer, x: F.linear(x, layer.weight, layer.bias),
            lambda dtype: ((x,) for x in rows(SMALL[0], dtype)),
        )
    return known[key]


#: Config fields for the number of experts per token.
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


def active(module: nn.Module, kind: LinearMatcher, config: Any) -> float:
    """Return the share of a module's weights that one token uses: 1, or for experts the share it is routed to."""
    count = kind.experts(module)
    if not count or kind is _LLAMA4:
        # All of Llama 4's experts process every token.
        return 1.0
    configs = [getattr(module, "config", None), config, getattr(config, "text_config", None)]
    numbers = (getattr(c, name, None) for c in configs for name in CHOSEN)
    return min(1.0, next((n for n in numbers if isinstance(n, int)), count) / count)


# ---- layers that stay in high precision unless a rule names them: output heads and PEFT adapters ----
#
# Published recipes leave output heads unquantized. Adapters are small and trained in 16 bits with a quantized base.
# Sources: DeepSeek-V3 (arXiv:2412.19437, section 3.3.1), NVIDIA's NVFP4 pre-training (arXiv:2509.25149), and QLoRA
# (arXiv:2305.14314, section 3), whose adapters are bfloat16 over a 4-bit base.

#: Attribute in which PEFT's layers list their adapters.
ADAPTERS = "adapter_layer_names"
ADAPTER_REASON = "an adapter of PEFT stays in high precision; a rule that names it converts it"


def output_heads(model: nn.Module) -> set[nn.Module]:
    """Return a model's output heads: its `get_output_embeddings`, and linear layers tied to an embedding.

    If the model has no such method, a linear layer with a head's name also counts if the name occurs once and its
    output features equal the vocabulary size.
    """
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not model}
    found = _modules_from(model, "get_output_embeddings")
    heads: set[nn.Module] = {part for head in found for part in head.modules() if isinstance(part, nn.Linear)}
    if not found:
        often, rows = Counter(map(_last, linear)), _vocabularies(model)
        for name, module in linear.items():
            if _last(name) in HEAD_NAMES and often[_last(name)] == 1 and module.out_features in rows:
                heads.add(module)
    return heads | {module for module in linear.values() if id(module._parameters.get("weight")) in tied}


def _vocabularies(model: nn.Module) -> set[int]:
    """Return the sizes of the input embeddings; if the model does not name them, those of all non-position
    embeddings.
    """
    tables = [m for m in _modules_from(model, "get_input_embeddings") if isinstance(m, nn.Embedding)]
    if not tables:
        named = [(_last(name), m) for name, m in model.named_modules() if isinstance(m, nn.Embedding)]
        tables = [m for last, m in named if "pos" not in last and last != "wpe"]
    return {table.num_embeddings for table in tables}


def _modules_from(model: nn.Module, method: str) -> list[nn.Module]:
    """Return the modules that a getter method, such as `get_output_embeddings`, returns on any submodule."""
    found = []
    for module in model.modules():
        getter = getattr(type(module), method, None)
        if getter is None:
            continue
        try:
            value = getter(module)
        except Exception:
            # Models without such an embedding raise various errors.
            continue
        if isinstance(value, nn.Module):
            found.append(value)
    return found


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield PEFT's wrappers around layers, recognized by the attributes that they all have."""
    for module in model.modules():
        if isinstance(getattr(type(module), ADAPTERS, None), tuple) and "base_layer" in module._modules:
            yield module


def adapter_layers(model: nn.Module) -> set[nn.Module]:
    """Return all modules inside the adapters of PEFT's layers."""
    layers: set[nn.Module] = set()
    for wrapper in wrappers(model):
        names: Any = getattr(type(wrapper), ADAPTERS)
        adapters = [wrapper._modules.get(name) for name in names]
        layers.update(part for adapter in adapters if adapter is not None for part in adapter.modules())
    return layers
