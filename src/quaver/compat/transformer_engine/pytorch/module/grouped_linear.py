"""Transformer Engine's `GroupedLinear`, and the padding that it asks for and that nothing here needs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quaver.compat.transformer_engine.pytorch.module.parameters import Common, Module
from quaver.core.options import spreads
from quaver.torch.blocks.norm_linear import Parts
from quaver.torch.linear.layer import Linear


class GroupedLinear(Module, Parts):
    """A linear layer for each run of tokens, with parameters `weight0`, `bias0` and so on, one GEMM after the other.

    `quaver.torch.grouped_matmul` has one GEMM of all where the weights are one tensor.
    """

    @spreads(Common)
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, parallel_mode: str | None = None, **others: Any
    ) -> None:
        super().__init__()
        options, names = Common(**others), tuple(f"gemm{i}" for i in range(num_gemms))
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        if options.return_bias:
            raise ValueError("return_bias is not there: GroupedLinear adds its biases")
        for name in names:
            setattr(self, name, Linear(in_features, out_features, options.bias, **options.like))
        own = {f"{key}{i}": (name, key) for key in ("weight", "bias") for i, name in enumerate(names)}
        self.lend(options, names, own)

    def forward(  # type: ignore[override]
        self, inp: Tensor, m_splits: Sequence[int] | Tensor, is_first_microbatch: bool | None = None
    ) -> Any:
        """Tokens [..., in_features], of each group so many one after the other.

        Raises:
            ValueError: numbers that do not add up to the tokens.
        """
        rows = inp.reshape(-1, self.in_features)
        splits = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        if len(splits) != self.num_gemms or sum(splits) != rows.shape[0]:
            raise ValueError(
                f"m_splits is {splits}: give {self.num_gemms} numbers that add up to {rows.shape[0]} tokens"
            )
        layers: list[Any] = [self._modules[name] for name in self.gemms]
        with self.takes:
            parts = [layer(part) for layer, part in zip(layers, rows.split(splits), strict=True)]
        return torch.cat(parts).view(*inp.shape[:-1], self.out_features)


class Fp8Padding(nn.Module):
    """Rows of each group filled with zeros to a multiple of `align_size`; no layer here needs it."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or 16

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        padded = [-(-n // self.align_size) * self.align_size for n in m_splits]
        parts = inp.split(list(m_splits))
        rows = [nn.functional.pad(part, (0, 0, 0, n - part.shape[0])) for part, n in zip(parts, padded, strict=True)]
        return torch.cat(rows), padded


class Fp8Unpadding(Fp8Padding):
    """The rows again that `Fp8Padding` was given."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:  # type: ignore[override]
        padded = [-(-n // self.align_size) * self.align_size for n in m_splits]
        return torch.cat([part[:n] for part, n in zip(inp.split(padded), m_splits, strict=True)])
