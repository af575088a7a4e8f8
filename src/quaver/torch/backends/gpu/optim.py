"""An optimizer's step of many parameters by one launch for each way to step; see `quaver.kernels.optim`.

What is launched is described by `Form`, which is compiled in, and by rows of addresses and numbers, one a parameter.
The rows go to the device once and again when one of them is another. A graph that is captured copies its rows at every
replay from memory of the host that is kept as long as what launches.
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
from quaver.torch.backends.gpu.launch_plan import LaunchPlan, LaunchPlanCache, LaunchSpec
from quaver.torch.backends.gpu.tensorwise import integers

#: Blocks that a program takes at once, and how often: 16 elements a thread. Where each element is looked for by itself,
#: which takes more registers, so many at once, the more often.
BLOCKS, ROUNDS, WARPS = 32, 8, 4
FEW_BLOCKS = 8
#: The most that a thread may have.
REGISTERS = 255
#: Elements that share a scale of a moment.
BLOCK, FIELDS = 64, codes.FIELDS.value
#: What kernels call dtypes: codes of eight bits are bytes.
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
KEEPINGS = {
    **{"plain": codes.PLAIN.value, "remainder": codes.REMAINDER.value},
    **{"residual8": codes.RESIDUAL.value, "residual16": codes.RESIDUAL.value, "float32": codes.MASTER.value},
}
#: Of moments, by the name of their code; those with scales have bfloat16 ones of blocks of 64.
KINDS = {
    **{"float32": codes.FLOAT32.value, "bfloat16": codes.BFLOAT16.value},
    **{"int8_mitchell": codes.INT8.value, "uint8_mitchell4": codes.UINT8.value},
}


@dataclass(frozen=True)
class MomentFormat:
    """How a moment is kept."""

    #: In `KINDS`.
    code: str
    stochastic: bool = False


@dataclass(frozen=True)
class StepSpecialization:
    """What a launch is compiled for: parameters that step alike."""

    #: In `RULES`.
    rule: str
    clamp: bool
    maximize: bool
    #: In `KEEPINGS`.
    master_format: str
    #: Of the weight, of what is beside it (None: nothing), and of the gradient, whose uint8 are E4M3 in blocks of 128.
    weight: torch.dtype
    beside: torch.dtype | None
    gradient: torch.dtype
    moments: tuple[MomentFormat, ...]
    #: Of codes with one scale in all, known before the step, or with scales of blocks.
    spec: QuantSpec | None = None
    #: Whether the weight, or its residual, is rounded at random.
    stochastic: bool = False
    #: Whether gradients are multiplied by a number first.
    factored: bool = False
    #: Whether parameters are whole chunks of blocks that lie one after the other, at multiples of 16 bytes.
    even: bool = True

    @property
    def blocks(self) -> int:
        """That a program takes at once."""
        return BLOCKS if self.even else FEW_BLOCKS

    @property
    def high(self) -> int:
        """Rows of the weight that share a scale with others; 0 where all do, or it is a float."""
        return 0 if self.spec is None else self.spec.block[0] or 0

    @property
    def wide(self) -> int:
        """Of blocks of a row, how many a tile has side by side."""
        return 2 if self.high == 128 else 1

    @property
    def twice(self) -> bool:
        """Whether a tile is more than a program takes at once, which then goes over it twice."""
        return self.high > self.blocks // self.wide

    @property
    def registers(self) -> int | None:
        """Of a thread, where a compiler that is not told takes fewer than it needs, for one program more."""
        spills = self.master_format == "residual8" and (self.spec is None or self.high == 1 or not self.even)
        return REGISTERS if (self.twice and self.even) or spills else None

    def tiles(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Of a weight with scales of blocks: rows of a tile, and how many there are."""
        rows = max(self.high, self.blocks // self.wide)
        return rows, -(-shape[0] // rows) * -(-shape[1] // (self.wide * BLOCK))

    def constants(self, device: torch.device) -> dict[str, Any]:
        """As the kernel takes them."""
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
            "MASTER_FORMAT": KEEPINGS[self.master_format],
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
    """One parameter: a matrix [rows, columns], its elements one after the other."""

    form: StepSpecialization
    #: As `Form` says them: the weight and its scale, what is beside it, codes and scale of each moment; gradient and
    #: its scale, the gradient's factor, amax of the stored weight and count of steps, float32 of one element each.
    tensors: dict[str, Tensor | None]
    shape: tuple[int, int]
    #: Of its first element in the whole parameter that ranks may divide, of the parameter, and of the noise.
    first: int
    number: int
    seed: int
    #: The parameter itself.
    owner: Any = None

    @property
    def written(self) -> list[Tensor]:
        """What the kernel writes."""
        read = ("gradient", "gradient_scale", "factor")
        return [t for name, t in self.tensors.items() if t is not None and name not in read]

    @property
    def blocks(self) -> int:
        return self.shape[0] * -(-self.shape[1] // BLOCK)

    @property
    def _tasks(self) -> tuple[int, int]:
        """What its programs take, blocks or tiles, and how many of them one takes."""
        form = self.form
        if not form.high:
            return self.blocks, BLOCKS * ROUNDS
        return form.tiles(self.shape)[1], 1 if form.twice else ROUNDS

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """The first block or tile of each program, and its rounds."""
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
        """As the table has them."""
        given = (self.tensors.get(name) for name in NAMES)
        tasks, most = self._tasks
        numbers = (self.shape[1], -(-self.shape[1] // BLOCK), self.blocks, -(-tasks // most), self.first, self.number)
        seed = self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF
        return [*(0 if t is None else t.data_ptr() for t in given), *numbers, *seed]


#: Of a row's tensors, in the table's order.
NAMES = (
    *("weight", "weight_scale", "beside", "first", "first_scale", "second", "second_scale"),
    *("gradient", "gradient_scale", "factor", "amax", "step"),
)
assert len(NAMES) == codes.STEP.value + 1


def even(form: StepSpecialization, tensors: Sequence[Tensor], shape: tuple[int, int]) -> bool:
    """Whether a parameter is read in runs: see `Form.even`, which `form` says.

    Args:
        tensors: all of its shape.
    """
    rows, columns = shape
    # Two of a row's blocks share a scale of a gradient in codes.
    whole = columns % (BLOCK * max(form.wide, 2 if form.gradient is torch.uint8 else 1)) == 0
    in_all = rows % form.tiles(shape)[0] if form.high else rows * -(-columns // BLOCK) % BLOCKS
    return whole and not in_all and all(t.data_ptr() % 16 == 0 for t in tensors)


class OptimizerLaunches:
    """Launches of one optimizer on one device, and what they read besides tensors of parameters."""

    def __init__(self) -> None:
        self._words: list[list[int]] = []
        self._forms: list[StepSpecialization] = []
        self._table: Tensor | None = None
        self._chunks: dict[StepSpecialization, Tensor] = {}
        self._work: Tensor | None = None
        #: These three as the stream that made them has them.
        self._made: CrossStream | None = None
        #: What the rows of a capture go to.
        self._pinned: Tensor | None = None
        #: What captured graphs read.
        self._captured: list[Any] = []

    def __call__(
        self, rows: Sequence[ParameterRow], scalars: Tensor, keep: Tensor | None = None, counts: Tensor | None = None
    ) -> None:
        """Step parameters in place, each way to step by one launch.

        Args:
            scalars: the rule's, float32 [scalars, rows].
            keep: bool [], False leaves everything as it is.
            counts: int64 [rows], raised by how many updates were held to their bound.
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
        """Have the rows on the device."""
        words, forms = [row.words for row in rows], [row.form for row in rows]
        alike = forms == self._forms and _sizes(words) == _sizes(self._words)
        if capture.capturing(device):
            self._capture(words, alike)
            return
        if self._pinned is None and device.type == "cuda":
            # A capture may allocate none.
            self._pinned = torch.empty((len(rows), FIELDS), dtype=torch.int64, device="cpu", pin_memory=True)
        if self._made is not None:
            self._made.wait()
        if alike and words == self._words:
            return
        if not alike:
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

    def _capture(self, words: list[list[int]], alike: bool) -> None:
        """Have the rows copied by the graph, from memory that stays.

        Raises:
            RuntimeError: no step before the capture stepped these parameters so.
        """
        if not alike or self._table is None:
            raise RuntimeError(
                "an optimizer's step is captured that steps other parameters, or others so, than the step before: take "
                "one step as it will be captured first, as CapturedStep does"
            )
        host, table = _host(words), torch.empty_like(self._table)
        if self._pinned is not None:
            host = self._pinned.copy_(host)
        table.copy_(host, non_blocking=True)
        self._captured += [host, table, self._work, *self._chunks.values()]
        # What runs later makes its own: the graph reads these at each replay.
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
    """The kernel; its tensors are those of `quaver.kernels.optim.step.step`, or of `step_of_blocks`."""
    _steps((chunks, table, scalars, work, keep, counts), form, len(table))


def _sizes(words: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(each[codes.COLUMNS.value], each[codes.BLOCKS_IN_ALL.value]) for each in words]


def _chunks(rows: Sequence[ParameterRow]) -> dict[StepSpecialization, list[tuple[int, int, int]]]:
    """By form: a parameter, its first block or tile and rounds for each program."""
    chunks: dict[StepSpecialization, list[tuple[int, int, int]]] = {}
    for number, row in enumerate(rows):
        chunks.setdefault(row.form, []).extend((number, *chunk) for chunk in row.chunks)
    return chunks


def _host(words: list[list[int]]) -> Tensor:
    return torch.tensor(words, dtype=torch.int64, device="cpu")


def _pass(given: Sequence[Any], form: StepSpecialization, parameters: int) -> LaunchPlan:
    chunks = given[0]
    constants = form.constants(chunks.device)
    kernel = step_of_blocks if form.high else step
    return LaunchPlan(
        given, (), [LaunchSpec(kernel, (len(chunks),), given, (parameters,), constants, WARPS, form.registers)]
    )


_steps = LaunchPlanCache(_pass)
