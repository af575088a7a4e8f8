"""Random calls, each in Python and in C."""

import ctypes as ct
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.capi.cases import WIDTHS, step_specializations
from quaver.recipes.formats import E2M1 as FP4
from quaver.recipes.formats import E4M3 as FP8
from quaver.recipes.formats import E5M2 as FP8_WIDE
from quaver.recipes.spec import Delayed, QuantSpec
from quaver.torch.backends.gpu import activation, block_scaled, cross_entropy, decode, norm, optim, rowwise, tensorwise
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.state.history import roll_gpu
from tests.native import library
from tests.native.launches import Launch
from tests.native.library import History, Library, Loss, Matrix, NormOptions, Options, Parameter, RopeOptions, Step

DTYPES = {torch.bfloat16: library.BF16, torch.float16: library.F16, torch.float32: library.F32}
FORMATS = {"e4m3": library.E4M3, "e5m2": library.E5M2, "e2m1": library.E2M1}
BLOCKS = {
    (None, None): library.TENSOR,
    (1, None): library.ROW,
    (1, 128): library.BLOCK_1X128,
    (128, 128): library.BLOCK_128X128,
    (1, 32): library.MX,
    (32, 32): library.MX_SQUARE,
    (1, 16): library.NV,
    (16, 16): library.NV_SQUARE,
}
SIDES = 1, 7, 15, 16, 17, 31, 32, 33, 64, 100, 127, 128, 129, 256, 384, 512, 1000, 1024, 2048, 4097, 4112
#: Shapes whose grid begins with rows, and rows that no program keeps in registers.
TALL = (32 * 65536 + 32, 512), (8 * 65536 + 8, 16), (8 * 65536 + 3, 17)
LONG = (33, 16640), (128, 20480), (31, 16385)


class Call(NamedTuple):
    """A call to make in both languages."""

    text: str
    python: Callable[[], object]
    #: (library, Python's launches) -> status.
    c: Callable[[Library, list[Launch]], int]
    #: Bytes that C fills with zeros first, because no kernel writes them.
    zeroed: int = 0


