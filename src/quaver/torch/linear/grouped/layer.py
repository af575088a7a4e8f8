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
from quaver.recipes.spec import Recipe
from quaver.recipes.text import instance
from quaver.torch.linear import store_weight, stored_weight
from quaver.torch.linear.grouped.function import GroupedLinearFunction, GroupedSetup
from quaver.torch.linear.grouped.operands import GIVEN, GroupedProduct, NoiseSource, PrequantizedRows, RowInputOp
from quaver.torch.linear.linear import Quantizable, recipe_of, refuse_sharded
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import operation, ops
from quaver.torch.operations.autograd import refuse_transforms
from quaver.torch.state import weight_cache
from quaver.torch.state.buffers import STATE, prepare
from quaver.torch.state.context import active_context, recipe_in_force
from quaver.torch.state.history import amax
from quaver.torch.state.layer_state import LayerState

# ---- matmul ----------------------------------------------------------------------------------------------
# One GEMM an expert: rows of x that lie group by group, each group times a matrix of its own.
#
#     fprop   y[t]      = x[t] @ w[e].T + b[e]             token t belongs to expert e
#     dgrad   grad_x[t] = grad_y[t] @ w[e]
#     wgrad   grad_w[e] = sum of grad_y[t] ⊗ x[t] over its tokens
#
# Every expert's tokens and weight are operands of their own, with the bits of a linear layer that sees nothing else.

#: An example.
OFFSETS = "group_sizes.cumsum(0, dtype=torch.int32)"
NO_TRANSFORMS = (
    "grouped products, quantized or not, do not run under torch.func transforms such as vmap and grad, and have no "
    "forward-mode derivative; loop over the batch and use torch.autograd, or call torch.nn.functional.linear of each "
    "group"
)


def grouped_matmul(
    x: Tensor | Quantized,
    weight: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    recipe: str | Recipe | None = None,
    seed: int = 0,
    count: Tensor | int = 0,
    name: str = "grouped",
) -> Tensor:
    """y[t] = x[t] @ weight[e].T + bias[e] for token t of group e, quantized as the recipe says; differentiable.

    Args:
        x: [T, K], the tokens of group 0 first, then those of group 1, and so on; or these quantized by the spec that
            the recipe has for its input, whose codes are multiplied as they are. Codes have no gradient, and what the
            weight's gradient consumes is then quantized from their values.
        weight: [groups, N, K], of x's dtype, or under torch.autocast any; a view, such as a transpose, is not copied.
        offsets: int32 [groups] on x's device, where each group ends: the running sum of the groups' sizes. A group may
            be empty; tokens beyond the last end give zeros. A GPU trusts them, since looking means waiting.
        bias: [groups, N].
        recipe: a name or Recipe; None takes the ambient one, and none of that leaves the products unquantized.
        seed, count, name: of stochastic rounding's noise, which differs by step where count does; group e draws from
            the stream of a layer "NAME.e".
    Returns:
        [T, N] in x's dtype; of codes in the weight's, or in torch.autocast's.
    Raises:
        ValueError: shapes, dtypes or offsets that do not fit; codes of another spec; delayed scaling, whose history no
            function keeps: `GroupedLinear` does.
        NotImplementedError: under torch.func and forward mode.
    Exact: codes and scales, those of each group alone. Bounded: outputs and gradients, relative RMS 1e-6 in float32 of
    the same products in float64.
    """
    instance("grouped_matmul", "weight", weight, Tensor, "torch.randn(groups, n, k)")
    instance("grouped_matmul", "offsets", offsets, Tensor, OFFSETS)
    if not isinstance(x, Quantized):
        instance("grouped_matmul", "x", x, Tensor, "torch.randn(tokens, k)")
    in_force = recipe_in_force(None if recipe is None else recipes.get(recipe))
    check(x, weight, offsets, bias, in_force)
    if in_force is not None and in_force.delayed is not None:
        raise ValueError(
            f"recipe {in_force} scales by a history, which a function has no place for; use "
            "quaver.torch.GroupedLinear, or 'tensorwise' or 'rowwise'"
        )
    return multiply(NoiseSource(seed, name, count), x, weight, bias, offsets, in_force)


