"""On a card: kernels launched from C give the codes and scales of the reference, also in a captured graph, as fast.

QUAVER_TEST_C_LIBRARY names a folder that `quaver kernels` wrote before, to save compiling it here.
"""

import ctypes as ct
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import reference
from quaver.recipes.formats import E2M1, E4M3
from quaver.recipes.spec import QuantSpec
from quaver.torch.numerics.quantized import Quantized
from tests.close import assert_bitwise
from tests.native import calls
from tests.native.library import COMPILERS, OK, Library, Options, build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not COMPILERS, reason="no C compiler (gcc or clang) is on the path")]
SPECS = {
    "tensorwise": QuantSpec(E4M3, scale="power_of_two"),
    "mxfp8": QuantSpec(E4M3, (1, 32), "e8m0"),
    "nvfp4": QuantSpec(E2M1, (1, 16), "two_level"),
    "nvfp4 gradient": QuantSpec(E2M1, (1, 16), "two_level", "stochastic"),
    "nvfp4 wgrad": QuantSpec(E2M1, (1, 16), "two_level", "stochastic", True),
}
SHAPES = [(256, 512), (1000, 1032), (4096, 4096)]
SEED, TENSOR_ID, COUNT = 0x1234567890ABCDEF, 0xDEADBEEF, 5


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = os.environ.get("QUAVER_TEST_C_LIBRARY")
    if folder is None:
        from quaver.capi.cases import Selection
        from quaver.capi.export import export

        major, minor = torch.cuda.get_device_capability()
        folder = str(tmp_path_factory.mktemp("library"))
        selected = Selection(families=("tensor", "mx", "nv"), formats=(E4M3,), ratios=False, widths=(256,))
        export([10 * major + minor], Path(folder), selected)
    lib = Library(build(Path(folder), COMPILERS[0]))
    size = lib.c.quaver_workspace_bytes(0)
    lib.workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")  # type: ignore[attr-defined]
    assert lib.create(lib.workspace.data_ptr(), size) == OK  # type: ignore[attr-defined]
    assert lib.c.quaver_preload(lib.handle) == OK
    return lib


class CCall:
    """One quantization from C, with its memory."""

    def __init__(self, lib: Library, x: Tensor, spec: QuantSpec) -> None:
        self.lib, self.x = lib, calls._plain(x)
        rows, columns = x.shape
        with torch.device("cuda"):
            self.result = calls._operand(spec, rows, spec.padded(columns))
        self.count, self.amax = torch.tensor([COUNT], device="cuda"), torch.zeros(1, device="cuda")
        stochastic = spec.rounding == "stochastic"
        self.options = Options(
            stochastic=stochastic,
            hadamard=spec.hadamard,
            seed=SEED,
            tensor_id=TENSOR_ID,
            count=self.count.data_ptr() if stochastic else None,
        )
        factor = self.result.tensor_factor
        self.q = calls.codes_of(
            spec,
            rows,
            columns,
            self.result.data.data_ptr(),
            self.result.scale.data_ptr(),
            0 if factor is None else factor.data_ptr(),
        )
        self.has_amax = spec.per_tensor or spec.two_level

    def __call__(self) -> Quantized:
        stream = torch.cuda.current_stream().cuda_stream
        amax = ct.c_void_p(self.amax.data_ptr() if self.has_amax else None)
        pointers = ct.byref(self.x), ct.byref(self.q), None, amax, ct.byref(self.options)
        status = self.lib.c.quaver_quantize(self.lib.handle, ct.c_void_p(stream), *pointers)
        assert status == OK, self.lib.text(status)
        return self.result


def values(rows: int, columns: int) -> Tensor:
    x = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    x *= 10.0 ** np.random.default_rng(1).uniform(-3, 3, (rows, 1)).astype(np.float32)
    return torch.from_numpy(x).to(torch.bfloat16).cuda()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_quantizing_from_c_gives_the_bits_of_the_reference(library: Library, name: str, shape: tuple[int, int]) -> None:
    x, spec = values(*shape), SPECS[name]
    result = CCall(library, x, spec)()
    noise = {"seed": SEED, "tensor_id": TENSOR_ID, "count": COUNT} if spec.rounding == "stochastic" else {}
    expected = reference.quantize(x.float().cpu().numpy(), spec, **noise)
    assert_bitwise(result.codes(), expected.codes())
    assert_bitwise(result.scales(), expected.scales())


def test_a_captured_call_runs_again_on_new_values(library: Library) -> None:
    x, spec = values(256, 512), SPECS["mxfp8"]
    call = CCall(library, x, spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for scale in (1.0, 0.37):
        x.mul_(scale)
        graph.replay()
        expected = reference.quantize(x.float().cpu().numpy(), spec)
        assert_bitwise(call.result.codes(), expected.codes())
        assert_bitwise(call.result.scales(), expected.scales())


def milliseconds(run: object, times: int = 200) -> float:
    assert callable(run)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / times


@pytest.mark.parametrize("name", ["tensorwise", "mxfp8", "nvfp4"])
def test_kernels_from_c_take_the_time_of_pythons(library: Library, name: str) -> None:
    """Both in graphs of ten calls, so that the host's time does not count."""
    x, spec = values(8192, 8192), SPECS[name]
    graphs = []
    for run in (CCall(library, x, spec), lambda: qt.quantize(x, spec)):
        run()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for _ in range(10):
                run()
    times = np.array([[milliseconds(graph.replay, 20) for graph in graphs] for _ in range(7)])
    c, python = np.median(times, 0)
    assert c <= 1.03 * python, f"{c / 10:.4f} ms from C, {python / 10:.4f} ms from Python"
