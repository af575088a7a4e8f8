"""Example calls on meta tensors, by family. Their recorded launches define which kernels the C library has.

Nothing is executed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from quaver.recipes.formats import E2M1, E4M3, E5M2, Format
from quaver.recipes.spec import Delayed, QuantSpec
from quaver.torch.backends.gpu import (
    activation,
    block_scaled,
    cross_entropy,
    decode,
    launch,
    norm,
    optim,
    rowwise,
    tensorwise,
)
from quaver.torch.backends.gpu.buffers import whole
from quaver.torch.backends.gpu.launch import KernelLaunch
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.state.history import roll_gpu

#: dtypes of values, by the names of the command line.
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
#: Widths of rows that one program keeps in registers: it has a kernel for each power of two.
WIDTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Kernels to export."""

    families: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    #: Largest number of columns of each kernel that keeps a row in registers.
    widths: tuple[int, ...] = WIDTHS
    formats: tuple[Format, ...] = (E4M3, E5M2)
    activations: tuple[str, ...] = tuple(activation.KINDS)
    #: True to export both kinds of float scales; False for powers of two only.
    ratios: bool = True


#: Shapes whose blocks are whole, whose rows lie at multiples of 16, and neither; the last for kernels that need
#: multiples of 4. No other number that a kernel gets from these is a multiple of 16 by chance.
SHAPES = ((8192, 4096), (8136, 4112), (8133, 4097), (8132, 4100))
#: One more for each, so tall that rows are the grid's first axis.
TALL_SHAPES = ((9_000_064, 4096), (9_000_008, 4112), (9_000_005, 4097))

Call = Callable[[], object]


def _matrices(selection: Selection, shapes: Sequence[tuple[int, int]] = SHAPES) -> Iterator[Tensor]:
    for shape in shapes:
        for dtype in selection.dtypes:
            yield torch.empty(shape, dtype=dtype, device="meta")


def _scale_kinds(selection: Selection) -> tuple[Any, ...]:
    return ("power_of_two", "fp32") if selection.ratios else ("power_of_two",)


def _float_scales(selection: Selection, block: Any) -> Iterator[QuantSpec]:
    for format in selection.formats:
        for kind in _scale_kinds(selection):
            yield QuantSpec(format, block, kind)


def _pairs(spec: QuantSpec) -> tuple[tuple[QuantSpec | None, QuantSpec | None], ...]:
    return (spec, None), (None, spec), (spec, spec)


def _amax(selection: Selection) -> Iterator[Call]:
    for x in _matrices(selection, (*SHAPES, *TALL_SHAPES)):
        yield partial(tensorwise.measure, x)


def _tensor(selection: Selection) -> Iterator[Call]:
    one = torch.empty(1, device="meta")
    yield from _amax(selection)
    for x in _matrices(selection):
        for spec in _float_scales(selection, (None, None)):
            for straight, transposed in ((True, False), (False, True), (True, True)):
                for factor, newest in ((None, None), (one, one)):
                    known = factor is not None
                    yield partial(tensorwise.per_tensor, x, spec, None, factor, known, transposed, straight, newest)


