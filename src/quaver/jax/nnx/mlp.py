"""The MLP of a Transformer, with and without a norm before it."""

from dataclasses import KW_ONLY, dataclass

from flax import nnx
from jax import Array

from quaver.core.options import pick, takes
from quaver.jax.blocks.feed_forward import activate_fused, matrices
from quaver.jax.blocks.options import MLPOptions, NormOptions
from quaver.jax.nnx.dense import Parameters, dense_of, of_part
from quaver.jax.nnx.norm import norm_of


@dataclass
class MLPArguments(MLPOptions, Parameters):
    """The arguments of `MLP`, which says what they are."""

    in_features: int
    hidden: int
    _: KW_ONLY
    activation: str = "gelu"


class MLP(nnx.Module):
    """Two DenseGeneral, `wi` and `wo`, and an activation between them; `wi` gives gate and value of a gated one.

    Args:
        in_features, hidden: of the input, and between the two.
        activation: a row of `quaver.jax.blocks.activation.ACTIVATIONS`.
        out: features of the output; None keeps the input's.
        partition: name the kernels' axes "embed" and "mlp", for nnx.logical_axis_rules.
        others: those of DenseGeneral.
    """

    @takes(MLPArguments)
    def __init__(self, options: MLPArguments) -> None:
        both = matrices(options.activation, options.hidden, options.out or options.in_features)
        self.activation = options.activation
        self.features = both["wi"].features
        self.wi = dense_of(options, "wi", options.in_features, both["wi"])
        self.wo = dense_of(options, "wo", options.hidden, both["wo"])

    def __call__(self, x: Array) -> Array:
        return self.wo(activate_fused(self.activation, self.wi(x), len(self.features)))


@dataclass
class LayerNormMLPArguments(MLPArguments, NormOptions):
    """The arguments of `LayerNormMLP`."""


class LayerNormMLP(nnx.Module):
    """MLP of the normalized input: submodules `norm` and `mlp`, with their arguments.

    Calling it returns the output, and the normalized input.
    """

    @takes(LayerNormMLPArguments)
    def __init__(self, options: LayerNormMLPArguments) -> None:
        self.norm = norm_of(options, options.in_features)
        self.mlp = MLP(**pick(MLPArguments, options) | of_part(options, "mlp"))

    def __call__(self, x: Array) -> tuple[Array, Array]:
        normalized = self.norm(x)
        return self.mlp(normalized), normalized
