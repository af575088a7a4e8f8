"""float32 products of bf16 on a CPU: equal to float64's within float32's own error, in every layout, on any threads.

Where the processor has no such block, another one stands for it: what surrounds it is the same.
"""

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quaver.torch.backends.cpu import gemm, quantize
from quaver.torch.backends.cpu import gemm as cpu_brgemm
from tests import forked
from tests.close import assert_bitwise
from tests.torch.backends.cpu import block


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> block.Functions:
    """The block functions of this processor, or an emulation."""
    multiply_and_release = block.functions()
    monkeypatch.setattr(cpu_brgemm, "_functions", lambda: multiply_and_release)
    return multiply_and_release


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 64, 2), (3, 32, 10), (128, 64, 512), (130, 96, 514), (257, 192, 1030), (130, 64, 77), (200, 64, 4095)],
    ids=str,
)
def test_product_is_float64s_within_float32s_error(shape: tuple[int, int, int], transposed: tuple[bool, bool]) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    if transposed[0]:
        a = a.t().contiguous().t()
    if transposed[1]:
        b = b.t().contiguous().t()
    y, exact = cpu_brgemm.brgemm_matmul(a, b), a.double() @ b.double().t()
    assert y.dtype is torch.float32 and y.is_contiguous()
    assert (y - exact).norm() <= 5e-7 * exact.norm()


def test_nan_infinity_and_an_outlier_stay_in_their_row() -> None:
    a, b = torch.randn(128, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    a[3, 5], a[7, 1], a[9, 2] = torch.nan, torch.inf, 1e30
    y = cpu_brgemm.brgemm_matmul(a, b)
    assert y[3].isnan().all() and y[7].isinf().all()
    others = [i for i in range(128) if i not in (3, 7)]
    torch.testing.assert_close(y[others], a[others].float() @ b.float().t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 64, 32, 64), (3, 128, 96, 64), (2, 64, 64, 128)], ids=str)
def test_several_matrices_are_multiplied_by_some_rows_and_columns_of_others(shape: tuple[int, int, int, int]) -> None:
    count, m, k, n = shape
    a, b = torch.randn(count, m, k).bfloat16(), torch.randn(count, k + 32, n + 64).bfloat16()
    pairs = b.view(count, -1, 2, n + 64).transpose(2, 3).contiguous()
    y = torch.full((count, m, n), torch.nan)
    cpu_brgemm.multiply_each(a, pairs, y)
    exact = a.double() @ b[:, :k, :n].double()
    assert (y - exact).norm() <= 5e-7 * exact.norm()
    with pytest.raises(ValueError, match="contiguous"):
        cpu_brgemm.multiply_each(a.transpose(1, 2).contiguous().transpose(1, 2), pairs, y)


def test_only_large_products_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_brgemm.brgemm_supports(512, 512, 512)
    for shape in [(64, 512, 512), (512, 500, 512), (128, 128, 128)]:
        assert not cpu_brgemm.brgemm_supports(*shape), shape
    monkeypatch.setattr(cpu_brgemm, "_functions", lambda: None)
    assert not cpu_brgemm.brgemm_supports(512, 512, 512)


def test_memory_passed_to_c_is_checked() -> None:
    good = torch.zeros(6, 4, dtype=torch.float32)
    assert cpu_brgemm.address(good, torch.float32, 24) == good.data_ptr()
    wrong = good.double(), good.to("meta"), good.t(), good[:, :3], torch.zeros(0, dtype=torch.float32)
    for t in wrong:
        with pytest.raises(ValueError, match=r"24 contiguous elements of torch\.float32 on the CPU"):
            cpu_brgemm.address(t, torch.float32, 24)