def _rows(selection: Selection) -> Iterator[Call]:
    for spec in _float_scales(selection, (1, None)):
        for x in _matrices(selection, [shape for width in (*selection.widths, 20480) for shape in _of_width(width)]):
            for straight, transposed in _pairs(spec):
                yield partial(rowwise.by_rows, x, straight, transposed)
        # The same for more rows: a program that measures column amaxes then takes four blocks.
        for width in selection.widths:
            for x in _matrices(selection, _of_rows(width, *(2112 * max(n // width, 1) for n in (16384, 8192)))):
                yield partial(rowwise.by_rows, x, spec, spec)
            for x in _matrices(selection, _of_rows(width, 2048 * 16384 // width, 2048 * 16384 // width)):
                yield partial(rowwise.by_rows, x, None, spec)


def _of_width(width: int) -> tuple[tuple[int, int], ...]:
    """Return shapes like `SHAPES` for kernels that keep a row of up to `width` columns, with so few rows that a program
    takes one block.
    """
    rows = 1024 if width <= WIDTHS[-1] else 512
    return _of_rows(width, rows, rows)


def _of_rows(width: int, whole: int, ragged: int) -> tuple[tuple[int, int], ...]:
    return (whole, width), (ragged - 3, width - 16), (ragged - 3, width - 1)


def _blocks(selection: Selection) -> Iterator[Call]:
    for x in _matrices(selection):
        for block in ((1, 128), (128, 128)):
            for spec in _float_scales(selection, block):
                for straight, transposed in _pairs(spec):
                    yield partial(rowwise.by_blocks, x, straight, transposed)


def _mx(selection: Selection) -> Iterator[Call]:
    for x in _matrices(selection):
        for block in ((1, 32), (32, 32)):
            for format in selection.formats:
                for straight, transposed in _pairs(QuantSpec(format, block, "e8m0")):
                    yield partial(block_scaled.by_exponents, x, straight, transposed)


def _nv(selection: Selection) -> Iterator[Call]:
    yield from _amax(selection)
    kinds: tuple[Any, ...] = ("two_level", "two_level_fp32") if selection.ratios else ("two_level",)
    roundings: tuple[Any, ...] = ("nearest", "stochastic")
    for x in _matrices(selection):
        for kind in kinds:
            for block, hadamard in (((1, 16), False), ((1, 16), True), ((16, 16), False)):
                for rounding in roundings:
                    spec = QuantSpec(E2M1, block, kind, rounding, hadamard)
                    for down in (False, True):
                        yield partial(block_scaled.by_two_levels, x, spec, down=down)


def _dequantize(selection: Selection) -> Iterator[Call]:
    specs = [QuantSpec(E2M1, block, kind) for block in ((1, 16), (16, 16)) for kind in ("two_level", "two_level_fp32")]
    for format in selection.formats:
        specs += [QuantSpec(format, block, "e8m0") for block in ((1, 32), (32, 32))]
        for block in ((None, None), (1, None), (1, 128), (128, 128)):
            specs += [QuantSpec(format, block, kind) for kind in ("power_of_two", "fp32")]
    for shape in SHAPES[:3]:
        for spec in specs:
            for dtype in decode.DTYPES:
                if decode.holds(spec, dtype):
                    yield partial(_decode, spec, shape, dtype)


def _decode(spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> None:
    decode.decode(_operand(spec, shape), dtype)


def _operand(spec: QuantSpec, shape: tuple[int, int]) -> Quantized:
    """Return an operand without memory, as the kernels write it."""
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    if spec.per_tensor:
        return tensorwise.per_tensor(x, spec, None, None, False, False)
    if spec.two_level:
        return block_scaled.by_two_levels(x, spec)
    by = (
        block_scaled.by_exponents
        if spec.scale == "e8m0"
        else rowwise.by_rows
        if spec.block[1] is None
        else rowwise.by_blocks
    )
    q = by(x, spec, None)[0]
    assert q is not None
    return q


#: Lengths of scaling histories that a roll reads at once; shorter ones take the next.
HISTORIES = 16, 128, 1024


def _delayed(selection: Selection) -> Iterator[Call]:
    table = torch.empty((2, 2), dtype=torch.int64, device="meta")
    e4m3, e5m2 = ([QuantSpec(format, scale=kind) for kind in _scale_kinds(selection)] for format in (E4M3, E5M2))
    for length in HISTORIES:
        history = torch.empty((length - 1, 3), device="meta")
        for algorithm in ("max", "most_recent"):
            delayed = Delayed(length=length - 1, algorithm=algorithm)
            for forward, gradient in zip(e4m3, e5m2, strict=True):
                for specs in ((forward,) * 3, (forward, forward, gradient), (gradient,) * 3):
                    yield partial(roll_gpu.launch, table, history, delayed, specs)


# ---- layers ----


def _activation(selection: Selection) -> Iterator[Call]:
    for name, options, x in _activations(selection):
        yield partial(activation.forward, name, options, x)
        yield partial(activation.backward, name, options, x[0], x)


def _activation_quantize(selection: Selection) -> Iterator[Call]:
    factor = torch.empty(1, device="meta")
    tensor = QuantSpec(E4M3)
    blocks = QuantSpec(E4M3, (1, 32), "e8m0"), QuantSpec(E4M3, (1, 128))
    for name, options, x in _activations(selection):
        for straight, transposed in ((True, False), (False, True), (True, True)):
            yield partial(activation.activated, name, options, x, tensor, factor, False, straight, transposed)
        for spec in blocks:
            yield partial(activation.activated, name, options, x, spec, None, False)


def _activations(selection: Selection) -> Iterator[tuple[str, tuple[float, ...], tuple[Tensor, ...]]]:
    """Yield names, options and inputs of activations."""
    for dtype in selection.dtypes:
        for (rows, columns), gap in zip(SHAPES[:3], (0, 0, 3), strict=True):
            gate, value = (
                torch.empty((rows, columns + gap), dtype=dtype, device="meta")[:, :columns] for _ in range(2)
            )
            for name in selection.activations:
                kind = activation.KINDS[name]
                options = (7.0, 1.702) if kind.clamped else ()
                yield name, options, (gate, value) if kind.gated else (gate,)


def _norm(selection: Selection) -> Iterator[Call]:
    for dtype in selection.dtypes:
        yield partial(_sums, dtype)
    for x, gamma in _rows_and_parameters(selection):
        for normalization, beta in (("RMSNorm", None), ("LayerNorm", gamma)):
            yield partial(_norm_and_backward, x, gamma, beta, normalization)


def _rows_and_parameters(selection: Selection) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs of norms of each width, with columns and strides that are multiples of 16 or not, and their
    parameters.
    """
    for dtype in selection.dtypes:
        for width in selection.widths:
            for less, gap in ((0, 0), (16, 16), (16, 8), (8, 8), (8, 0)):
                x = torch.empty((1021, width - less + gap), dtype=dtype, device="meta")[:, : width - less]
                yield x, torch.empty(width - less, dtype=dtype, device="meta")


def _sums(dtype: torch.dtype) -> None:
    """Launch sums of partial gradients, of whole blocks and of a number of columns that no norm has."""
    for programs, columns in ((256, 1024), (264, 1001)):
        for splits in (1, 2):
            sums = whole((programs, splits * columns), torch.float32)
            out = [whole((columns,), dtype) for _ in range(splits)]
            cross_entropy.sum_launch(sums, out[0], programs, splits * columns, *out[1:]).compiled(torch.device("meta"))


def _norm_quantize(selection: Selection) -> Iterator[Call]:
    factor = torch.empty(1, device="meta")
    blocks: tuple[Any, ...] = ((None, None), (1, None), (1, 128), (1, 32))
    specs = [QuantSpec(E4M3, block, "e8m0" if block == (1, 32) else "power_of_two") for block in blocks]
    for x, gamma in _rows_and_parameters(selection):
        for normalization, beta in (("RMSNorm", None), ("LayerNorm", gamma)):
            for spec in specs:
                known = factor if spec.per_tensor else None
                yield partial(norm.normalized, x, gamma, beta, normalization, 1e-6, spec, known, False)


def _norm_and_backward(x: Tensor, gamma: Tensor, beta: Tensor | None, normalization: str) -> None:
    norm.normalized(x, gamma, beta, normalization, 1e-6)
    if x.shape[1] <= norm.WIDEST_BACKWARD:
        rows = torch.empty((x.shape[0], 1), device="meta")
        norm.backward(x, x, gamma, beta, rows, rows, normalization)


def _cross_entropy(selection: Selection) -> Iterator[Call]:
    for dtype in selection.dtypes:
        for columns, stride in ((32768, 32768), (32016, 32016), (32017, 32019)):
            logits = torch.empty((1021, stride), dtype=dtype, device="meta")[:, :columns]
            targets = torch.empty(1021, dtype=torch.int64, device="meta")
            weights = torch.empty(1021, device="meta")
            for gradient, given in ((False, None), (True, None), (True, weights)):
                for smoothing, z_loss, cap in product((0.0, 0.1), repeat=3):
                    rule = -100, smoothing, z_loss, cap
                    yield partial(cross_entropy.rows, logits, targets, given, gradient, rule)


#: Features of a head, all of them rotated.
HEAD_DIMS = 64, 128


def _rope(selection: Selection) -> Iterator[Call]:
    for dtype in selection.dtypes:
        # Whole blocks of heads, and others; heads that are not contiguous.
        for dim, (heads, gap) in product(HEAD_DIMS, ((64, 0), (33, 0), (33, 1))):
            cos, sin = (torch.empty((7, 1, dim + gap), device="meta")[..., :dim] for _ in range(2))
            q, k = (torch.empty((3, 7, heads, dim + gap), dtype=dtype, device="meta")[..., :dim] for _ in range(2))
            for second, interleaved, back in product((None, k), (False, True), (False, True)):
                yield partial(norm.turn, q, second, cos, sin, interleaved, back)


#: Storage of both moments: float32, and eight bits.
MOMENTS = (
    (optim.MomentFormat("float32"), optim.MomentFormat("float32")),
    (optim.MomentFormat("int8_mitchell", True), optim.MomentFormat("uint8_mitchell4", True)),
)


def step_specializations(dtypes: Sequence[torch.dtype]) -> Iterator[optim.StepSpecialization]:
    """Yield what the parameters of a launch of AdamW may share."""
    gradients = dict.fromkeys((torch.float32, *dtypes))
    for weight, gradient, moments in product((torch.float32, torch.bfloat16), gradients, MOMENTS):
        plain = weight is torch.float32
        for factored, even in product((False, True), repeat=2):
            yield optim.StepSpecialization(
                rule="adamw",
                clamp=True,
                maximize=False,
                master_format="plain" if plain else "remainder",
                weight=weight,
                beside=None if plain else torch.int16,
                gradient=gradient,
                moments=moments,
                factored=factored,
                even=even,
            )


def _optimizer(selection: Selection) -> Iterator[Call]:
    chunks, work = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((7, 3), (3, 2)))
    table = torch.empty((3, optim.FIELDS), dtype=torch.int64, device="meta")
    scalars = torch.empty((8, 3), device="meta")
    for form in step_specializations(selection.dtypes):
        yield partial(optim.launch, form, chunks, table, scalars, work)


#: Calls of each family of the command line's --families.
FAMILIES: dict[str, Callable[[Selection], Iterator[Call]]] = {
    "tensor": _tensor,
    "row": _rows,
    "block": _blocks,
    "mx": _mx,
    "nv": _nv,
    "dequantize": _dequantize,
    "delayed": _delayed,
    "norm": _norm,
    "norm_quantize": _norm_quantize,
    "activation": _activation,
    "activation_quantize": _activation_quantize,
    "rope": _rope,
    "cross_entropy": _cross_entropy,
    "optimizer": _optimizer,
}


def record(selection: Selection, arch: int) -> list[KernelLaunch]:
    """Return the launches of the chosen calls on sm_`arch`."""
    with launch.recording(arch) as launches:
        for family in selection.families:
            before = len(launches)
            for call in FAMILIES[family](selection):
                call()
            # Operands to decode are quantized by launches that are their own family's.
            if family == "dequantize":
                launches[before:] = [one for one in launches[before:] if one.fn.__name__ == "decode"]
    return launches