def multiply(
    owner: NoiseSource | GroupedProduct,
    x: Tensor | Quantized,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    recipe: Recipe | None,
    transposed: bool = False,
) -> Tensor:
    """`grouped_matmul` of what has been checked, with what remembers its state.

    Args:
        transposed: whether the weight is given as it lies, [groups, K, N].
    Raises:
        ValueError: dtypes that do not fit.
    """
    quantized = isinstance(x, Quantized)
    device = ops.autocast_device(weight)
    casting = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if casting else (_plain(owner, weight) if quantized else x.dtype)  # type: ignore[union-attr]
    if isinstance(x, Quantized):
        rows, taken = PrequantizedRows.of(x)
        return apply(owner, rows, taken, weight, bias, offsets, recipe, dtype, transposed)
    return apply(owner, GIVEN, [x.to(dtype)], weight, bias, offsets, recipe, dtype, transposed)


def apply(
    owner: NoiseSource | GroupedProduct,
    rows: RowInputOp,
    taken: Sequence[Tensor | None],
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    recipe: Recipe | None,
    dtype: torch.dtype,
    transposed: bool = False,
) -> Tensor:
    """The products of rows that are made of some tensors, in a dtype.

    Args:
        transposed: whether the weight is given as it lies, [groups, K, N].
    """
    if not is_tracing():
        refuse_transforms(*taken, weight, bias, sentence=NO_TRANSFORMS)
    followed = recipe or recipes.get("bf16")
    if not followed.quantizes:
        weight = weight if weight.dtype in stored_weight.CODES else weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    setup = GroupedSetup(rows, len(taken), owner, followed, dtype, torch.is_grad_enabled(), transposed)
    y: Tensor
    if is_tracing():
        y = GroupedLinearFunction.apply(setup, *taken, weight, bias, offsets)
        return y
    run: Any = (
        GroupedLinearFunction.apply
        if active_context.split is None
        else active_context.split(GroupedLinearFunction, GroupedLinearFunction.apply)
    )
    with ops.without_autocast(ops.autocast_device(weight)):
        y = run(setup, *taken, weight, bias, offsets)
    return y


def _plain(owner: NoiseSource | GroupedProduct, weight: Tensor) -> torch.dtype:
    """What a weight is in high precision."""
    if weight.dtype not in stored_weight.CODES:
        return weight.dtype
    assert isinstance(owner, GroupedProduct)
    dtype: torch.dtype = owner.layer.__dict__["weight_dtype"]
    return dtype


def check(x: Tensor | Quantized, weight: Tensor, offsets: Tensor, bias: Tensor | None, recipe: Recipe | None) -> None:
    """Refuse what does not fit, in a sentence. Raises: ValueError."""
    _check_shapes(x, weight, offsets, bias)
    if offsets.dtype is not torch.int32:
        raise ValueError(f"offsets count tokens and are {offsets.dtype}; convert them to torch.int32")
    if offsets.device != x.device or weight.device != x.device:
        raise ValueError(
            f"x is on {x.device}, weight on {weight.device}, offsets on {offsets.device}; move them to one"
        )
    if isinstance(x, Quantized):
        check_codes(x, recipe)
        return
    if x.dtype not in ops.DTYPES or weight.dtype not in ops.DTYPES:
        raise ValueError(f"x and weight are float32, bfloat16 or float16, not {x.dtype} and {weight.dtype}")
    if weight.dtype is not x.dtype and not torch.is_autocast_enabled(ops.autocast_device(x)):
        raise ValueError(f"x is {x.dtype} and weight {weight.dtype}; convert one of them, or enter torch.autocast")


