"""Bits are part of the API: numpy, torch's plain tensors, the fast CPU path and torch.compile store the same."""

from collections.abc import Hashable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

import quaver.torch as qt
from quaver import reference
from quaver.costs.ledger import saved_bytes
from quaver.recipes.formats import E4M3
from quaver.recipes.spec import QuantSpec, Recipe
from quaver.reference import numerics
from quaver.torch.numerics.quantized import FLOAT8
from quaver.torch.numerics.rounding import philox4x32, rows_of_uniform, uniform
from quaver.torch.operations.ops import QUANTIZE
from quaver.torch.optim import step as pieces
from tests.close import assert_bitwise
from tests.operands import SPECS, every_nth, nasty, variants
from tests.reference.test_philox import KNOWN

STREAM = {"seed": 0x1234567890ABCDEF, "tensor_id": 0xDEADBEEF, "count": 3}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(37, 70), (1, 1), (130, 257), (16, 16), (3, 129), (0, 5), (5, 0), (0, 0)]
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def implementations() -> Iterator[str]:
    """The implementation that a user gets on this machine, then the plain one."""
    yield "preferred"
    with qt.only("reference"):
        yield "reference"


def same(got: qt.Quantized, expected: reference.Quantized, what: str) -> None:
    assert_bitwise(got.scales(), expected.scales(), f"{what}, scales")
    assert_bitwise(got.codes(), expected.codes(), f"{what}, codes")


def operand_by_operand(
    spec: QuantSpec, shape: tuple[int, int], at: int, of: int, *amax: float, **options: Any
) -> Iterator[tuple[str, torch.Tensor, reference.Quantized]]:
    """Every `of`-th edge-case operand in one dtype, alternately contiguous and transposed, and its codes from numpy.

    It is yielded once with each implementation; an amax is that of all blocks.
    """
    blocks = [np.full(amaxes(spec, shape), number, np.float32) for number in amax]
    for number, (name, x) in enumerate(every_nth(hard(shape), at, of).items()):
        other = -(number + at // of) % len(DTYPES)
        t = torch.from_numpy(x.copy()).to(DTYPES[other])
        expected = reference.quantize(t.float().numpy(), spec, *blocks, **options)
        transposed = (at + number + other) % 2
        for implementation in implementations():
            what = f"{implementation}, {shape}, {name}, {t.dtype}{', transposed' * transposed}"
            yield what, t.t().contiguous().t() if transposed else t, expected


@cache
def hard(shape: tuple[int, int]) -> dict[str, np.ndarray]:
    return nasty(shape)


def amaxes(spec: QuantSpec, shape: tuple[int, int]) -> tuple[int, int]:
    return (1, 1) if spec.two_level else spec.blocks(shape[0], spec.padded(shape[1]))


@every_spec
def test_torch_stores_the_bits_of_numpy(spec: QuantSpec) -> None:
    # Alternate, so that each spec occurs with each operand in several shapes, and each shape with several specs.
    for at, shape in enumerate(SHAPES, list(SPECS.values()).index(spec)):
        for what, t, expected in operand_by_operand(spec, shape, at, 4, **STREAM):
            same(qt.quantize(t, spec, **STREAM), expected, what)  # type: ignore[arg-type]


AMAXES = [1.3, 0.0, 1e-39, 3e38, np.inf, np.nan]


@every_spec
def test_torch_stores_the_bits_of_numpy_under_a_given_amax(spec: QuantSpec) -> None:
    shape = (19, 70)
    for at, amax in enumerate(AMAXES, list(SPECS.values()).index(spec)):
        given = torch.full(amaxes(spec, shape), amax)
        for what, t, expected in operand_by_operand(spec, shape, at, 5, amax):
            same(qt.quantize(t, spec, given), expected, f"{what}, amax {amax}")
            if spec.per_tensor:
                same(qt.quantize(t, spec, amax), expected, f"{what}, amax {amax} as a number")


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.per_tensor], ids=str)
def test_torch_stores_the_bits_of_numpy_under_a_given_factor(spec: QuantSpec) -> None:
    factors = (0.0, 8.0, 2.0**-126, 2.0**100) if spec.power_of_two else (0.0, 8.0, 0.3, 1e30)
    for at, factor in enumerate(factors):
        for what, t, expected in operand_by_operand(spec, (19, 70), at, 3, factor=factor):
            same(qt.quantize(t, spec, factor=factor), expected, f"{what}, factor {factor}")
            same(qt.quantize(t, spec, factor=torch.tensor(factor)), expected, f"{what}, factor {factor} as a tensor")


