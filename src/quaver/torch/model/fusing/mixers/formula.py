"""Mamba-2 mixers of any family, computed by our convolution, scan and gated norm between their own projections.

What a mixer is made of is told by the names that transformers' classes share; which norm, in which order with the gate
and in which groups, is tried on a small copy. A call that goes on from a cache runs the module's own forward.
"""

import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.blocks.prologues.activation import ACTIVATIONS
from quaver.torch.blocks.state_space.convolution import causal_conv1d
from quaver.torch.blocks.state_space.gated_norm import GatedNormalization
from quaver.torch.blocks.state_space.mamba2 import SWIGLU, Sizes, scanned
from quaver.torch.linear.projections import is_bare, project
from quaver.torch.model.fusing.comparing import buffers_of, drawn, linear, of_block, twin, why_not, wide
from quaver.torch.model.fusing.fused import Named, changed, fixed, patched, stands_aside, untold
from quaver.torch.model.fusing.mixers.calling import CalledMixer, with_functions
from quaver.torch.model.fusing.mixers.packing import cu_seqlens_of, last_starts
from quaver.torch.model.fusing.mixers.reading import WHOLE, is_mixer, original_class
from quaver.torch.model.reach.exchanging import bare_class
from quaver.torch.model.reach.same import differentiated

#: Parts and parameters of a mixer, and the attributes that say its sizes.
PARTS, PARAMETERS = ("in_proj", "conv1d", "out_proj"), ("A_log", "D", "dt_bias")
SIZES = ("num_heads", "head_dim", "n_groups", "ssm_state_size")
#: What Falcon-H1 multiplies the input of its first projection by, a number, and the output, a buffer.
FACTOR, FACTORS = "ssm_in_multiplier", "mup_vector"


@dataclass(frozen=True)
class MixerFormula:
    """What a mixer computes between its projections."""

    sizes: Sizes
    activation: str
    dt_limit: tuple[float, float]
    #: None has no norm behind the scan.
    norm: GatedNormalization | None
    #: The norm's and the convolution's class and attributes, as they were compared.
    skipped: tuple[tuple[str, type, Named], ...] = ()
    #: Attributes as they were compared.
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
        """The mixer of x [B, S, dim] by a module's parts.

        Args:
            mask: [B, S], 0 where a token is padding.
            cache: of transformers, to which the last tokens and states are given.
            cu_seqlens: int [sequences + 1], where sequences of the B · S tokens begin and end: each begins anew.
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
    """The tokens [B, S, channels] and the state of each row's last sequence, other tokens 0."""
    batch, length = mixed.shape[:2]
    last, starts = last_starts(cu_seqlens, batch, length)
    places = torch.arange(batch * length, dtype=torch.int64, device=mixed.device).view(batch, length, 1)
    return mixed.masked_fill(places < starts[:, None, None], 0), states[last]


