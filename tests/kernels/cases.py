"""The launches that the static gate compiles: one row for each way in which the library launches a kernel.

A row calls a launching function of `quaver.torch.backends.gpu` on meta tensors of a realistic size; the gate records
the launches, compiles them for every architecture and reads the machine code. Add a row with a kernel, then write
its figures with `python -m tests.kernels.gate --update --only 'name*'`. A launch that several rows make belongs
to the first of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quaver import E2M1, E2M3, E4M3, E5M2, QuantSpec, recipes
from quaver.recipes.spec import Recipe
from quaver.torch.backends.gpu import (
    activation,
    attention,
    block_scaled,
    cross_entropy,
    decode,
    emulation,
    grouped_block_scaled,
    grouped_gemm,
    grouped_quantize,
    grouped_values,
    norm,
    permutation,
    quantize,
    ssm,
)
from quaver.torch.backends.gpu import emulation as emulated_blocks
from quaver.torch.backends.gpu import optim as optimizing
from quaver.torch.backends.gpu.launch import LaunchSpec
from quaver.torch.backends.gpu.optim import MomentFormat
from quaver.torch.backends.gpu.quantize_launch import RequestedOperands, combine_launches
from quaver.torch.numerics.grouped import GroupedNoise, GroupedOperand, GroupOffsets
from quaver.torch.numerics.quantized import FLOAT8, Quantized
from quaver.torch.state.history import roll_gpu

ROWS, COLUMNS = 8192, 4096
#: Elements of an optimizer's program.
PROGRAM = optimizing.BLOCKS * optimizing.ROUNDS * optimizing.BLOCK
BF16, FLOAT32 = torch.bfloat16, torch.float32


#: Iterations of loops, the outermost first, or of each loop at the same depth.
Trips = tuple[int | tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row."""

    name: str
    #: Launches on meta tensors; the result is ignored.
    launch: Callable[[], object]
    #: Elements that one program works on; None: BM times BN of its constants, if it has them.
    elements: int | None = None
    #: Iterations of a program's loops, the outermost first, or of each loop at the same depth; a fourth of them where
    #: the compiler unrolls a loop four times.
    trips: Trips = ()
    #: The same for a kernel of its own, if the row launches several; "kernel #2" is the second launch of one kernel. Or
    #: a function of the launch's constants.
    trips_by_kernel: Mapping[str, Trips | Callable[[Mapping[str, Any]], Trips]] = field(default_factory=dict)
    #: Multiply-adds of a launch by kernel, if these bound it instead of memory.
    products: Mapping[str, float] = field(default_factory=dict)
    #: Bytes moved through addresses in a table, in addition to those of the arguments.
    extra_bytes: int = 0
    #: How often an argument is read or written, if more than once.
    times: Mapping[str, int] = field(default_factory=dict)
    #: By the name of a rule (`tests.kernels.gate.rules.RULES`), why it does not hold for this row.
    exceptions: Mapping[str, str] = field(default_factory=dict)
    #: Whether `make test` never compiles it. Loop counts are unknown: registers, memory and accesses are checked.
    rare: bool = False
    #: The first architecture on which a step launches it: 100 if the GEMM that reads its result needs Blackwell.
    since: int = 80
    #: The first architecture for which it compiles.
    compiles_from: int = 80


def matrix(rows: int = ROWS, columns: int = COLUMNS, dtype: torch.dtype = BF16) -> Tensor:
    """A meta tensor of this size and dtype."""
    return torch.empty(rows, columns, dtype=dtype, device="meta")


def number(dtype: torch.dtype = FLOAT32) -> Tensor:
    """A meta tensor of one element."""
    return torch.empty(1, dtype=dtype, device="meta")


