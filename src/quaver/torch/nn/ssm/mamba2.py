"""The Mamba-2 block: input projection, short convolution, scan, gated norm and output projection.

    z, x B C, dt = in_proj(norm(u))
    x, B, C      = silu(conv1d(x B C))
    y            = scan(x, softplus(dt + dt_bias), -exp(A_log), B, C) + D x
    output       = out_proj(gated_norm(y, z))

Both projections are quantized layers; everything between them is computed in float32. Source: Dao and Gu 2024,
arXiv:2405.21060.
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.options import pick, takes
from quaver.torch.linear.fused_projections import project
from quaver.torch.nn.activation import ActivationInputOp
from quaver.torch.nn.attention.kv_cache import LayerCache, check_even, check_layer, check_same, same
from quaver.torch.nn.mlp import MLP, ComposedBlock, MLPOptions, PartOptions
from quaver.torch.nn.norm import normalized_projections
from quaver.torch.nn.ssm.causal_conv import CausalConv1d, last_tokens
from quaver.torch.nn.ssm.chunked_scan import UNLIMITED
from quaver.torch.nn.ssm.gated_norm import GatedRMSNorm, gated_projection
from quaver.torch.nn.ssm.scan import check_chunk, ssd
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations.autograd import Fork, Join
from quaver.torch.state.context import checkpoint

# ---- cache for decoding, whose size does not depend on the number of tokens ----


class StateCache(LayerCache):
    """Cache of state-space layers for decoding: the last tokens of each layer's convolution and the state of its scan.

    Args:
        layers: number of state-space layers that share it; the attention layers of a hybrid model use a `KVCache`.
    Raises:
        ValueError: a number that is not positive.

    All sequences of a batch have the same length. No gradients. A state is a sum over tokens and cannot be truncated:
    keep a `copy.deepcopy` to return to. Exact.
    """

    def __init__(self, layers: int) -> None:
        if layers < 1:
            raise ValueError(f"a cache needs a positive number of layers, not {layers}")
        super().__init__(layers)
        #: [B, taps - 1, channels] in the tokens' dtype, and [B, H, P, N] in float32 or float64, per layer.
        self._tokens, self._states = self._buffers

    def read(self, layer: int, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return one layer's last tokens and state, valid until its next update; (None, None) before the first.

        Args:
            layer: index of the layer, from 0.
            x: the next tokens, [B, S, ...].
        Raises:
            ValueError: a layer that does not exist or is ahead of the others, another batch size, or x that requires
                gradients.
        """
        check_layer(layer, self.layers, x)
        check_even(self._counts, layer)
        if not self._counts[layer]:
            return None, None
        tokens, state = self._tokens[layer], self._states[layer]
        assert tokens is not None and state is not None
        if tokens.shape[0] != x.shape[0]:
            raise ValueError(
                f"the cache holds {tokens.shape[0]} sequences, but got {x.shape[0]}; reset() it, or use another"
            )
        return tokens, state

    def update(self, layer: int, tokens: Tensor, state: Tensor, count: int) -> None:
        """Replace one layer's last tokens and state.

        Args:
            layer: index of the layer, from 0.
            tokens: [B, taps - 1, channels].
            state: [B, H, P, N].
            count: number of new tokens.
        Raises:
            ValueError: shapes or dtypes that differ from earlier ones; nothing is written in that case.
        """
        new = tokens.detach(), state.detach()
        if self._counts[layer]:
            for buffers, value, what in zip(self._buffers, new, ("last tokens", "states"), strict=True):
                old = buffers[layer]
                assert old is not None
                check_same(old, value, what, tuple(range(value.dim())))
        # Inference tensors cannot be written outside inference mode.
        with torch.inference_mode(False):
            for buffers, value in zip(self._buffers, new, strict=True):
                old = buffers[layer]
                if old is None or not same(old, value, tuple(range(value.dim()))):
                    old = buffers[layer] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
                old.copy_(value)
        self._counts[layer] += count

    def truncate(self, length: int) -> None:
        """Drop all tokens (length 0), or none.

        Raises:
            ValueError: only some tokens would be dropped.
        """
        if length == 0:
            self.reset()
        elif length != self.length or len(set(self._counts)) > 1:
            raise ValueError(
                f"the cache has seen {self.length} tokens and a state cannot be truncated to {length}: keep a "
                "copy.deepcopy of the cache to return to, or reset() it"
            )