@every_spec
def test_dequantize_and_the_transpose_match_numpy(spec: QuantSpec) -> None:
    at = list(SPECS.values()).index(spec)
    for what, t, expected in operand_by_operand(spec, (19, 70), at, 2):
        values = expected.dequantize()
        q = qt.quantize(t, spec)
        assert_bitwise(qt.dequantize(q), values, what)
        if spec.transposable:
            assert_bitwise(q.T.dequantize(), values.T, f"{what}, transposed")


def every_bf16() -> dict[str, torch.Tensor]:
    """All 65,536 values as one operand; and again with zeros for non-finite ones, which would decide every scale."""
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    values = codes.view(torch.bfloat16).reshape(256, 256)
    finite = torch.where(values.isfinite(), values, torch.zeros_like(values))
    return {"all": values, "finite": finite, "finite, along k": finite.t().contiguous()}


@every_spec
def test_every_bf16_value_is_stored_as_in_numpy(spec: QuantSpec) -> None:
    for name, x in every_bf16().items():
        expected = reference.quantize(x.float().numpy(), spec, **STREAM)  # type: ignore[arg-type]
        for implementation in implementations():
            same(qt.quantize(x, spec, **STREAM), expected, f"{implementation}, {name}")  # type: ignore[arg-type]


def _compiled() -> Iterator[Any]:
    """Compile each format to Inductor's graph, and one operand of each distinct kind completely."""
    kinds: dict[Hashable, QuantSpec] = {}
    for spec in SPECS.values():
        kinds.setdefault((spec.format.packed, spec.two_level, spec.rounding), spec)
    yield pytest.param(tuple(kinds.values()), "inductor", id="kinds")
    for name in sorted({spec.format.name for spec in SPECS.values()}):
        specs = tuple(spec for spec in SPECS.values() if spec.format.name == name)
        yield pytest.param(specs, "aot_eager_decomp_partition", id=f"{name}, graph alone")
        yield pytest.param(specs, "inductor", id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(("specs", "backend"), list(_compiled()))
def test_compiled_code_stores_the_bits_of_numpy(specs: tuple[QuantSpec, ...], backend: str) -> None:
    """Between an operation in bf16 that a compiler would fuse and a GEMM that it would feed, in one graph."""
    torch._dynamo.reset()
    weight = torch.randn(32, 256, dtype=torch.bfloat16)

    @partial(torch.compile, fullgraph=True, backend=backend)
    def step(x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        stored = []
        for spec in specs:
            q = qt.quantize(x * 0.37, spec, **STREAM)  # type: ignore[arg-type]
            stored.append((q.codes(), q.scales(), qt.matmul(q, qt.quantize(weight, spec), torch.bfloat16)))
        return stored

    for name, x in every_bf16().items():
        for spec, (codes, scales, y) in zip(specs, step(x), strict=True):
            expected = reference.quantize((x * 0.37).float().numpy(), spec, **STREAM)  # type: ignore[arg-type]
            assert_bitwise(scales, expected.scales(), f"{spec}, {name}, scales")
            assert_bitwise(codes, expected.codes(), f"{spec}, {name}, codes")
            q = qt.quantize(x * 0.37, spec, **STREAM)  # type: ignore[arg-type]
            product = qt.matmul(q, qt.quantize(weight, spec), torch.bfloat16)
            assert_bitwise(y, product, f"{spec}, {name}, GEMM")


PER_TENSOR = [s for s in SPECS.values() if s.per_tensor]


# One case is compiled by Inductor; the others only to its graph.
@pytest.mark.parametrize(
    ("spec", "backend"),
    [(s, "aot_eager_decomp_partition" if at else "inductor") for at, s in enumerate(PER_TENSOR)],
    ids=str,
)
def test_compiled_code_takes_amax_and_factor(spec: QuantSpec, backend: str) -> None:
    torch._dynamo.reset()

    @partial(torch.compile, fullgraph=True, backend=backend)
    def step(x: torch.Tensor, amax: torch.Tensor, factor: torch.Tensor) -> list[torch.Tensor]:
        given, set_ = qt.quantize(x.t(), spec, amax), qt.quantize(x.t(), spec, factor=factor)
        return [given.codes(), given.scales(), set_.codes(), set_.scales()]

    x = torch.randn(40, 24)
    got = step(x, torch.tensor(1.3), torch.tensor(8.0))
    transposed = np.ascontiguousarray(x.t().numpy())
    given = reference.quantize(transposed, spec, np.full((1, 1), 1.3, np.float32))
    set_ = reference.quantize(transposed, spec, factor=8.0)
    for a, b in zip(got, [given.codes(), given.scales(), set_.codes(), set_.scales()], strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_torchs_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    got = philox4x32(*(torch.tensor([c]) for c in counter), key[0] | key[1] << 32)
    assert tuple(int(w) for w in got) == words


@pytest.mark.parametrize("first", [0, 3, 2**34 - 6, 5 * 2**36 + 1])
def test_random_words_of_an_optimizer_match_the_reference(first: int) -> None:
    """Philox of two words, keyed by a word of Philox of four, by numpy; the step beyond 32 bits, a seed of 64."""
    seed, parameter, step, number = 0xFEDC_BA98_7654_3210, 3, (1 << 32) + 7, 11
    key, upper = numerics.noise_stream(seed, parameter, step)
    e = np.arange(first, first + number, dtype=np.uint64)
    two = numerics.philox2x32((e // 4 & 0xFFFFFFFF, (e // 4 >> 32) ^ np.uint64(upper)), key)
    word = two[np.arange(number), (e % 4 // 2).astype(int)]
    expected = np.where(e % 2 == 0, word, word << 16 | word >> 16)
    assert np.array_equal(pieces.words(first, number, seed, parameter, step, torch.device("cpu")).numpy(), expected)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7, 16, 33])
def test_rows_draw_the_same_noise_as_in_the_whole_operand(k: int) -> None:
    every = uniform(12, k, 5, 7, 2, torch.device("cpu"))
    rows = torch.tensor([11, 0, 3, 4, 9])
    assert torch.equal(rows_of_uniform(rows, k, 5, 7, 2), every[rows])


@pytest.mark.parametrize("shape", [(300, 301), (7, 3), (0, 4), (4, 0)])
def test_torch_draws_the_numbers_of_numpy(shape: tuple[int, int]) -> None:
    for count in (5, (7 << 32) + 5):
        stream = (STREAM["seed"], STREAM["tensor_id"], count)
        expected = numerics.uniform(*shape, *stream)
        assert_bitwise(uniform(*shape, *stream, torch.device("cpu")), expected)
        assert_bitwise(uniform(*shape, *stream[:2], torch.tensor(count), torch.device("cpu")), expected)


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.two_level or s.format.name in FLOAT8], ids=str)
def test_the_preferred_implementation_is_not_the_plain_one(spec: QuantSpec) -> None:
    """Emulated formats have only the plain implementation."""
    runs = next(name for name, why in QUANTIZE.explain(torch.zeros(2, 2), spec) if not why)
    assert runs != "reference", "the two implementations that the tests above compare are one"


@pytest.mark.parametrize("recipe", variants().values(), ids=variants())
def test_the_plan_counts_the_bytes_that_are_stored(recipe: Recipe) -> None:
    spec = recipe.wgrad.b
    if spec is not None:
        for tokens, features in ((64, 48), (100, 33)):
            stored = qt.quantize(torch.randn(features, tokens), spec).nbytes
            # The scale of a tensor is stored on the host or in four bytes; two levels need four bytes more.
            assert abs(saved_bytes(recipe, tokens, features) - stored) <= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_given_factor_need_not_be_a_power_of_two(dtype: torch.dtype) -> None:
    spec = QuantSpec(E4M3)
    x = torch.randn(64, 96).to(dtype)
    q = qt.quantize(x, spec, factor=5.3)
    r = reference.quantize(x.float().numpy(), spec, factor=5.3)
    assert (q.codes().numpy() == r.codes()).all() and (q.scales().numpy() == r.scales()).all()
