"""State of one grouped product: its configuration, the amaxes it measures, and the cached operands of its weights.

The state of a layer is read before the products run and written after them, all in this module. The products themselves
(`cpu`, `gpu`) are functions of tensors, which torch.compile can call as one operator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.backends.gpu.device import why_no_fp8
from quaver.torch.linear import stored_weight
from quaver.torch.linear.general import LATER, capturing
from quaver.torch.numerics.grouped import GroupedNoise, GroupedOperand, GroupOffsets, WeightStack
from quaver.torch.numerics.quantized import Quantized, rebuild_operand, split_operand
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.operation import Implementation, Operation
from quaver.torch.state import counters, layer_state, noise, weight_cache
from quaver.torch.state.history import amax, scaling_step

# ---- context of a call ----


@dataclass(frozen=True)
class NoiseSource:
    """Source of noise for `grouped_matmul`, which has no state: one counter for all groups."""

    seed: int
    name: str
    count: Tensor | int

    def draw(self, operand: str, groups: int) -> GroupedNoise:
        streams = [noise.named_id(f"{self.name}.{group}", operand) for group in range(groups)]
        return GroupedNoise(self.seed, streams, [int(self.count)] * groups)


class GroupedProduct(NamedTuple):
    """One product of a layer: a range of consecutive groups of one parameter."""

    layer: nn.Module
    #: Name of the parameter.
    name: str = "weight"
    #: Index of the first group.
    first: int = 0


class GradientLike(NamedTuple):
    """Shapes, dtypes and layout of the gradients of weight and bias."""

    #: (groups, N, K).
    shape: tuple[int, int, int]
    dtype: torch.dtype
    #: True if the parameter is stored as [groups, K, N].
    transposed: bool
    #: (groups, N).
    bias: tuple[int, int]
    bias_dtype: torch.dtype

    @property
    def features(self) -> int:
        return self.shape[2]

    @property
    def weight_dtype(self) -> torch.dtype:
        """dtype of the weight's gradient."""
        return torch.float32 if self.dtype in stored_weight.CODES else self.dtype

    def new_weight(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized gradient [groups, N, K] in the layout of the weight."""
        groups, n, k = self.shape
        if self.transposed:
            return torch.empty((groups, k, n), dtype=dtype, device=device).transpose(1, 2)
        return torch.empty((groups, n, k), dtype=dtype, device=device)

    def in_parameter_layout(self, grad: Tensor) -> Tensor:
        """Convert a gradient [groups, N, K] to the layout of the parameter."""
        return grad.transpose(1, 2) if self.transposed else grad


@dataclass(slots=True, eq=False)
class GroupedContext:
    """State that one grouped product carries from its forward to its backward."""

    recipe: Recipe
    offsets: GroupOffsets
    #: dtype of the products and of the gradient of their input.
    dtype: torch.dtype
    #: True if gradients are enabled.
    training: bool
    #: Owner of noise and state, or None inside an operator, which receives them as arguments.
    owner: NoiseSource | GroupedProduct | None
    #: Encode factors of input, weight and grad_output of each group in the forward: a list of three numbers per group,
    #: or float32 [groups, 3]. None without delayed scaling.
    factors: Any = None
    #: Returns the noise of all groups for the name of an operand.
    draw: Callable[[str], GroupedNoise] | None = None
    #: Cached weight operands by side, "fprop" and "dgrad"; each entry holds a `WeightStack`.
    saved_stacks: dict[str, weight_cache.CachedWeight] = field(default_factory=dict)
    #: Cache key for the weights' encode factors: their values on the host, or the version of the factors on a device.
    factor_key: Any = None
    #: Measured amaxes of the groups, by history column; 0 for groups without tokens.
    amaxes: dict[int, Any] = field(default_factory=dict)
    #: Operands that were rounded stochastically.
    drawn: list[str] = field(default_factory=list)
    #: Scales and layout of a weight that is stored as codes, else None.
    codes: stored_weight.StackCodes | None = None
    #: Handle that keeps the delayed-scaling step open until the backward of this call has run.
    pending: Any = None

    def factor(self, group: int, column: int) -> Any:
        """Return the encode factor of a group, or None without delayed scaling."""
        return None if self.factors is None else self.factors[group][column]

    def noise(self, operand: str, spec: QuantSpec) -> GroupedNoise | None:
        """Return the noise of an operand's groups, or None if the operand is rounded to nearest."""
        if spec.rounding == "nearest":
            return None
        assert self.draw is not None
        self.drawn.append(operand)
        return self.draw(operand)

    def note(self, operand: str, x: Tensor, q: Quantized) -> None:
        """Report an operand of one or several groups to the counters, if there are any."""
        if (
            counters.active.counters is not None
            and isinstance(self.owner, GroupedProduct)
            and not layer_state.replaying()
        ):
            counters.active.counters.count(self.owner.layer, operand, x, q, self.owner.name)


def begin(
    owner: NoiseSource | GroupedProduct,
    recipe: Recipe,
    offsets: GroupOffsets,
    dtype: torch.dtype,
    training: bool,
    weight: Tensor,
) -> GroupedContext:
    """Begin a call and join the current step of delayed scaling."""
    call = GroupedContext(recipe, offsets, dtype, training, owner)
    if weight.dtype in stored_weight.CODES:
        assert isinstance(owner, GroupedProduct)
        call.codes = stored_weight.stack_codes(owner.layer)
    if isinstance(owner, NoiseSource):
        call.draw = lambda operand: owner.draw(operand, offsets.groups)
        return call
    layer, members = owner.layer, slice(owner.first, owner.first + offsets.groups)
    if recipe.delayed is not None:
        call.factors = scaling_step.factors(layer, training)[members]
        if not isinstance(call.factors, Tensor):
            call.factor_key = tuple(factors[amax.WEIGHT] for factors in call.factors)
            if not ops.on_host(offsets.ends):
                call.factors = torch.tensor(call.factors, dtype=torch.float32, device=offsets.ends.device).view(-1, 3)
        if training and not is_tracing():
            call.pending = scaling_step.pending(layer)
    call.draw = lambda operand: _drawn_by(layer, members, operand)
    return call


def _drawn_by(layer: nn.Module, members: slice, operand: str) -> GroupedNoise:
    seed, *drawn = noise.draw(layer, operand)
    streams, counts = (numbers[members] for numbers in drawn)  # type: ignore[index]
    if not is_tracing() and ops.on_host(counts):
        counts = counts.tolist()
    return GroupedNoise(seed, streams, counts)


def finish(call: GroupedContext) -> None:
    """Write the amaxes and noise counters that a call has collected to its layer."""
    owner = call.owner
    if isinstance(owner, GroupedProduct):
        if call.training and call.factors is not None:
            for column, amaxes in call.amaxes.items():
                amax.record_each(owner.layer, column, amaxes, owner.first)
        for operand in call.drawn:
            noise.drawn(owner.layer, operand, has_tokens(call.offsets), owner.first)
    call.amaxes.clear()
    call.drawn.clear()


def has_tokens(offsets: GroupOffsets) -> Tensor:
    """Return bool [groups], True for groups that have tokens."""
    ends = offsets.ends
    return torch.diff(ends, prepend=ends.new_zeros(1)) > 0


def stack(
    call: GroupedContext, weight: Tensor, side: str, full: Callable[[], WeightStack] | None = None
) -> WeightStack:
    """Return the weight operands for a side, from `quaver.torch.state.weight_cache` if valid.

    For `grouped_matmul`, which has no cache, they last from its forward to its backward.

    Args:
        side: "fprop" or "dgrad".
        full: computes all operands if none are cached; None lets the reader fill in each operand.
    """
    entry = call.saved_stacks.get(side)
    if entry is None or entry.quantized is None:
        entry = call.saved_stacks[side] = _entry(
            call, weight, side, full or (lambda: WeightStack([None] * call.offsets.groups))
        )
    saved_stacks: WeightStack = entry.quantized
    return saved_stacks


def _entry(
    call: GroupedContext, weight: Tensor, side: str, full: Callable[[], WeightStack]
) -> weight_cache.CachedWeight:
    owner, gemm = call.owner, call.recipe.fprop if side == "fprop" else call.recipe.dgrad
    if not isinstance(owner, GroupedProduct) or weight.dtype in stored_weight.CODES or capturing(weight):
        return weight_cache.CachedWeight(full())
    layer, key, factor_key = owner.layer, f"{side} {owner.name}", _written(call, owner.layer)
    assert gemm.b is not None
    entry = weight_cache.lookup(layer, key, weight, gemm.b, factor_key, call.training)
    if entry is not None and entry.quantized is not None:
        return entry
    window = weight_cache.begin(layer, weight, call.training)
    operands = full()
    entry = weight_cache.store(layer, key, weight, gemm.b, factor_key, operands, window)
    if entry is None and not call.training:
        weight_cache.count_uncached_forward(layer, weight)
    return entry or weight_cache.CachedWeight(operands)


def _written(call: GroupedContext, layer: nn.Module) -> Any:
    """Return `GroupedContext.factor_key`, read at first use."""
    if call.factors is None:
        return 0.0
    if call.factor_key is None:
        factor = layer._buffers["factor"]
        assert factor is not None
        call.factor_key = factor._version
        if layer_state.state.replay is not None or layer_state.state.writing:
            call.factor_key = layer_state.logged_or_replayed(layer, "version of factors", call.factor_key)
    return call.factor_key


def of_weights(needed: Any, gives: Callable[..., Tensor]) -> Any:
    """Return the gradient, a function that computes it if it is needed `LATER`, or None."""
    return gives if needed is LATER else gives() if needed else None


def of_biases(sums: Tensor | None, *, dtype: torch.dtype) -> Tensor:
    """Return the gradients of the biases in a dtype."""
    assert sums is not None
    return sums.to(dtype)


# ---- rows of a grouped product ----
# Rows are passed by the caller as values or codes, or computed inside the autograd function. A `RowInputOp` can
# quantize tokens before it moves them; rows then arrive as codes without a high-precision copy and go to fprop
# directly. Its backward receives the gradient of the high-precision rows, as if nothing had been quantized.


class RowInputOp(Protocol):
    """Interface of an operation that computes rows outside of autograd.

    One object may serve many calls, and torch.compile treats equal objects as one. Methods take as many tensors as the
    operation has inputs; some may be None.
    """

    @property
    def recomputes_input(self) -> bool:
        """True if backward recomputes the rows, so that only the tensors saved by `forward` remain."""

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        """Compute the rows [T, K] sorted by group, and the values that the other methods need.

        Args:
            spec: spec of fprop's input; None if it is not quantized.

        Returns:
            Rows quantized by this spec, or in high precision, which are then quantized per group; and saved tensors,
            operands or None.
        """

    def recompute_input(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        """Recompute the rows bit for bit."""

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        """Return the high-precision values of rows that are codes, or None if there are none.

        wgrad's operand is quantized from them if it differs from fprop's; without them the values of the codes are
        used.
        """

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs from the gradient g [T, K] of the high-precision rows.

        Args:
            needs: one flag per input.
        """


@dataclass(frozen=True)
class IdentityRows:
    """Rows passed by the caller in high precision."""

    recomputes_input: bool = False

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        (value,) = x
        assert value is not None
        return value, ()

    def recompute_input(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        raise AssertionError("what is given is kept")

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        raise AssertionError("rows in high precision are their own")

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        return (g,)


IDENTITY_ROWS = IdentityRows()


@dataclass(frozen=True)
class PrequantizedRows:
    """Rows passed by the caller as codes, with the layout to rebuild the operand; they have no gradient."""

    layout: tuple[Any, ...]
    recomputes_input: bool = False

    @staticmethod
    def of(q: Quantized) -> "tuple[PrequantizedRows, list[Tensor | None]]":
        tensors, layout = split_operand(q.plain())
        assert layout is not None
        return PrequantizedRows(layout), tensors

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        return rebuild_operand(self.layout, x), ()

    def recompute_input(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        raise AssertionError("what is given is kept")

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        return None

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        return (None,) * len(needs)


# ---- grouped products on a GPU ----

_GEMMS, _VALUES, _HIGH = (f"{ops.GPU}.grouped_mm" for _ in range(3))


def _no_gemms(a: GroupedOperand, *_: Any) -> str:
    return why_no_fp8(a.data.device, "native")


def _no_values(a: GroupedOperand, *_: Any) -> str:
    return ops._reason_not_on_gpu(a)  # type: ignore[arg-type]


def _no_kernels(a: GroupedOperand, *_: Any) -> str:
    return ops.no_kernels(a.data)


#: Tokens of each group times its matrix: (tokens, matrices, offsets, n, dtype, bias, fast_accum) -> [T, n].
GROUPED_MATMUL: Operation[Tensor] = Operation(
    "grouped_matmul",
    [
        Implementation("native", f"{_GEMMS}:matmul", f"{_GEMMS}:reason", _no_gemms),
        Implementation("decoded", f"{_VALUES}:bf16_matmul", f"{_VALUES}:reason_decoded", _no_values),
        Implementation("triton", f"{_VALUES}:kernel_matmul", f"{_VALUES}:reason_kernel", _no_kernels),
        Implementation("group by group", f"{_VALUES}:group_by_group"),
    ],
    parts=ops.MATMUL,
)
#: Transposed operands multiplied per group and summed over its tokens: (one, other, dtype, fast_accum) -> [groups, n,
#: k].
GROUPED_SUMS: Operation[Tensor] = Operation(
    "grouped_sums",
    [
        Implementation("native", f"{_GEMMS}:sums", f"{_GEMMS}:reason_sums", _no_gemms),
        Implementation("decoded", f"{_VALUES}:bf16_sums", f"{_VALUES}:reason_decoded_sums", _no_values),
        Implementation("triton", f"{_VALUES}:kernel_sums", f"{_VALUES}:reason_kernel", _no_kernels),
        Implementation("group by group", f"{_VALUES}:sums_group_by_group"),
    ],
    parts=ops.MATMUL,
)


def _no_kernels_high(x: Tensor, *_: Any) -> str:
    return ops.no_kernels(x)


#: Unquantized `GROUPED_MATMUL`: (x [T, k], w [groups, n, k], offsets, dtype, bias) -> [T, n].
HIGH_MATMUL: Operation[Tensor] = Operation(
    "grouped_high",
    [
        Implementation("torch", f"{_HIGH}:high_matmul", f"{_HIGH}:reason_high"),
        Implementation("triton", f"{_HIGH}:kernel_high", f"{_HIGH}:reason_kernel_high", _no_kernels_high),
        Implementation("group by group", f"{_HIGH}:high_group_by_group"),
    ],
)
#: Unquantized `GROUPED_SUMS`: (a [T, n], b [T, k], offsets, dtype) -> [groups, n, k], summed over each group's rows.
HIGH_SUMS: Operation[Tensor] = Operation(
    "grouped_high_sums",
    [
        Implementation("torch", f"{_HIGH}:high_sums", f"{_HIGH}:reason_high_sums"),
        Implementation("triton", f"{_HIGH}:kernel_high_sums", f"{_HIGH}:reason_kernel_high", _no_kernels_high),
        Implementation("group by group", f"{_HIGH}:high_sums_group_by_group"),
    ],
)