def _check_shapes(x: Tensor | Quantized, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> None:
    shape = tuple(x.shape)
    if len(shape) != 2 or weight.dim() != 3 or offsets.shape != weight.shape[:1] or shape[1] != weight.shape[2]:
        raise ValueError(
            f"x is [T, K], weight [groups, N, K] and offsets [groups]; these are {shape}, {tuple(weight.shape)} and "
            f"{tuple(offsets.shape)}"
        )
    if bias is not None and bias.device != weight.device:
        raise ValueError(f"bias is on {bias.device} and weight on {weight.device}; move them to one")
    if bias is not None and bias.shape != weight.shape[:2]:
        raise ValueError(f"bias is [groups, N], here {tuple(weight.shape[:2])}; this one is {tuple(bias.shape)}")


def check_codes(x: Quantized, recipe: Recipe | None) -> None:
    """Refuse codes that fprop does not read. Raises: ValueError."""
    spec = None if recipe is None else recipe.fprop.a
    if spec is None:
        raise ValueError(
            f"x is quantized as {x.spec}, and {'no recipe' if recipe is None else f'recipe {recipe}'} quantizes it "
            "here: give a recipe that does, or x.dequantize()"
        )
    if x.spec != spec or x.transposed:
        raise ValueError(
            f"x is quantized as {x.spec}{', transposed' * x.transposed}, and recipe {recipe} reads its input as "
            f"{spec}: "
            "quantize it so, or give x.dequantize()"
        )
    if spec.block[0] not in (1, None):
        raise ValueError(
            f"x is quantized as {spec}, whose blocks may have rows of several groups: give x.dequantize(), or take a "
            "recipe with blocks of one row"
        )


# ---- layer -----------------------------------------------------------------------------------------------

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
        store_weight.begin(self)
        operation.register()

    def _begin(self, serial: int | None, groups: int) -> None:
        self.__dict__["_state"] = LayerState(serial)
        self._state.members = tuple(map(str, range(groups)))

    def reset_parameters(self) -> None:
        """Fill each group's weight and bias as nn.Linear does, one group after the other."""
        if self.weight_spec is None:
            fill(self.matrices(self.weight), self.bias)
            return
        value = torch.empty(store_weight.shape_of(self), dtype=self.weight_dtype, device=self.weight.device)
        fill(self.matrices(value), self.bias)
        store_weight.fill(self, value)

    def matrices(self, weight: Tensor) -> Tensor:
        """A weight as it lies as [groups, N, K], and back: a view."""
        return weight if self.layout == "nk" else weight.transpose(1, 2)

    def set_weight(self, value: Tensor) -> None:
        """Give the weight a new value, as it lies, in place; one in eight bits is quantized anew."""
        store_weight.write(self, value)

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

    def project(self, rows: RowInputOp, taken: Sequence[Tensor | None], offsets: Tensor) -> Tensor:
        """`forward` of rows that are made of some tensors within the same autograd function."""
        return self._run(None, rows, taken, offsets)

    def _run(self, x: Any, rows: RowInputOp | None, taken: Sequence[Tensor | None], offsets: Tensor) -> Tensor:
        compiling, training = is_tracing(), torch.is_grad_enabled()
        recipe = recipe_of(self, compiling)
        weight, bias = self.weight, self.bias
        if weight.__class__ is not nn.Parameter and not compiling:
            refuse_sharded(self, weight)
        if self.weight_spec is not None:
            stored_weight.check_uncast(self, weight)
            stored_weight.check_gradient(weight)
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
                weight_cache.look(self, weight)
        elif training and self._state.prepared is not recipe:
            prepare(self, recipe)
        owner, transposed = GroupedProduct(self), self.layout == "kn"
        if rows is None:
            return multiply(owner, x, weight, bias, offsets, recipe, transposed)
        return apply(owner, rows, taken, weight, bias, offsets, recipe, dtype, transposed)

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
