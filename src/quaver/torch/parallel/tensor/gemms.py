"""One operand of which each rank has a part: it gets the codes and scales that the part has in the whole operand.

Where a scale serves elements of several ranks they agree on its amax first, as one maximum of integers. Elsewhere
blocks lie within a rank, which is asked for. Noise is drawn by an element's place in the whole.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.recipes.spec import GemmSpec, QuantSpec
from quaver.torch.linear.gemms import LinearContext
from quaver.torch.linear.linear import Quantizable
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import Noise, magnitude_bits, part_of_uniform, rotate, rows_of_uniform
from quaver.torch.parallel import comm

# ---- layout ----------------------------------------------------------------------------------------------
# How the operands of a linear layer's three GEMMs lie on the ranks: which axis of each is in parts, if any is.
#
#     Column   weight [N/R, K]   input [T(/R), K]   output [T, N/R]       dgrad's sums lie on all ranks
#     Row      weight [N, K/R]   input [T, K/R]     output [T(/R), N]     fprop's sums lie on all ranks
#
# R ranks; tokens T are in parts where the sequence is. Tokens are in parts along the last axis but one: of a batch
# [B, S, features] each rank has S/R tokens of every sequence.


@dataclass(frozen=True)
class ShardLayout:
    """Of one layer."""

    #: Whether each rank has some of the output's features, else some of the input's.
    column: bool
    #: Whether each rank has some tokens of what all ranks need whole: of a column's input, or of a row's output.
    sequence: bool
    #: Whether tokens travel within GEMMs of operands in high precision, as `overlapping` says.
    overlap: bool = False

    @property
    def name(self) -> str:
        """As the style is written."""
        return f"{'ColwiseParallel' if self.column else 'RowwiseParallel'}({'sequence=True' if self.sequence else ''})"

    @property
    def weight_axis(self) -> int:
        """The axis of the weight [N, K] that is in parts."""
        return 0 if self.column else 1

    def axis(self, operand: str) -> int | None:
        """The axis that is in parts of an operand as it is quantized, "weight" or "input.T" for instance; or None."""
        name, _, transposed = operand.partition(".")
        axis: int | None = self.weight_axis
        if name == "input":
            axis = (0 if self.sequence else None) if self.column else 1
        elif name == "grad_output":
            axis = 1 if self.column else (0 if self.sequence else None)
        return axis if axis is None or not transposed else 1 - axis

    def of_tokens(self, operand: str) -> bool:
        """Whether what is in parts of an operand is its tokens, else its features."""
        return self.axis(operand) is not None and operand.startswith("input" if self.column else "grad_output")


# ---- parts -----------------------------------------------------------------------------------------------

#: What travels within GEMMs: sums of wider numbers would be rounded to them, or GPUs have no fast GEMM of them.
NARROW = (torch.bfloat16, torch.float16)


class TensorParallelComm:
    """The ranks that one call of a layer runs on, and this one's part."""

    __slots__ = (
        *("batches", "group", "layer", "layout", "number", "parameter", "rank", "recipe", "rows", "run", "source"),
    )

    def __init__(
        self, layout: ShardLayout, call: LinearContext, parameter: Any, batches: int, rows: Sequence[int]
    ) -> None:
        self.layer, self.layout = call.layer, layout
        #: The weight as a DTensor.
        self.parameter: Tensor = parameter
        self.group = parameter.device_mesh.get_group()
        self.number = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        #: This rank's rows of each matrix that lies in a column's weight, q, k and v for instance.
        self.rows = rows
        #: So many sequences follow one another among the tokens.
        self.batches = batches
        #: The input as the layer was given it, by which others know what became of it.
        self.source: Tensor | None = None
        #: The recipe of the call, and what quantizes an operand by it.
        self.recipe, self.run = call.recipe, call.quantize

    def quantize(
        self, operand: str, x: Tensor, spec: QuantSpec, factor: Tensor | float | None, noise: Noise
    ) -> Quantized:
        """This rank's part of an operand; see `quaver.torch.linear.gemms.OperandComm`."""
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
        """The amaxes of the scales that elements of several ranks share, float32; None where there are none."""
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
        return comm.agree(bits.contiguous(), self.group).view(torch.float32)

    def agreed_of(self, own: Tensor) -> Tensor:
        """The largest of the ranks' amaxes of one scale for all of an operand, float32 of any shape."""
        bits = own.contiguous().view(torch.int32) & 0x7FFFFFFF
        return comm.agree(bits, self.group).view(torch.float32)

    def check(self, operand: str, length: int, spec: QuantSpec, axis: int) -> None:
        """Refuse parts that would cut a block, a group of 16 that is rotated, or four elements that share noise.

        Args:
            length: of this rank's part along the axis.
        """
        tokens, needed, why = self.layout.of_tokens(operand), spec.block[axis] or 1, ""
        parts = self._lengths(length, tokens)
        if axis == 1 and spec.hadamard and needed % 16:
            needed, why = 16, "groups of 16 that are rotated together"
        if axis == 1 and spec.rounding == "stochastic" and needed % 4:
            needed, why = 4, "fours that share their noise"
        part = next((part for part in parts if part % needed), None)
        if part is not None:
            why = why or f"blocks of {needed}"
            of = "tokens of each sequence" if tokens else "features"
            raise ValueError(
                f"{self.says()} has {part} {of} of {operand} on each of {self.number} ranks, and recipe "
                f"{self.recipe.name} quantizes them in {why}: give each rank a multiple of {needed}, or take a "
                "recipe with scales of whole tensors or rows, such as tensorwise"
            )

    def check_gradient(self, weight: Tensor, given: Sequence[int]) -> None:
        """`check` what backward will quantize, before anything is computed.

        Args:
            weight: this rank's part.
            given: the shape of the input.
        """
        length = weight.shape[0] if self.layout.column else math.prod(given[:-1]) // self.number
        for operand, spec in (("grad_output", self.recipe.dgrad.a), ("grad_output.T", self.recipe.wgrad.a)):
            axis = self.layout.axis(operand)
            if spec is not None and axis is not None:
                self.check(operand, length, spec, axis)

    def says(self) -> str:
        """The layer and its style, for an error."""
        return f"{self.layer.__dict__.get('qualified_name') or type(self.layer).__name__} under {self.layout.name}"

    def _noise(self, operand: str, x: Tensor, spec: QuantSpec, axis: int, noise: Noise) -> Tensor:
        """What the elements of this part are rounded with in the whole operand."""
        k = spec.padded(x.shape[1])
        tokens = self.layout.of_tokens(operand)
        seed, tensor_id, count = noise
        if axis == 0:
            return rows_of_uniform(self._places(x.shape[0], tokens, 1, x.device), k, seed, int(tensor_id), count)
        rows = torch.arange(x.shape[0], dtype=torch.int64, device=x.device)
        return part_of_uniform(rows, self._places(k, tokens, 4, x.device), k * self.number, seed, int(tensor_id), count)

    def _lengths(self, length: int, tokens: bool) -> Sequence[int]:
        """Of what lies one after the other along an axis in parts, this rank's part of each: sequences, or matrices."""
        if tokens:
            return [length // self.batches] * self.batches
        return self.rows if self.layout.column and len(self.rows) > 1 else [length]

    def _places(self, length: int, tokens: bool, unit: int, device: torch.device) -> Tensor:
        """Where the pieces of `unit` elements of this rank's part lie in the whole."""
        places, before = [], 0
        for part in self._lengths(length, tokens):
            first = (before * self.number + self.rank * part) // unit
            places.append(torch.arange(first, first + part // unit, dtype=torch.int64, device=device))
            before += part
        return torch.cat(places)

    def overlaps(self, x: Tensor, weight: Tensor, gemm: GemmSpec) -> bool:
        """Whether tokens of x travel within a GEMM with the weight, neither of which it quantizes."""
        plain = gemm.a is None and gemm.b is None and x.dtype is weight.dtype and x.dtype in NARROW
        return self.layout.overlap and plain and not self.recipe.dequantized_backward and x.numel() > 0

    @property
    def is_quantizable(self) -> bool:
        """Whether the layer is ours, which keeps what its weight was quantized to."""
        return isinstance(self.layer, Quantizable)

    def shape(self, given: Sequence[int], features: int) -> tuple[int, ...]:
        """Of the output for an input of a shape."""
        lead = [*given[:-1]]
        if self.layout.sequence:
            lead[-1] = lead[-1] * self.number if self.layout.column else lead[-1] // self.number
        return (*lead, features)

    def gather(self, operand: str, x: Tensor | Quantized) -> comm.Pending:
        """Begin to put the ranks' tokens of an operand together; one that is whole is given as it is."""
        axis = self.layout.axis(operand)
        if axis is None or not self.layout.of_tokens(operand):
            return lambda: x
        if isinstance(x, Quantized):
            return comm.gather_operand(x, axis, self.group, self.batches)
        return comm.gather(x, axis, self.group, self.batches)

    def sum(self, partial: Tensor) -> comm.Pending:
        """Begin to sum the ranks' [T, n], float32: all tokens, or this rank's."""
        if self.layout.sequence:
            return comm.scatter_sums(partial, self.group, self.batches)
        return comm.sum_parts(partial, self.group)


def _largest(x: Tensor) -> Tensor:
    """The bits of the largest magnitude, int32 []; 0 of nothing."""
    if not x.numel():
        return torch.zeros((), dtype=torch.int32, device=x.device)
    low, high = torch.aminmax(x.detach())
    return torch.maximum(low.float().abs(), high.float().abs()).view(torch.int32) & 0x7FFFFFFF
