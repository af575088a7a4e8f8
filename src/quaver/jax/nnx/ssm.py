"""The Mamba-2 block."""

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

from flax import nnx
from jax import Array

from quaver.jax.blocks.options import PartOptions
from quaver.jax.blocks.ssm import (
    Mamba2Options,
    Mamba2State,
    first_parameters,
    first_state,
    mixed,
    parameter_names,
    projections,
    sizes_of,
)
from quaver.jax.nnx.dense import Parameters, dense_of
from quaver.options import takes

#: Options of the block itself, which a call reads.
OWN = tuple(f.name for f in fields(Mamba2Options) if f.name not in {g.name for g in fields(PartOptions)})


@dataclass
class Mamba2Arguments(Mamba2Options, Parameters):
    """Constructor arguments of `Mamba2`; see there."""

    in_features: int
    _: KW_ONLY


class Mamba2(nnx.Module):
    """The Mamba-2 block: input projection, short convolution, scan, gated norm and output projection.

    Submodules: `in_proj`, with columns of z, x, B, C and dt, and `out_proj`, both DenseGeneral. Parameters: `kernel`
    [taps, 1, channels] and `bias` of the convolution, `scale` [inner] of the gated norm; `dt_bias`, `A_log` and `D`
    [heads], which should have no weight decay.

    Args:
        in_features: features of input and output.
        others: those of `Mamba2Options`, and of DenseGeneral except axis, kernel_axes and bias_axes.

    Bounded: in float32, relative RMS 1e-6 of `quaver.torch.Mamba2`. Source: Dao and Gu 2024, arXiv:2405.21060.
    """

    @takes(Mamba2Arguments)
    def __init__(self, options: Mamba2Arguments) -> None:
        dim, draw = options.in_features, options.rngs.params
        self.sizes = sizes = sizes_of(options, dim)
        self.dim = dim
        for name in OWN:
            setattr(self, name, getattr(options, name))
        into, out = projections(sizes, dim).values()
        self.in_proj = dense_of(options, "in_proj", dim, into)
        shape = (options.taps, 1, sizes.channels)
        self.kernel = nnx.Param(options.kernel_init(draw(), shape, options.param_dtype))
        self.bias = nnx.data(None)
        if options.conv_bias:
            self.bias = nnx.Param(options.bias_init(draw(), shape[-1:], options.param_dtype))
        for name, value in first_parameters(draw(), options, sizes).items():
            setattr(self, name, nnx.Param(value))
        options.use_bias = options.use_bias if options.out_bias is None else options.out_bias
        self.out_proj = dense_of(options, "out_proj", sizes.inner, out)

    def __call__(self, x: Array, *, mask: Array | None = None, state: Mamba2State | None = None) -> Any:
        """Run the block on x [B, S, d]; returns the same shape.

        Args:
            x: input.
            mask: bool [B, S], True for padding, which must precede a sequence and has no effect on it.
            state: state of earlier tokens, from which these continue; the call then returns (output, next state).
        """
        parameters: dict[str, Any] = {name: getattr(self, name)[...] for name in ("kernel", *parameter_names(self))}
        parameters["bias"] = None if self.bias is None else self.bias[...]
        y, after = mixed(self.in_proj(x), parameters, self, self.sizes, mask, state)
        y = self.out_proj(y)
        return y if state is None else (y, after)

    def first_state(self, batch: int, dtype: Any = None) -> Mamba2State:
        """Return the state before the first token, for `batch` sequences of tokens of a dtype; None is float32."""
        return first_state(self, self.dim, batch, *(() if dtype is None else (dtype,)))
