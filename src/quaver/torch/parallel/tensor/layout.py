"""How the operands of a linear layer's three GEMMs lie on the ranks: which axis of each is in parts, if any is.

    Column   weight [N/R, K]   input [T(/R), K]   output [T, N/R]       dgrad's sums lie on all ranks
    Row      weight [N, K/R]   input [T, K/R]     output [T(/R), N]     fprop's sums lie on all ranks

R ranks; tokens T are in parts where the sequence is. Tokens are in parts along the last axis but one: of a batch
[B, S, features] each rank has S/R tokens of every sequence.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
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
        return f"{'Column' if self.column else 'Row'}({'sequence=True' if self.sequence else ''})"

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
