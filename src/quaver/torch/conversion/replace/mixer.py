"""Mamba mixers: find layers whose weight is used without a call, make mixers call their layers, and fuse Mamba-2
    mixers.

The class's own forward runs as a copy with other globals, so the framework is not modified. An installed package's
convolution and scan stay in use.
"""

import ast
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.conversion.matchers.swap_class import global_names, original_class, read_of_class, unconverted_class
from quaver.torch.conversion.probe import Results, first_equal, random_tensor, stand_in
from quaver.torch.conversion.replace.fused_module import (
    FusedModule,
    Named,
    bypassed_child,
    fixed,
    needs_original,
    reason_mutable,
    replaced,
    with_functions,
)
from quaver.torch.conversion.replace.mamba_packing import cu_seqlens_of, last_starts
from quaver.torch.linear.fused_projections import project
from quaver.torch.linear.linear import Quantizable
from quaver.torch.nn.activation import ACTIVATIONS
from quaver.torch.nn.ssm.causal_conv import causal_conv1d
from quaver.torch.nn.ssm.gated_norm import GatedNormalization
from quaver.torch.nn.ssm.mamba2 import SWIGLU, ScanSizes, scanned
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.state.context import recipe_in_force

# ---- layers whose weight the parent reads without calling them ----
#
# Found in the source of the parent's forward: Mamba's `dt_proj.weight @ dt`, WavLM's projections. Converting such a
# layer would have no effect.

#: Names of transformers' functions that compute a mixer from its projected input on, including the output projection.
#: Without their package they return None, and the mixer continues with its layers.
WHOLE = re.compile(r"^mamba\w*(inner_fn|scan_combined)$")
#: Attributes of a weight that can be read without multiplying by it.
METADATA_ATTRIBUTES = {
    "dtype",
    "device",
    "shape",
    "size",
    "dim",
    "ndim",
    "numel",
    "requires_grad",
    "is_cuda",
    "is_meta",
}


#: Ways in which a forward uses a child: it reads the weight, does so only as an argument of functions of `WHOLE`, or
#: uses the child otherwise, such as calling it.
READ, READ_INSIDE, CALL = "read", "read inside", "call"


def bypassed(module: nn.Module, is_layer: Callable[[nn.Module], bool]) -> dict[nn.Module, str]:
    """Return the direct child layers whose weight the forward multiplies by without calling them, and the reason.

    Args:
        module: the parent.
        is_layer: function that returns True for a layer that multiplies by a weight.
    """
    layers = {name: part for name, part in module._modules.items() if part is not None and is_layer(part)}
    if not layers or "forward" in module.__dict__:
        return {}
    kind = original_class(module)
    used = uses(kind, kind.forward)
    mixes, reasons = is_mixer(module), {}
    for name, layer in layers.items():
        use = used.get(name, set())
        # For mixers a single read counts: they may call a layer in evaluation and read its weight in training.
        if use & {READ, READ_INSIDE} and not (CALL in use and (READ not in use or not mixes)):
            reasons[layer] = f"{kind.__name__} multiplies by its weight without calling it"
    return reasons


def is_mixer(module: nn.Module) -> bool:
    """Return True for a state-space mixer, recognized by the parameter A_log that all families have."""
    return "A_log" in module._parameters


def whole_functions(forward: Any) -> tuple[str, ...]:
    """Return the names of functions of `WHOLE` that a forward calls, if each returns None without its package."""
    plain = inspect.unwrap(forward)
    names = [name for name in getattr(plain, "__code__", is_mixer.__code__).co_names if WHOLE.match(name)]
    functions = [plain.__globals__.get(name) for name in names]
    return tuple(names) if functions and all(map(_gives_none, functions)) else ()


def _gives_none(function: Any) -> bool:
    try:
        plain = inspect.unwrap(function)
        needed = [p for p in inspect.signature(plain).parameters.values() if p.default is p.empty]
        passed = [None for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD]
        return plain(*passed) is None
    except Exception:
        return False


@functools.lru_cache(maxsize=1024)
def uses(kind: type, forward: Any) -> dict[str, set[str]]:
    """Return how a forward, and the methods it calls, use the module's children, by child name.

    Empty if no weight is read, or if there is no source code.
    """
    members = [inspect.unwrap(member) for _, member in read_of_class(kind, None) if callable(member)]
    functions = [member for member in members if hasattr(member, "__code__")]
    if not any("weight" in global_names(function.__code__) for function in functions):
        return {}
    used: dict[str, set[str]] = {}
    for function in functions:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            continue
        for name, use in _of_text(tree):
            used.setdefault(name, set()).add(use)
    return used


