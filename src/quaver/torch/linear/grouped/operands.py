"""One call of grouped products: what its forward decides, what it measures on the way, and where its weights are kept.

What a layer remembers from call to call is read before the products run and written after them, here: the products
themselves (`host`, `device`) are functions of tensors, which a compiler may call as one operator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.backends.gpu.device import why_no_fp8
from quaver.torch.linear import stored_weight
from quaver.torch.linear.gemms import LATER, capturing
from quaver.torch.numerics.grouped import GroupedNoise, GroupedOperand, GroupOffsets, WeightStack
from quaver.torch.numerics.quantized import Quantized, put_together, take_apart
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.operation import Implementation, Operation
from quaver.torch.state import counters, layer_state, noise, weight_cache
from quaver.torch.state.history import amax, scaling_step

# ---- call ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoiseSource:
    """Where a function, which remembers nothing, has its noise from: one count for all groups."""

    seed: int
    name: str
    count: Tensor | int

    def draw(self, operand: str, groups: int) -> GroupedNoise:
        streams = [noise.named_id(f"{self.name}.{group}", operand) for group in range(groups)]
        return GroupedNoise(self.seed, streams, [int(self.count)] * groups)


class GroupedProduct(NamedTuple):
    """One of a layer's products: some of its members in a row."""

    layer: nn.Module
    #: Of its parameter.
    name: str = "weight"
    #: The first of these members.
    first: int = 0


