"""State of one call of grouped GEMMs: configuration, noise, measured amaxes, and the cached operands of the weights.

A call covers groups [first, first + groups) of one parameter [groups, N, K]. The state of its layer is read before the
GEMMs run and written after them, all in this module. The GEMMs themselves (`products`) are functions of tensors, which
torch.compile calls as one operator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.linear import general
from quaver.torch.linear.plan import LinearCall
from quaver.torch.linear.stored_weight import gradient_dtype
from quaver.torch.numerics.grouped import GroupedNoise, GroupOffsets
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.state import noise, observer, weight_cache
from quaver.torch.state.history import amax, scaling_step


@dataclass(frozen=True)
class NoiseSource:
    """Source of noise for `grouped_matmul`, which has no state: one counter for all groups."""

    seed: int
    name: str
    count: Tensor | int

    def draw(self, operand: str, groups: int) -> GroupedNoise:
        streams = [noise.named_id(f"{self.name}.{group}", operand) for group in range(groups)]
        return GroupedNoise(self.seed, streams, [int(self.count)] * groups)


class LayerGroups(NamedTuple):
    """One product of a layer: a range of consecutive groups of one parameter."""

    layer: nn.Module
    #: Name of the parameter.
    name: str = "weight"
    #: Index of the first group.
    first: int = 0

    def draw(self, operand: str, groups: int) -> GroupedNoise:
        seed, *drawn = noise.draw(self.layer, operand)
        streams, counts = (numbers[self.first : self.first + groups] for numbers in drawn)  # type: ignore[index]
        if not is_tracing() and ops.on_host(counts):
            counts = counts.tolist()
        return GroupedNoise(seed, streams, counts)


class GroupedCall(LinearCall):
    """State that one grouped product carries from its forward to its backward.

    Its `factors` are those of each group: a list of three numbers per group, or float32 [groups, 3].
    """

    #: Cache key of the weights' encode factors if the host knows them.
    host_factors: Any = None

    def __init__(
        self,
        owner: NoiseSource | LayerGroups | None,
        recipe: Recipe,
        offsets: GroupOffsets,
        like: Tensor,
        dtype: torch.dtype,
        training: bool,
        weight: Tensor,
        bias_dtype: torch.dtype,
        transposed: bool,
    ) -> None:
        """
        Args:
            owner: owner of noise and state, or None inside an operator, which receives them as arguments.
            like: tensor whose device selects the implementations.
            dtype: dtype of the products and of the gradient of their input.
            weight: in the layer's layout, [groups, K, N] if `transposed`.
            bias_dtype: dtype of the bias and of its gradient.
        """
        layer: Any = owner.layer if isinstance(owner, LayerGroups) else None
        super().__init__(general.plan_for(recipe, like), layer, training, dtype, is_tracing())
        self.owner, self.offsets, self.transposed, self.bias_dtype = owner, offsets, transposed, bias_dtype
        #: The weight if it is stored in eight or four bits.
        self.stored = weight if isinstance(weight, QuantizedTensor) else None
        n, k = weight.shape[1:] if not transposed else (weight.shape[2], weight.shape[1])
        #: (groups, N, K), and dtype of the weight's gradient.
        self.weight_shape, self.weight_dtype = (weight.shape[0], n, k), gradient_dtype(weight)
        #: Returns the noise of all groups for the name of an operand.
        self.draw: Callable[[str], GroupedNoise] | None = None
        if owner is not None:
            self.draw = lambda operand: owner.draw(operand, offsets.groups)
        #: Cached weight operands by side, "fprop" and "dgrad".
        self.stacks: dict[str, weight_cache.CachedWeight] = {}
        #: Measured amaxes of the groups by history column, 0 for groups without tokens; and the names of operands that
        #: were rounded stochastically. `finish` writes both to the layer.
        self.amaxes: dict[int, Any] = {}
        self.drawn: list[str] = []

    def begin(self) -> "GroupedCall":
        """Join the current step of delayed scaling."""
        owner = self.owner
        if isinstance(owner, LayerGroups) and self.recipe.delayed is not None:
            factors: Any = scaling_step.factors(owner.layer, self.training)
            factors = factors[owner.first : owner.first + self.offsets.groups]
            if not isinstance(factors, Tensor):
                self.host_factors = tuple(each[amax.WEIGHT] for each in factors)
                if not ops.on_host(self.offsets.ends):
                    device = self.offsets.ends.device
                    factors = torch.tensor(factors, dtype=torch.float32, device=device).view(-1, 3)
            self.factors = factors
            if self.training and not self.traced:
                self.pending = scaling_step.pending(owner.layer)
        return self

    def view(self, weight: Tensor) -> Tensor:
        """View a weight in high precision as [groups, N, K]; a stored one stays in its layout."""
        return weight.transpose(1, 2) if self.transposed and self.stored is None else weight

    def factor(self, group: int, column: int) -> Any:
        """Return the encode factor of a group, or None without delayed scaling."""
        return None if self.factors is None else self.factors[group][column]

    def noise(self, operand: str, spec: QuantSpec) -> GroupedNoise | None:
        """Return the noise of an operand's groups, or None if the operand is rounded to nearest."""
        if spec.rounding == "nearest" or not operand:
            return None
        assert self.draw is not None
        self.drawn.append(operand)
        return self.draw(operand)

    def note(self, operand: str, x: Tensor, q: Quantized) -> None:
        """Report an operand of one or several groups to the active observer; "" is not reported."""
        owner = self.owner
        if not observer.active.observers or not operand or not isinstance(owner, LayerGroups):
            return
        if self.is_observable:
            for each in observer.active.observers:
                each.observe_operand(owner.layer, self.recipe, operand, x, q, owner.name)

    def newest(self, operand: str, column: int, x: Tensor) -> Tensor | None:
        """Return the newest amaxes of the groups' histories, to which a kernel may write those of an operand.

        None if `record` must do it.
        """
        owner = self.owner
        if not operand or not self.training or self.factors is None or not isinstance(owner, LayerGroups):
            return None
        return amax.newest_each(owner.layer, column, x, owner.first, self.offsets.groups)

    def record(self, operand: str, column: int, amaxes: Any) -> None:
        """Record the amaxes of an operand's groups under delayed scaling; "" is not recorded."""
        if operand and amaxes is not None and self.training and self.factors is not None:
            self.amaxes[column] = amaxes

    def finish(self) -> None:
        """Write the amaxes and noise counters that the call has collected to its layer."""
        owner = self.owner
        if isinstance(owner, LayerGroups):
            if self.training and self.factors is not None:
                for column, amaxes in self.amaxes.items():
                    amax.record_each(owner.layer, column, amaxes, owner.first)
            for operand in self.drawn:
                noise.advance_count(owner.layer, operand, self.offsets.has_rows(), owner.first)
        self.amaxes.clear()
        self.drawn.clear()


