"""One GEMM an expert: rows of x that lie group by group, each group times a matrix of its own.

    fprop   y[t]      = x[t] @ w[e].T + b[e]             token t belongs to expert e
    dgrad   grad_x[t] = grad_y[t] @ w[e]
    wgrad   grad_w[e] = sum of grad_y[t] ⊗ x[t] over its tokens

Every expert's tokens and weight are operands of their own, with the bits of a linear layer that sees nothing else.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver import recipes
from quaver.core.spec import Recipe
from quaver.core.text.given import instance
from quaver.torch.linear.grouped.call import Product, Source
from quaver.torch.linear.grouped.function import Grouped, Setup
from quaver.torch.linear.grouped.rows import GIVEN, Codes, Rows
from quaver.torch.linear.stored import stored
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.derivatives import refuse_transforms
from quaver.torch.state.context import ambient, recipe_in_force

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
    return multiply(Source(seed, name, count), x, weight, bias, offsets, in_force)


def multiply(
    owner: Source | Product,
    x: Tensor | Quantized,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    recipe: Recipe | None,
    turned: bool = False,
) -> Tensor:
    """`grouped_matmul` of what has been checked, with what remembers its state.

    Args:
        turned: whether the weight is given as it lies, [groups, K, N].
    Raises:
        ValueError: dtypes that do not fit.
    """
    quantized = isinstance(x, Quantized)
    device = ops.autocast_device(weight)
    casting = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if casting else (_plain(owner, weight) if quantized else x.dtype)  # type: ignore[union-attr]
    if isinstance(x, Quantized):
        rows, taken = Codes.of(x)
        return apply(owner, rows, taken, weight, bias, offsets, recipe, dtype, turned)
    return apply(owner, GIVEN, [x.to(dtype)], weight, bias, offsets, recipe, dtype, turned)


def apply(
    owner: Source | Product,
    rows: Rows,
    taken: Sequence[Tensor | None],
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    recipe: Recipe | None,
    dtype: torch.dtype,
    turned: bool = False,
) -> Tensor:
    """The products of rows that are made of some tensors, in a dtype.

    Args:
        turned: whether the weight is given as it lies, [groups, K, N].
    """
    if not is_tracing():
        refuse_transforms(*taken, weight, bias, sentence=NO_TRANSFORMS)
    followed = recipe or recipes.get("bf16")
    if not followed.quantizes:
        weight = weight if weight.dtype in stored.CODES else weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    setup = Setup(rows, len(taken), owner, followed, dtype, torch.is_grad_enabled(), turned)
    y: Tensor
    if is_tracing():
        y = Grouped.apply(setup, *taken, weight, bias, offsets)
        return y
    run: Any = Grouped.apply if ambient.split is None else ambient.split(Grouped, Grouped.apply)
    with ops.without_autocast(ops.autocast_device(weight)):
        y = run(setup, *taken, weight, bias, offsets)
    return y


def _plain(owner: Source | Product, weight: Tensor) -> torch.dtype:
    """What a weight is in high precision."""
    if weight.dtype not in stored.CODES:
        return weight.dtype
    assert isinstance(owner, Product)
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
    if x.spec != spec or x.turned:
        raise ValueError(
            f"x is quantized as {x.spec}{', transposed' * x.turned}, and recipe {recipe} reads its input as {spec}: "
            "quantize it so, or give x.dequantize()"
        )
    if spec.block[0] not in (1, None):
        raise ValueError(
            f"x is quantized as {spec}, whose blocks may have rows of several groups: give x.dequantize(), or take a "
            "recipe with blocks of one row"
        )