class GradientLike(NamedTuple):
    """What the gradients of a weight and of a bias are like."""

    #: (groups, N, K).
    shape: tuple[int, int, int]
    dtype: torch.dtype
    #: Whether it is of a parameter that lies as [groups, K, N].
    transposed: bool
    #: (groups, N).
    bias: tuple[int, int]
    bias_dtype: torch.dtype

    @property
    def features(self) -> int:
        return self.shape[2]

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the weight's gradient."""
        return torch.float32 if self.dtype in stored_weight.CODES else self.dtype

    def new_weight(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[groups, N, K], which lies as the weight does."""
        groups, n, k = self.shape
        if self.transposed:
            return torch.empty((groups, k, n), dtype=dtype, device=device).transpose(1, 2)
        return torch.empty((groups, n, k), dtype=dtype, device=device)

    def as_it_lies(self, grad: Tensor) -> Tensor:
        """A gradient [groups, N, K] as that of the parameter."""
        return grad.transpose(1, 2) if self.transposed else grad


@dataclass(slots=True, eq=False)
class GroupedContext:
    """One call, as its forward decides it."""

    recipe: Recipe
    offsets: GroupOffsets
    #: Of the products and of the gradient of their input.
    dtype: torch.dtype
    #: Whether gradients are switched on.
    training: bool
    #: What remembers; None inside of an operator, which is given what others read there.
    owner: NoiseSource | GroupedProduct | None
    #: Encode factors of input, weight and grad_output of each group, as the forward saw them: a list of three numbers
    #: each, or float32 [groups, 3]; None without delayed scaling.
    factors: Any = None
    #: (operand) to the noise of its groups.
    draw: Callable[[str], GroupedNoise] | None = None
    #: The weights' operands by side, "fprop" and "dgrad": a `Stack` each.
    kept: dict[str, weight_cache.CachedWeight] = field(default_factory=dict)
    #: What stands for the weights' factors in a key: their values, or of those on a device which writing of theirs the
    #: forward saw.
    written: Any = None
    #: By column of a history, the amaxes that the groups measured; 0 of those without tokens.
    amaxes: dict[int, Any] = field(default_factory=dict)
    #: Operands that were rounded at random.
    drawn: list[str] = field(default_factory=list)
    #: What a weight that exists only as codes has beside them.
    codes: stored_weight.StackCodes | None = None
    #: What keeps a step of delayed scaling from being over until this call's backward has run.
    pending: Any = None

    def factor(self, group: int, column: int) -> Any:
        """A group's encode factor, or None."""
        return None if self.factors is None else self.factors[group][column]

    def noise(self, operand: str, spec: QuantSpec) -> GroupedNoise | None:
        """The noise of an operand's groups, if it is rounded at random."""
        if spec.rounding == "nearest":
            return None
        assert self.draw is not None
        self.drawn.append(operand)
        return self.draw(operand)

    def note(self, operand: str, x: Tensor, q: Quantized) -> None:
        """Count an operand of one group, or of several."""
        if (
            counters.active.counters is not None
            and isinstance(self.owner, GroupedProduct)
            and not layer_state.replaying()
        ):
            counters.active.counters.note(self.owner.layer, operand, x, q, self.owner.name)


def begin(
    owner: NoiseSource | GroupedProduct,
    recipe: Recipe,
    offsets: GroupOffsets,
    dtype: torch.dtype,
    training: bool,
    weight: Tensor,
) -> GroupedContext:
    """A call, which joins the step of delayed scaling that its thread is in."""
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
            call.written = tuple(factors[amax.WEIGHT] for factors in call.factors)
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


def settle(call: GroupedContext) -> None:
    """Give a layer what its call has measured and drawn so far."""
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
    """Which groups have tokens, bool [groups]."""
    ends = offsets.ends
    return torch.diff(ends, prepend=ends.new_zeros(1)) > 0


def stack(
    call: GroupedContext, weight: Tensor, side: str, full: Callable[[], WeightStack] | None = None
) -> WeightStack:
    """The weights' operands for a side, which are kept as `quaver.torch.state.weight_cache` says; those of a function
    last from its forward to its backward.

    Args:
        side: "fprop" or "dgrad".
        full: makes all of them where none are kept; without it each is for its reader to fill in.
    """
    entry = call.kept.get(side)
    if entry is None or entry.quantized is None:
        entry = call.kept[side] = _entry(
            call, weight, side, full or (lambda: WeightStack([None] * call.offsets.groups))
        )
    kept: WeightStack = entry.quantized
    return kept


def _entry(
    call: GroupedContext, weight: Tensor, side: str, full: Callable[[], WeightStack]
) -> weight_cache.CachedWeight:
    owner, gemm = call.owner, call.recipe.fprop if side == "fprop" else call.recipe.dgrad
    if not isinstance(owner, GroupedProduct) or weight.dtype in stored_weight.CODES or capturing(weight):
        return weight_cache.CachedWeight(full())
    layer, key, written = owner.layer, f"{side} {owner.name}", _written(call, owner.layer)
    assert gemm.b is not None
    entry = weight_cache.lookup(layer, key, weight, gemm.b, written, call.training)
    if entry is not None and entry.quantized is not None:
        return entry
    window = weight_cache.begin(layer, weight, call.training)
    operands = full()
    entry = weight_cache.keep(layer, key, weight, gemm.b, written, operands, window)
    if entry is None and not call.training:
        weight_cache.quantized_again(layer, weight)
    return entry or weight_cache.CachedWeight(operands)


def _written(call: GroupedContext, layer: nn.Module) -> Any:
    """`Call.written`, read where it is first asked for."""
    if call.factors is None:
        return 0.0
    if call.written is None:
        factor = layer._buffers["factor"]
        assert factor is not None
        call.written = factor._version
        if layer_state.state.replay is not None or layer_state.state.writing:
            call.written = layer_state.recorded_amax(layer, "version of factors", call.written)
    return call.written


def of_weights(needed: Any, gives: Callable[..., Tensor]) -> Any:
    """A gradient, what gives it later, or None."""
    return gives if needed is LATER else gives() if needed else None


def of_biases(sums: Tensor | None, *, dtype: torch.dtype) -> Tensor:
    """The gradients of the biases, in a dtype."""
    assert sums is not None
    return sums.to(dtype)


# ---- rows ------------------------------------------------------------------------------------------------
# Where the rows of a grouped product come from: given, as numbers or as codes, or made within its autograd function.
#
# What makes them may quantize tokens before it moves them: rows then arrive as codes, of which no copy in high
# precision exists, and go to fprop as they are. The gradient that it takes back is of the rows in high precision, as
# if none of them had been quantized.


class RowInputOp(Protocol):
    """How rows are made, outside of autograd; one object may serve many calls, and equal ones are one to a compiler.

    Its methods are called with as many tensors as it takes, None among them.
    """

    @property
    def recomputes_input(self) -> bool:
        """True if backward makes the rows again, so that nothing of them is kept but what `forward` saves."""

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        """The rows [T, K], those of group 0 first, and what the other methods need of them: tensors, operands or None.

        Args:
            spec: fprop's of its input; None where that is not quantized.
        Returns:
            Rows quantized by this spec, or in high precision, which are then quantized group by group.
        """

    def recompute_input(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        """The rows once more, bit for bit."""

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        """Of rows that are codes the same in high precision, from which wgrad's operand is quantized where it is
        another one than fprop's; None quantizes the values of the codes once more."""

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """The gradients of what it took, of the gradient g [T, K] of the rows in high precision.

        Args:
            needs: whether each is needed.
        """


@dataclass(frozen=True)
class IdentityRows:
    """Rows in high precision that are there already."""

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


GIVEN = IdentityRows()


@dataclass(frozen=True)
class PrequantizedRows:
    """Rows that are given as codes, with the tensors of which they are put together; they have no gradient."""

    layout: tuple[Any, ...]
    recomputes_input: bool = False

    @staticmethod
    def of(q: Quantized) -> "tuple[PrequantizedRows, list[Tensor | None]]":
        tensors, layout = take_apart(q.plain())
        assert layout is not None
        return PrequantizedRows(layout), tensors

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        return put_together(self.layout, x), ()

    def recompute_input(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        raise AssertionError("what is given is kept")

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        return None

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        return (None,) * len(needs)


# ---- products --------------------------------------------------------------------------------------------
# The products of groups on a GPU, each with its implementations in order of preference.

_GEMMS, _VALUES, _HIGH = (f"{ops.GPU}.grouped_mm" for _ in range(3))


def _no_gemms(a: GroupedOperand, *_: Any) -> str:
    return why_no_fp8(a.data.device, "native")


def _no_values(a: GroupedOperand, *_: Any) -> str:
    return ops._off_a_gpu(a)  # type: ignore[arg-type]


def _no_kernels(a: GroupedOperand, *_: Any) -> str:
    return ops.no_kernels(a.data)


#: Tokens of all groups by each group's matrix: (tokens, matrices, offsets, n, dtype, bias, fast_accum) to [T, n].
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
#: Transposes by transposes, summed over each group's slots: (one, other, dtype, fast_accum) to [groups, n, k].
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


#: The same of what is not quantized: (x [T, k], w [groups, n, k], offsets, dtype, bias) to [T, n].
HIGH_MATMUL: Operation[Tensor] = Operation(
    "grouped_high",
    [
        Implementation("torch", f"{_HIGH}:high_matmul", f"{_HIGH}:reason_high"),
        Implementation("triton", f"{_HIGH}:kernel_high", f"{_HIGH}:reason_kernel_high", _no_kernels_high),
        Implementation("group by group", f"{_HIGH}:high_group_by_group"),
    ],
)
#: (a [T, n], b [T, k], offsets, dtype) to [groups, n, k], summed over each group's rows.
HIGH_SUMS: Operation[Tensor] = Operation(
    "grouped_high_sums",
    [
        Implementation("torch", f"{_HIGH}:high_sums", f"{_HIGH}:reason_high_sums"),
        Implementation("triton", f"{_HIGH}:kernel_high_sums", f"{_HIGH}:reason_kernel_high", _no_kernels_high),
        Implementation("group by group", f"{_HIGH}:high_sums_group_by_group"),
    ],
)
