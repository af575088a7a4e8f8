"""Grouped linear layer: rows x [T, K] sorted by group, and a weight [N, K] and a bias [N] for each group.

    fprop   y[t]      = x[t] @ weight[e].T + bias[e]     row t belongs to group e
    dgrad   grad_x[t] = grad_y[t] @ weight[e]
    wgrad   grad_w[e] = sum of grad_y[t] ⊗ x[t] over its rows

`grouped_matmul` is the function and `GroupedLinear` the layer; both run `quaver.torch.linear.grouped.function`. Each
group is quantized separately, with the bits of a linear layer of that group alone, and has the state that a `Linear` in
its place would have.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.recipes.text import check_instance
from quaver.torch.linear import stored_weight
from quaver.torch.linear.grouped.call import LayerGroups, NoiseSource
from quaver.torch.linear.grouped.function import GroupedLinearFunction, GroupedSetup
from quaver.torch.linear.grouped.operands import RowInputOp, given_rows
from quaver.torch.linear.linear import Quantizable, check_not_sharded, recipe_of
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import operation, ops
from quaver.torch.operations.autograd import refuse_transforms
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.state import weight_cache
from quaver.torch.state.buffers import STATE, create_state_buffers
from quaver.torch.state.context import active_context, recipe_in_force
from quaver.torch.state.history import amax
from quaver.torch.state.layer_state import LayerState

# ---- grouped_matmul ----

#: Example of `offsets` for error messages.
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
    """Compute y[t] = x[t] @ weight[e].T + bias[e] for token t of group e, quantized by a recipe; differentiable.

    Args:
        x: [T, K], sorted by group; or the same quantized by the recipe's spec for its input, whose codes are multiplied
            directly. Codes have no gradient, and the wgrad operand is then quantized from their values.
        weight: [groups, N, K] in the dtype of x, or in any dtype under torch.autocast. Views, such as a transpose, are
            not copied.
        offsets: int32 [groups] on the device of x: the end of each group, that is the cumulative sum of group sizes.
            Groups may be empty, and tokens after the last end give zeros. On a GPU the values are not checked, because
            that would synchronize.
        bias: [groups, N].
        recipe: name or Recipe; None uses that of the surrounding `autocast`. Without any recipe the products are
            unquantized.
        seed, count, name: of the noise for stochastic rounding. Pass another count in each step. Group e uses the noise
            stream of a layer called "NAME.e".

    Returns:
        [T, N] in the dtype of x; if x is quantized, in the dtype of the weight or of torch.autocast.

    Raises:
        ValueError: shapes, dtypes or offsets do not fit; codes have another spec; or the recipe uses delayed scaling,
            which needs the history of a `GroupedLinear`.
        NotImplementedError: under torch.func and forward mode.

    Codes and scales equal those of each group alone, bit for bit. Outputs and gradients in float32 have a relative RMS
    error of at most 1e-6 against the same products in float64.
    """
    check_instance("grouped_matmul", "weight", weight, Tensor, "torch.randn(groups, n, k)")
    check_instance("grouped_matmul", "offsets", offsets, Tensor, OFFSETS)
    if not isinstance(x, Quantized):
        check_instance("grouped_matmul", "x", x, Tensor, "torch.randn(tokens, k)")
    in_force = recipe_in_force(None if recipe is None else recipes.get(recipe))
    check(x, weight, offsets, bias, in_force)
    if in_force is not None and in_force.delayed is not None:
        raise ValueError(
            f"recipe {in_force} uses delayed scaling, and a function has no scaling history; use "
            "quaver.torch.GroupedLinear, or the recipe 'tensorwise' or 'rowwise'"
        )
    return multiply(NoiseSource(seed, name, count), x, weight, bias, offsets, in_force)


def multiply(
    owner: NoiseSource | LayerGroups,
    x: Any,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    recipe: Recipe | None,
    transposed: bool = False,
    rows: RowInputOp | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Run `grouped_matmul` for checked arguments, with the owner of its noise and scaling state.

    Args:
        x: rows [T, K] in high precision or quantized; or the tensors from which `rows` computes them.
        transposed: True if the weight is stored as [groups, K, N].
        dtype: of the products; None is that of torch.autocast, or of the rows, or of the weight.
    """
    device = ops.autocast_device(weight)
    if dtype is None:
        own = x.dtype if isinstance(x, Tensor) else weight.dtype
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else own
    if rows is None:
        rows, x = given_rows(x, dtype)
    traced = is_tracing()
    if not traced:
        refuse_transforms(*x, weight, bias, sentence=NO_TRANSFORMS)
    followed = recipe or recipes.get("bf16")
    if not followed.quantizes:
        weight = weight if isinstance(weight, QuantizedTensor) else weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    setup = GroupedSetup(rows, len(x), owner, followed, dtype, torch.is_grad_enabled(), transposed)
    apply: Any = GroupedLinearFunction.apply
    y: Tensor
    if traced:
        y = GroupedLinearFunction.apply(setup, *x, weight, bias, offsets)
        return y
    if active_context.apply_override is not None:
        apply = active_context.apply_override(GroupedLinearFunction, apply)
    with ops.without_autocast(device):
        y = apply(setup, *x, weight, bias, offsets)
    return y


