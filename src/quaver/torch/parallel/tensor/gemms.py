"""Quantization of sharded operands, with the codes and scales that the shard has in the whole operand.

If elements on several ranks share a scale, the ranks first all-reduce its amax as an integer maximum. Other blocks must
lie within one rank, which is checked. Stochastic rounding uses the noise of an element's position in the whole operand.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.recipes.spec import GemmSpec, QuantSpec
from quaver.torch.linear.linear import Quantizable
from quaver.torch.linear.plan import LinearCall
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import Noise, magnitude_bits, part_of_uniform, rotate, rows_of_uniform
from quaver.torch.parallel import comm
from quaver.torch.parallel.tensor.overlap import ChunkedGather, Rows, chunk_rows, has_independent_rows
from quaver.torch.state import observer

# ---- layouts ----
# Sharded axis of each operand of a linear layer's three GEMMs.
#
#     Column   weight [N/R, K]   input [T(/R), K]   output [T, N/R]       dgrad is summed over ranks
#     Row      weight [N, K/R]   input [T, K/R]     output [T(/R), N]     fprop is summed over ranks
#
# R ranks; tokens T are sharded with sequence=True, along the second-last axis: of a batch [B, S, features], each rank
# has S/R tokens of every sequence.


@dataclass(frozen=True)
class ShardLayout:
    """Tensor-parallel layout of one linear layer."""

    #: True if output features are sharded (column-parallel), False if input features are.
    column: bool
    #: True if the tokens of a column layer's input, or of a row layer's output, are sharded.
    sequence: bool
    #: Chunks in which a rank's tokens are sent while GEMMs run; 0 communicates before or after a GEMM.
    overlap: int = 0
    #: True if GEMMs of unquantized operands communicate through symmetric memory, see `TensorParallelComm.is_fused`.
    symmetric: bool = False

    @property
    def name(self) -> str:
        """The style as the user writes it, for messages."""
        return f"{'ColwiseParallel' if self.column else 'RowwiseParallel'}({'sequence=True' if self.sequence else ''})"

    @property
    def weight_axis(self) -> int:
        """Sharded axis of the weight [N, K]."""
        return 0 if self.column else 1

    def axis(self, operand: str) -> int | None:
        """Return the sharded axis of an operand in the form it is quantized in, such as "weight" or "input.T"; None if
        replicated.
        """
        name, _, transposed = operand.partition(".")
        axis: int | None = self.weight_axis
        if name == "input":
            axis = (0 if self.sequence else None) if self.column else 1
        elif name == "grad_output":
            axis = 1 if self.column else (0 if self.sequence else None)
        return axis if axis is None or not transposed else 1 - axis

    def of_tokens(self, operand: str) -> bool:
        """Return True if an operand is sharded over tokens, False if over features or not at all."""
        return self.axis(operand) is not None and operand.startswith("input" if self.column else "grad_output")


# ---- operands ----

#: Dtypes for GEMMs on symmetric memory: wider sums would be rounded to them, or GPUs have no fast GEMM for wider ones.
NARROW = (torch.bfloat16, torch.float16)


class TensorParallelComm:
    """Process group and shard of one call of a tensor-parallel layer; quantizes its operands and communicates them."""

    __slots__ = (
        *("batches", "group", "key", "layer", "layout", "local_weight", "number", "of_wgrad", "parameter", "partial"),
        *("rank", "recipe", "rows", "run"),
    )

    def __init__(
        self,
        layout: ShardLayout,
        call: LinearCall,
        parameter: Any,
        local_weight: Tensor,
        batches: int,
        rows: Sequence[int],
    ) -> None:
        self.layer, self.layout = call.layer, layout
        #: The weight as a DTensor, and this rank's shard of it.
        self.parameter: Tensor = parameter
        self.local_weight = local_weight
        self.group = parameter.device_mesh.get_group()
        self.number = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        #: This rank's rows of each matrix joined in a column layer's weight, for instance q, k and v.
        self.rows = rows
        #: Number of sequences stacked along the tokens.
        self.batches = batches
        #: All-gather of the saved wgrad input, set by the forward; layers with the same input share it.
        self.of_wgrad: Any = None
        #: Result of the last GEMM that is summed over ranks, before the sum; set only while GEMMs are measured.
        self.partial: Tensor | None = None
        #: Other layers share the quantized input only if their key is the same.
        self.key = layout, self.group, call.training and parameter.requires_grad
        #: The recipe of the call, and the function that quantizes an operand.
        self.recipe, self.run = call.recipe, call.operations.quantize

    def quantize(
        self, operand: str, x: Tensor, spec: QuantSpec, factor: Tensor | float | None, noise: Noise
    ) -> Quantized:
        """Quantize this rank's shard of an operand; see `LinearCall.comm`."""
        axis = self.layout.axis(operand)
        if axis is None:
            return self.run(x, spec, None, factor, noise)
        self.check(operand, x.shape[axis], spec, axis)
        amax = self.agreed(x, spec, axis)
        if spec.rounding == "stochastic":
            q = reference.quantize(x, spec, amax, factor, self._noise(operand, x, spec, axis, noise))
        else:
            q = self.run(x, spec, amax, factor, noise)
        if amax is not None:
            q.amax = amax
        return q

    def agreed(self, x: Tensor, spec: QuantSpec, axis: int) -> Tensor | None:
        """Return the amaxes of scales that several ranks share, all-reduced in float32, or None if there are none."""
        if spec.scale == "unit" or (spec.block[axis] is not None and not spec.two_level):
            return None
        if spec.hadamard:
            x = rotate(x.float())
        if spec.two_level:
            bits = _largest(x).view(1, 1)
        elif spec.per_tensor:
            bits = _largest(x).view(spec.blocks(*x.shape))
        else:
            bits = reference.block_bits(magnitude_bits(x.float()), spec)
        return comm.all_reduce_amax(bits.contiguous(), self.group).view(torch.float32)

    def agreed_of(self, own: Tensor) -> Tensor:
        """All-reduce an amax, float32 of any shape, to its maximum over ranks."""
        bits = own.contiguous().view(torch.int32) & 0x7FFFFFFF
        return comm.all_reduce_amax(bits, self.group).view(torch.float32)

    def check(self, operand: str, length: int, spec: QuantSpec, axis: int) -> None:
        """Raise a ValueError if the shard would cut a block, a rotated group of 16, or four elements that share noise.

        Args:
            operand: name such as "input" or "grad_output.T".
            length: length of this rank's shard along the axis.
            spec: how the operand is quantized.
            axis: sharded axis.
        """
        tokens, needed, why = self.layout.of_tokens(operand), spec.block[axis] or 1, ""
        parts = self._lengths(length, tokens)
        if axis == 1 and spec.hadamard and needed % 16:
            needed, why = 16, "groups of 16 that are rotated together"
        if axis == 1 and spec.rounding == "stochastic" and needed % 4:
            needed, why = 4, "groups of four that share noise"
        part = next((part for part in parts if part % needed), None)
        if part is not None:
            why = why or f"blocks of {needed}"
            of = "tokens of each sequence" if tokens else "features"
            raise ValueError(
                f"{self.description()} has {part} {of} of {operand} on each of {self.number} ranks, and recipe "
                f"{self.recipe.name} quantizes them in {why}: give each rank a multiple of {needed}, or take a "
                "recipe with scales of whole tensors or rows, such as tensorwise"
            )

    def check_gradient(self, weight: Tensor, input_shape: Sequence[int]) -> None:
        """`check` the operands of backward before anything is computed.

        Args:
            weight: this rank's shard.
            input_shape: shape of the input.
        """
        length = weight.shape[0] if self.layout.column else math.prod(input_shape[:-1]) // self.number
        for operand, spec in (("grad_output", self.recipe.dgrad.a), ("grad_output.T", self.recipe.wgrad.a)):
            axis = self.layout.axis(operand)
            if spec is not None and axis is not None:
                self.check(operand, length, spec, axis)

    def description(self) -> str:
        """Return the layer and its style for an error message."""
        return f"{self.layer.__dict__.get('qualified_name') or type(self.layer).__name__} under {self.layout.name}"

    def _noise(self, operand: str, x: Tensor, spec: QuantSpec, axis: int, noise: Noise) -> Tensor:
        """Return the noise of this shard's elements, drawn by their position in the whole operand."""
        k = spec.padded(x.shape[1])
        tokens = self.layout.of_tokens(operand)
        seed, tensor_id, count = noise
        if axis == 0:
            return rows_of_uniform(self._places(x.shape[0], tokens, 1, x.device), k, seed, int(tensor_id), count)
        rows = torch.arange(x.shape[0], dtype=torch.int64, device=x.device)
        return part_of_uniform(rows, self._places(k, tokens, 4, x.device), k * self.number, seed, int(tensor_id), count)

    def _lengths(self, length: int, tokens: bool) -> Sequence[int]:
        """Return the lengths of this rank's consecutive runs along a sharded axis: one per sequence or per joined
        matrix.
        """
        if tokens:
            return [length // self.batches] * self.batches
        return self.rows if self.layout.column and len(self.rows) > 1 else [length]

    def _places(self, length: int, tokens: bool, unit: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's groups of `unit` elements in the whole operand."""
        places, before = [], 0
        for part in self._lengths(length, tokens):
            first = (before * self.number + self.rank * part) // unit
            places.append(torch.arange(first, first + part // unit, dtype=torch.int64, device=device))
            before += part
        return torch.cat(places)

    def is_fused(self, x: Tensor, weight: Tensor, gemm: GemmSpec) -> bool:
        """True if the tokens of x are communicated inside a GEMM on symmetric memory, which quantizes no operand."""
        plain = gemm.a is None and gemm.b is None and x.dtype is weight.dtype and x.dtype in NARROW
        return self.layout.symmetric and plain and not self.recipe.dequantized_backward and x.numel() > 0

    def chunks(self, tokens: int, operand: Tensor | Quantized, features: int, dtype: torch.dtype) -> list[Rows]:
        """Return the ranges of a rank's tokens that are sent one by one, or [] to communicate them at once.

        Args:
            tokens: tokens of one rank.
            operand: left operand of the GEMM, with tokens as rows.
            features, dtype: columns and dtype of the GEMM's output.
        """
        block = operand.spec.block[0] if isinstance(operand, Quantized) else None
        in_rows = not (isinstance(operand, Quantized) and operand.transposed)
        # A chunk of blocks must not end within the tokens that a rank has of a sequence.
        whole = not tokens // self.batches % (block or 1)
        if not (self.layout.overlap and in_rows and whole and has_independent_rows(operand.device, features, dtype)):
            return []
        return chunk_rows(tokens, self.layout.overlap, block)

    @property
    def is_quantizable(self) -> bool:
        """True if the layer is a Quaver layer, which has a weight cache."""
        return isinstance(self.layer, Quantizable)

    def shape(self, input_shape: Sequence[int], features: int) -> tuple[int, ...]:
        """Return the output shape for an input shape."""
        lead = [*input_shape[:-1]]
        if self.layout.sequence:
            lead[-1] = lead[-1] * self.number if self.layout.column else lead[-1] // self.number
        return (*lead, features)

    def gather(self, operand: str, x: Tensor | Quantized) -> comm.Pending:
        """Start an all-gather of an operand that is sharded over tokens; any other is returned unchanged."""
        axis = self.layout.axis(operand)
        if axis is None or not self.layout.of_tokens(operand):
            return lambda: x
        if isinstance(x, Quantized):
            return comm.gather_operand(x, axis, self.group, self.batches)
        return comm.gather(x, axis, self.group, self.batches)

    def gather_for_gemm(self, operand: str, x: Tensor | Quantized, features: int, dtype: torch.dtype) -> comm.Pending:
        """Start an all-gather like `gather` of the left operand of a GEMM, in chunks with overlap.

        Args:
            features, dtype: columns and dtype of the GEMM's output.
        """
        chunks = self.chunks(x.shape[0], x, features, dtype) if self.layout.of_tokens(operand) else []
        return ChunkedGather(x, chunks, self.group, self.batches) if chunks else cache(self.gather(operand, x))

    def sum(self, partial: Tensor) -> comm.Pending:
        """Start an all-reduce of partial sums [T, n] in float32, or a reduce-scatter with sequence=True."""
        if self.layout.sequence:
            return comm.scatter_sums(partial, self.group, self.batches)
        return comm.sum_parts(partial, self.group)

    def local_gemm(
        self, gemm: str, a: Tensor, b: Tensor, bias: Tensor | None, y: Any
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor] | None:
        """Return operands, bias and result of this rank's GEMM for observers, or None if it is not measured.

        Args:
            gemm: "fprop", "dgrad" or "wgrad".
            a, b, bias: this rank's shards of the operands before quantization, and of the bias.
            y: the result of the layer on this rank.
        """
        partial, self.partial = self.partial, None
        if not (self.is_quantizable and observer.measures_gemms()):
            return None
        names = {
            "fprop": ("input", "weight"),
            "dgrad": ("grad_output", "weight"),
            "wgrad": ("grad_output.T", "input.T"),
        }
        if gemm == ("dgrad" if self.layout.column else "fprop"):
            if partial is None:  # summed by a GEMM on symmetric memory, whose operands are not quantized
                return None
            y, bias = partial, None
        a, b = (self.gather(name, x)() for name, x in zip(names[gemm], (a, b), strict=True))
        return a, b, bias, y


def _largest(x: Tensor) -> Tensor:
    """Return the bits of the largest magnitude, int32 []; 0 for an empty tensor."""
    if not x.numel():
        return torch.zeros((), dtype=torch.int32, device=x.device)
    low, high = torch.aminmax(x.detach())
    return torch.maximum(low.float().abs(), high.float().abs()).view(torch.int32) & 0x7FFFFFFF
