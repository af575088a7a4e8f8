"""Optimizer steps of many parameters in one launch per specialization; kernels are in `quaver.kernels.optim`.

A launch is compiled for a `StepSpecialization`, and gets a table of addresses and numbers with one row per parameter.
The table is copied to the device again whenever a row changes. A captured graph copies its table at every replay from
host memory that lives as long as the launches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quaver.kernels.optim import codes
from quaver.kernels.optim import step as rules
from quaver.kernels.optim.step import step, step_of_blocks
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu import capture
from quaver.torch.backends.gpu.buffers import CrossStream
from quaver.torch.backends.gpu.launch import LaunchPlan, LaunchPlanCache, LaunchSpec
from quaver.torch.backends.gpu.tensorwise import integers

#: Blocks that a program processes at once, and rounds: 16 elements per thread. FEW_BLOCKS is used where each element is
#: addressed separately, which needs more registers.
BLOCKS, ROUNDS, WARPS = 32, 8, 4
FEW_BLOCKS = 8
#: Maximum number of registers per thread.
REGISTERS = 255
#: Elements that share the scale of a moment.
BLOCK, FIELDS = 64, codes.FIELDS.value
#: Triton's dtypes; eight-bit codes are bytes.
TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.uint8: tl.uint8,
    torch.float8_e4m3fn: tl.uint8,
}
RULES = {"adamw": rules.ADAMW.value, "adam": rules.ADAM.value, "lion": rules.LION.value}
RULES |= {"sgd": rules.SGD.value, "nesterov": rules.NESTEROV.value}
MASTER_KINDS = {
    **{"plain": codes.PLAIN.value, "remainder": codes.REMAINDER.value},
    **{"residual8": codes.RESIDUAL.value, "residual16": codes.RESIDUAL.value, "float32": codes.MASTER.value},
}
#: Storage of moments by name of the code; codes with scales have a bfloat16 scale per block of 64.
KINDS = {
    **{"float32": codes.FLOAT32.value, "bfloat16": codes.BFLOAT16.value},
    **{"int8_mitchell": codes.INT8.value, "uint8_mitchell4": codes.UINT8.value},
}


@dataclass(frozen=True)
class MomentFormat:
    """Storage of a moment."""

    #: Key of `KINDS`.
    code: str
    stochastic: bool = False


@dataclass(frozen=True)
class StepSpecialization:
    """Compile-time properties of a launch, shared by the parameters that it steps."""

    #: Key of `RULES`.
    rule: str
    clamp: bool
    maximize: bool
    #: Key of `MASTER_KINDS`.
    master_format: str
    #: dtypes of the weight, of its residual or master (None without), and of the gradient (uint8: E4M3 in blocks of
    #: 128).
    weight: torch.dtype
    beside: torch.dtype | None
    gradient: torch.dtype
    moments: tuple[MomentFormat, ...]
    #: Spec of a weight stored as codes, with one scale known before the step, or with block scales; else None.
    spec: QuantSpec | None = None
    #: True if the weight, or its residual, is rounded stochastically.
    stochastic: bool = False
    #: True if gradients are first multiplied by a factor.
    factored: bool = False
    #: True if parameters are whole chunks of contiguous blocks at addresses that are multiples of 16.
    even: bool = True

    @property
    def blocks(self) -> int:
        """Number of blocks that a program processes at once."""
        return BLOCKS if self.even else FEW_BLOCKS

    @property
    def high(self) -> int:
        """Rows of the weight that share a scale; 0 with a single scale, or if the weight is not stored as codes."""
        return 0 if self.spec is None else self.spec.block[0] or 0

    @property
    def wide(self) -> int:
        """Number of blocks of a row that are side by side in a tile."""
        return 2 if self.high == 128 else 1

    @property
    def twice(self) -> bool:
        """True if a tile is larger than one round of a program, which then passes over it twice."""
        return self.high > self.blocks // self.wide

    @property
    def registers(self) -> int | None:
        """Registers per thread where the compiler would otherwise spill to fit one more program, else None."""
        spills = self.master_format == "residual8" and (self.spec is None or self.high == 1 or not self.even)
        return REGISTERS if (self.twice and self.even) or spills else None

    def tiles(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows of a tile and the number of tiles, for a weight with block scales."""
        rows = max(self.high, self.blocks // self.wide)
        return rows, -(-shape[0] // rows) * -(-shape[1] // (self.wide * BLOCK))

    def constants(self, device: torch.device) -> dict[str, Any]:
        """Return the constexpr arguments of the kernel."""
        first, second = (*self.moments, None, None)[:2]
        spec = self.spec
        return {
            "BLOCKS": self.blocks,
            "EVEN": self.even,
            "RULE": RULES[self.rule],
            "CLAMP": self.clamp,
            "MAXIMIZE": self.maximize,
            "FACTORED": self.factored,
            "GRADIENT_TYPE": TYPES[self.gradient],
            "GRADIENT_CODES": self.gradient is torch.uint8,
            "MASTER_FORMAT": MASTER_KINDS[self.master_format],
            "WEIGHT_TYPE": TYPES[self.weight],
            "BESIDE_TYPE": TYPES[self.beside or self.weight],
            "WEIGHT_NOISE": self.stochastic,
            **self._of_codes(),
            "POWER_OF_TWO": spec is not None and spec.power_of_two,
            "EMAX": 0 if spec is None else spec.format.emax,
            "TOP_MANTISSA": 0 if spec is None else spec.format.max_mantissa,
            "MAX": 1.0 if spec is None else float(spec.format.max),
            "INTEGERS": integers(device),
            **_of_moment("FIRST", first),
            **_of_moment("SECOND", second),
        }

    def _of_codes(self) -> dict[str, Any]:
        if not self.high:
            return {"CODES": self.spec is not None}
        assert self.spec is not None
        return {"HIGH": self.high, "PAIRS": self.spec.scale == "e8m0"}


def _of_moment(name: str, moment: MomentFormat | None) -> dict[str, Any]:
    if moment is None:
        return {f"{name}_KIND": codes.NONE.value, f"{name}_NOISE": False}
    return {
        f"{name}_KIND": KINDS[moment.code],
        f"{name}_NOISE": moment.stochastic,
    }


@dataclass
class ParameterRow:
    """One parameter as a contiguous matrix [rows, columns]."""

    form: StepSpecialization
    #: Tensors by name, with the dtypes of `StepSpecialization`: weight and its scale, residual or master, codes and
    #: scale of each moment, gradient and its scale; float32 of one element: gradient factor, amax of the stored weight,
    #: and step count.
    tensors: dict[str, Tensor | None]
    shape: tuple[int, int]
    #: Index of the first element in the whole parameter, of which this may be a shard; parameter number; noise seed.
    first: int
    number: int
    seed: int
    #: The parameter itself.
    owner: Any = None

    @property
    def written(self) -> list[Tensor]:
        """Tensors that the kernel writes."""
        read = ("gradient", "gradient_scale", "factor")
        return [t for name, t in self.tensors.items() if t is not None and name not in read]

    @property
    def blocks(self) -> int:
        return self.shape[0] * -(-self.shape[1] // BLOCK)

    @property
    def _tasks(self) -> tuple[int, int]:
        """Number of blocks or tiles, and how many of them one program processes."""
        form = self.form
        if not form.high:
            return self.blocks, BLOCKS * ROUNDS
        return form.tiles(self.shape)[1], 1 if form.twice else ROUNDS

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """First block or tile of each program, and its number of rounds."""
        form, (tasks, most) = self.form, self._tasks
        firsts = range(0, tasks, most)
        if not form.high:
            return [(first, -(-min(tasks - first, most) // form.blocks)) for first in firsts]
        if not form.twice:
            return [(first, min(tasks - first, most)) for first in firsts]
        across, at_once = -(-self.shape[1] // (form.wide * BLOCK)), form.blocks // form.wide
        left = (self.shape[0] - tile // across * form.high for tile in firsts)
        return [(tile, -(-min(rows, form.high) // at_once)) for tile, rows in zip(firsts, left, strict=True)]

    @property
    def words(self) -> list[int]:
        """Row of this parameter in the table."""
        tensors_in = (self.tensors.get(name) for name in NAMES)
        tasks, most = self._tasks
        numbers = (self.shape[1], -(-self.shape[1] // BLOCK), self.blocks, -(-tasks // most), self.first, self.number)
        seed = self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF
        return [*(0 if t is None else t.data_ptr() for t in tensors_in), *numbers, *seed]


#: Names of a row's tensors, in the order of the table.
NAMES = (
    *("weight", "weight_scale", "beside", "first", "first_scale", "second", "second_scale"),
    *("gradient", "gradient_scale", "factor", "amax", "step"),
)
assert len(NAMES) == codes.STEP.value + 1


def even(form: StepSpecialization, tensors: Sequence[Tensor], shape: tuple[int, int]) -> bool:
    """Return True if a parameter can use `StepSpecialization.even`.

    Args:
        tensors: all tensors with the shape of the parameter.
    """
    rows, columns = shape
    # Two blocks of a row share the scale of an eight-bit gradient.
    whole = columns % (BLOCK * max(form.wide, 2 if form.gradient is torch.uint8 else 1)) == 0
    in_all = rows % form.tiles(shape)[0] if form.high else rows * -(-columns // BLOCK) % BLOCKS
    return whole and not in_all and all(t.data_ptr() % 16 == 0 for t in tensors)


class OptimizerLaunches:
    """Launches of one optimizer on one device, with their tables and workspaces."""

    def __init__(self) -> None:
        self._words: list[list[int]] = []
        self._forms: list[StepSpecialization] = []
        self._table: Tensor | None = None
        self._chunks: dict[StepSpecialization, Tensor] = {}
        self._work: Tensor | None = None
        #: Lets other streams wait for these three.
        self._made: CrossStream | None = None
        #: Pinned memory for the table of a capture.
        self._pinned: Tensor | None = None
        #: Tensors that captured graphs read.
        self._captured: list[Any] = []

    def __call__(
        self, rows: Sequence[ParameterRow], scalars: Tensor, keep: Tensor | None = None, counts: Tensor | None = None
    ) -> None:
        """Step parameters in place, with one launch per specialization.

        Args:
            scalars: scalars of the rule, float32 [scalars, rows].
            keep: bool []; False leaves everything unchanged.
            counts: int64 [rows], increased by the number of updates that were clamped.
        """
        device = scalars.device
        self._know(rows, device)
        assert self._table is not None
        assert self._work is not None
        kernel_args = None if keep is None else keep.reshape(1)
        scalars = scalars.contiguous()
        for form, chunks in self._chunks.items():
            own = counts if form.clamp else None
            launch(form, chunks, self._table, scalars, self._work, kernel_args, own)

    def _know(self, rows: Sequence[ParameterRow], device: torch.device) -> None:
        """Copy the table to the device if it has changed."""
        words, forms = [row.words for row in rows], [row.form for row in rows]
        same_layout = forms == self._forms and _sizes(words) == _sizes(self._words)
        if capture.capturing(device):
            self._capture(words, same_layout)
            return
        if self._pinned is None and device.type == "cuda":
            # Allocated before a capture, which must not allocate pinned memory.
            self._pinned = torch.empty((len(rows), FIELDS), dtype=torch.int64, device="cpu", pin_memory=True)
        if self._made is not None:
            self._made.wait()
        if same_layout and words == self._words:
            return
        if not same_layout:
            self._chunks = {
                form: torch.tensor(chunks, dtype=torch.int32, device="cpu").to(device, non_blocking=True)
                for form, chunks in _chunks(rows).items()
            }
            self._work = torch.zeros((len(rows), 2), dtype=torch.int32, device=device)
            self._pinned = None if self._pinned is None or len(self._pinned) != len(rows) else self._pinned
        self._words, self._forms = words, forms
        self._table = _host(words).to(device, non_blocking=True)
        assert self._work is not None
        self._made = CrossStream((self._table, self._work, *self._chunks.values()), device)

    def _capture(self, words: list[list[int]], same_layout: bool) -> None:
        """Let the graph copy the table at each replay, from memory that is never freed.

        Raises:
            RuntimeError: the step before the capture had other parameters or specializations.
        """
        if not same_layout or self._table is None:
            raise RuntimeError(
                "the captured optimizer step has other parameters or settings than the step before: first take one "
                "step exactly as it will be captured, as CapturedStep does"
            )
        host, table = _host(words), torch.empty_like(self._table)
        if self._pinned is not None:
            host = self._pinned.copy_(host)
        table.copy_(host, non_blocking=True)
        self._captured += [host, table, self._work, *self._chunks.values()]
        # Later steps make new ones, because the graph reads these at each replay.
        self._table, self._pinned, self._made, self._words, self._forms = table, None, None, [], []


def launch(
    form: StepSpecialization,
    chunks: Tensor,
    table: Tensor,
    scalars: Tensor,
    work: Tensor,
    keep: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:
    """Run the kernel; its tensors are those of `quaver.kernels.optim.step.step` or `step_of_blocks`."""
    _steps((chunks, table, scalars, work, keep, counts), form, len(table))


def _sizes(words: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(each[codes.COLUMNS.value], each[codes.BLOCKS_IN_ALL.value]) for each in words]


def _chunks(rows: Sequence[ParameterRow]) -> dict[StepSpecialization, list[tuple[int, int, int]]]:
    """Return for each specialization the list of (parameter, first block or tile, rounds), one per program."""
    chunks: dict[StepSpecialization, list[tuple[int, int, int]]] = {}
    for number, row in enumerate(rows):
        chunks.setdefault(row.form, []).extend((number, *chunk) for chunk in row.chunks)
    return chunks


def _host(words: list[list[int]]) -> Tensor:
    return torch.tensor(words, dtype=torch.int64, device="cpu")


@LaunchPlanCache
def _steps(tensors_in: Sequence[Any], form: StepSpecialization, parameters: int) -> LaunchPlan:
    chunks = tensors_in[0]
    constants = form.constants(chunks.device)
    kernel = step_of_blocks if form.high else step
    return LaunchPlan(
        tensors_in,
        (),
        [LaunchSpec(kernel, (len(chunks),), tensors_in, (parameters,), constants, WARPS, form.registers)],
    )
