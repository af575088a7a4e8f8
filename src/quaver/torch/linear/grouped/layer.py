"""y[t] = x[t] @ weight[e].T + bias[e], rows group by group, every operand quantized as a recipe says.

`quaver.torch.linear.grouped.function`, dressed as a layer: each expert keeps what a `Linear` in its place would.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from quaver import recipes
from quaver.core.spec import Recipe
from quaver.core.text.given import instance
from quaver.torch.linear.grouped.call import Product
from quaver.torch.linear.grouped.matmul import OFFSETS, apply, check_codes, multiply
from quaver.torch.linear.grouped.rows import Rows
from quaver.torch.linear.layer import Quantizable, recipe_of, refuse_sharded
from quaver.torch.linear.stored import stored, storing
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.operations import counting, ops
from quaver.torch.state import kept_weights
from quaver.torch.state.buffers import STATE, prepare
from quaver.torch.state.history import amax
from quaver.torch.state.layer import LayerState

Layout = Literal["nk", "kn"]


class GroupedLinear(Quantizable):
    """A `Linear` for each group of rows, such as the experts of a mixture, in one weight.

    Args:
        groups: how many.
        in_features, out_features: K and N, of all groups.
        bias: whether each group has one: a parameter [groups, N].
        device, dtype: of the parameters.
        recipe: a name or Recipe that this layer always uses; None takes the ambient one.
        seed: of stochastic rounding.
        layout: how the weight lies: "nk" is [groups, N, K], "kn" is [groups, K, N], of which products read a
            transposed view.
    Each group is quantized as the layer of its number in an nn.ModuleList in this one's place would be. Delayed scaling
    adds buffers `history` [groups, length, 3] and `factor` [groups, 3], stochastic rounding `count` [groups, 3]; those
    of a group without tokens stay. Initial values are those of as many nn.Linear, made one after the other.
    Exact: all codes and scales. Bounded: outputs and gradients, relative RMS 1e-6 in float32 of the same products in
    float64.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe | None = None,
        seed: int = 0,
        layout: Layout = "nk",
    ) -> None:
        sizes = {"groups": groups, "in_features": in_features, "out_features": out_features}
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise ValueError(f"GroupedLinear: {name} is {size!r}; give a whole number, 0 or more")
        if layout not in ("nk", "kn"):
            raise ValueError(f"GroupedLinear: layout is {layout!r}; give 'nk' for [groups, N, K], or 'kn'")
        self._begin(None, groups)
        super().__init__()
        self.groups, self.in_features, self.out_features = groups, in_features, out_features
        self.layout, self.seed = layout, seed
        lies = (out_features, in_features) if layout == "nk" else (in_features, out_features)
        self.weight = nn.Parameter(torch.empty((groups, *lies), dtype=dtype, device=device))
        if bias:
            self.bias = nn.Parameter(torch.empty((groups, out_features), dtype=dtype, device=device))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        amax.register(self)
        if recipe is not None:
            self.recipe = recipes.get(recipe)
            prepare(self, self.recipe)
        storing.begin(self)
        counting.register()

    def _begin(self, serial: int | None, groups: int) -> None:
        self.__dict__["_state"] = LayerState(serial)
        self._state.members = tuple(map(str, range(groups)))

    def reset_parameters(self) -> None:
        """Fill each group's weight and bias as nn.Linear does, one group after the other."""
        if self.weight_spec is None:
            fill(self.matrices(self.weight), self.bias)
            return
        value = torch.empty(storing.shape_of(self), dtype=self.weight_dtype, device=self.weight.device)
        fill(self.matrices(value), self.bias)
        storing.fill(self, value)

    def matrices(self, weight: Tensor) -> Tensor:
        """A weight as it lies as [groups, N, K], and back: a view."""
        return weight if self.layout == "nk" else weight.transpose(1, 2)

    def set_weight(self, value: Tensor) -> None:
        """Give the weight a new value, as it lies, in place; one in eight bits is quantized anew."""
        storing.write(self, value)

    def forget(self) -> None:
        """Have no recipe of its own any more, and nothing of what that one has recorded."""
        for buffer in STATE:
            self._buffers.pop(buffer, None)
        for attribute in ("recipe", "qualified_name"):
            self.__dict__.pop(attribute, None)
        self._begin(self._state.serial, self.groups)

    def forward(self, x: Tensor | Quantized, offsets: Tensor) -> Tensor:
        """[T, N] of rows x [T, K], those of group 0 first.

        Args:
            x: float32, bfloat16 or float16, of the weight's dtype or under torch.autocast; or quantized by the recipe's
                spec of its input: codes go to the products as they are, and have no gradient. float64 runs unquantized,
                with a warning.
            offsets: int32 [groups] on x's device, where each group ends: the running sum of the groups' sizes.
        """
        if not isinstance(x, Quantized):
            instance("GroupedLinear", "x", x, Tensor, "torch.randn(tokens, in_features)")
        return self._run(x, None, (), offsets)

    def project(self, rows: Rows, taken: Sequence[Tensor | None], offsets: Tensor) -> Tensor:
        """`forward` of rows that are made of some tensors within the same autograd function."""
        return self._run(None, rows, taken, offsets)

    def _run(self, x: Any, rows: Rows | None, taken: Sequence[Tensor | None], offsets: Tensor) -> Tensor:
        compiling, training = is_tracing(), torch.is_grad_enabled()
        recipe = recipe_of(self, compiling)
        weight, bias = self.weight, self.bias
        if weight.__class__ is not nn.Parameter and not compiling:
            refuse_sharded(self, weight)
        if self.weight_spec is not None:
            stored.check_uncast(self, weight)
            stored.check_gradient(weight)
        self._check(x, offsets)
        if isinstance(x, Quantized):
            check_codes(x, recipe)
        if recipe is not None and not recipe.quantizes:
            recipe = None
        device = ops.autocast_device(weight)
        casting = torch.is_autocast_enabled(device)
        plain = self.weight_dtype or weight.dtype
        if isinstance(x, Tensor):
            casting = casting and x.dtype in ops.DTYPES
            if x.dtype is not plain and not casting and self.weight_spec is None:
                raise ValueError(
                    f"{self._named()} has {weight.dtype} weights and got a {x.dtype} input; convert the input, or "
                    "enter torch.autocast"
                )
        dtype = torch.get_autocast_dtype(device) if casting else x.dtype if isinstance(x, Tensor) else plain
        if dtype not in ops.DTYPES:
            self._refuse_dtype(dtype, recipe)
            recipe = None
        if recipe is None:
            if training and not compiling and self._state.weights is not None:
                kept_weights.look(self, weight)
        elif training and self._state.prepared is not recipe:
            prepare(self, recipe)
        owner, turned = Product(self), self.layout == "kn"
        if rows is None:
            return multiply(owner, x, weight, bias, offsets, recipe, turned)
        return apply(owner, rows, taken, weight, bias, offsets, recipe, dtype, turned)

    def _named(self) -> str:
        name: str | None = self.__dict__.get("qualified_name")
        return name or f"GroupedLinear({self.groups}, {self.in_features} → {self.out_features})"

    def _check(self, x: Any, offsets: Tensor) -> None:
        """Refuse what does not fit, in a sentence. Raises: ValueError, TypeError of what is no tensor."""
        instance("GroupedLinear", "offsets", offsets, Tensor, OFFSETS)
        if x is not None and (len(x.shape) != 2 or x.shape[1] != self.in_features):
            raise ValueError(
                f"{self._named()} got rows of shape {tuple(x.shape)}; they are [T, {self.in_features}], those of group "
                "0 first: flatten leading axes"
            )
        if offsets.dtype is not torch.int32 or offsets.shape != (self.groups,):
            raise ValueError(
                f"{self._named()} got offsets {tuple(offsets.shape)} of {offsets.dtype}; they are int32 "
                f"[{self.groups}], where each group ends: group_sizes.cumsum(0, dtype=torch.int32)"
            )
        device = self.weight.device
        if offsets.device != device or (x is not None and x.device != device):
            where = "" if x is None else f"rows on {x.device} and "
            raise ValueError(f"{self._named()} is on {device}, and got {where}offsets on {offsets.device}; move them")

    def _refuse_dtype(self, dtype: torch.dtype, recipe: Recipe | None) -> None:
        """Refuse integers and codes, and warn of float64. Raises: ValueError."""
        if dtype is not torch.float64 or self.weight_spec is not None:
            raise ValueError(
                f"{self._named()} got a {dtype} input; rows are float32, bfloat16 or float16: convert them"
            )
        if recipe is not None and "float64" not in _warned:
            _warned.add("float64")
            warnings.warn(
                f"{dtype} is computed in high precision: recipes quantize float32, bfloat16 and float16", stacklevel=5
            )

    def extra_repr(self) -> str:
        own = "" if self.recipe is None else f", recipe={self.recipe}"
        own += "" if self.weight_spec is None else f", weight={self.weight_spec}"
        own += "" if self.layout == "nk" else f", layout={self.layout!r}"
        bias = self.bias is not None
        return f"{self.groups}, in_features={self.in_features}, out_features={self.out_features}, bias={bias}{own}"


_warned: set[str] = set()


@torch.no_grad()
def fill(weight: Tensor, bias: Tensor | None) -> None:
    """Initial values of [groups, N, K] and [groups, N], as one nn.Linear a group draws them."""
    bound = 1 / math.sqrt(weight.shape[2]) if weight.shape[2] else 0.0
    if hasattr(weight, "device_mesh"):
        # In parts on ranks, none of which has a whole matrix.
        for parameter in (weight, bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)
        return
    for group in range(weight.shape[0]):
        if weight[group].numel():
            values = torch.empty(weight.shape[1:], dtype=weight.dtype, device=weight.device)
            weight[group].copy_(nn.init.kaiming_uniform_(values, a=math.sqrt(5)))
        if bias is not None:
            nn.init.uniform_(bias[group], -bound, bound)