# ---- block ----

#: Order of gate and norm: gate before the norm, after it, or no norm.
GATES = ("gate_first", "norm_first", "no_norm")


class ScanSizes(NamedTuple):
    """Sizes of a scan."""

    heads: int
    head_dim: int
    groups: int
    state: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.heads * self.head_dim + 2 * self.groups * self.state


@dataclass(frozen=True, kw_only=True)
class Mamba2Options(PartOptions):
    """Options of the block."""

    # Features of the scan's input; None is 2 * dim.
    inner: int | None = None
    head_dim: int = 64
    # Features of a state, and number of groups of heads that share B and C.
    state: int = 128
    groups: int = 1
    # Options of the convolution.
    taps: int = 4
    conv_bias: bool = True
    conv_activation: str = "silu"
    # Bias of in_proj and out_proj; None for out_bias uses `bias`.
    bias: bool = False
    out_bias: bool | None = None
    # A name in `GATES`; number of feature groups of the norm (None uses `groups`); its eps (None uses `eps`).
    gate: str = "gate_first"
    gate_groups: int | None = None
    gate_eps: float | None = None
    # Minimum and maximum of a step.
    dt_limit: tuple[float, float] = UNLIMITED
    # Initial values: range of the steps, drawn log-uniformly, and of the decays.
    dt_range: tuple[float, float] = (1e-3, 1e-1)
    A_range: tuple[float, float] = (1.0, 16.0)
    chunk_size: int | None = None


@dataclass(frozen=True)
class Mamba2Arguments(Mamba2Options):
    """Constructor arguments of `Mamba2`; see there."""

    dim: int
    _: KW_ONLY


