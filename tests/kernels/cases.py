"""What the static gate compiles: one row for each way in which the library launches a kernel.

A row calls a launching function of `quaver.torch.gpu` on meta tensors of a realistic size; the gate notes what would be
launched, compiles it for every architecture and reads the machine code. Add a row with a kernel, then write its figures
with `python -m tests.kernels.gate --update --only 'name*'`. A launch that an earlier row makes too belongs to that row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quaver import E4M3, E5M2, QuantSpec
from quaver.torch.gpu import quantize

ROWS, COLUMNS = 8192, 4096
BF16, FLOAT32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row."""

    name: str
    #: Launches on meta tensors; what it returns does not matter.
    launch: Callable[[], object]
    #: Elements that one program works on; None: BM times BN of its constants, if it has them.
    elements: int | None = None
    #: By the name of a rule (`tests.kernels.gate.rules.RULES`), why it does not hold for this row.
    exceptions: Mapping[str, str] = field(default_factory=dict)


def matrix(rows: int = ROWS, columns: int = COLUMNS, dtype: torch.dtype = BF16) -> Tensor:
    """A meta tensor: of this size and dtype, with no memory."""
    return torch.empty(rows, columns, dtype=dtype, device="meta")


def number(dtype: torch.dtype = FLOAT32) -> Tensor:
    """A meta tensor of one element."""
    return torch.empty(1, dtype=dtype, device="meta")


ONE_NUMBER = {"wide stores": "it writes one number"}
POWER, RATIO = QuantSpec(E4M3), QuantSpec(E4M3, scale="fp32")


def _per_tensor() -> list[Case]:
    def cast(spec: QuantSpec, both: bool, x: Callable[[], Tensor] = matrix, **given: bool) -> Callable[[], object]:
        return lambda: quantize.per_tensor(
            x(),
            spec,
            number() if given.get("amax") else None,
            number() if given.get("factor") else None,
            given.get("factor", False),
            both,
        )

    def ragged() -> Tensor:
        return matrix(8191, 4095)

    def wide() -> Tensor:
        return matrix(dtype=FLOAT32)

    return [
        Case(name="amax bf16", launch=lambda: quantize.measure(matrix()), exceptions=ONE_NUMBER),
        Case(name="amax float32", launch=lambda: quantize.measure(wide()), exceptions=ONE_NUMBER),
        Case(name="amax ragged", launch=lambda: quantize.measure(ragged()), exceptions=ONE_NUMBER),
        Case(name="cast bf16", launch=cast(POWER, False)),
        Case(name="cast+transpose bf16", launch=cast(POWER, True)),
        Case(name="cast+transpose bf16 E5M2", launch=cast(QuantSpec(E5M2), True)),
        Case(name="cast+transpose float32", launch=cast(POWER, True, wide)),
        Case(name="cast+transpose fp32 scale", launch=cast(RATIO, True)),
        Case(name="cast+transpose+amax delayed", launch=cast(POWER, True, factor=True)),
        Case(name="cast+transpose+amax delayed E5M2", launch=cast(QuantSpec(E5M2), True, factor=True)),
        Case(name="cast+amax delayed", launch=cast(POWER, False, factor=True)),
        Case(name="cast+transpose given amax", launch=cast(POWER, True, amax=True)),
        Case(name="cast+transpose ragged", launch=cast(POWER, True, ragged)),
    ]


#: Helper kernels first: what another row launches on the way is theirs.
CASES: list[Case] = [
    *_per_tensor(),
]
