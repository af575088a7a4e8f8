"""A layer whose weight is [in, out], as transformers' Conv1D of GPT-2: a linear layer of the transposed view.

What is kept of the quantized weight goes by the parameter, not by the view.
"""

from torch import Tensor, nn

from quaver.torch.linear.layer import Quantizable, recipe_of
from quaver.torch.model.reach.products import product
from quaver.torch.numerics.tracing import is_tracing

#: The class, by name: transformers need not be installed to ask.
CONV1D = "transformers.pytorch_utils", "Conv1D"


class Transposed(Quantizable):
    """Stands above a class whose forward is x [..., in] @ weight [in, out] + bias."""

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
    """True for transformers' Conv1D and its subclasses."""
    return _conv1d(module) is not None


def why_not(module: nn.Module) -> str:
    """Why one cannot be converted, or ""."""
    kind = _conv1d(module)
    if not isinstance(module, Transposed) and type(module).forward is not kind.forward:  # type: ignore[union-attr]
        return f"{type(module).__name__} has a forward of its own"
    return ""


def _conv1d(module: nn.Module) -> type | None:
    return next((kind for kind in type(module).__mro__ if (kind.__module__, kind.__name__) == CONV1D), None)