def _of_text(tree: ast.AST) -> Iterator[tuple[str, str]]:
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"):
            continue
        above = parents.get(node)
        if not isinstance(above, ast.Attribute) or above.attr == "forward":
            yield node.attr, CALL
        elif above.attr == "weight":
            attribute = parents.get(above)
            if not (isinstance(attribute, ast.Attribute) and attribute.attr in METADATA_ATTRIBUTES):
                yield node.attr, READ_INSIDE if _inside(above, parents) else READ


def _inside(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return True if a node is within the arguments of a function of `WHOLE`."""
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and WHOLE.match(node.func.id):
            return True
    return False


# ---- mixers that call their layers ----


class CalledMixer(FusedModule):
    """Mixin above a mixer class that uses one fused function for all; calls the layers while one of them is
    quantized.
    """

    #: Copies of the original forward that call the layers: for eager mode, and for torch.compile.
    _by_layers: tuple[Any, Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_original" in vars(cls):
            forward = cls._original.forward
            cls._by_layers = by_its_layers(forward, False), by_its_layers(forward, True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training or replaced(self) or not layers_quantize(self):
            return super().forward(*args, **kwargs)
        return self._by_layers[is_tracing()](self, *args, **kwargs)


def calls_its_layers(module: nn.Module) -> bool:
    """Return True for a mixer that `CalledMixer` can make call its layers."""
    return is_mixer(module) and bool(whole_functions(original_class(module).forward))


def layers_quantize(module: nn.Module) -> bool:
    """Return True if a direct child layer quantizes under the recipe in force, or has a weight stored as codes."""
    for layer in module._modules.values():
        if isinstance(layer, Quantizable):
            recipe = recipe_in_force(layer.recipe)
            if layer.weight_spec is not None or (recipe is not None and recipe.quantizes):
                return True
    return False


def by_its_layers(forward: Any, snapshot: bool) -> Any:
    """Return a copy of the forward whose fused functions return None, after which it calls its layers."""
    return with_functions(forward, dict.fromkeys(whole_functions(forward), _nothing), snapshot)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


# ---- Mamba-2 mixers with Quaver's convolution, scan and gated norm between their own projections ----
#
# Children and parameters are recognized by transformers' names. The kind of norm, its order with the gate and its
# groups are tried on a small copy. A call that continues from a cache runs the module's own forward.

#: Children and parameters of a mixer, and the attributes with its sizes.
PARTS, PARAMETERS = ("in_proj", "conv1d", "out_proj"), ("A_log", "D", "dt_bias")
SIZES = ("num_heads", "head_dim", "n_groups", "ssm_state_size")
#: Falcon-H1's multipliers: attribute with a number for the input of in_proj, and buffer for its output.
FACTOR, FACTORS = "ssm_in_multiplier", "mup_vector"


@dataclass(frozen=True)
class MixerFormula:
    """Formula of a Mamba-2 mixer between its projections: sizes, activation, step limits and norm."""

    sizes: ScanSizes
    activation: str
    dt_limit: tuple[float, float]
    #: Gated norm after the scan, or None.
    norm: GatedNormalization | None
    #: Name, class and attributes of the norm and the convolution, as they were compared.
    skipped: tuple[tuple[str, type, Named], ...] = ()
    #: Attributes of the mixer as they were compared.
    attributes: Named = ()

    def __str__(self) -> str:
        if self.norm is None:
            return "Mamba-2 without a norm"
        first = "norm before the gate" if self.norm.norm_before_gate else "norm after the gate"
        return f"Mamba-2, {first}" + f" in {self.norm.groups} groups" * (self.norm.groups > 1)

    def of(
        self,
        module: nn.Module,
        x: Tensor,
        mask: Tensor | None = None,
        cache: Any = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Compute the mixer of x [B, S, dim] with a module's children and parameters.

        Args:
            module: the mixer.
            x: input [B, S, dim].
            mask: [B, S], 0 for padding, or None.
            cache: transformers' cache, which receives the last tokens and states, or None.
            cu_seqlens: int [sequences + 1], boundaries of packed sequences among the B * S tokens; each starts with a
                zero state.
        """
        parts: Any = module._modules
        x = _masked(x, mask)
        factor, features = getattr(module, FACTOR, 1), module._buffers.get(FACTORS)
        projected = parts["in_proj"](x if factor == 1 else x * factor)
        projected = projected if features is None else projected * features
        channels, heads = self.sizes.channels, self.sizes.heads
        z, mixed, dt = projected.split((heads * self.sizes.head_dim, channels, heads), -1)
        weight, bias = parts["conv1d"].weight.squeeze(1), parts["conv1d"].bias
        tokens, steps = (mixed, dt) if cu_seqlens is None else (mixed.flatten(0, 1), dt.flatten(0, 1))
        convolved = causal_conv1d(tokens, weight, bias, activation=self.activation, cu_seqlens=cu_seqlens)
        convolved = _masked(convolved.view(mixed.shape), mask).view(tokens.shape)
        y, last = scanned(convolved, steps, module._parameters, self.sizes, self.dt_limit, cu_seqlens=cu_seqlens)
        y = y.view(z.shape)
        if cache is not None:
            if cu_seqlens is not None:
                mixed, last = _of_last(mixed, last, cu_seqlens)
            layer: Any = module.layer_idx
            cache.update_conv_state(mixed.transpose(1, 2), layer, conv_kernel_size=weight.shape[1])
            cache.update_recurrent_state(last, layer_idx=layer)
        if self.norm is None:
            return project(SWIGLU, (z, y), (parts["out_proj"],))[0]
        return project(self.norm, (y, z, parts["norm"].weight), (parts["out_proj"],))[0]


def _of_last(mixed: Tensor, states: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens [B, S, channels], zeroed before each row's last sequence, and the state of that sequence."""
    batch, length = mixed.shape[:2]
    last, starts = last_starts(cu_seqlens, batch, length)
    places = torch.arange(batch * length, dtype=torch.int64, device=mixed.device).view(batch, length, 1)
    return mixed.masked_fill(places < starts[:, None, None], 0), states[last]


class FusedMixer(CalledMixer):
    """Mixin above a Mamba-2 mixer class that runs Quaver's convolution, scan and gated norm."""

    _formula: MixerFormula

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        formula = self._formula
        x, cache, mask = _arguments_of_call(args, kwargs)
        if x is None or not _is_empty(cache, self):
            return super().forward(*args, **kwargs)
        if needs_original(self, x) or bypassed_child(self, formula.skipped):
            return super().forward(*args, **kwargs)
        return formula.of(self, x, mask, cache, cu_seqlens_of(x, kwargs))


def _arguments_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return (hidden_states, cache_params, attention_mask) of a forward's arguments; all None if there are too many."""
    names = "hidden_states", "cache_params", "attention_mask"
    if len(args) > len(names):
        return None, None, None
    passed = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
    return passed.get("hidden_states"), passed.get("cache_params"), passed.get("attention_mask")


def _is_empty(cache: Any, module: Any) -> bool:
    """Return True if a cache has no entry for the layer yet."""
    if cache is None:
        return True
    get_conv_state, layer = getattr(cache, "get_conv_state", None), getattr(module, "layer_idx", None)
    if get_conv_state is None or layer is None or cache.is_recording_past(layer):
        return False
    return get_conv_state(layer, state_idx=0) is None and cache.get_recurrent_state(layer, state_idx=0) is None


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else (x * mask[..., None]).to(x.dtype)


def hook_note(module: nn.Module, formula: MixerFormula) -> str:
    """Return a note that a hook on a child makes the module's own forward run, or ""."""
    part = bypassed_child(module, formula.skipped)
    return f"a hook on {part}: while it is registered, the module's own forward runs" if part else ""


def is_mamba2(module: nn.Module) -> bool:
    """Return True if the module may be a Mamba-2 mixer: transformers' names, and one decay per head."""
    if not is_mixer(module) or module._parameters["A_log"].dim() != 1:  # type: ignore[union-attr]
        return False
    there = all(module._modules.get(name) is not None for name in PARTS)
    numbers = all(isinstance(getattr(module, name, None), int) for name in SIZES)
    return there and numbers and all(module._parameters.get(name) is not None for name in PARAMETERS)


def formula_of(module: Any) -> tuple[MixerFormula | None, str]:
    """Return what a mixer computes, or None and the reason why it is not replaced."""
    if why := reason_mutable(module.__dict__):
        return None, why
    for name in module._buffers:
        if name != FACTORS:
            return None, f"it has a buffer {name!r}, and a write to it could not be detected"
    forward = original_class(module).forward
    plain = with_functions(forward, _plain_functions(forward))

    def theirs(copied: Any, x: Tensor, mask: Tensor | None) -> Tensor:
        y: Tensor = plain(copied, x, attention_mask=mask)
        return y

    return first_equal(
        _candidates(module),
        lambda dtype: small(module, dtype),
        _inputs,
        "a small copy gives other results in float32, in evaluation",
        theirs=theirs,
        agree=_agree,
    )


def _plain_functions(forward: Any) -> dict[str, Any]:
    """Return pure-torch versions of the package functions that a forward calls, because the comparison runs on a
    CPU.
    """
    plain = inspect.unwrap(forward)
    found = {name: plain.__globals__.get(name) for name in plain.__code__.co_names}
    wrapped = {name: function for name, function in found.items() if hasattr(function, "__wrapped__")}
    return {n: _nothing if WHOLE.match(n) else inspect.unwrap(f) for n, f in wrapped.items()}


def _candidates(module: Any) -> Iterator[MixerFormula]:
    sizes = ScanSizes(module.num_heads, module.head_dim, module.n_groups, module.ssm_state_size)
    limit = getattr(module, "time_step_limit", None) or (0.0, float("inf"))
    named = getattr(module, "activation", None)
    activations = [n for n, row in ACTIVATIONS.items() if not row.gated and n in (named, "silu")]
    norm = module._modules.get("norm")
    norms: list[GatedNormalization | None] = [None]
    if norm is not None and norm._parameters.get("weight") is not None:
        eps = next((v for n, v in vars(norm).items() if "eps" in n and isinstance(v, float)), 1e-6)
        orders = itertools.product(dict.fromkeys((sizes.groups, 1)), (False, True))
        norms = [GatedNormalization(groups, eps, first) for groups, first in orders]
    found = [(name, module._modules[name]) for name in ("norm", "conv1d") if module._modules.get(name) is not None]
    skipped = tuple((name, unconverted_class(part), fixed(part.__dict__)) for name, part in found)
    for activation, one in itertools.product(activations, norms):
        yield MixerFormula(sizes, activation, tuple(limit), one, skipped)


#: Tokens, input features, and chunk size of the copy's own scan.
TOKENS, SMALL, CHUNK = 7, 8, 4
#: Bounds of the comparison. float32: relative RMS error of each tensor. bf16, where both round often: RMS error of the
#: block divided by that of the original; both errors are measured against the original in float32.
WITHIN, FURTHER = 1e-5, 1.25
#: Number of random inputs in bf16; with one, the few heads' gradients are too noisy.
SAMPLES = 4


def _inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield inputs, with and without padding."""
    seen = torch.ones(2, TOKENS, dtype=torch.int64, device="cpu")
    seen[1, :2] = 0
    for mask, n in itertools.product((None, seen), range(SAMPLES if dtype is torch.bfloat16 else 1)):
        yield random_tensor((2, TOKENS, SMALL), dtype, 5 + n), mask


def _agree(dtype: torch.dtype, results: list[Results]) -> bool:
    """Return True if the errors are within the bound: in float32 of each tensor, in bf16 of all together."""
    ours, theirs = 0.0, 0.0
    for got, expected, exact in results:
        if any(not _same_type(a, b) for a, b in zip(got, expected, strict=True)):
            return False
        right = expected if dtype is torch.float32 else exact()
        errors = _relative_errors(got, right)
        if dtype is torch.float32 and max(errors) > WITHIN**2:
            return False
        ours, theirs = ours + sum(errors), theirs + sum(_relative_errors(expected, right))
    return dtype is torch.float32 or ours <= FURTHER**2 * theirs


def _same_type(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype is b.dtype


def _relative_errors(results: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> list[float]:
    """Return the relative squared error of each tensor."""
    pairs = [(a.double(), b.double()) for a, b in zip(results, exact, strict=True) if a is not None and b is not None]
    squares = [(float((a - b).square().sum()), float(b.square().sum())) for a, b in pairs]
    return [wrong / right if right else wrong for wrong, right in squares]


def small(module: Any, dtype: torch.dtype) -> nn.Module:
    """Return a small copy with few input and output features and the module's own heads."""
    features = {"in_proj": (SMALL, module.in_proj.out_features), "out_proj": (module.out_proj.in_features, SMALL)}
    copied = stand_in(module, dtype, features)
    for name in copied._buffers.keys() & {FACTORS}:
        copied._buffers[name] = random_tensor(module._buffers[name].shape, dtype, 70, 1.0, 0.2)
    if "chunk_size" in copied.__dict__:
        copied.__dict__["chunk_size"] = CHUNK
    return copied