class Drawn:
    """Random calls of the families that were exported."""

    def __init__(self, seed: int, families: list[str], dtypes: list[torch.dtype], small: bool) -> None:
        self.random = random.Random(seed)
        self.dtypes, self.small = dtypes, small
        self.formats = [FP8] if small else [FP8, FP8_WIDE]
        self.kinds = [getattr(self, f"_{family}") for family in families]

    def __call__(self) -> Call:
        return self.random.choice(self.kinds)()  # type: ignore[no-any-return]

    def _matrix(self, widest: int = SIDES[-1], others: Sequence[tuple[int, int]] = ()) -> tuple[Tensor, Matrix]:
        rows, columns = self.random.choice(SIDES), self.random.choice([n for n in SIDES if n <= widest])
        if widest in WIDTHS and self.random.random() < 0.7:
            # Each width has a kernel; rows of that width, with strides of a multiple of 16, or with neither.
            width = self.random.choice([n for n in WIDTHS if n <= widest])
            columns = width - self.random.choice([0, 16, 1])
            rows = self.random.choice([1024, 1024, *(2112 * max(n // width, 1) for n in (16384, 8192)), 2**25 // width])
            rows -= self.random.choice([0, 3])
        if others and self.random.random() < 0.1:
            rows, columns = self.random.choice(others)
        dtype = self.random.choice(self.dtypes)
        pad, offset = self.random.choice([0, 0, 0, 16, 1, 8]), self.random.choice([0, 0, 0, 8, 1])
        memory = torch.empty(rows * (columns + pad) + 16 + offset, dtype=dtype)
        x = memory.as_strided((rows, columns), (columns + pad, 1), offset)
        described = Matrix(rows=rows, columns=columns, stride=columns + pad, dtype=DTYPES[dtype], data=x.data_ptr())
        return x, described

    def _kind(self) -> Any:
        return "power_of_two" if self.small else self.random.choice(["power_of_two", "fp32"])

    def _orientation(self) -> tuple[bool, bool]:
        return self.random.choice([(True, False), (False, True), (True, True)])

    def _pair(self, spec: QuantSpec, which: tuple[bool, bool]) -> tuple[QuantSpec | None, QuantSpec | None]:
        return (spec if which[0] else None), (spec if which[1] else None)

    def _amax(self) -> Call:
        x, matrix = self._matrix(others=TALL)
        return Call(
            f"amax of {x.shape} {x.dtype}",
            lambda: tensorwise.measure(x),
            lambda c, python: c.amax(matrix, python[0].values["out"]),
        )

    def _tensor(self) -> Call:
        x, matrix = self._matrix()
        spec, which = QuantSpec(self.random.choice(self.formats), scale=self._kind()), self._orientation()
        factor = newest = None
        if self.random.random() < 0.4:
            factor, newest = torch.ones(1), torch.zeros(1)
        return _quantized(
            x,
            matrix,
            spec,
            which,
            lambda: tensorwise.per_tensor(x, spec, None, factor, factor is not None, which[1], which[0], newest),
            Options(
                power_of_two=spec.power_of_two,
                factor=None if factor is None else factor.data_ptr(),
                newest=None if newest is None else newest.data_ptr(),
            ),
        )

    def _row(self) -> Call:
        widest = 256 if self.small else 16384
        return self._scaled((1, None), rowwise.by_rows, widest)

    def _block(self) -> Call:
        return self._scaled(self.random.choice([(1, 128), (128, 128)]), rowwise.by_blocks)

    def _scaled(self, block: Any, by: Callable[..., object], widest: int = SIDES[-1]) -> Call:
        x, matrix = self._matrix(widest, LONG if block == (1, None) else ())
        spec, which = QuantSpec(self.random.choice(self.formats), block, self._kind()), self._orientation()
        options = Options(power_of_two=spec.power_of_two)
        return _quantized(x, matrix, spec, which, lambda: by(x, *self._pair(spec, which)), options)

    def _mx(self) -> Call:
        x, matrix = self._matrix()
        spec = QuantSpec(self.random.choice(self.formats), self.random.choice([(1, 32), (32, 32)]), "e8m0")
        which = self._orientation()
        return _quantized(x, matrix, spec, which, lambda: block_scaled.by_exponents(x, *self._pair(spec, which)), None)

    def _nv(self) -> Call:
        x, matrix = self._matrix()
        down = self.random.random() < 0.5
        hadamard, square = self.random.choice([(False, False), (True, False), (False, True)])
        k = x.shape[0] if down else x.shape[1]
        stochastic = self.random.random() < 0.5 and (hadamard or k % 4 == 0)
        kind: Any = "two_level" if self.small else self.random.choice(["two_level", "two_level_fp32"])
        block = (16, 16) if square else (1, 16)
        spec = QuantSpec(FP4, block, kind, "stochastic" if stochastic else "nearest", hadamard)
        seed, tensor_id = self.random.getrandbits(64), self.random.getrandbits(32)
        options = Options(
            power_of_two=kind == "two_level", stochastic=stochastic, hadamard=hadamard, seed=seed, tensor_id=tensor_id
        )
        count = torch.tensor([5])
        if stochastic:
            options.count = count.data_ptr()
        return _quantized(
            x,
            matrix,
            spec,
            (not down, down),
            lambda: block_scaled.by_two_levels(x, spec, None, (seed, tensor_id, count), down),
            options,
        )

    def _dequantize(self) -> Call:
        rows, columns = self.random.choice(SIDES), self.random.choice(SIDES)
        block = self.random.choice(list(BLOCKS))
        format = FP4 if block in ((1, 16), (16, 16)) else self.random.choice(self.formats)
        kind: Any = "e8m0" if block in ((1, 32), (32, 32)) else self.random.choice(["power_of_two", "fp32"])
        if format is FP4:
            kind = {"power_of_two": "two_level", "fp32": "two_level_fp32"}[kind]
        spec = QuantSpec(format, block, kind)
        dtype = self.random.choice([one for one in decode.DTYPES if decode.holds(spec, one)])
        q = _operand(spec, rows, columns)
        power_of_two = kind not in ("fp32", "two_level_fp32")

        def c(lib: Library, python: list[Launch]) -> int:
            values = python[-1].values
            codes = codes_of(spec, rows, columns, values["q"], values["scale"], values.get("factor", 0))
            y = Matrix(rows=rows, columns=columns, stride=columns, dtype=DTYPES[dtype], data=values["out"])
            return lib.dequantize(codes, y, power_of_two)

        return Call(f"dequantize {spec} [{rows}, {columns}] to {dtype}", lambda: decode.decode(q, dtype), c)

    def _delayed(self) -> Call:
        length, layers = self.random.choice([1, 5, 15, 16, 17, 100, 128, 1000, 1024]), self.random.choice([1, 3, 64])
        contiguous = self.random.random() < 0.5
        history = torch.zeros(length, 3) if contiguous else torch.zeros(3, length).t()
        formats = [(FP8,) * 3] if self.small else [(FP8,) * 3, (FP8, FP8, FP8_WIDE), (FP8_WIDE,) * 3]
        chosen, kind = self.random.choice(formats), self._kind()
        specs: Any = tuple(QuantSpec(format, scale=kind) for format in chosen)
        algorithm: Any = self.random.choice(["max", "most_recent"])
        delayed = Delayed(length=length, margin=self.random.choice([0, 0, 1, 512]), algorithm=algorithm)
        table = torch.zeros(layers, 2, dtype=torch.int64)
        given = History(
            layers=layers,
            length=length,
            step=history.stride(0),
            column_step=history.stride(1),
            margin=delayed.margin,
            most_recent=algorithm != "max",
            power_of_two=kind == "power_of_two",
            dtypes=(ct.c_int32 * 3)(*(FORMATS[format.name] for format in chosen)),
        )
        return Call(
            f"roll {layers} histories of {length} {specs} {delayed}",
            lambda: roll_gpu.launch(table, history, delayed, specs),
            lambda lib, python: lib.roll(given, table.data_ptr(), python[0].values["factors"]),
        )

    def _activation(self) -> Call:
        name = self.random.choice(list(activation.KINDS))
        number, kind = list(activation.KINDS).index(name), activation.KINDS[name]
        gate, m_gate = self._matrix()
        shape, gap = gate.shape, self.random.choice([0, 0, 16, 3])
        if shape[0] == 1:  # whose stride Python does not look at
            m_gate.stride, gap = shape[1], 0
        limits = (7.0, 1.702) if kind.clamped else ()

        def other() -> tuple[Tensor, Matrix]:
            x = torch.empty(shape[0], shape[1] + gap, dtype=gate.dtype)[:, : shape[1]]
            return x, _plain(x)

        def out(name: str, values: dict[str, int], stride: int) -> Matrix:
            given = {"rows": shape[0], "columns": shape[1], "dtype": m_gate.dtype}
            return Matrix(**given, stride=stride, data=values.get(name, 0))

        (value, m_value), (grad, m_grad) = other(), other()
        x = (gate, value) if kind.gated else (gate,)
        if self.random.random() < 0.5:
            return Call(
                f"{name} of {shape} {gate.dtype} {gate.stride()} {gap}",
                lambda: activation.forward(name, limits, x),
                lambda lib, python: lib.activate(
                    number,
                    m_gate,
                    m_value if kind.gated else None,
                    Matrix(
                        rows=shape[0], columns=shape[1], stride=shape[1], dtype=m_gate.dtype, data=python[0].values["y"]
                    ),
                    *limits,
                ),
            )

        def backward(lib: Library, python: list[Launch]) -> int:
            values = python[0].values
            of_gate, of_value = (out(of, values, values[f"{of}_stride"]) for of in ("of_gate", "of_value"))
            given = (m_grad, m_gate, m_value, of_gate, of_value)
            if not kind.gated:
                given = (m_grad, m_gate, None, of_gate, None)
            return lib.activate_backward(number, *given, limits=limits or (0, 0))

        return Call(
            f"backward of {name} of {shape} {gate.dtype} {gate.stride()} {gap}",
            lambda: activation.backward(name, limits, grad, x),
            backward,
        )

    def _activation_quantize(self) -> Call:
        name = self.random.choice(["silu", "swiglu", "clamped_swiglu"] if self.small else list(activation.KINDS))
        number, kind = list(activation.KINDS).index(name), activation.KINDS[name]
        gate, m_gate = self._matrix()
        rows, columns = gate.shape
        if rows == 1:  # whose stride Python does not look at
            m_gate.stride = columns
        value = torch.empty(rows, columns, dtype=gate.dtype)
        limits = (7.0, 1.702) if kind.clamped else ()
        block = self.random.choice([(None, None), (1, 128), (1, 32)])
        spec = QuantSpec(FP8, block, "e8m0" if block == (1, 32) else "power_of_two")
        factor = torch.ones(1) if spec.per_tensor else None
        straight, transposed = self._orientation() if spec.per_tensor else (True, False)
        x = (gate, value) if kind.gated else (gate,)
        ragged = block == (1, 32) and (rows % 128 != 0 or columns % 128 != 0)

        def c(lib: Library, python: list[Launch]) -> int:
            values = python[0].values
            q = codes_of(spec, rows, columns, values["q"], values["scale"], 0) if straight else None
            qt = codes_of(spec, columns, rows, values["qt"], values["scale"], 0) if transposed else None
            given = m_gate, _plain(value) if kind.gated else None, q, qt
            how = Options(factor=0 if factor is None else factor.data_ptr())
            return lib.activate_quantize(number, how, *given, amax=values.get("top", 0), limits=limits or (0, 0))

        return Call(
            f"{name} of {(rows, columns)} {gate.dtype} {gate.stride()} to {spec}, {straight, transposed}",
            lambda: activation.activated(name, limits, x, spec, factor, False, straight, transposed),
            c,
            ragged * -(-rows // 128) * -(-columns // 128) * 512,
        )

    def _norm_input(self) -> tuple[Tensor, Tensor, Tensor | None, NormOptions]:
        """Draw x, gamma, beta or None, and the options for C."""
        most = 256 if self.small else 16384
        widths = [width for width in (8, 16, *WIDTHS) if width <= most]
        columns = max(self.random.choice(widths) - self.random.choice([0, 8, 16, 40]), 8)
        rows, dtype = self.random.choice([1, 7, 64, 256, 264, 1000]), self.random.choice(self.dtypes)
        stride = columns + self.random.choice([0, 0, 8, 16]) * (rows > 1)
        x = torch.empty(rows, stride, dtype=dtype)[:, :columns]
        gamma, beta = torch.empty(columns, dtype=dtype), torch.empty(columns, dtype=dtype)
        if self.random.random() < 0.5:
            return x, gamma, None, NormOptions(gamma=gamma.data_ptr())
        return x, gamma, beta, NormOptions(centred=1, gamma=gamma.data_ptr(), beta=beta.data_ptr())

    def _norm_quantize(self) -> Call:
        x, gamma, shift, options = self._norm_input()
        rows, columns = x.shape
        block = self.random.choice([(None, None), (1, None), (1, 128), (1, 32)])
        spec = QuantSpec(FP8, block, "e8m0" if block == (1, 32) else "power_of_two")
        factor = torch.ones(1) if spec.per_tensor else None
        name = "RMSNorm" if shift is None else "LayerNorm"
        how = Options(factor=0 if factor is None else factor.data_ptr())
        ragged = block == (1, 32) and (rows % 128 != 0 or columns % 128 != 0)

        def c(lib: Library, python: list[Launch]) -> int:
            values = python[0].values
            q = codes_of(spec, rows, columns, values["q"], values["scale"], 0)
            addresses = values.get("top", 0), values["mean"], values["inverse"]
            return lib.norm_quantize(options, how, _plain(x), q, *addresses)

        return Call(
            f"{name} of {(rows, columns)} {x.dtype} {x.stride()} to {spec}",
            lambda: norm.normalized(x, gamma, shift, name, 1e-6, spec, factor, False),
            c,
            ragged * -(-rows // 128) * -(-columns // 128) * 512,
        )

    def _norm(self) -> Call:
        x, gamma, shift, options = self._norm_input()
        (rows, columns), dtype, centred = x.shape, x.dtype, shift is not None
        name = "LayerNorm" if centred else "RMSNorm"
        text = f"{name} of {(rows, columns)} {dtype} {x.stride()}"

        def out(data: int) -> Matrix:
            return Matrix(rows=rows, columns=columns, stride=columns, dtype=DTYPES[dtype], data=data)

        def forward(lib: Library, python: list[Launch]) -> int:
            values = python[0].values
            return lib.norm(options, _plain(x), out(values["y"]), values["mean"], values["inverse"])

        if columns > 8192 or self.random.random() < 0.5:
            return Call(text, lambda: norm.normalized(x, gamma, shift, name, 1e-6), forward)
        # A gradient with rows of its own, whose alignment is that of x.
        grad = torch.empty(rows, x.stride(0) + self.random.choice([0, 16]) * (rows > 1), dtype=dtype)[:, :columns]
        mean, inverse = (torch.empty(rows if wanted else 0, 1) for wanted in (centred, True))

        def backward(lib: Library, python: list[Launch]) -> int:
            values, last = python[0].values, python[1].values
            addresses = values["mean"], values["inverse"], last["out"], last.get("second", 0), values["partial"]
            size = lib.c.quaver_norm_partial_bytes(lib.handle, rows, columns, int(centred))
            assert size == 4 * values["programs"] * values["width"]
            return lib.norm_backward(options, (_plain(grad), _plain(x), out(values["dx"])), addresses)

        return Call(
            f"backward of {text}",
            lambda: norm.backward(grad, x, gamma, shift, mean, inverse, name),
            backward,
        )

    def _rope(self) -> Call:
        dim, dtype, gap = (
            self.random.choice([64, 128]),
            self.random.choice(self.dtypes),
            self.random.choice([0, 0, 1, 16]),
        )
        outer, inner = self.random.choice([2, 3]), self.random.choice([2, 5, 64])
        heads, k_heads = self.random.choice([32, 33, 64]), self.random.choice([0, 8, 32, 64])
        q, k = (torch.empty(outer, inner, n, dim + gap, dtype=dtype)[..., :dim] for n in (heads, k_heads))
        cos, sin = torch.empty(inner, 1, dim + gap)[..., :dim], torch.empty(inner, 1, dim + gap)[..., :dim]
        interleaved, back = self.random.random() < 0.5, self.random.random() < 0.5
        options = RopeOptions(
            dtype=DTYPES[dtype],
            interleaved=interleaved,
            back=back,
            outer=outer,
            inner=inner,
            heads=heads,
            k_heads=k_heads,
            dim=dim,
            q_strides=(ct.c_int64 * 3)(*q.stride()[:3]),
            k_strides=(ct.c_int64 * 3)(*k.stride()[:3]),
            table_strides=(ct.c_int64 * 2)(0, cos.stride(0)),
        )

        def c(lib: Library, python: list[Launch]) -> int:
            values = python[0].values
            return lib.rope(options, *(values.get(name, 0) for name in ("q", "k", "q_out", "k_out", "cos", "sin")))

        text = f"rope of {tuple(q.shape)}, {k_heads} {dtype} {gap} {interleaved} {back}"
        return Call(text, lambda: norm.turn(q, k if k_heads else None, cos, sin, interleaved, back), c)

    def _cross_entropy(self) -> Call:
        rows, columns = self.random.choice([1, 7, 100, 1000]), self.random.choice([1, 1000, 4096, 8192, 8208, 4097])
        dtype, gap = self.random.choice(self.dtypes), self.random.choice([0, 0, 16, 3])
        logits = torch.empty(rows, columns + gap, dtype=dtype)[:, :columns]
        targets, weights = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
        gradient, weighted = self.random.choice([(False, False), (True, False), (True, True)])
        smoothing, z_loss, cap = (self.random.choice([0.0, 0.125]) for _ in range(3))
        options = Loss(gradient=gradient, ignore_index=-100, label_smoothing=smoothing, z_loss=z_loss, soft_cap=cap)
        if weighted:
            options.weights = weights.data_ptr()
        rule = (-100, smoothing, z_loss, cap)
        return Call(
            f"cross entropy of {(rows, columns)} {dtype} {gap} {rule} {gradient} {weighted}",
            lambda: cross_entropy.rows(logits, targets, weights if weighted else None, gradient, rule),
            lambda lib, python: lib.cross_entropy(
                options, _plain(logits), targets.data_ptr(), python[0].values["losses"]
            ),
        )

    def _optimizer(self) -> Call:
        form = self.random.choice(list(step_specializations(self.dtypes)))
        rows = [_stepped(self.random, form, number) for number in range(self.random.choice([1, 3, 8]))]
        chunks = torch.tensor([(i, *chunk) for i, row in enumerate(rows) for chunk in row.chunks], dtype=torch.int32)
        table = torch.tensor([row.words for row in rows])
        scalars, work = torch.zeros(8, len(rows)), torch.zeros(len(rows), 2, dtype=torch.int32)
        options = Step(
            weight=DTYPES[form.weight],
            gradient=DTYPES[form.gradient],
            moments=int(form.moments[0].code != "float32"),
            even=form.even,
            factored=form.factored,
        )
        addresses = [t.data_ptr() for t in (chunks, table, scalars, work)]

        def c(lib: Library, python: list[Launch]) -> int:
            _rows_in_c(lib, options, rows)
            return lib.adamw_step(options, len(chunks), len(rows), *addresses)

        return Call(
            f"AdamW of {[row.shape for row in rows]} {form}",
            lambda: optim.launch(form, chunks, table, scalars, work),
            c,
        )


def _stepped(random: random.Random, form: optim.StepSpecialization, number: int) -> optim.ParameterRow:
    """Draw a parameter of a launch of AdamW."""
    shape = random.choice([1, 7, 32]), random.choice([64, 128, 1024] if form.even else [1, 63, 64, 65, 1000])
    shape = 32 * shape[0] if form.even else shape[0], shape[1]
    eight = form.moments[0].code != "float32"
    scales = (shape[0], -(-shape[1] // 64))
    tensors: dict[str, Tensor | None] = {
        "weight": torch.empty(shape, dtype=form.weight),
        "beside": None if form.beside is None else torch.empty(shape, dtype=form.beside),
        "gradient": torch.empty(shape, dtype=form.gradient),
        "first": torch.empty(shape, dtype=torch.int8 if eight else torch.float32),
        "second": torch.empty(shape, dtype=torch.uint8 if eight else torch.float32),
        "first_scale": torch.empty(scales, dtype=torch.bfloat16) if eight else None,
        "second_scale": torch.empty(scales, dtype=torch.bfloat16) if eight else None,
        "factor": torch.ones(1) if form.factored else None,
        "step": torch.zeros(1),
    }
    return optim.ParameterRow(form, tensors, shape, random.getrandbits(35), number, random.getrandbits(64))


def _parameter(row: optim.ParameterRow) -> Parameter:
    """Describe a parameter for C."""
    known = {"weight": "weight", "beside": "low", "step": "count", "gradient": "gradient", "factor": "factor"}
    known |= {name: name for name in ("first", "first_scale", "second", "second_scale")}
    addresses = {known[name]: t.data_ptr() for name, t in row.tensors.items() if t is not None}
    rows, columns = row.shape
    return Parameter(number=row.number, rows=rows, columns=columns, offset=row.first, seed=row.seed, **addresses)


def _rows_in_c(lib: Library, options: Step, rows: list[optim.ParameterRow]) -> None:
    """Compare the rows and chunks that C writes with Python's."""
    for index, row in enumerate(rows):
        programs = lib.c.quaver_step_programs(*row.shape)
        words, chunks = (ct.c_int64 * 20)(), (ct.c_int32 * 3 * programs)()
        parameter = _parameter(row)
        assert lib.c.quaver_step_even(ct.byref(options), ct.byref(parameter)) == _even(row), f"even of {row.shape}"
        assert lib.step_row(options, parameter, index, words, chunks) == library.OK, f"row of {row.shape}"
        assert list(words) == row.words, f"row of {row.shape}: {list(words)}"
        assert [tuple(chunk) for chunk in chunks] == [(index, *chunk) for chunk in row.chunks], f"chunks of {row.shape}"


def _even(row: optim.ParameterRow) -> bool:
    wide = [t for name in ("weight", "beside", "first", "second", "gradient") if (t := row.tensors[name]) is not None]
    return optim.even(row.form, wide, row.shape)


def _plain(x: Tensor) -> Matrix:
    """Describe values for C."""
    rows, columns = x.shape
    return Matrix(rows=rows, columns=columns, stride=x.stride(0), dtype=DTYPES[x.dtype], data=x.data_ptr())


def _operand(spec: QuantSpec, rows: int, columns: int) -> Quantized:
    """Return an operand of zeros in the layout that the kernels write."""
    stride = -(-columns // 32) * 16 if spec.two_level else tensorwise.padded(columns)
    data = torch.zeros((rows, stride), dtype=torch.uint8)
    if spec.two_level:
        scale = torch.zeros(block_scaled._scales(rows, columns, 16), dtype=torch.uint8)
        half = data[:, : -(-columns // 2)]
        return Quantized(half, scale, spec, (rows, columns), tensor_factor=torch.zeros((1, 1)), swizzled=True)
    data = data.view(tensorwise.FLOAT8[spec.format.name])
    if spec.scale == "e8m0":
        scale = torch.zeros(block_scaled._scales(rows, columns, 32), dtype=torch.uint8)
        return Quantized(data[:, :columns], scale, spec, (rows, columns), swizzled=True)
    if spec.per_tensor or spec.block[1] is None:
        scale = torch.zeros((1 if spec.per_tensor else rows, 1))
    else:
        buffer = rowwise._buffer(rows, columns, spec)
        scale = torch.empty_strided(buffer.shape, buffer.strides)[:, : -(-columns // 128)]
    return Quantized(data[:, :columns], scale, spec, (rows, columns))


def codes_of(spec: QuantSpec, rows: int, columns: int, data: int, scale: int, factor: int) -> Matrix:
    """Return an operand [rows, columns] as C takes it."""
    stride = -(-columns // 32) * 16 if spec.two_level else tensorwise.padded(columns)
    return Matrix(
        rows=rows,
        columns=columns,
        stride=stride,
        dtype=FORMATS[spec.format.name],
        block=BLOCKS[spec.block],
        data=data,
        scale=scale,
        factor=factor,
    )


def _quantized(
    x: Tensor,
    matrix: Matrix,
    spec: QuantSpec,
    which: tuple[bool, bool],
    python: Callable[[], object],
    options: Options | None,
) -> Call:
    rows, columns = x.shape
    zeroed = 0
    if spec.block == (128, 128):
        for wanted, (m, n) in zip(which, ((rows, columns), (columns, rows)), strict=True):
            zeroed += wanted and -(-n // 128) % 4 != 0 and 4 * -(-m // 128) * 4 * -(-n // 512)

    def c(lib: Library, launches: list[Launch]) -> int:
        values: dict[str, int] = {}
        for each in launches:
            # The scales of a transpose that a kernel of its own writes.
            known = {"scale": "transposed_scale"} if each.kernel == "columnwise" else {}
            values |= {known.get(name, name): value for name, value in each.values.items()}
        scale = values.get("scale", values.get("s", values.get("s4", 0)))
        transposed = values.get("transposed_scale", values.get("st", scale))
        factor = values.get("factor", 0) if spec.two_level else 0
        q = codes_of(spec, rows, columns, values["q"], scale, factor) if which[0] else None
        qt = codes_of(spec, columns, rows, values["qt"], transposed, factor) if which[1] else None
        return lib.quantize(matrix, q, qt, values.get("top", 0), options)

    strides = x.stride(0), x.data_ptr() % 16
    return Call(f"quantize {spec} of {tuple(x.shape)} {x.dtype}, {strides}, {which}", python, c, zeroed)
