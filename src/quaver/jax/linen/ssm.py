"""The Mamba-2 block."""

from typing import Any

from flax import linen as nn
from jax import Array

from quaver.jax.blocks.options import DenseOptions
from quaver.jax.blocks.ssm import (
    Mamba2Options,
    Mamba2State,
    first_parameters,
    mixed,
    parameter_names,
    projections,
    sizes_of,
)
from quaver.jax.linen.dense import DenseGeneral, dense_of
from quaver.jax.numerics.quantized import array
from quaver.options import pick, suggests


@suggests
class Mamba2(nn.Module, Mamba2Options):
    """The Mamba-2 block: input projection, short convolution, scan, gated norm and output projection.

    Submodules: `in_proj`, with columns of z, x, B, C and dt, and `out_proj`, both DenseGeneral. Parameters: `kernel`
    [taps, 1, channels] and `bias` of the convolution, `scale` [inner] of the gated norm; `dt_bias`, `A_log` and `D`
    [heads], which should have no weight decay.

    Attributes: those of `Mamba2Options` and DenseGeneral.

    Bounded: in float32, relative RMS 1e-6 of `quaver.torch.Mamba2`. Source: Dao and Gu 2024, arXiv:2405.21060.
    """

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None, state: Mamba2State | None = None) -> Any:
        """Run the block on x [B, S, d]; returns the same shape.

        Args:
            x: input.
            mask: bool [B, S], True for padding, which must precede a sequence and has no effect on it.
            state: state of earlier tokens, from which these continue; the call then returns (output, next state).
                `quaver.jax.blocks.ssm.first_state` makes the first.
        """
        x = array("Mamba2", "x", x)
        dim = x.shape[-1]
        sizes = sizes_of(self, dim)
        into, out = projections(sizes, dim).values()
        projected = dense_of(self, "in_proj", into)(x)
        shape = (self.taps, 1, sizes.channels)
        parameters: dict[str, Any] = {"kernel": self.param("kernel", self.kernel_init, shape, self.param_dtype)}
        bias = self.param("bias", self.bias_init, shape[-1:], self.param_dtype) if self.conv_bias else None
        for name in parameter_names(self):
            parameters[name] = self.param(name, lambda key, name=name: first_parameters(key, self, sizes)[name])
        y, after = mixed(projected, parameters | {"bias": bias}, self, sizes, mask, state)
        options = pick(DenseOptions, self) | {"use_bias": self.use_bias if self.out_bias is None else self.out_bias}
        y = DenseGeneral(dim, **options, **out.named(self.partition), name="out_proj")(y)
        return y if state is None else (y, after)
