"""The MLP of a Transformer, with and without a norm before it."""

from flax import linen as nn
from jax import Array

from quaver.core.options import pick, suggests
from quaver.jax.blocks.feed_forward import activate_fused, matrices
from quaver.jax.blocks.options import MLPOptions, NormOptions
from quaver.jax.linen.dense import dense_of
from quaver.jax.linen.norm import norm_of


@suggests
class MLP(nn.Module, MLPOptions):
    """Two DenseGeneral, `wi` and `wo`, and an activation between them; `wi` gives gate and value of a gated one.

    Attributes:
        hidden: features between the two.
        activation: a row of `quaver.jax.blocks.activation.ACTIVATIONS`.
        out: features of the output; None keeps the input's.
        partition: name the kernels' axes "embed" and "mlp", for flax's logical sharding rules.
        others: those of DenseGeneral.
    """

    hidden: int
    activation: str = "gelu"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        both = matrices(self.activation, self.hidden, self.out or x.shape[-1])
        wi, wo = (dense_of(self, name, matrix) for name, matrix in both.items())
        return wo(activate_fused(self.activation, wi(x), len(both["wi"].features)))


@suggests
class LayerNormMLP(nn.Module, MLPOptions, NormOptions):
    """MLP of the normalized input: submodules `norm` and `mlp`, with their attributes.

    Returns:
        The output, and the normalized input.
    """

    hidden: int
    activation: str = "gelu"

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        normalized = norm_of(self, "norm")(x)
        mlp = MLP(self.hidden, self.activation, **pick(MLPOptions, self), name="mlp")
        return mlp(normalized), normalized