def check(x: Tensor | Quantized, weight: Tensor, offsets: Tensor, bias: Tensor | None, recipe: Recipe | None) -> None:
    """Raise ValueError if shapes, dtypes or devices do not fit."""
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
    """Raise ValueError if fprop cannot read these codes."""
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
            f"x is quantized as {spec}, whose blocks may span rows of several groups: pass x.dequantize(), or use a "
            "recipe with blocks of one row"
        )


# ---- GroupedLinear ----

Layout = Literal["nk", "kn"]


class GroupedLinear(Quantizable):
    """One `Linear` per group of rows, such as the experts of a mixture, with all weights in one parameter.

    Args:
        groups: number of groups.
        in_features, out_features: K and N, the same for all groups.
        bias: True for a parameter [groups, N].
        device, dtype: of the parameters.
        recipe: name or Recipe that this layer always uses; None uses that of the surrounding `autocast`.
        seed: seed of stochastic rounding.
        layout: layout of the weight: "nk" is [groups, N, K]; "kn" is [groups, K, N], read through a transposed view.

    Each group is quantized like the layer with its index in an nn.ModuleList of Linear layers. Delayed scaling adds the
    buffers `history` [groups, length, 3] and `factor` [groups, 3], stochastic rounding adds `count` [groups, 3]. Those
    of a group without tokens do not change. Initial values equal those of as many nn.Linear constructed in order.

    Codes and scales equal those of `quaver.reference` bit for bit. Outputs and gradients in float32 have a relative RMS
    error of at most 1e-6 against the same products in float64.
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
        shape = (out_features, in_features) if layout == "nk" else (in_features, out_features)
        self.weight = nn.Parameter(torch.empty((groups, *shape), dtype=dtype, device=device))
        if bias:
            self.bias = nn.Parameter(torch.empty((groups, out_features), dtype=dtype, device=device))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        amax.register(self)
        if recipe is not None:
            self.recipe = recipes.get(recipe)
            create_state_buffers(self, self.recipe)
        stored_weight.store_if_quantized_init(self)
        operation.register_flop_formulas()

    def _begin(self, serial: int | None, groups: int) -> None:
        self.__dict__["_state"] = LayerState(serial)
        self._state.members = tuple(map(str, range(groups)))

    def reset_parameters(self) -> None:
        """Initialize weight and bias of each group as nn.Linear does, in the order of the groups."""
        if self.weight_spec is None:
            fill(self.matrices(self.weight), self.bias)
            return
        value = torch.empty(stored_weight.shape_of(self), dtype=self.weight_dtype, device=self.weight.device)
        fill(self.matrices(value), self.bias)
        stored_weight.fill(self, value)

    def matrices(self, weight: Tensor) -> Tensor:
        """View a weight in the layer's layout as [groups, N, K], and the other way round."""
        return weight if self.layout == "nk" else weight.transpose(1, 2)

    def set_weight(self, value: Tensor) -> None:
        """Overwrite the weight in place with a value in the layer's layout; a stored quantized weight is quantized
        again.
        """
        stored_weight.write(self, value)

    def forget(self) -> None:
        """Remove the layer's own recipe and the state that it has recorded."""
        for buffer in STATE:
            self._buffers.pop(buffer, None)
        for attribute in ("recipe", "qualified_name"):
            self.__dict__.pop(attribute, None)
        self._begin(self._state.serial, self.groups)

    def forward(self, x: Tensor | Quantized, offsets: Tensor) -> Tensor:
        """Compute [T, N] from rows x [T, K] sorted by group.

        Args:
            x: float32, bfloat16 or float16, in the weight's dtype unless torch.autocast is active; or quantized by the
                recipe's spec for its input. Codes are multiplied directly and have no gradient. float64 runs
                unquantized, with a warning.
            offsets: int32 [groups] on the device of x: the end of each group, that is the cumulative sum of group
                sizes.
        """
        if not isinstance(x, Quantized):
            check_instance("GroupedLinear", "x", x, Tensor, "torch.randn(tokens, in_features)")
        return self._run(x, None, offsets)

    def project(self, rows: RowInputOp, input_tensors: Sequence[Tensor | None], offsets: Tensor) -> Tensor:
        """Run `forward` for rows that `rows` computes from the tensors `input_tensors` inside the same autograd
        function.
        """
        return self._run(input_tensors, rows, offsets)

    def _run(self, x: Any, rows: RowInputOp | None, offsets: Tensor) -> Tensor:
        compiling, training = is_tracing(), torch.is_grad_enabled()
        recipe = recipe_of(self, compiling)
        weight, bias = self.weight, self.bias
        if weight.__class__ is not nn.Parameter and not compiling:
            check_not_sharded(self, weight)
        if self.weight_spec is not None:
            stored_weight.check_stored(self, weight)
            stored_weight.check_gradient(weight)
        self._check(None if rows is not None else x, offsets)
        if isinstance(x, Quantized):
            check_codes(x, recipe)
        recipe = None if recipe is None or not recipe.quantizes else recipe
        dtype = self._dtype(x, weight)
        if dtype not in ops.DTYPES:
            self._refuse_dtype(dtype, recipe)
            recipe = None
        if recipe is None:
            if training and not compiling and self._state.weights is not None:
                weight_cache.expire(self, weight)
        elif training and self._state.buffers_recipe is not recipe:
            create_state_buffers(self, recipe)
        return multiply(LayerGroups(self), x, weight, bias, offsets, recipe, self.layout == "kn", rows, dtype)

    def _dtype(self, x: Any, weight: Tensor) -> torch.dtype:
        """Return the dtype of the products; raise ValueError if rows and weight differ outside of torch.autocast."""
        device, plain = ops.autocast_device(weight), self.weight_dtype or weight.dtype
        is_tensor = isinstance(x, Tensor)
        if torch.is_autocast_enabled(device) and (not is_tensor or x.dtype in ops.DTYPES):
            return torch.get_autocast_dtype(device)
        if is_tensor and x.dtype is not plain and self.weight_spec is None:
            raise ValueError(
                f"{self._named()} has {weight.dtype} weights and got a {x.dtype} input; convert the input, or enter "
                "torch.autocast"
            )
        dtype: torch.dtype = x.dtype if is_tensor else plain
        return dtype

    def _named(self) -> str:
        name: str | None = self.__dict__.get("qualified_name")
        return name or f"GroupedLinear({self.groups}, {self.in_features} → {self.out_features})"

    def _check(self, x: Any, offsets: Tensor) -> None:
        """Raise TypeError if offsets is no tensor; ValueError if a shape, a device or offsets' dtype does not fit."""
        check_instance("GroupedLinear", "offsets", offsets, Tensor, OFFSETS)
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
        """Raise ValueError for integers and codes; warn once that float64 runs unquantized."""
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
    """Initialize weight [groups, N, K] and bias [groups, N] with the values of one nn.Linear per group."""
    bound = 1 / math.sqrt(weight.shape[2]) if weight.shape[2] else 0.0
    if hasattr(weight, "device_mesh"):
        # Sharded over ranks, so no rank has a whole matrix.
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
