"""One call of grouped products: what its forward decides, what it measures on the way, and where its weights are kept.

What a layer remembers from call to call is read before the products run and written after them, here: the products
themselves (`host`, `device`) are functions of tensors, which a compiler may call as one operator.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.core.spec import QuantSpec, Recipe
from quaver.torch.linear.gemms import LATER, capturing
from quaver.torch.linear.stored import stored
from quaver.torch.numerics.grouped import Draw
from quaver.torch.numerics.groups import Offsets, Stack
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.operations import ops
from quaver.torch.state import counters, kept_weights, noise, recomputation
from quaver.torch.state.history import amax, steps


@dataclass(frozen=True)
class Source:
    """Where a function, which remembers nothing, has its noise from: one count for all groups."""

    seed: int
    name: str
    count: Tensor | int

    def draw(self, operand: str, groups: int) -> Draw:
        streams = [noise.named_id(f"{self.name}.{group}", operand) for group in range(groups)]
        return Draw(self.seed, streams, [int(self.count)] * groups)


class Product(NamedTuple):
    """One of a layer's products: some of its members in a row."""

    layer: nn.Module
    #: Of its parameter.
    name: str = "weight"
    #: The first of these members.
    first: int = 0


class Like(NamedTuple):
    """What the gradients of a weight and of a bias are like."""

    #: (groups, N, K).
    shape: tuple[int, int, int]
    dtype: torch.dtype
    #: Whether it is of a parameter that lies as [groups, K, N].
    turned: bool
    #: (groups, N).
    bias: tuple[int, int]
    bias_dtype: torch.dtype

    @property
    def features(self) -> int:
        return self.shape[2]

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the weight's gradient."""
        return torch.float32 if self.dtype in stored.CODES else self.dtype

    def new_weight(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[groups, N, K], which lies as the weight does."""
        groups, n, k = self.shape
        if self.turned:
            return torch.empty((groups, k, n), dtype=dtype, device=device).transpose(1, 2)
        return torch.empty((groups, n, k), dtype=dtype, device=device)

    def as_it_lies(self, grad: Tensor) -> Tensor:
        """A gradient [groups, N, K] as that of the parameter."""
        return grad.transpose(1, 2) if self.turned else grad


@dataclass(slots=True, eq=False)
class Call:
    """One call, as its forward decides it."""

    recipe: Recipe
    offsets: Offsets
    #: Of the products and of the gradient of their input.
    dtype: torch.dtype
    #: Whether gradients are switched on.
    training: bool
    #: What remembers; None inside of an operator, which is given what others read there.
    owner: Source | Product | None
    #: Encode factors of input, weight and grad_output of each group, as the forward saw them: a list of three numbers
    #: each, or float32 [groups, 3]; None without delayed scaling.
    factors: Any = None
    #: (operand) to the noise of its groups.
    draw: Callable[[str], Draw] | None = None
    #: The weights' operands by side, "fprop" and "dgrad": a `Stack` each.
    kept: dict[str, kept_weights.Entry] = field(default_factory=dict)
    #: What stands for the weights' factors in a key: their values, or of those on a device which writing of theirs the
    #: forward saw.
    written: Any = None
    #: By column of a history, the amaxes that the groups measured; 0 of those without tokens.
    amaxes: dict[int, Any] = field(default_factory=dict)
    #: Operands that were rounded at random.
    drawn: list[str] = field(default_factory=list)
    #: What a weight that exists only as codes has beside them.
    codes: stored.StackCodes | None = None
    #: What keeps a step of delayed scaling from being over until this call's backward has run.
    owed: Any = None

    def factor(self, group: int, column: int) -> Any:
        """A group's encode factor, or None."""
        return None if self.factors is None else self.factors[group][column]

    def noise(self, operand: str, spec: QuantSpec) -> Draw | None:
        """The noise of an operand's groups, if it is rounded at random."""
        if spec.rounding == "nearest":
            return None
        assert self.draw is not None
        self.drawn.append(operand)
        return self.draw(operand)

    def note(self, operand: str, x: Tensor, q: Quantized) -> None:
        """Count an operand of one group, or of several."""
        if counters.active.counters is not None and isinstance(self.owner, Product) and not recomputation.replaying():
            counters.active.counters.note(self.owner.layer, operand, x, q, self.owner.name)


def begin(
    owner: Source | Product, recipe: Recipe, offsets: Offsets, dtype: torch.dtype, training: bool, weight: Tensor
) -> Call:
    """A call, which joins the step of delayed scaling that its thread is in."""
    call = Call(recipe, offsets, dtype, training, owner)
    if weight.dtype in stored.CODES:
        assert isinstance(owner, Product)
        call.codes = stored.stack_codes(owner.layer)
    if isinstance(owner, Source):
        call.draw = lambda operand: owner.draw(operand, offsets.groups)
        return call
    layer, members = owner.layer, slice(owner.first, owner.first + offsets.groups)
    if recipe.delayed is not None:
        call.factors = steps.factors(layer, training)[members]
        if not isinstance(call.factors, Tensor):
            call.written = tuple(factors[amax.WEIGHT] for factors in call.factors)
            if not ops.on_host(offsets.ends):
                call.factors = torch.tensor(call.factors, dtype=torch.float32, device=offsets.ends.device).view(-1, 3)
        if training and not is_tracing():
            call.owed = steps.owed(layer)
    call.draw = lambda operand: _drawn_by(layer, members, operand)
    return call


def _drawn_by(layer: nn.Module, members: slice, operand: str) -> Draw:
    seed, *drawn = noise.draw(layer, operand)
    streams, counts = (numbers[members] for numbers in drawn)  # type: ignore[index]
    if not is_tracing() and ops.on_host(counts):
        counts = counts.tolist()
    return Draw(seed, streams, counts)


def settle(call: Call) -> None:
    """Give a layer what its call has measured and drawn so far."""
    owner = call.owner
    if isinstance(owner, Product):
        if call.training and call.factors is not None:
            for column, amaxes in call.amaxes.items():
                amax.record_each(owner.layer, column, amaxes, owner.first)
        for operand in call.drawn:
            noise.drawn(owner.layer, operand, has_tokens(call.offsets), owner.first)
    call.amaxes.clear()
    call.drawn.clear()


def has_tokens(offsets: Offsets) -> Tensor:
    """Which groups have tokens, bool [groups]."""
    ends = offsets.ends
    return torch.diff(ends, prepend=ends.new_zeros(1)) > 0


def stack(call: Call, weight: Tensor, side: str, full: Callable[[], Stack] | None = None) -> Stack:
    """The weights' operands for a side, which are kept as `quaver.torch.state.kept_weights` says; those of a function
    last from its forward to its backward.

    Args:
        side: "fprop" or "dgrad".
        full: makes all of them where none are kept; without it each is for its reader to fill in.
    """
    entry = call.kept.get(side)
    if entry is None or entry.quantized is None:
        entry = call.kept[side] = _entry(call, weight, side, full or (lambda: Stack([None] * call.offsets.groups)))
    kept: Stack = entry.quantized
    return kept


def _entry(call: Call, weight: Tensor, side: str, full: Callable[[], Stack]) -> kept_weights.Entry:
    owner, gemm = call.owner, call.recipe.fprop if side == "fprop" else call.recipe.dgrad
    if not isinstance(owner, Product) or weight.dtype in stored.CODES or capturing(weight):
        return kept_weights.Entry(full())
    layer, key, written = owner.layer, f"{side} {owner.name}", _written(call, owner.layer)
    assert gemm.b is not None
    entry = kept_weights.lookup(layer, key, weight, gemm.b, written, call.training)
    if entry is not None and entry.quantized is not None:
        return entry
    window = kept_weights.begin(layer, weight, call.training)
    operands = full()
    entry = kept_weights.keep(layer, key, weight, gemm.b, written, operands, window)
    if entry is None and not call.training:
        kept_weights.quantized_again(layer, weight)
    return entry or kept_weights.Entry(operands)


def _written(call: Call, layer: nn.Module) -> Any:
    """`Call.written`, read where it is first asked for."""
    if call.factors is None:
        return 0.0
    if call.written is None:
        factor = layer._buffers["factor"]
        assert factor is not None
        call.written = factor._version
        if recomputation.state.replay is not None or recomputation.state.writing:
            call.written = recomputation.noted(layer, "version of factors", call.written)
    return call.written


def of_weights(needed: Any, gives: Callable[..., Tensor]) -> Any:
    """A gradient, what gives it later, or None."""
    return gives if needed is LATER else gives() if needed else None


def of_biases(sums: Tensor | None, *, dtype: torch.dtype) -> Tensor:
    """The gradients of the biases, in a dtype."""
    assert sums is not None
    return sums.to(dtype)