def test_blocks_are_compiled_for_few_sizes_for_any_token_count(
    functions: block.Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = set()

    def brgemm(*arguments: Any) -> None:
        sizes.add(arguments[:7])
        functions[0](*arguments)

    monkeypatch.setattr(cpu_brgemm, "_functions", lambda: (brgemm, functions[1]))
    w = torch.randn(64, 96).bfloat16()
    for tokens in range(128, 1500, 13):
        x, g = torch.randn(tokens, 96).bfloat16(), torch.randn(tokens, 64).bfloat16()
        cpu_brgemm.brgemm_matmul(x, w)
        cpu_brgemm.brgemm_matmul(g, w.t())
        cpu_brgemm.brgemm_matmul(torch.randn(tokens, 128).bfloat16().t(), x.t())
    # Of wgrad: a last piece of 1 to 16 steps, the first or one that is added, and whole ones.
    assert len(sizes) <= 2 + 3 * 16, sorted(sizes)


@pytest.mark.parametrize("piece", [quantize.PIECE, 4096])
@pytest.mark.parametrize("k", [1, 2, 7, 64, 66, 127])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_pairs_of_rows_are_interleaved(
    shifted: bool, transposed: bool, k: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also shifted by one element, so that nothing is aligned to 32 bits."""
    monkeypatch.setattr(quantize, "PIECE", piece)
    b = torch.randn(192, k).bfloat16()
    b[0, 0], b[1, k // 2], b[2, -1] = torch.nan, -torch.inf, -0.0
    given = b.t().contiguous().t() if transposed else b
    if shifted:
        given = torch.cat([given.new_zeros(1), given.as_strided((given.numel(),), (1,))])[1:].as_strided(
            given.shape, given.stride(), 1
        )
    padded = -(-k // 32) * 32
    whole = torch.cat([b, b.new_zeros(192, padded - k)], 1)
    expected = whole.view(3, 64, padded // 2, 2).permute(0, 2, 1, 3).contiguous()
    assert_bitwise(cpu_brgemm._pairs(given, 64, padded).view(torch.int16), expected.view(torch.int16))


def operands(m: int, n: int = 192, k: int = 1030) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m)
    return torch.randn(m, k, generator=generator).bfloat16(), torch.randn(n, k, generator=generator).bfloat16()


@pytest.mark.parametrize("m", [100, 128, 130, 255, 257, 512])
@pytest.mark.parametrize("helpers", [1, 2, 7])
def test_threads_give_the_bits_of_one(m: int, helpers: int, functions: block.Functions) -> None:
    a, b = operands(m)
    assert_bitwise(
        cpu_brgemm._product(functions, a, b, helpers), cpu_brgemm._product(functions, a, b, 0), f"{helpers} helpers"
    )


def test_as_many_threads_work_as_torch_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(gemm, "run_on_threads", lambda work, units, helpers: asked.append(helpers))
    for threads in (1, 2, 4, 32):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        cpu_brgemm.brgemm_matmul(*operands(512, 512, 512))
        # Too little for a second thread.
        cpu_brgemm.brgemm_matmul(*operands(128, 64, 512))
    assert asked == [0, 0, 1, 0, 3, 0, 15, 0]


class Watched:
    """A block and its release, and which thread called which; each thread's first call waits for the others'."""

    def __init__(self, functions: block.Functions, threads: int) -> None:
        self.multiply, self.end = functions
        self.calls: dict[int, list[str]] = {}
        self.together = threading.Barrier(threads, timeout=60)

    def functions(self) -> block.Functions:
        return self.block, self.release

    def block(self, *arguments: Any) -> None:
        calls = self.calls.setdefault(threading.get_ident(), [])
        if not calls:
            self.together.wait()
        calls.append("block")
        self.multiply(*arguments)

    def release(self, in_pairs: bool) -> None:
        self.calls[threading.get_ident()].append("release")
        self.end(in_pairs)


def test_each_thread_releases_its_tiles(functions: block.Functions) -> None:
    watched = Watched(functions, 3)
    a, b = operands(700)
    y = cpu_brgemm._product(watched.functions(), a, b, 2)
    assert_bitwise(y, cpu_brgemm._product(functions, a, b, 0))
    assert len(watched.calls) == 3
    for calls in watched.calls.values():
        assert set(calls[:-1]) == {"block"} and calls[-1] == "release"


@pytest.mark.parametrize("fails", ["the caller", "a helper"])
def test_an_exception_of_a_thread_is_raised_once_all_have_ended(fails: str, functions: block.Functions) -> None:
    watched, caller = Watched(functions, 2), threading.get_ident()
    rest = threading.Event()

    def multiply(*arguments: Any) -> None:
        watched.block(*arguments)
        if (threading.get_ident() == caller) == (fails == "the caller"):
            rest.set()
            raise FloatingPointError(fails)
        assert rest.wait(60)

    a, b = operands(2000)
    with pytest.raises(FloatingPointError, match=fails):
        cpu_brgemm._product((multiply, watched.release), a, b, 1)
    assert len(watched.calls) == 2 and all(calls[-1] == "release" for calls in watched.calls.values())


def test_products_of_many_threads_match_one(functions: block.Functions) -> None:
    a, b = operands(300)
    expected, results = cpu_brgemm._product(functions, a, b, 0), []

    def run() -> None:
        results.extend(cpu_brgemm._product(functions, a, b, 5) for _ in range(3))

    callers = [threading.Thread(target=run) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 18
    for y in results:
        assert_bitwise(y, expected)


#: In a process of its own, since other libraries' threads do not take a fork well.
FORK = """
import os, torch
from quaver.torch.backends.cpu import gemm as brgemm
from tests.torch.backends.cpu import block
a, b, functions = torch.ones(300, 512).bfloat16(), torch.ones(192, 512).bfloat16(), block.functions()
torch.set_num_threads(1)
before = brgemm._product(functions, a, b, 2)
child = os.fork()
if not child:
    os._exit(0 if torch.equal(brgemm._product(functions, a, b, 2), before) else 1)
raise SystemExit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_multiplies_without_helper_threads() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    done = forked.quick.run(command, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_openmp_the_caller_does_all(functions: block.Functions, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(functions, 1)
    gemm._parallel.cache_clear()
    monkeypatch.setattr(gemm, "_PARALLEL", "a name that libtorch was not linked with")
    try:
        a, b = operands(300)
        assert_bitwise(cpu_brgemm._product(watched.functions(), a, b, 3), cpu_brgemm._product(functions, a, b, 0))
    finally:
        gemm._parallel.cache_clear()
    assert list(watched.calls) == [threading.get_ident()]


@pytest.mark.parametrize("m", [128, 200, 256, 300, 511, 512, 700])
def test_bits_do_not_depend_on_the_rows_of_a_block(m: int, functions: block.Functions) -> None:
    a, b = operands(m)
    assert_bitwise(cpu_brgemm._product(functions, a, b, 1), cpu_brgemm._product(functions, a, b, 0))


def test_an_interrupt_in_a_thread_of_the_team_is_raised_in_the_caller() -> None:
    taken = list[int]()

    def work(units: Iterator[int]) -> None:
        for unit in units:
            taken.append(unit)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gemm.run_on_threads(work, range(100), 2)
    assert len(taken) <= 3