class FusedMixer(CalledMixer):
    """Stands above a class of mixers."""

    _formula: MixerFormula

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        formula = self._formula
        x, cache, mask = _given(args, kwargs)
        if x is None or not _is_empty(cache, self):
            return super().forward(*args, **kwargs)
        if patched(self) or changed(self.__dict__, formula.attributes) or stands_aside(self, x):
            return super().forward(*args, **kwargs)
        if in_the_way(self, formula):
            return super().forward(*args, **kwargs)
        return formula.of(self, x, mask, cache, cu_seqlens_of(x, kwargs))


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(hidden_states, cache_params, attention_mask) of a forward; the first None where there are others."""
    names = "hidden_states", "cache_params", "attention_mask"
    if len(args) > len(names):
        return None, None, None
    given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
    return given.get("hidden_states"), given.get("cache_params"), given.get("attention_mask")


def _is_empty(cache: Any, module: Any) -> bool:
    """Whether a cache has nothing of a layer yet."""
    if cache is None:
        return True
    asks, layer = getattr(cache, "get_conv_state", None), getattr(module, "layer_idx", None)
    if asks is None or layer is None or cache.is_recording_past(layer):
        return False
    return asks(layer, state_idx=0) is None and cache.get_recurrent_state(layer, state_idx=0) is None


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else (x * mask[..., None]).to(x.dtype)


def in_the_way(module: nn.Module, formula: MixerFormula) -> str:
    """The part that our block would not call and that must be: a hook stands on it, it was exchanged, or an attribute
    of it was; or ""."""
    parts: Any = module._modules
    for name, kind, attributes in formula.skipped:
        part = parts.get(name)
        if part is None or bare_class(part) is not kind or not is_bare(part) or changed(part.__dict__, attributes):
            return name
    return ""


def hooked(module: nn.Module, formula: MixerFormula) -> str:
    """What a hook inside costs, or ""."""
    part = in_the_way(module, formula)
    return f"a hook on {part}: while it stands the module's own forward runs" if part else ""


def is_mamba2(module: nn.Module) -> bool:
    """True for what may be a Mamba-2 mixer: its parts and parameters by transformers' names, one decay a head."""
    if not is_mixer(module) or module._parameters["A_log"].dim() != 1:  # type: ignore[union-attr]
        return False
    there = all(module._modules.get(name) is not None for name in PARTS)
    numbers = all(isinstance(getattr(module, name, None), int) for name in SIZES)
    return there and numbers and all(module._parameters.get(name) is not None for name in PARAMETERS)


def formula_of(module: Any) -> tuple[MixerFormula | None, str]:
    """What a mixer computes, or None and why it is left alone."""
    if why := untold(module.__dict__):
        return None, why
    for name in module._buffers:
        if name != FACTORS:
            return None, f"it has a buffer {name!r}, and nothing would tell that it was written to"
    forward = original_class(module).forward
    plain = with_functions(forward, _plain_functions(forward), False)
    reasons = []
    for formula in _candidates(module):
        reasons.append(_differs(module, plain, formula))
        if not reasons[-1]:
            return formula, ""
    # The one that came furthest.
    return None, next((why for why in reasons if "bfloat16" in why), reasons[0])


def _plain_functions(forward: Any) -> tuple[tuple[str, Any], ...]:
    """The functions of packages that a forward calls, each by torch alone: the copy that is tried is on a CPU."""
    plain = inspect.unwrap(forward)
    held = {name: plain.__globals__.get(name) for name in plain.__code__.co_names}
    wrapped = {name: function for name, function in held.items() if hasattr(function, "__wrapped__")}
    return tuple((n, (lambda *a, **k: None) if WHOLE.match(n) else inspect.unwrap(f)) for n, f in wrapped.items())


def _candidates(module: Any) -> Iterator[MixerFormula]:
    sizes = Sizes(module.num_heads, module.head_dim, module.n_groups, module.ssm_state_size)
    limit = getattr(module, "time_step_limit", None) or (0.0, float("inf"))
    named = getattr(module, "activation", None)
    activations = [n for n, row in ACTIVATIONS.items() if not row.gated and n in (named, "silu")]
    norm = module._modules.get("norm")
    norms: list[GatedNormalization | None] = [None]
    if norm is not None and norm._parameters.get("weight") is not None:
        eps = next((v for n, v in vars(norm).items() if "eps" in n and isinstance(v, float)), 1e-6)
        orders = itertools.product(dict.fromkeys((sizes.groups, 1)), (False, True))
        norms = [GatedNormalization(groups, eps, first) for groups, first in orders]
    held = [(name, module._modules[name]) for name in ("norm", "conv1d") if module._modules.get(name) is not None]
    skipped = tuple((name, bare_class(part), fixed(part.__dict__)) for name, part in held)
    for activation, one in itertools.product(activations, norms):
        yield MixerFormula(sizes, activation, tuple(limit), one, skipped)


#: Tokens, features of the input, and tokens of a chunk of the copy's own scan.
TOKENS, SMALL, CHUNK = 7, 8, 4
#: How far outputs and gradients may lie from theirs in float32, relative RMS of each; and in bf16, where both round
#: often, the mean of these from float32, over theirs.
WITHIN, FURTHER = 1e-5, 1.25
#: Inputs in bf16: of one the few heads' gradients say little.
DRAWN = 4