class Mamba2(nn.Module):
    """The Mamba-2 block, as in Mamba-2, Nemotron-H, Bamba, Zamba2, Granite 4 and Falcon-H1.

    Args:
        dim: features of input and output.
        inner: features of the scan's input; None is 2 * dim.
        head_dim: features of a head.
        state: features of a state (d_state, N).
        groups: number of groups of heads that share B and C.
        taps: taps of the convolution (d_conv).
        conv_bias, conv_activation: bias and activation of the convolution.
        bias: True for a bias in both projections.
        out_bias: bias of `out_proj`; None uses `bias`.
        gate: "gate_first", rms(y silu(z)); "norm_first", rms(y) silu(z); "no_norm", y silu(z).
        gate_groups: number of feature groups of the norm; None uses `groups`.
        gate_eps: eps of the norm; None uses `eps`.
        dt_limit: minimum and maximum of a step.
        dt_range, A_range: ranges of initial steps and decays.
        chunk_size: chunk size of the scan; None chooses.
        normalization: norm of the input before `in_proj`; with eps, zero_centered and norm_bias.
        recipe, seed: as for `quaver.torch.Linear`, for both projections. Submodules: `norm` if there is one, `in_proj`
            (rows of z, x, B, C and dt), `conv1d`, `gated_norm` unless "no_norm",
        `out_proj`. Own parameters: `dt_bias`, `A_log` and `D` [heads], which should have no weight decay.
    Raises:
        ValueError: sizes that do not divide, or unknown names.
    Bounded: in float32, convolution, scan and norm within 1e-6, 9e-7 and 1e-6 of float64.
    Source: Dao and Gu 2024, arXiv:2405.21060.
    """

    @takes(Mamba2Arguments)
    def __init__(self, options: Mamba2Arguments) -> None:
        super().__init__()
        inner = 2 * options.dim if options.inner is None else options.inner
        _check(options, inner)
        self.dim, self.inner, self.heads = options.dim, inner, inner // options.head_dim
        self.sizes = ScanSizes(self.heads, options.head_dim, options.groups, options.state)
        self.gate, self.dt_limit, self.chunk_size = options.gate, options.dt_limit, options.chunk_size
        self.dt_range, self.A_range = options.dt_range, options.A_range
        channels = self.sizes.channels
        self.register_module("norm", options.norm(options.dim))
        self.in_proj = options.linear(options.dim, inner + channels + self.heads)
        activation = options.conv_activation
        self.conv1d = CausalConv1d(channels, options.taps, options.conv_bias, activation=activation, **options.like)
        for name in ("dt_bias", "A_log", "D"):
            own = torch.empty(self.heads, device=options.device, dtype=options.dtype)
            self.register_parameter(name, nn.Parameter(own))
        gated: GatedRMSNorm | None = None
        if options.gate != "no_norm":
            groups = options.groups if options.gate_groups is None else options.gate_groups
            eps = options.eps if options.gate_eps is None else options.gate_eps
            first = options.gate == "norm_first"
            gated = GatedRMSNorm(inner, groups, eps, norm_before_gate=first, **options.like)
        self.register_module("gated_norm", gated)
        self.out_proj = options.linear(inner, options.dim, options.out_bias)
        self._reset_own()

    def reset_parameters(self) -> None:
        """Reset the parameters of each part; initial steps and decays are random."""
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]
        self._reset_own()

    @torch.no_grad()
    def _reset_own(self) -> None:
        parameters: Any = self._parameters
        low, high = map(math.log, self.dt_range)
        steps = torch.empty_like(parameters["dt_bias"], dtype=torch.float32).uniform_(low, high).exp_().clamp_(min=1e-4)
        # Inverse of softplus, so that softplus(dt_bias) is the step.
        parameters["dt_bias"].copy_(steps + torch.log(-torch.expm1(-steps)))
        parameters["A_log"].copy_(torch.empty_like(steps).uniform_(*self.A_range).log_())
        parameters["D"].fill_(1.0)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: StateCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Run the block on x [B, S, dim], or with cu_seqlens [T, dim]; returns the same shape.

        Args:
            x: input.
            mask: bool [B, S], True for padding, which must precede a sequence and has no effect on it.
            cu_seqlens: int [sequences + 1], boundaries of concatenated sequences; each starts with a zero state.
            cache: state of earlier tokens, from which these continue.
            layer: index of this layer in the cache.
        Raises:
            ValueError: inputs that do not fit, or a cache together with cu_seqlens.
        """
        _check_input(self, x, mask, cu_seqlens, cache)
        parts: Any = self._modules
        (projected,) = normalized_projections(parts["norm"], x, (parts["in_proj"],))
        parted = self.inner, self.sizes.channels, self.heads
        if projected.shape[-1] != sum(parted):
            raise ValueError(
                f"in_proj gives {projected.shape[-1]} features instead of {sum(parted)}: a Mamba2 cannot be "
                "sharded across ranks; leave its layers out of the plan"
            )
        z, mixed, dt = projected.split(parted, -1)
        if mask is not None:
            # A NaN step in padding would make its chunk NaN although it contributes nothing.
            mixed, dt = (t.masked_fill(mask[..., None], 0) for t in (mixed, dt))
        tokens, state = (None, None) if cache is None else cache.read(layer, x)
        convolved = parts["conv1d"](mixed, tokens, cu_seqlens)
        if mask is not None:
            convolved = convolved.masked_fill(mask[..., None], 0)
        how = {"initial_states": state, "cu_seqlens": cu_seqlens, "chunk_size": self.chunk_size}
        y, last = scanned(convolved, dt, self._parameters, self.sizes, self.dt_limit, **how)
        if cache is not None:
            cache.update(layer, last_tokens(mixed, parts["conv1d"].weight.shape[2], tokens), last, x.shape[1])
        if parts["gated_norm"] is None:
            projected_out: Tensor = project(SWIGLU, (z, y), (parts["out_proj"],))[0]
            return projected_out
        return gated_projection(parts["gated_norm"], y, z, parts["out_proj"])

    def extra_repr(self) -> str:
        text = ", ".join(f"{name}={number}" for name, number in self.sizes._asdict().items())
        return text + f", gate={self.gate!r}" * (self.gate != "gate_first")


def scanned(
    convolved: Tensor,
    dt: Tensor,
    parameters: Mapping[str, Any],
    sizes: ScanSizes,
    dt_limit: tuple[float, float],
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """Scan the concatenated x, B and C; returns [..., heads * head_dim], and the last states.

    Args:
        convolved: x, B and C along the last axis.
        dt: steps before bias and softplus.
        parameters: dict with `A_log`, `D` and `dt_bias`.
        sizes: sizes of the scan.
        dt_limit: minimum and maximum of a step.
        how: further arguments of `ssd`.
    """
    heads, head_dim, groups, state = sizes
    x, B, C = convolved.split((heads * head_dim, groups * state, groups * state), -1)
    B, C = (t.unflatten(-1, (groups, state)) for t in (B, C))
    A = -torch.exp(parameters["A_log"].to(torch.promote_types(x.dtype, torch.float32)))
    own = {"dt_bias": parameters["dt_bias"], "dt_limit": dt_limit}
    y, last = ssd(x.unflatten(-1, (heads, head_dim)), dt, A, B, C, parameters["D"], **own, **how)
    return y.flatten(-2), last


#: Input op of the gate without a norm.
SWIGLU = ActivationInputOp("swiglu", ())


def _check(options: Mamba2Arguments, inner: int) -> None:
    if options.head_dim < 1 or inner < 1 or inner % options.head_dim:
        raise ValueError(
            f"{inner} inner features do not divide into heads of {options.head_dim}; give an inner that does"
        )
    heads = inner // options.head_dim
    if options.groups < 1 or heads % options.groups or options.state < 1:
        raise ValueError(
            f"{heads} heads cannot share {options.groups} groups of {options.state} state features; give groups that "
            "divide the heads, and a state above 0"
        )
    if options.gate not in GATES:
        raise ValueError(f"gate is {options.gate!r}; give one of {', '.join(map(repr, GATES))}")
    check_chunk(options.chunk_size)
    for name, (low, high) in (("dt_range", options.dt_range), ("A_range", options.A_range)):
        if not 0 < low <= high < math.inf:
            raise ValueError(f"{name} is {(low, high)}; give (least, most), both above 0")


def _check_input(
    block: Mamba2, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, cache: StateCache | None
) -> None:
    dims = 3 if cu_seqlens is None else 2
    if x.dim() != dims or x.shape[-1] != block.dim:
        raise ValueError(
            f"Mamba2({block.dim}) got an input of shape {tuple(x.shape)}; give [batch, tokens, {block.dim}], or with "
            f"cu_seqlens [tokens, {block.dim}]"
        )
    if cache is not None and cu_seqlens is not None:
        raise ValueError(
            "a cache cannot be combined with cu_seqlens; run each sequence in its own call, or leave out the cache"
        )
    if mask is not None and (mask.shape != x.shape[:-1] or mask.dtype is not torch.bool):
        raise ValueError(
            f"mask is {mask.dtype} {tuple(mask.shape)}; give bool {tuple(x.shape[:-1])}, True where a token is padding"
        )


# ---- layer: a Mamba-2 block and an optional MLP on the residual stream ----


@dataclass(frozen=True)
class Mamba2LayerArguments(Mamba2Options, MLPOptions):
    """Constructor arguments of `Mamba2Layer`; see there."""

    dim: int
    _: KW_ONLY
    # Hidden features of an MLP; None for no MLP.
    hidden: int | None = None
    activation: str = "swiglu"
    mlp_bias: bool | None = None
    normalization: str = "RMSNorm"
    residual_scale: float = 1.0
    residual_in_fp32: bool = False
    # None or "full".
    recompute: str | None = None


class Mamba2Layer(ComposedBlock):
    """Mamba-2 layer: x + mixer(norm(x)) with a `Mamba2`, and with `hidden` an `MLP` after it in the same way.

    Args:
        dim: features of the residual stream.
        inner, head_dim, state, groups, taps, conv_bias, conv_activation, gate, gate_groups, gate_eps: of the block; see
            `Mamba2`.
        dt_limit, dt_range, A_range, chunk_size: likewise.
        hidden, activation, activation_options, fused, eight_bit_activations: of the MLP; see `MLP`. None for hidden: no
            MLP.
        normalization: "RMSNorm" or "LayerNorm" in front of both; with eps, zero_centered and norm_bias.
        bias: True for a bias in all linear layers.
        out_bias, mlp_bias: override `bias` for the block's output projection and the MLP.
        residual_scale: factor of each part's output before it is added.
        residual_in_fp32: True keeps the residual stream in float32.
        recompute: "full" recomputes the layer in backward.
        recipe, seed: as for `quaver.torch.Linear`. Submodules: `mixer`, `mlp` or None, each with its `norm` inside.
    Raises:
        ValueError: options that do not fit.
    """

    @takes(Mamba2LayerArguments)
    def __init__(self, options: Mamba2LayerArguments) -> None:
        super().__init__()
        if options.recompute not in (None, "full"):
            raise ValueError(f"recompute is {options.recompute!r}; give None or 'full'")
        self.recompute, self.residual_scale = options.recompute, options.residual_scale
        self.residual_in_fp32 = options.residual_in_fp32
        self.mixer = Mamba2(options.dim, **pick(Mamba2Options, options))
        mlp: MLP | None = None
        if options.hidden is not None:
            bias = options.bias if options.mlp_bias is None else options.mlp_bias
            mlp = MLP(options.dim, options.hidden, options.activation, **pick(MLPOptions, options) | {"bias": bias})
        self.register_module("mlp", mlp)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: StateCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Run the layer on x [B, S, dim], or with cu_seqlens [T, dim]; returns the same shape. Arguments as for
        `Mamba2`.
        """
        if cache is None and self.recompute == "full" and torch.is_grad_enabled():
            y: Tensor = checkpoint(self._forward, x, mask=mask, cu_seqlens=cu_seqlens)
            return y
        return self._forward(x, mask=mask, cu_seqlens=cu_seqlens, cache=cache, layer=layer)

    def _forward(self, x: Tensor, **of_mixer: Any) -> Tensor:
        parts: Any = self._modules
        x, h = self._branch(x)
        x = self._add(x, parts["mixer"](h, **of_mixer))
        if parts["mlp"] is None:
            return x
        x, h = self._branch(x)
        return self._add(x, parts["mlp"](h))

    def _branch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream, and the input of a part."""
        x, h = Fork.apply(x, 2) if is_tracing() else (x, x)
        if not self.residual_in_fp32:
            return x, h
        weight = self.mixer.in_proj.weight.dtype
        narrow = weight if weight.is_floating_point and weight.itemsize > 1 else h.dtype
        return x.to(torch.promote_types(x.dtype, torch.float32)), h.to(narrow)

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        y = y if self.residual_scale == 1.0 else y * self.residual_scale
        return Join.apply(x, y) if is_tracing() else x + y

    def extra_repr(self) -> str:
        options = {"residual_scale": self.residual_scale, "residual_in_fp32": self.residual_in_fp32}
        usual = {"residual_scale": 1.0, "residual_in_fp32": False, "recompute": None}
        every = options | {"recompute": self.recompute}
        return ", ".join(f"{name}={value!r}" for name, value in every.items() if value != usual[name])