#: Rows of one program of a norm on 132 multiprocessors, forward and backward.
ROUNDS, BACK = (-(-ROWS // (8 * 132)),), (ROWS // (2 * 132),)
SCALE_BYTES = {"shared bytes": "scales change threads as bytes, one for 32 elements"}
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

    def history() -> object:
        return quantize.per_tensor(matrix(), POWER, None, number(), True, True, newest=number())

    def summed(height: int = ROWS, factor: bool = False) -> Callable[[], object]:
        known = number() if factor else None
        return lambda: quantize.per_tensor(matrix(height), POWER, None, known, factor, True, sums=True)

    def with_a_weight(height: int = ROWS, spec: QuantSpec = POWER, sums: bool = False) -> list[LaunchSpec]:
        return two(matrix(height), spec, matrix(COLUMNS), POWER, sums)

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
        Case(name="cast+transpose ragged tokens", launch=cast(POWER, True, lambda: matrix(8175))),
        Case(name="cast columns only", launch=lambda: quantize.quantize(matrix().t(), POWER, 1.0)),
        Case(name="cast+transpose+amax history", launch=history),
        Case(name="cast+transpose+sums bf16", launch=summed()),
        Case(name="cast+transpose+sums ragged tokens", launch=summed(8175)),
        Case(name="cast+transpose+amax+sums delayed", launch=summed(factor=True)),
        Case(name="amax of two", launch=lambda: run(with_a_weight()[:1]), exceptions=ONE_NUMBER),
        Case(name="amax of two ragged tokens", launch=lambda: run(with_a_weight(8176)[:1]), exceptions=ONE_NUMBER),
        Case(name="cast+transpose of two", launch=lambda: run(with_a_weight())),
        Case(name="cast+transpose of two ragged tokens", launch=lambda: run(with_a_weight(8176))),
        Case(name="cast+transpose of two and sums", launch=lambda: run(with_a_weight(ROWS, QuantSpec(E5M2), True))),
        Case(
            name="cast+transpose+amax of two delayed",
            launch=lambda: run(two(matrix(), POWER, matrix(COLUMNS), POWER, known=True)),
        ),
    ]


def two(
    x: Tensor, spec: QuantSpec, w: Tensor, other: QuantSpec, sums: bool = False, known: bool | None = None
) -> list[LaunchSpec]:
    """The launches that an input, or a grad_output to be summed, shares with a weight."""
    plans = []
    for one, one_spec, wanted in (
        (x, spec, RequestedOperands(sums=sums)),
        (w, other, RequestedOperands(transpose=True)),
    ):
        family = quantize.family_of(one_spec, one_spec)
        plan = (
            None
            if family is None or family.plan_launch is None
            else family.plan_launch(one, one_spec, one_spec, wanted)
        )
        assert plan is not None
        plans.append(plan)
    shared, key = combine_launches(*plans), None if known is None else (known, known)
    assert shared is not None
    launches = list(shared.launches((key, key)))
    assert len(launches) == len(plans[0].launches(key))
    return launches


def run(launches: list[LaunchSpec]) -> None:
    for one in launches:
        one.compiled(torch.device("meta"))


def _by_rows_and_blocks() -> list[Case]:
    rows, ratio = QuantSpec(E4M3, (1, None)), QuantSpec(E5M2, (1, None), "fp32")
    runs, squares = QuantSpec(E4M3, (1, 128)), QuantSpec(E4M3, (128, 128))
    run_ratio = QuantSpec(E4M3, (1, 128), "fp32")

    def one(spec: QuantSpec, x: Callable[[], Tensor] = matrix) -> Callable[[], object]:
        return lambda: quantize.quantize(x(), spec)

    def both(spec: QuantSpec, x: Callable[[], Tensor] = matrix) -> Callable[[], object]:
        return lambda: quantize.quantize_both(x(), spec, spec)

    def codes(height: int) -> Callable[[], object]:
        return lambda: quantize.transpose(matrix(height, dtype=torch.float8_e4m3fn))

    return [
        Case(name="rows 4096", launch=one(rows)),
        Case(name="rows 4096 fp32 scale E5M2", launch=one(ratio)),
        Case(name="rows 14336", launch=one(rows, lambda: matrix(columns=14336))),
        Case(name="rows 28672", launch=one(rows, lambda: matrix(columns=28672)), trips=(7,)),
        Case(name="columns", launch=one(rows, lambda: matrix().t())),
        Case(name="rows+columns 4096", launch=both(rows)),
        Case(name="rows+columns ragged tokens", launch=both(rows, lambda: matrix(8175))),
        Case(name="rows+columns 14336", launch=both(rows, lambda: matrix(columns=14336))),
        Case(name="rows+columns of two", launch=lambda: run(two(matrix(), rows, matrix(COLUMNS), rows))),
        Case(name="1x128", launch=one(runs)),
        Case(name="1x128 columns", launch=one(runs, lambda: matrix().t())),
        Case(name="1x128 dual", launch=both(runs)),
        Case(name="1x128 dual fp32 scale", launch=both(run_ratio)),
        Case(name="1x128 dual ragged tokens", launch=both(runs, lambda: matrix(8175))),
        Case(name="1x128 dual float32", launch=both(runs, lambda: matrix(dtype=FLOAT32))),
        Case(name="128x128+transpose", launch=both(squares)),
        Case(name="transpose", launch=codes(ROWS)),
        Case(name="transpose ragged tokens", launch=codes(8175)),
    ]


def _optimizers() -> list[Case]:
    """Steps of matrices with each preset, also with rows that end within a block."""
    codes = MomentFormat("int8_mitchell", stochastic=True), MomentFormat("uint8_mitchell4", stochastic=True)
    float32 = optimizing.StepSpecialization(
        rule="adamw",
        clamp=True,
        maximize=False,
        master_format="plain",
        weight=FLOAT32,
        beside=None,
        gradient=FLOAT32,
        moments=(MomentFormat("float32"), MomentFormat("float32")),
    )
    noisy = MomentFormat("bfloat16", stochastic=True)
    exact = replace(
        float32, master_format="remainder", weight=BF16, beside=torch.int16, gradient=BF16, moments=(noisy, noisy)
    )
    weight = {"weight": torch.float8_e4m3fn, "spec": QuantSpec(E4M3), "moments": codes}
    balanced = replace(exact, master_format="residual16", **weight)
    lean = replace(balanced, master_format="residual8", beside=torch.int8, gradient=torch.uint8, stochastic=True)

    def program(form: optimizing.StepSpecialization) -> int:
        """Elements of one program."""
        return form.high * form.wide * 64 if form.twice else PROGRAM

    def launch(form: optimizing.StepSpecialization, skips: bool) -> Callable[[], object]:
        return lambda: optimizing.launch(
            form,
            matrix(ROWS * COLUMNS // program(form), 3, torch.int32),
            matrix(1, optimizing.FIELDS, torch.int64),
            matrix(4 if form.rule == "lion" else 8, 1, FLOAT32),
            matrix(1, 2, torch.int32),
            number(torch.bool) if skips else None,
            number(torch.int64) if skips else None,
        )

    per_program = {
        "wide loads": "a program reads some twenty addresses and numbers once, before its loop",
        "wide stores": "a scale for every 64 bytes, and what the last program writes of the whole",
    }

    def row(name: str, form: optimizing.StepSpecialization, read: float, written: float, **exceptions: str) -> Case:
        moved = round(ROWS * COLUMNS * (read + written))
        rounds = program(form) // 64 // form.blocks
        own = {
            "elements": form.blocks * 64,
            "trips": ((rounds, rounds) if form.twice else rounds,),
            "extra_bytes": moved,
        }
        return Case(
            name=f"optimizer {name}",
            launch=launch(form, name.endswith("skipping")),
            exceptions=per_program | exceptions,
            **own,
        )

    #: Bytes of an element: of both moments in codes, and of a gradient in codes.
    moments, gradient = 2 + 4 / 64, 1 + 2 / 128
    expensive = "random words, a root, a division and codes of nine bytes an element: more than memory takes"
    block_scaled_weights = [
        row(
            f"{form} {name}{'' if even else ' ragged'}",
            replace(whole, spec=spec, even=even),
            *(rest + moments for rest in ((2 + gradient, 2) if whole is lean else (5, 3))),
            instructions=expensive,
        )
        for name, spec in (
            ("128x128", QuantSpec(E4M3, (128, 128))),
            ("32x32", QuantSpec(E4M3, (32, 32), "e8m0")),
            ("1x32", QuantSpec(E4M3, (1, 32), "e8m0")),
        )
        for form, whole, even in (("lean", lean, True), ("balanced", balanced, True), ("lean", lean, False))
        if even or spec.block[0] != 1
    ]
    return [
        row("float32", float32, 16, 12),
        row("exact", exact, 10, 8),
        row("balanced", balanced, 5 + moments, 3 + moments, instructions=expensive),
        row("lean", lean, 2 + gradient + moments, 2 + moments, instructions=expensive),
        row("lean clipped", replace(lean, factored=True), 2 + gradient + moments, 2 + moments, instructions=expensive),
        row(
            "lean of bf16",
            replace(lean, weight=BF16, spec=None),
            3 + gradient + moments,
            3 + moments,
            instructions=expensive,
        ),
        row(
            "lion lean",
            replace(lean, rule="lion", clamp=False, moments=codes[:1]),
            3 + gradient,
            3,
            instructions=expensive,
        ),
        row("lean skipping", lean, 2 + gradient + moments, 2 + moments, instructions=expensive),
        row("float32 ragged", replace(float32, even=False), 16, 12),
        row("lean ragged", replace(lean, even=False), 2 + gradient + moments, 2 + moments, instructions=expensive),
        *block_scaled_weights,
    ]


def _training_steps() -> list[Case]:
    delayed, most_recent = recipes.delayed(), recipes.delayed(power_of_two=False, algorithm="most_recent")
    history = "each value of a history moves by one position, so that accesses cannot be aligned"
    one = {"wide loads": "it reads two numbers", "wide stores": "it writes one number"}
    pairs = {"wide loads": "of each pair of equal angles in the tables only one is read"}

    def rolled(recipe: Recipe) -> Callable[[], object]:
        assert recipe.delayed is not None
        window = torch.empty(3, recipe.delayed.length, device="meta").t()
        addresses, specs = matrix(224, 2, torch.int64), recipe.history_specs
        return lambda: roll_gpu.launch(addresses, window, recipe.delayed, specs)

    def transposed(interleaved: bool, back: bool, fraction: float = 1.0, keys: bool = True) -> Callable[[], object]:
        q, k = (torch.empty(2, 4096, heads, 128, dtype=BF16, device="meta") for heads in (32, 8))
        angles = torch.empty(4096, 1, int(128 * fraction), device="meta")
        return lambda: norm.turn(q, k if keys else None, angles, angles, interleaved, back)

    def parts(interleaved: bool, back: bool) -> Callable[[], object]:
        x = [torch.empty(2, 4096, heads, 128, dtype=BF16, device="meta") for heads in ((32, 8, 8) if back else (48,))]
        angles = torch.empty(4096, 1, 128, device="meta")
        return lambda: norm.turn_parts(x, 32, angles, angles, interleaved)

    def losses(vocabulary: int, gradient: bool = True, **rule: float) -> Callable[[], object]:
        logits = cross_entropy.padded_rows(2048, vocabulary, BF16, torch.device("meta"))
        targets = torch.empty(2048, dtype=torch.int64, device="meta")
        options = (rule.get("smoothing", 0.0), rule.get("z_loss", 0.0), rule.get("cap", 0.0))
        return lambda: cross_entropy.rows(logits, targets, None, gradient, (-100, *options), padded=True)

    # The rows in flight, 800 of 256 KB, do not fit into the L2 cache: the gradient reads them again.
    read_twice = {"logits": 3}
    return [
        Case(name="roll", launch=rolled(delayed), exceptions={"wide loads": history, "wide stores": history}),
        Case(name="roll fp32", launch=rolled(most_recent), exceptions={"wide loads": history, "wide stores": history}),
        Case(name="note", launch=lambda: roll_gpu.record_amax(matrix(4, 3, FLOAT32), 1, number()), exceptions=one),
        Case(name="rope", launch=transposed(False, False), elements=2048),
        Case(name="rope back", launch=transposed(False, True), elements=2048),
        Case(name="rope interleaved", launch=transposed(True, False), elements=2048, exceptions=pairs),
        Case(name="rope half", launch=transposed(False, False, 0.5), elements=4096),
        Case(name="rope queries", launch=transposed(False, False, keys=False), elements=2048),
        Case(name="rope of a projection", launch=parts(False, False), elements=2048),
        Case(name="rope of a projection back", launch=parts(False, True), elements=2048),
        Case(name="rope of a projection interleaved", launch=parts(True, False), elements=2048, exceptions=pairs),
        Case(name="cross entropy", launch=losses(131072), trips=(32,), times=read_twice),
        Case(name="cross entropy without gradient", launch=losses(131072, False), trips=(32,), exceptions=ONE_NUMBER),
        Case(name="cross entropy ragged", launch=losses(50257), trips=(13,), times=read_twice),
        Case(
            name="cross entropy with all terms",
            launch=losses(131072, smoothing=0.1, z_loss=1e-4, cap=30.0),
            trips=(32,),
            times=read_twice,
        ),
    ]


def _fused() -> list[Case]:
    rows, runs, micro = QuantSpec(E4M3, (1, None)), QuantSpec(E4M3, (1, 128)), QuantSpec(E4M3, (1, 32), "e8m0")
    order = {"wide stores": "8 codes a thread, so that a row is summed in one order whatever is written"}
    bytewise = {**order, "shared bytes": "the scales of a row's blocks, bytes, change places"}
    sums = {"wide stores": "it writes a sum a column"}
    few = {"wide stores": "of a row's 16 elements a thread its statistic and the amax are a third of the stores"}

    def launch_of(
        kind: str, spec: QuantSpec | None = None, one_pass: bool = False, output: bool = True, columns: int = COLUMNS
    ) -> Callable[[], object]:
        gamma = None if kind == "L2" else torch.empty(columns, device="meta")
        beta = torch.empty(columns, device="meta") if kind == "LayerNorm" else None
        factor = number() if one_pass else None
        return lambda: norm.normalized(matrix(columns=columns), gamma, beta, kind, 1e-5, spec, factor, output)

    def back(kind: str, columns: int = COLUMNS) -> Callable[[], object]:
        gamma, statistics = torch.empty(columns, device="meta"), torch.empty(ROWS, device="meta")
        beta = gamma if kind == "LayerNorm" else None
        x = matrix(columns=columns)
        return lambda: norm.backward(x, x, gamma, beta, statistics, statistics, kind)

    def activated(name: str, spec: QuantSpec | None = None, **how: bool) -> Callable[[], object]:
        gated = activation.KINDS[name].gated
        x, options = [matrix(columns=14336 * (1 + gated))], (7.0, 1.702) if name == "clamped_swiglu" else ()
        factor = number() if how.get("one_pass") else None
        rows_wanted, transposed = how.get("rows", True), how.get("transposed", False)
        output = how.get("output", False)
        return lambda: activation.activated(name, options, x, spec, factor, output, rows_wanted, transposed)

    def deactivated(name: str) -> Callable[[], object]:
        gated = activation.KINDS[name].gated
        x = [matrix(columns=14336 * (1 + gated))]
        options = (7.0, 1.702) if name == "clamped_swiglu" else ()
        return lambda: activation.backward(name, options, matrix(columns=14336), x)

    return [
        Case(
            name="bias gradient",
            launch=lambda: cross_entropy.column_sum(matrix(), BF16),
            trips=(8,),
            exceptions=sums,
        ),
        Case(
            name="sums of partial sums",
            launch=lambda: cross_entropy.sum_rows(matrix(264, dtype=FLOAT32)),
            trips=(9,),
            exceptions=sums,
        ),
        Case(name="RMSNorm", trips=ROUNDS, launch=launch_of("RMSNorm")),
        Case(name="RMSNorm+amax", trips=ROUNDS, launch=launch_of("RMSNorm", POWER), exceptions=few),
        Case(
            name="RMSNorm+cast+amax delayed",
            trips=ROUNDS,
            launch=launch_of("RMSNorm", POWER, True, False),
            exceptions=order,
        ),
        Case(
            name="LayerNorm+cast+amax delayed",
            trips=ROUNDS,
            launch=launch_of("LayerNorm", POWER, True, False),
            exceptions=order,
        ),
        Case(name="RMSNorm+rows", trips=ROUNDS, launch=launch_of("RMSNorm", rows, output=False), exceptions=order),
        Case(
            name="RMSNorm+rows 16384",
            trips=ROUNDS,
            launch=launch_of("RMSNorm", rows, False, False, 16384),
            exceptions=order,
        ),
        Case(name="RMSNorm+1x128", trips=ROUNDS, launch=launch_of("RMSNorm", runs, output=False), exceptions=order),
        Case(name="RMSNorm+1x32", trips=ROUNDS, launch=launch_of("RMSNorm", micro, output=False), exceptions=bytewise),
        Case(
            name="LayerNorm+cast 32768",
            trips=(*ROUNDS, 8),
            launch=launch_of("LayerNorm", POWER, True, False, 32768),
            exceptions=order,
        ),
        Case(name="RMSNorm back", trips=BACK, launch=back("RMSNorm")),
        Case(name="LayerNorm back", trips=BACK, trips_by_kernel={"column_sums": (9,)}, launch=back("LayerNorm")),
        Case(name="LayerNorm back 16384", trips=(*BACK, (1, 4)), launch=back("LayerNorm", 16384)),
        Case(name="swiglu", launch=activated("swiglu", output=True)),
        Case(name="swiglu+amax", launch=activated("swiglu", POWER)),
        Case(name="swiglu+cast+transpose", launch=activated("swiglu", POWER, one_pass=True, transposed=True)),
        Case(name="swiglu+cast", launch=activated("swiglu", POWER, one_pass=True)),
        Case(name="swiglu+transpose", launch=activated("swiglu", POWER, one_pass=True, rows=False, transposed=True)),
        Case(name="gelu+cast", launch=activated("gelu", POWER, one_pass=True)),
        Case(name="gelu_exact+cast", launch=activated("gelu_exact", POWER, one_pass=True)),
        Case(name="clamped_swiglu+cast", launch=activated("clamped_swiglu", POWER, one_pass=True)),
        Case(name="swiglu+rows", launch=activated("swiglu", rows)),
        Case(name="swiglu+1x128", launch=activated("swiglu", runs)),
        Case(
            name="swiglu+1x32",
            launch=activated("swiglu", micro),
            exceptions={"shared bytes": bytewise["shared bytes"]},
        ),
        Case(name="swiglu back", launch=deactivated("swiglu")),
        Case(name="clamped_swiglu back", launch=deactivated("clamped_swiglu")),
        Case(name="gelu back", launch=deactivated("gelu")),
        Case(name="geglu_exact back", launch=deactivated("geglu_exact")),
    ]


def _in_narrow_blocks() -> list[Case]:
    mx, square = QuantSpec(E4M3, (1, 32), "e8m0"), QuantSpec(E4M3, (32, 32), "e8m0")
    count = torch.empty(1, dtype=torch.int64, device="meta")
    halves = {"sectors loaded": "a thread's next load takes the other half of its sector from the first-level cache"}
    random = {"instructions": "ten rounds of two-word Philox for four elements: 5 an element"}

    def nv(down: bool, rounding: str = "nearest", hadamard: bool = False, block: int = 1) -> Callable[[], object]:
        spec = QuantSpec(E2M1, (block, 16), "two_level", rounding, hadamard)  # type: ignore[arg-type]
        return lambda: block_scaled.by_two_levels(matrix(), spec, number(), (1, 3, count), down)

    def nv_both(rounding: str) -> Callable[[], object]:
        kinds = [QuantSpec(E2M1, (1, 16), "two_level", rounding, hadamard) for hadamard in (False, True)]  # type: ignore[arg-type]

        def launch() -> None:
            plan = block_scaled.plan_launch_two_level(matrix(), kinds[0], kinds[1], RequestedOperands())
            assert plan is not None
            # The first launch, which measures, belongs to a row of `_emulated`.
            run(list(plan.launches(((1, 2, 3), (True, True)))[1:]))

        return launch

    return [
        Case(name="mxfp8 rows", launch=lambda: block_scaled.by_exponents(matrix(), mx, None)),
        Case(name="mxfp8 columns", launch=lambda: block_scaled.by_exponents(matrix(), None, mx)),
        Case(
            name="mxfp8 both",
            launch=lambda: block_scaled.by_exponents(matrix(), mx, mx),
            exceptions=SCALE_BYTES,
        ),
        Case(
            name="mxfp8 both squares",
            launch=lambda: block_scaled.by_exponents(matrix(), square, square),
            exceptions=SCALE_BYTES,
        ),
        Case(name="mxfp8 rows squares", launch=lambda: block_scaled.by_exponents(matrix(), square, None)),
        Case(
            name="mxfp8 both ragged",
            launch=lambda: block_scaled.by_exponents(matrix(8191, 4095), mx, mx),
            exceptions={
                **SCALE_BYTES,
                "overlap": "two bytes a load, masked, take 194 registers; sides of models are even",
            },
        ),
        Case(
            name="nvfp4 amax along",
            launch=lambda: block_scaled.rotated(matrix(), False),
            exceptions={**ONE_NUMBER, **halves},
        ),
        Case(name="nvfp4 amax down", launch=lambda: block_scaled.rotated(matrix(), True), exceptions=ONE_NUMBER),
        Case(name="nvfp4 along", launch=nv(False), exceptions=halves),
        Case(name="nvfp4 along squares", launch=nv(False, block=16), exceptions=halves),
        Case(name="nvfp4 along random", launch=nv(False, "stochastic"), exceptions={**halves, **random}),
        Case(name="nvfp4 down", launch=nv(True)),
        Case(name="nvfp4 down squares", launch=nv(True, block=16)),
        Case(name="nvfp4 down rotated", launch=nv(True, hadamard=True)),
        Case(
            name="nvfp4 down rotated random",
            launch=nv(True, "stochastic", True),
            exceptions={
                "wide loads": "the random words leave registers for four elements of each of sixteen rows",
                **random,
            },
        ),
        Case(
            name="nvfp4 both",
            since=100,
            launch=nv_both("nearest"),
            times={"x": 2},
            exceptions={
                **halves,
                "instructions": "of its two ways the longer is counted, down columns; along rows allows 136 %",
            },
        ),
        Case(
            name="nvfp4 both random",
            since=100,
            launch=nv_both("stochastic"),
            times={"x": 2},
            exceptions={
                **halves,
                "wide loads": "the random words leave registers for four elements of each of sixteen rows",
                **random,
            },
        ),
    ]


def _decoded() -> list[Case]:
    def operand(spec: QuantSpec) -> Quantized:
        four, narrow = spec.format.bits == 4, spec.scale != "power_of_two"
        width = COLUMNS // 2 if four else COLUMNS
        data = torch.empty(ROWS, width, dtype=torch.uint8 if four else torch.float8_e4m3fn, device="meta")
        blocks = spec.blocks(ROWS, COLUMNS)
        scale = torch.empty(blocks, device="meta")
        if narrow:
            scale = torch.empty(blocks[0] * blocks[1], dtype=torch.uint8, device="meta")
        factor = torch.empty(1, 1, device="meta") if spec.two_level else None
        return Quantized(data, scale, spec, (ROWS, COLUMNS), tensor_factor=factor, swizzled=narrow)

    specs = {
        "tensor": QuantSpec(E4M3),
        "row": QuantSpec(E4M3, (1, None)),
        "1x128": QuantSpec(E4M3, (1, 128)),
        "128x128": QuantSpec(E4M3, (128, 128)),
        "mxfp8": QuantSpec(E4M3, (1, 32), "e8m0"),
        "nvfp4": QuantSpec(E2M1, (1, 16), "two_level"),
    }

    def launch(spec: QuantSpec) -> Callable[[], object]:
        return lambda: decode.decode(operand(spec))

    lone = {"wide loads": "each row has a scale of four bytes for 128 of codes"}
    narrow = {"row": lone, "1x128": lone}
    return [
        Case(name=f"decode {name}", launch=launch(spec), exceptions=narrow.get(name, {}))
        for name, spec in specs.items()
    ]


def _emulated() -> list[Case]:
    """Emulation of GEMMs that a GPU does not have."""
    mx, square = QuantSpec(E4M3, (1, 32), "e8m0"), QuantSpec(E4M3, (32, 32), "e8m0")
    line, four_square = QuantSpec(E2M1, (1, 16), "two_level"), QuantSpec(E2M1, (16, 16), "two_level")
    rotated = QuantSpec(E2M1, (1, 16), "two_level", hadamard=True)
    random = QuantSpec(E2M1, (1, 16), "two_level", "stochastic")
    random_rotated = QuantSpec(E2M1, (1, 16), "two_level", "stochastic", True)

    def values(spec: QuantSpec, keeps: bool, x: Callable[[], Tensor] = matrix) -> Callable[[], object]:
        return lambda: emulated_blocks.values(x(), spec, keeps)

    def two_levels(spec: QuantSpec, other: QuantSpec, keeps: bool, height: int = ROWS) -> Callable[[], object]:
        counts = torch.empty(3, dtype=torch.int64, device="meta")
        noise = emulation.StochasticRounding(1, 2, 3, counts) if spec.rounding == "stochastic" else None
        return lambda: emulation.two_level_values(matrix(height), spec, other, keeps, noise)

    def saved(spec: QuantSpec) -> Callable[[], object]:
        height = spec.block[1]
        assert height is not None
        codes = matrix(dtype=torch.float8_e4m3fn)
        return lambda: emulated_blocks.saved_values(codes, matrix(ROWS // height, dtype=torch.uint8), spec)

    def saved_two_levels() -> object:
        codes = torch.empty(ROWS // 16, 2, COLUMNS, dtype=torch.int32, device="meta")
        return emulation.cached_two_level_values(codes, matrix(ROWS // 16 + 1, dtype=torch.uint8))

    def product() -> Tensor:
        return matrix(dtype=FLOAT32)

    def folded(bias: bool, scales: bool) -> Callable[[], object]:
        row_scale, column_scale = (torch.empty(n, device="meta") if scales else None for n in (ROWS, COLUMNS))
        added = torch.empty(COLUMNS, dtype=BF16, device="meta") if bias else None
        return lambda: emulation.fold(product(), BF16, added, row_scale, column_scale)

    few = "the random words leave registers for two elements of each of sixteen rows"
    drawn = {"wide loads": few, "wide stores": few}
    four = "both results leave registers for four elements of each of sixteen rows"
    both = {"wide loads": four, "wide stores": four}
    # On sm_89 the cast goes through float16, which has every value of E4M3.
    exact = {"rounding": "what is cast to FP8 is one of its values already"}
    bytewise = {
        **exact,
        "shared bytes": "a scale for 128 rows of a column is a byte",
        "overlap": "not fixed: 181 registers",
    }
    halves = dict.fromkeys(("sectors loaded", "sectors stored"), "not fixed: a thread moves 16 bytes of 32")
    both = {**both, **halves}
    drawn = {**drawn, **halves, "instructions": "ten rounds of two-word Philox for four elements"}
    drawn["overlap"] = "136 registers on sm_100, whose NVFP4 GEMMs are native: none of its recipes launches this"
    return [
        Case(name="values 1x32", launch=values(mx, False)),
        Case(name="values 1x32 kept", launch=values(mx, True), exceptions=exact),
        Case(
            name="values 1x32 ragged tokens",
            launch=values(mx, True, lambda: matrix(8175)),
            exceptions=exact,
        ),
        Case(name="values 32x32", launch=values(square, False)),
        Case(
            name="values E2M3 1x32 kept",
            launch=values(QuantSpec(E2M3, (1, 32), "e8m0"), True),
            exceptions=exact,
        ),
        Case(name="values 1x128 kept", launch=values(QuantSpec(E4M3, (1, 128)), True), exceptions=bytewise),
        Case(name="values 128x128", launch=values(QuantSpec(E4M3, (128, 128)), False)),
        Case(name="kept values 1x32", launch=saved(mx)),
        Case(name="kept values 1x128", launch=saved(QuantSpec(E4M3, (1, 128)))),
        Case(name="values 1x16 amaxes", launch=two_levels(line, rotated, False), exceptions=both),
        Case(name="values 1x16 kept", launch=two_levels(line, rotated, True), exceptions=halves),
        Case(name="values 16x16", launch=two_levels(four_square, four_square, False), exceptions=halves),
        Case(name="values 1x16 random", launch=two_levels(random, random_rotated, False), exceptions=drawn),
        Case(
            name="values 1x16 kept ragged tokens",
            launch=two_levels(line, rotated, True, 8176),
            exceptions=halves,
        ),
        Case(name="kept values 1x16", launch=saved_two_levels),
        Case(name="fold", launch=folded(False, True)),
        Case(name="fold with a bias", launch=folded(True, False)),
        Case(name="round two products", launch=lambda: emulation.round_two(product(), product(), BF16)),
    ]


def _groups() -> list[Case]:
    """Products of 64 groups of rows, each with its own matrix."""
    experts, features = 64, 2048

    def ends() -> Tensor:
        return torch.empty(experts, dtype=torch.int32, device="meta")

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=FLOAT32, device="meta")

    def rows(dtype: torch.dtype, biased: bool = False, scaled: bool = False) -> Callable[[], object]:
        bias = torch.empty(experts, features, dtype=BF16, device="meta") if biased else None
        row_scale, column_scale = (numbers(ROWS), numbers(experts * features)) if scaled else (None, None)
        w = matrix(experts * features)
        return lambda: emulation.multiply(matrix(), w, ends(), features, dtype, bias, row_scale, column_scale)

    def sums(dtype: torch.dtype, scaled: bool = False) -> Callable[[], object]:
        scales = (numbers(experts, COLUMNS), numbers(experts, features)) if scaled else (None, None)
        x, w = (
            torch.empty(COLUMNS, ROWS, dtype=BF16, device="meta"),
            torch.empty(features, ROWS, dtype=BF16, device="meta"),
        )
        return lambda: emulation.add_up(x, w, ends(), 128, dtype, *scales)

    deep, tall = COLUMNS // 64, ROWS // experts // 64
    one = ROWS * COLUMNS * features
    byte = {"shared bytes": "one byte a thread on sm_100, of no tile"}
    few = {
        **byte,
        "instructions": "128 rows of a group are two rounds of its sums, in addition to the prologue and epilogue",
    }
    rows_case: dict[str, Any] = {"trips": (experts, deep), "products": {"multiply_groups": one}, "exceptions": byte}
    sums_case: dict[str, Any] = {"trips": (tall,), "products": {"sum_groups": one}, "exceptions": few}
    return [
        Case(name="groups' rows", launch=rows(BF16, True, True), **rows_case),
        Case(name="groups' rows in float32", launch=rows(FLOAT32), **rows_case),
        Case(name="groups' sums", launch=sums(BF16, True), **sums_case),
        Case(name="groups' sums in float32", launch=sums(FLOAT32), **sums_case),
    ]


#: Choices per token of a mixture of experts, and tokens whose choices are ROWS rows.
CHOICES = 2
TOKENS = ROWS // CHOICES


def _experts() -> list[Case]:
    """Rows of eight groups, quantized and multiplied as codes."""
    experts, features = 8, 2048
    nvfp4 = recipes.get("nvfp4")

    def offsets() -> GroupOffsets:
        return GroupOffsets(torch.empty(experts, dtype=torch.int32, device="meta"), ROWS)

    def codes(spec: QuantSpec | None, other: QuantSpec | None) -> Callable[[], object]:
        return lambda: grouped_quantize.quantize(matrix(), spec, other, offsets())

    def narrow_codes(spec: QuantSpec | None, other: QuantSpec | None, *noise: Any) -> Callable[[], object]:
        return lambda: grouped_block_scaled.quantize(matrix(), spec, other, offsets(), None, *noise)

    def weights(spec: QuantSpec) -> Callable[[], object]:
        weight = torch.empty(experts, features, COLUMNS, dtype=BF16, device="meta")
        return lambda: grouped_quantize.quantize_weights(weight, spec, spec)

    def values(spec: QuantSpec | None, other: QuantSpec | None, **how: Any) -> Callable[[], object]:
        assert spec is not None and other is not None
        return lambda: grouped_values.values(matrix(), spec, other, offsets(), **how)

    def saved() -> object:
        shapes, dtypes = grouped_values.saved_shapes(nvfp4.wgrad.b, ROWS, experts, COLUMNS)  # type: ignore[arg-type]
        tensors = (torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, dtypes, strict=True))
        return grouped_values.saved_values(*tensors, nvfp4.wgrad.b)  # type: ignore[arg-type, misc]

    def operand(spec: QuantSpec, columns: int, for_wgrad: bool) -> GroupedOperand:
        places = offsets().slots(128 if spec.block[1] else 16) if for_wgrad else offsets().slots(1)
        places.ends = torch.empty(experts, dtype=torch.int32, device="meta")
        shape = (columns, places.count) if for_wgrad else (ROWS, columns)
        blocks = spec.block[1]
        scales = (experts, columns) if for_wgrad else (ROWS, 1)
        if blocks is not None:
            scales = (places.count // blocks, columns) if for_wgrad else (ROWS, columns // blocks)
        data = torch.empty(shape, dtype=FLOAT8[spec.format.name], device="meta")
        k = places.count if for_wgrad else columns
        return GroupedOperand(data, torch.empty(scales, device="meta"), None, spec, for_wgrad, places, k)

    def products(spec: QuantSpec, other: QuantSpec, fast: bool = False) -> Callable[[], object]:
        square = other.block[1] is not None
        rows = experts * features
        scale = torch.empty(rows // 128 if square else rows, COLUMNS // 128 if square else 1, device="meta")
        w = Quantized(matrix(rows, COLUMNS, FLOAT8[other.format.name]), scale, other, (rows, COLUMNS))
        return lambda: grouped_gemm.matmul(operand(spec, COLUMNS, False), w, offsets(), features, BF16, None, fast)

    def sums(spec: QuantSpec, other: QuantSpec) -> Callable[[], object]:
        return lambda: grouped_gemm.sums(operand(spec, features, True), operand(other, COLUMNS, True), BF16)

    def choices() -> Tensor:
        return torch.empty(ROWS, dtype=torch.int64, device="meta")

    def router() -> Tensor:
        return torch.empty(ROWS, dtype=BF16, device="meta")

    def gathered(x: Tensor, weighted: bool) -> Callable[[], object]:
        return lambda: permutation.gather(x, choices(), CHOICES, router() if weighted else None)

    row, gradient, line = QuantSpec(E4M3, (1, None)), QuantSpec(E5M2, (1, None)), QuantSpec(E4M3, (1, 128))
    mxfp8, square = QuantSpec(E4M3, (1, 32), "e8m0"), QuantSpec(E4M3, (128, 128))
    multiply_adds = ROWS * COLUMNS * features
    noise = GroupedNoise(1, range(experts), range(experts))
    single = dict.fromkeys(("wide loads", "wide stores"), "ends of groups and scales of rows are single numbers")
    halves = dict.fromkeys(("sectors loaded", "sectors stored"), "not fixed: a thread moves 16 bytes of 32")
    found = {"instructions": "a program finds its group, and masks its last rows"}
    byte = {"shared bytes": "one byte a thread on sm_100, of no tile", **single, **found}
    byte |= {"overlap": "a tile of sums takes a multiprocessor's registers; tensor cores run beside loads"}
    drawn = {"instructions": "ten rounds of two-word Philox for four elements", **halves, **single}
    searched: dict[str, Any] = {"trips": (experts,), "exceptions": {**single, **found}}
    tiles = (ROWS // 128 + experts) * (features // 256) // 132
    multiplied: dict[str, Any] = {
        "trips": (tiles, (experts, COLUMNS // 128)),
        "products": {"multiply_codes": multiply_adds},
        "exceptions": byte,
        "compiles_from": grouped_gemm.FIRST,
    }
    summed: dict[str, Any] = {
        "trips": (experts * (features // 128) * (COLUMNS // 256) // 132, ROWS // experts // 128),
        "products": {"sum_codes": multiply_adds},
        "exceptions": byte,
        "compiles_from": grouped_gemm.FIRST,
    }
    narrow: dict[str, Any] = {"trips": (experts,), "since": 100}
    shared = {**SCALE_BYTES, **single, **found}
    return [
        Case(name="experts, a scale per group", launch=codes(POWER, POWER), **searched),
        Case(name="experts, a scale per row", launch=codes(row, row), **searched),
        Case(name="experts, transposes alone", launch=codes(None, row), **searched),
        Case(name="experts, blocks 1x128", launch=codes(line, line), **searched),
        Case(name="experts, weights", launch=weights(POWER), **searched),
        Case(name="experts, weights 128x128", launch=weights(square)),
        Case(name="experts, values 1x32", launch=values(mxfp8, mxfp8), **searched),
        Case(name="experts, values 1x32 saved", launch=values(mxfp8, mxfp8, saves_codes=True), **searched),
        Case(
            name="experts, values 1x16 saved",
            launch=values(nvfp4.fprop.a, nvfp4.wgrad.b, saves_codes=True),
            trips=(experts,),
            exceptions={**single, **halves, **found},
        ),
        Case(
            name="experts, values 1x16 stochastic",
            launch=values(nvfp4.dgrad.a, nvfp4.wgrad.a, noise=noise, other_noise=noise),
            trips=(experts,),
            exceptions=drawn,
        ),
        Case(name="experts, saved values 1x16", launch=saved, exceptions=single),
        Case(
            name="experts, mxfp8",
            launch=narrow_codes(mxfp8, mxfp8),
            **narrow,
            exceptions={**shared, "overlap": "sm_120 has too few registers, and no GEMM that would read it"},
        ),
        Case(
            name="experts, nvfp4",
            launch=narrow_codes(nvfp4.fprop.a, nvfp4.wgrad.b),
            **narrow,
            exceptions={**shared, **halves},
        ),
        Case(
            name="experts, nvfp4 stochastic",
            launch=narrow_codes(nvfp4.dgrad.a, nvfp4.wgrad.a, noise, noise),
            **narrow,
            exceptions={**shared, **drawn},
        ),
        Case(name="experts, products of codes", launch=products(row, row, True), **multiplied),
        Case(name="experts, products of E5M2 codes", launch=products(gradient, row), **multiplied),
        Case(
            name="experts, products in blocks",
            launch=products(line, square),
            **{**multiplied, "trips": (2 * tiles, (experts, COLUMNS // 128))},
        ),
        Case(name="experts, sums of codes", launch=sums(gradient, row), **summed),
        Case(
            name="experts, sums in blocks",
            launch=sums(line, line),
            **{**summed, "exceptions": {**byte, "local memory": "32 bytes a thread on sm_90"}},
        ),
        Case(name="experts, gathered", launch=gathered(matrix(TOKENS), False), times={"x": CHOICES}, exceptions=single),
        Case(
            name="experts, gathered codes",
            launch=gathered(matrix(TOKENS, COLUMNS, torch.uint8), False),
            times={"x": CHOICES},
            exceptions=single,
        ),
        Case(
            name="experts, gathered gradients",
            launch=gathered(matrix(TOKENS), True),
            times={"x": CHOICES},
            exceptions=single,
        ),
        Case(
            name="experts, combined",
            launch=lambda: permutation.combine(matrix(), choices(), CHOICES, router()),
            trips=(CHOICES - 1,),
            exceptions=single,
        ),
        Case(
            name="experts, dots",
            launch=lambda: permutation.dots(matrix(TOKENS), matrix(), choices(), CHOICES),
            elements=4 * 512,
            trips=(COLUMNS // 512,),
            times={"x": CHOICES},
            exceptions={**single, "sectors stored": "it writes one number for each choice"},
        ),
        Case(
            name="experts, order",
            # No expert reaches this capacity, which int32 does not hold.
            launch=lambda: permutation.order(choices(), experts, 16, 2**40, ROWS + experts * 15),
            elements=128,
            trips_by_kernel={"scan_counts": (1,), "expert_ends": (1,)},
            exceptions={
                **single,
                **dict.fromkeys(
                    ("sectors loaded", "sectors stored", "instructions", "overlap"),
                    "it sorts integers: a part in 500 of the bytes of the rows",
                ),
            },
        ),
        Case(
            name="experts, swizzled scales",
            launch=lambda: grouped_block_scaled.swizzle_groups(matrix(ROWS, COLUMNS // 32, torch.uint8), offsets()),
            elements=512,
            trips=(experts,),
            since=100,
            exceptions={
                **single,
                **dict.fromkeys(("sectors loaded", "sectors stored"), "not fixed: four bytes a thread"),
            },
        ),
        Case(
            name="experts, finished",
            launch=lambda: grouped_quantize.finish_groups(
                torch.empty(experts, features, COLUMNS, dtype=BF16, device="meta"), offsets().ends
            ),
            exceptions=single,
        ),
        Case(
            name="experts, finished rows",
            launch=lambda: grouped_quantize.finish_rows(matrix(), matrix(experts), offsets().ends),
            trips=(experts,),
            exceptions={**single, **found},
        ),
    ]


#: Attention that only `make slow` compiles: name, recipe, whether backward, and other options.
RARE: tuple[tuple[str, str, bool, dict[str, Any]], ...] = (
    ("by heads, 64 features", "tensorwise", False, {"features": 64}),
    ("by heads, 64 features, back", "tensorwise", True, {"features": 64}),
    # These compile to the same code: how many heads share keys is an argument at run time.
    ("by heads with keys of their own", "tensorwise", False, {"shared": 1}),
    ("by heads with keys of their own, back", "tensorwise", True, {"shared": 1}),
    ("by heads that see all", "tensorwise", False, {"limited": False}),
    ("by heads that see all, back", "tensorwise", True, {"limited": False}),
    # The backward kernels take no sinks.
    ("by heads with sinks", "tensorwise", False, {"sinks": True}),
    ("by rows", "rowwise", False, {}),
    ("by rows back", "rowwise", True, {}),
    ("1x128", "blockwise", False, {}),
    ("1x128 back", "blockwise", True, {}),
    ("1x32 and a mask", "mxfp8", False, {"masked": True}),
    ("1x32 back", "mxfp8", True, {}),
)


def _attention() -> list[Case]:
    batch, heads, tokens = 2, 32, 4096

    def operand(number: int, rows: int, k: int, spec: QuantSpec) -> attention.Operand:
        data = torch.empty(batch, number, rows, k, dtype=FLOAT8[spec.format.name], device="meta")
        dtype = torch.uint8 if spec.scale == "e8m0" else FLOAT32
        return data, torch.empty(batch, number, *spec.blocks(rows, k), dtype=dtype, device="meta")

    def launch(
        name: str, back: bool, features: int = 128, shared: int = 4,
        masked: bool = False, limited: bool = True, sinks: bool = False,
    ) -> Callable[[], object]:  # fmt: skip
        spec, groups = recipes.get(name, attention=True).attention, heads // shared
        assert spec is not None
        one, other = spec.input, spec.grad_output
        sides = [(heads, tokens, features), (groups, tokens, features)]
        (q, k), v = (operand(*side, one) for side in sides), operand(*sides[1], one)
        numbers = {} if one.transposable else {"qt": heads, "kt": groups, "vt": groups}
        transposed = {name: operand(number, features, tokens, one) for name, number in numbers.items()}
        do = operand(*sides[0], other) if back else None
        dot = operand(heads, features, tokens, other) if back and not other.transposable else None
        operands = attention.AttentionOperands(q, k, v, do, dot=dot, **transposed)
        runs = torch.empty(2, tokens, dtype=torch.int32, device="meta") if limited and not masked else None
        hidden = torch.empty(batch, 1, tokens, tokens, dtype=torch.bool, device="meta") if masked else None
        logits = torch.empty(heads, dtype=FLOAT32, device="meta") if sinks else None
        if not back:
            return lambda: attention.forward(operands, runs, hidden, logits, spec, 0.125, BF16)
        total = torch.empty(batch, heads, tokens, dtype=torch.float64, device="meta")
        return lambda: attention.backward(operands, runs, hidden, total, spec, 0.125, BF16)

    few = {
        "local memory": "128 features a head: registers do not suffice up to sm_89, where codes are made of bits",
        "shared bytes": "one byte a thread on sm_100, of no tile",
        "wide loads": "each row of codes has a scale, and each query its run of keys, its sum and its Δ",
        "wide stores": "what only finds Δ writes two numbers a query",
        "overlap": "its sums of products fill the registers of a multiprocessor",
        "instructions": "dK and dV add two sums of 128 features for each tile of 64 queries",
    }
    # Multiply-adds of all queries with all keys, over 128 features.
    one = batch * heads * tokens**2 * 128
    back = {"attention_rows": 4 * one, "attention_rows #2": 3 * one, "attention_columns": 4 * one}
    # Each sweep has a loop over tiles that need no mask, here all of them, and one over the others.
    trips = {
        "attention": lambda constants: ((tokens // constants["BN"], 0) * 2,),
        "attention_rows": lambda constants: ((tokens // constants["BN"], 0, 1), (tokens // constants["BN"], 0)),
        "attention_rows #2": lambda constants: (1, (tokens // constants["BN"], 0)),
        "attention_columns": lambda constants: (4, 1, (tokens // constants["BM"], 0)),
    }
    # Of rows whose loop counts are unknown.
    uncounted = {
        **few,
        "local memory": "of 64 features too where codes are made of bits; of scales of rows on Hopper too",
        "trips": "loop counts are unknown: only registers, memory and accesses are checked",
    }
    return [
        Case(
            name="attention by heads",
            launch=launch("tensorwise", False),
            trips_by_kernel=trips,
            products={"attention": 3 * one},
            exceptions=few,
        ),
        Case(
            name="attention by heads back",
            launch=launch("tensorwise", True),
            trips_by_kernel=trips,
            products=back,
            exceptions={**few, "trips": "before Hopper the sweep for Δ has its loops in another order"},
        ),
        *(
            Case(name=f"attention {title}", launch=launch(recipe, back, **how), exceptions=uncounted, rare=True)
            for title, recipe, back, how in RARE
        ),
    ]


def _scans() -> list[Case]:
    """Scans of 64 heads in 8 groups, with 2048 tokens a sequence."""
    batch, heads, groups = 4, 64, 8

    def launch(
        back: bool,
        length: int = 2048,
        packed: bool = False,
        dim: int = 64,
        size: int = 128,
        dtype: torch.dtype = BF16,
    ) -> Callable[[], object]:
        lead = (1, batch * length) if packed else (batch, length)
        x, dt = (torch.empty(*lead, *end, dtype=dtype, device="meta") for end in ((heads, dim), (heads,)))
        B, C = (torch.empty(*lead, groups, size, dtype=dtype, device="meta") for _ in range(2))
        A, D, bias = (torch.empty(heads, dtype=FLOAT32, device="meta") for _ in range(3))
        cu = torch.empty(batch + 1, dtype=torch.int32, device="meta") if packed else None
        given = (x, dt, A, B, C, D, bias, None, cu, True, "0.0,inf", 0)
        if not back:
            return lambda: ssm.forward_scan(*given)
        g, last = torch.empty_like(x), torch.empty(batch, heads, dim, size, dtype=FLOAT32, device="meta")
        return lambda: ssm.backward_scan(g, last, *given)

    # A program loops over the 8 heads of a group, or over the chunks of a sequence.
    shared, chunks = (groups,), (32,)
    trips = {
        "pass_states": chunks,
        "chunk_scan": shared,
        "chunk_scan_backward_pairs": shared,
        "chunk_scan_backward": shared,
        "chunk_scan_backward_rows": shared,
    }
    scalars = {
        "wide loads": "each token has its step and its sums, and each chunk its last sum",
        "wide stores": "gradients of steps and exponents are a number a token and head",
        "instructions": "steps sum in float64, over a hundredth of a scan's bytes",
        "shared bytes": "one byte a thread on sm_100, of no tile",
    }
    uncounted = {**scalars, "trips": "loop counts are unknown: only registers, memory and accesses are checked"}
    return [
        Case(name="scan", launch=launch(False), trips_by_kernel=trips, exceptions=scalars),
        Case(name="scan back", launch=launch(True), trips_by_kernel=trips, exceptions=scalars),
        Case(name="scan ragged", launch=launch(False, 2030), exceptions=uncounted, rare=True),
        Case(name="scan packed back", launch=launch(True, 2030, True), exceptions=uncounted, rare=True),
        Case(name="scan of wide states", launch=launch(False, size=256), exceptions=uncounted, rare=True),
        Case(name="scan of wide states back", launch=launch(True, size=256), exceptions=uncounted, rare=True),
        Case(name="scan of wide heads", launch=launch(False, dim=128), exceptions=uncounted, rare=True),
        Case(name="scan of wide heads back", launch=launch(True, dim=128), exceptions=uncounted, rare=True),
        Case(
            name="scan float32", launch=launch(False, dim=32, size=32, dtype=FLOAT32), exceptions=uncounted, rare=True
        ),
        Case(
            name="scan float32 back",
            launch=launch(True, dim=32, size=32, dtype=FLOAT32),
            exceptions=uncounted,
            rare=True,
        ),
    ]


def _convolutions() -> list[Case]:
    """Convolutions of x, B and C: 6144 adjacent channels in the output of a projection."""
    batch, inner, states, taps = 4, 4096, 2048, 4

    def launch(back: bool, length: int = 2048, packed: bool = False, dtype: torch.dtype = BF16) -> Callable[[], object]:
        lead, channels = (1, batch * length) if packed else (batch, length), inner + states
        whole = torch.empty(*lead, inner + channels + 64, dtype=dtype, device="meta")
        weight, bias = (torch.empty(channels, *end, dtype=dtype, device="meta") for end in ((taps,), ()))
        cu = torch.empty(batch + 1, dtype=torch.int32, device="meta") if packed else None
        early = torch.empty(batch, taps - 1, channels, dtype=dtype, device="meta") if packed else None
        given = (whole[..., inner : inner + channels], weight, bias, early, cu, "silu")
        if not back:
            return lambda: ssm.forward(*given)
        g = torch.empty(*lead, channels, dtype=dtype, device="meta")
        return lambda: ssm.backward(g, *given)

    expensive = {"instructions": "each of four taps converts, multiplies and adds every element"}
    return [
        Case(name="convolution", launch=launch(False), exceptions=expensive),
        Case(name="convolution back", launch=launch(True), exceptions=expensive),
        Case(name="convolution packed", launch=launch(False, 2030, True), exceptions=expensive, rare=True),
        Case(name="convolution packed back", launch=launch(True, 2030, True), exceptions=expensive, rare=True),
        Case(name="convolution float32 back", launch=launch(True, dtype=FLOAT32), rare=True),
    ]


#: Helper kernels first: a launch belongs to the first row that makes it.
CASES: list[Case] = [
    *_per_tensor(),
    *_by_rows_and_blocks(),
    *_fused(),
    *_in_narrow_blocks(),
    *_decoded(),
    *_emulated(),
    *_groups(),
    *_experts(),
    *_training_steps(),
    *_optimizers(),
    *_attention(),
    *_scans(),
    *_convolutions(),
]