def _differs(module: Any, forward: Any, formula: MixerFormula) -> str:
    """Where they differ, or "": in training and in evaluation, without padding and with some."""
    seen = torch.ones(2, TOKENS, dtype=torch.int64, device="cpu")
    seen[1, :2] = 0
    for dtype, training in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        copied = small(module, dtype).train(training)
        ours, theirs = 0.0, 0.0
        for mask, n in itertools.product((None, seen), range(DRAWN if dtype is torch.bfloat16 else 1)):

            def by_theirs(copied: Any, x: Tensor, mask: Tensor | None = mask) -> Tensor:
                y: Tensor = forward(copied, x, attention_mask=mask)
                return y

            def by_ours(copied: Any, x: Tensor, mask: Tensor | None = mask) -> Tensor:
                return formula.of(copied, x, mask)

            x = (drawn((2, TOKENS, SMALL), dtype, 5 + n),)
            try:
                expected = differentiated(by_theirs, copied, x)
                results = of_block(by_ours, copied, x)
                exact = expected if dtype is torch.float32 else wide(by_theirs, copied, x)
            except Exception as error:
                return why_not(error)
            where = f"in {str(dtype).partition('.')[2]}, in {'training' if training else 'evaluation'}"
            if any(not _alike(a, b) for a, b in zip(results, expected, strict=True)):
                return f"a small copy gives results of other shapes or dtypes {where}"
            ours += sum(_apart(results, exact))
            theirs += sum(_apart(expected, exact))
            if dtype is torch.float32 and max(_apart(results, exact)) > WITHIN**2:
                return f"a small copy gives other results {where}"
        if not ours <= (FURTHER**2 * theirs if dtype is torch.bfloat16 else torch.inf):
            return f"a small copy gives other results {where}"
    return ""


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype is b.dtype


def _apart(results: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> list[float]:
    """Of each, the squared error over the squares."""
    pairs = [(a.double(), b.double()) for a, b in zip(results, exact, strict=True) if a is not None and b is not None]
    squares = [(float((a - b).square().sum()), float(b.square().sum())) for a, b in pairs]
    return [wrong / right if right else wrong for wrong, right in squares]


def small(module: Any, dtype: torch.dtype) -> nn.Module:
    """A twin of few features of input and output, whose heads are those of the module."""
    parts: dict[str, nn.Module] = {}
    for i, (name, part) in enumerate(module._modules.items()):
        if name in ("in_proj", "out_proj"):
            n, k = (
                part.weight.shape
                if part._parameters.get("weight") is not None
                else (part.out_features, part.in_features)
            )
            n, k = (n, SMALL) if name == "in_proj" else (SMALL, k)
            bias = None if getattr(part, "bias", None) is None else drawn((n,), dtype, 2 * i + 1, scale=0.3)
            parts[name] = linear(drawn((n, k), dtype, 2 * i, scale=k**-0.5), bias)
            continue
        mean, scale = (0.0, 0.5) if name == "conv1d" else (1.0, 0.2)
        values = {n: drawn(p.shape, dtype, i, mean, scale) for n, p in part._parameters.items() if p is not None}
        parts[name] = twin(part, original_class(part), {}, values)
        parts[name]._buffers.update(buffers_of(part))
    own = {n: drawn(p.shape, dtype, 50 + i, -0.5, 0.5) for i, (n, p) in enumerate(module._parameters.items())}
    copied = twin(module, original_class(module), parts, own)
    like = module._parameters["dt_bias"].dtype
    for n, b in module._buffers.items():
        copied._buffers[n] = None if b is None else drawn(b.shape, dtype if b.dtype is like else b.dtype, 70, 1.0, 0.2)
    if "chunk_size" in copied.__dict__:
        copied.__dict__["chunk_size"] = CHUNK
    return copied
