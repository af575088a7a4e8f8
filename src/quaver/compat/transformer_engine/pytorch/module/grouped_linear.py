"""Transformer Engine's `GroupedLinear`, and its padding modules, which Quaver does not need."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quaver.compat import extra_state
from quaver.compat.transformer_engine.pytorch.module.parameters import Common, Module
from quaver.options import spreads
from quaver.torch.linear.grouped.layer import GroupedLinear as Stack
from quaver.torch.linear.linear import Linear
from quaver.torch.nn.mlp import ComposedBlock
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations.ops import DTYPES, without_autocast


class _Packed(Stack):
    """GroupedLinear with separate bias parameters `bias0` and so on, stacked in each forward."""

    def _packed(self) -> Tensor:
        with without_autocast(self.weight.device.type):
            return torch.stack([p for name, p in self._parameters.items() if name.startswith("bias") and p is not None])

    bias = property(_packed)

    def reset_parameters(self) -> None:
        """Do nothing: the enclosing module initializes the parameters."""


class GroupedLinear(Module, ComposedBlock):
    """A linear layer for each group of tokens, with parameters `weight0`, `bias0` and so on, and a separate GEMM for
    each.

    Args:
        single_grouped_weight: use one parameter `weight` [num_gemms, out_features, in_features] and grouped GEMMs,
            which need no GPU synchronization for the group sizes. Checkpoints of either form load into both.
        single_grouped_bias: use one parameter `bias` [num_gemms, out_features], only with such a weight.
        use_grouped_tensor: False excludes these two options; otherwise grouped GEMMs are used with a single weight.
    Raises:
        ValueError: contradictory options, return_bias, or several ranks.
    """

    @spreads(Common)
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, parallel_mode: str | None = None,
        single_grouped_weight: bool = False, single_grouped_bias: bool = False, use_grouped_tensor: bool | None = None,
        **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        options = Common(**others)
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.single_grouped_weight, self.single_grouped_bias = single_grouped_weight, single_grouped_bias
        if options.return_bias:
            raise ValueError("return_bias is not supported: GroupedLinear adds its biases")
        if single_grouped_bias and not single_grouped_weight:
            raise ValueError("single_grouped_bias requires a single weight: give single_grouped_weight=True, too")
        if single_grouped_weight and use_grouped_tensor is False:
            raise ValueError("single_grouped_weight needs grouped GEMMs, which use_grouped_tensor=False excludes")
        names = tuple(f"gemm{i}" for i in range(num_gemms))
        own = {f"{key}{i}": (name, key) for key in ("weight", "bias") for i, name in enumerate(names)}
        if single_grouped_weight:
            names = ("grouped",)
            self.grouped = Stack(num_gemms, in_features, out_features, options.bias, **options.like)
            own = {key: ("grouped", key) for key in ("weight", "bias")}
            if options.bias and not single_grouped_bias:
                own = {"weight": ("grouped", "weight")} | self._divide_biases()
        else:
            for name in names:
                setattr(self, name, Linear(in_features, out_features, options.bias, **options.like))
        self.lend(options, names, own)

    def _divide_biases(self) -> dict[str, tuple[str, str]]:
        """Split the stacked bias into separate parameters; returns their names and locations."""
        whole: Any = self.grouped._parameters.pop("bias")
        for i, bias in enumerate(whole):
            self.grouped.register_parameter(f"bias{i}", nn.Parameter(bias.detach().clone()))
        self.grouped.__class__ = _Packed
        return {f"bias{i}": ("grouped", f"bias{i}") for i in range(self.num_gemms)}

    def forward(  # type: ignore[override]
        self, inp: Tensor, m_splits: Sequence[int] | Tensor, is_first_microbatch: bool | None = None
    ) -> Any:
        """Compute the outputs of tokens [..., in_features], sorted by group with the given group sizes.

        Raises:
            ValueError: group sizes do not add up to the number of tokens.
        """
        rows, splits = inp.reshape(-1, self.in_features), list[int]()
        if self.single_grouped_weight and isinstance(m_splits, Tensor) and (is_tracing() or not m_splits.is_cpu):
            # Not validated, since that would synchronize with the device.
            offsets = m_splits.cumsum(0, dtype=torch.int32)
        else:
            splits = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
            if len(splits) != self.num_gemms or sum(splits) != rows.shape[0]:
                raise ValueError(
                    f"m_splits is {splits}: give {self.num_gemms} numbers that add up to {rows.shape[0]} tokens"
                )
            offsets = torch.tensor(splits, device="cpu").cumsum(0, dtype=torch.int32).to(rows.device)
        layers: list[Any] = [self._modules[name] for name in self.gemms]
        with self.takes:
            if self.single_grouped_weight:
                y = layers[0](rows, offsets)
            else:
                y = torch.cat([layer(part) for layer, part in zip(layers, rows.split(splits), strict=True)])
        return y.view(*inp.shape[:-1], self.out_features)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for kind in ("weight", "bias"):
            whole, parts = prefix + kind, [f"{prefix}{kind}{i}" for i in range(self.num_gemms)]
            tensors = [state_dict[name] for name in (whole, *parts) if name in state_dict]
            if not tensors or tensors[0].dtype not in DTYPES:
                # Codes need scales, which have other names and are then reported as missing.
                continue
            if kind == "bias" and whole in state_dict:
                # Transformer Engine may store it as [num_gemms, 1, out_features].
                state_dict[whole] = state_dict[whole].flatten(1)
            if kind in self.aliases and whole not in state_dict and len(tensors) == self.num_gemms:
                state_dict[whole] = torch.stack([state_dict.pop(name) for name in parts])
            elif f"{kind}0" in self.aliases and whole in state_dict and len(tensors) == 1:
                state_dict.update(zip(parts, state_dict.pop(whole), strict=False))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _recorded(self, state: Any, where: str) -> list[dict[str, Tensor]]:
        if state is None or not self.single_grouped_weight:
            return super()._recorded(state, where)
        each = extra_state.histories(state, where, self.num_gemms)
        return [{name: torch.stack([one[name] for one in each]) for name in each[0]}] if each else []


class Fp8Padding(nn.Module):
    """Pads the rows of each group with zeros to a multiple of `align_size`; no Quaver layer needs it."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or 16

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        padded = [-(-n // self.align_size) * self.align_size for n in m_splits]
        parts = inp.split(list(m_splits))
        rows = [nn.functional.pad(part, (0, 0, 0, n - part.shape[0])) for part, n in zip(parts, padded, strict=True)]
        return torch.cat(rows), padded


class Fp8Unpadding(Fp8Padding):
    """Removes the rows that `Fp8Padding` added."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:  # type: ignore[override]
        padded = [-(-n // self.align_size) * self.align_size for n in m_splits]
        return torch.cat([part[:n] for part, n in zip(inp.split(padded), m_splits, strict=True)])
