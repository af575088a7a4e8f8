"""Many MLPs of one kind in two stacks of matrices, each of which sees the tokens that chose it.

down[e](activation(up[e](x)))        or, gated,        down[e](f(gate[e](x)) · up[e](x))
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from quaver.core.options import takes
from quaver.core.reference.experts import check_permute
from quaver.core.spec import Recipe
from quaver.torch.blocks.experts.permutation import order, unpermute
from quaver.torch.blocks.experts.rows import Activations, Tokens
from quaver.torch.blocks.norm_linear import Parts
from quaver.torch.blocks.prologues.activation import Activated, get_activation, option_values
from quaver.torch.linear.grouped.layer import GroupedLinear, Layout
from quaver.torch.linear.grouped.rows import Rows
from quaver.torch.linear.stored import stored
from quaver.torch.operations import ops


@dataclass(frozen=True)
class ExpertsArguments:
    """The arguments of `Experts`, which says what they are."""

    experts: int
    dim: int
    hidden: int
    activation: str = "swiglu"
    _: KW_ONLY
    activation_options: Mapping[str, float] | None = None
    bias: bool = False
    layout: Layout = "nk"
    interleaved: bool = False
    pad: int = 1
    codes_alone: bool = False
    eight_bit_activations: bool = False
    recipe: str | Recipe | None = None
    seed: int = 0
    device: Any = None
    dtype: torch.dtype | None = None


class Experts(Parts):
    """MLPs of which each token goes through those that it chose, summed with its weights.

    Args:
        experts: how many.
        dim: features of input and output.
        hidden: features between, of each expert.
        activation, activation_options: as `MLP`.
        bias: of both matrices.
        layout: of both weights, as `GroupedLinear` takes it.
        interleaved: a gated activation's gate and value lie by turns, as gpt-oss has them, and not one after the other.
        pad: rows of each expert are filled with zeros up to a multiple of it; see `permute`.
        codes_alone: where the recipe's blocks lie within a row, keep tokens as codes alone, of whose values the
            weight's gradient is made; docs/blocks/experts.md has what that changes. Else it is made of the tokens.
        eight_bit_activations: as `MLP`.
        recipe, seed: as `quaver.torch.Linear`.
    Submodules: `gate_up_proj`, the gate's rows first, or `up_proj` if there is no gate; `down_proj`; `GroupedLinear`s.
    Exact: codes and scales, those of each expert's tokens alone; nothing waits for how many each has.
    """

    @takes(ExpertsArguments)
    def __init__(self, options: ExpertsArguments) -> None:
        super().__init__()
        check_permute((0, 1), True, options.experts, options.pad, None)
        gated = get_activation(options.activation).gated
        if options.interleaved and not gated:
            raise ValueError(f"activation {options.activation!r} has no gate to be interleaved; leave interleaved out")
        self.dim, self.hidden, self.activation = options.dim, options.hidden, options.activation
        self.pad, self.codes_alone = options.pad, options.codes_alone
        values = option_values(options.activation, options.activation_options or {})
        narrow = options.eight_bit_activations and gated
        self._activations = Activations(Activated(options.activation, values, narrow), options.interleaved)
        self._entrance = "gate_up_proj" if gated else "up_proj"
        own: dict[str, Any] = {
            "recipe": options.recipe,
            "seed": options.seed,
            "layout": options.layout,
            "device": options.device,
            "dtype": options.dtype,
        }
        groups, dim, hidden = options.experts, options.dim, options.hidden
        self.register_module(
            self._entrance, GroupedLinear(groups, dim, (2 if gated else 1) * hidden, options.bias, **own)
        )
        self.down_proj = GroupedLinear(groups, hidden, dim, options.bias, **own)

    @property
    def experts(self) -> int:
        """How many there are."""
        return self.down_proj.groups

    def forward(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        capacity: int | None = None,
        meanwhile: Callable[[], Tensor] | None = None,
    ) -> Any:
        """x [T, dim] to [T, dim].

        Args:
            indices, weights: [T, k], as `route` gives them.
            capacity: choices that an expert takes at most; see `permute`.
            meanwhile: what may be computed while rows travel, where experts lie on several ranks: the output is
                (this one's, what it gives) then.
        Raises:
            ValueError: shapes or dtypes that do not fit.
        """
        x, k = self.checked(x, indices, capacity, self.experts), indices.shape[1]
        offsets, places, sources = order(indices, self.experts, self.pad, capacity)
        rows = self.on_rows(Tokens(k, self.codes_alone), (x, sources, places), offsets)
        y = unpermute(rows, places, k, weights)
        return y if meanwhile is None else (y, meanwhile())

    def checked(self, x: Tensor, indices: Tensor, capacity: int | None, experts: int) -> Tensor:
        """Tokens in the dtype that products have.

        Args:
            experts: how many may be chosen.
        Raises:
            ValueError: what does not fit, in a sentence.
        """
        integers = indices.dtype in (torch.int64, torch.int32)
        check_permute(tuple(indices.shape), integers, experts, self.pad, capacity)
        if x.dim() != 2 or x.shape[1] != self.dim or x.shape[0] != indices.shape[0]:
            raise ValueError(
                f"experts of {self.dim} features got tokens {tuple(x.shape)} and indices {tuple(indices.shape)}; give "
                f"[T, {self.dim}] and [T, k] of the same tokens"
            )
        device = ops.autocast_device(x)
        if torch.is_autocast_enabled(device) and x.dtype in ops.DTYPES:
            return x.to(torch.get_autocast_dtype(device))
        down: Any = self._modules["down_proj"]
        own = down.weight_dtype or down.weight.dtype
        if down.weight_spec is not None:
            stored.check_uncast(down, down.weight)
            if x.dtype is not own:
                raise ValueError(
                    f"experts have weights in codes of {own} and got {x.dtype} tokens; convert the tokens, enter "
                    f"torch.autocast, or call model.to({x.dtype}) before it is sharded: a MixedPrecisionPolicy casts "
                    "no codes"
                )
        if x.dtype is not own:
            raise ValueError(
                f"experts have {own} weights and got {x.dtype} tokens; convert the tokens, or enter torch.autocast"
            )
        return x

    def on_rows(self, rows: Rows, taken: Sequence[Tensor | None], offsets: Tensor) -> Tensor:
        """[rows, dim] of rows that are made of some tensors inside of the first product.

        Args:
            rows, taken: as `GroupedLinear.project` takes them.
            offsets: int32 [experts], where each expert's rows end.
        """
        entrance: Any = self._modules[self._entrance]
        return self._rest(entrance.project(rows, taken, offsets), offsets)

    def _rest(self, h: Tensor, offsets: Tensor) -> Tensor:
        down: Any = self._modules["down_proj"]
        y: Tensor = down.project(self._activations, (h,), offsets)
        return y

    def extra_repr(self) -> str:
        shown = {"pad": self.pad} if self.pad != 1 else {}
        flags = {
            "codes_alone": self.codes_alone,
            "interleaved": self._activations.interleaved,
            "eight_bit_activations": self._activations.prologue.eight_bits,
        }
        shown |= {name: value for name, value in flags.items() if value}
        return f"activation={self.activation!r}" + "".join(f", {name}={value}" for name, value in shown.items())