# ---- weight operands ----


def weights(call: GroupedCall, weight: Tensor, side: str, quantize: Callable[[], Any], kind: str = "") -> Any:
    """Return the weight operands for a side, from `quaver.torch.state.weight_cache` if valid.

    On a CPU they are a list with the operand of each group, None until it is needed, since a group without rows needs
    none. On a GPU they are one operand, concatenated by rows. For `grouped_matmul`, which has no cache, they last from
    its forward to its backward.

    Args:
        side: "fprop" or "dgrad".
        quantize: makes the operands if none are cached.
        kind: prefix of the cache key for operands of another kind.
    """
    entry = call.stacks.get(side)
    if entry is None or entry.quantized is None:
        entry = call.stacks[side] = _entry(call, weight, side, partial(outside_inference, call, weight, quantize), kind)
    return entry.quantized


def _entry(
    call: GroupedCall, weight: Tensor, side: str, quantize: Callable[[], Any], kind: str
) -> weight_cache.CachedWeight:
    owner, gemm = call.owner, call.recipe.gemms[side]
    if not isinstance(owner, LayerGroups) or call.stored is not None or general.capturing(weight):
        return weight_cache.CachedWeight(quantize())
    # An operand of fprop may have that of dgrad as its `cached_transpose`, whose spec another recipe may not share.
    factors = call.host_factors or general.factor_key(call), call.recipe.dgrad.b
    key = f"{kind}{side} {owner.name}", weight, gemm.b, factors
    entry = weight_cache.lookup(owner.layer, *key, call.training)  # type: ignore[arg-type]
    if entry is not None and entry.quantized is not None:
        return entry
    window = weight_cache.begin(owner.layer, weight, call.training)
    operands = quantize()
    entry = weight_cache.store(owner.layer, *key, operands, window)  # type: ignore[arg-type]
    if entry is None and not call.training:
        weight_cache.count_uncached_forward(owner.layer, weight)
    return entry or weight_cache.CachedWeight(operands)


def outside_inference(call: GroupedCall, weight: Tensor, quantize: Callable[[], Any]) -> Any:
    """Quantize a weight; cached tensors must not be inference tensors, because other modes read them too."""
    if torch.is_inference_mode_enabled() and call.layer is not None and weight_cache.can_cache(call.layer, weight):
        with torch.inference_mode(False), torch.no_grad():
            return quantize()
    return quantize()
