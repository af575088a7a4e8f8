"""Let a CPU stand in for a GPU: interpreted kernels, GEMMs with cuBLASLt's checks, a kernel driver, CUDA graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType
from torch.utils._python_dispatch import _disable_current_modes

from quaver.recipes.spec import Recipe
from quaver.torch.backends.gpu import capture, device, interpreter, launch, quantize, scaled_mm
from quaver.torch.backends.gpu.launch import read_as
from quaver.torch.linear import linear as linear_module
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops
from quaver.torch.state.history import amax, roll_gpu
from tests.torch.backends.gpu.cublaslt import stand_in

#: Cached results of GEMM probes by architecture and kind of call; a probe takes a tenth of a second to interpret.
_probes: dict[Any, str] = {}
KINDS, SWIZZLES = ({kind.value: kind for kind in all.__members__.values()} for all in (ScalingType, SwizzleType))


def _resolve(recipe: Recipe, x: Tensor) -> ops.ResolvedOperations:
    multiply = scaled_mm.matmul if device.why_no_fp8(x.device, "native") else scaled_mm.scaled_matmul
    return ops.ResolvedOperations(recipe, quantize.quantize, multiply, quantize.quantize_both)


@contextmanager
def as_on_a_gpu(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run CPU tensors through the GPU code: interpreted kernels, and the scaled GEMM that torch has for CPUs."""
    before = set(device.forced_implementations)
    device.forced_implementations.update({"triton", "native"})
    patch.setattr(launch, "card", lambda _: (0, lambda: 0, lambda _: 0, None))
    patch.setattr(ops, "_resolve", _resolve)
    # GEMM choices cached for one GPU do not apply to another.
    patch.setattr(scaled_mm, "_choices", {})
    patch.setattr(scaled_mm, "_transposes", {})
    # As on a GPU, where the host does not read factors.
    patch.setattr(amax, "saved_factors", lambda layer: amax._on_device(layer, layer.factor))
    ops.clear_resolved()
    yield
    device.forced_implementations.intersection_update(before)
    ops.clear_resolved()
    # Drop launches recorded by a `Driver`.
    launch._forget()


def become(arch: int, patch: pytest.MonkeyPatch, either: bool | None = None) -> list[list[str]]:
    """Use the kernels and GEMM checks of one architecture; return the list of GEMM calls, which grows as they run.

    Args:
        either: as `stand_in`.
    """
    calls: list[list[str]] = []
    run = stand_in(arch, calls, either)

    def kernel_args(a: Tensor, b: Tensor, sa: Any, ka: Any, wa: Any, sb: Any, kb: Any, wb: Any, *rest: Any) -> Tensor:
        kinds = [[KINDS[kind] for kind in side] for side in (ka, kb)]
        swizzles = [[SWIZZLES[swizzle] for swizzle in side] or None for side in (wa, wb)]
        return run(a, b, sa, kinds[0], sb, kinds[1], *swizzles, *rest)

    patch.setattr(torch, "_scaled_mm_v2", kernel_args)
    patch.setattr(scaled_mm, "scaled_mm", run)
    patch.setattr(device, "_architecture", lambda _: arch)
    probe = scaled_mm._probe

    def probed(chosen: scaled_mm.GemmChoice, a: Quantized, b: Quantized, *dtypes: Any) -> str:
        if scaled_mm.scaled_mm is not run:
            return probe(chosen, a, b, *dtypes)
        sizes = scaled_mm._evenness(a.shape[0]), scaled_mm._evenness(a.shape[1], 128), a.transposed, b.transposed
        key = arch, either, chosen.kind, chosen.out, chosen.adds, a.spec, b.spec, sizes, dtypes
        if key not in _probes:
            _probes[key] = probe(chosen, a, b, *dtypes)
        return _probes[key]

    patch.setattr(scaled_mm, "_probe", probed)
    scaled_mm._choices.clear()
    linear_module.plans.clear()
    scaled_mm._transposes.clear()
    return calls


class Driver:
    """Load kernels as a driver does, never while a graph is captured, and record launches.

    Args:
        runs: whether launches are also interpreted; else results stay uninitialized, except those of probes.
    """

    def __init__(self, patch: pytest.MonkeyPatch, runs: bool) -> None:
        self.runs = runs
        self.loaded: set[Any] = set()
        self.launched: list[Any] = []
        self.capturing = False
        self.waited = False
        launch._forget()
        patch.setattr(launch, "interpreted", lambda _: False)
        patch.setattr(launch, "_compiled", self._compiled)
        patch.setattr(capture, "capturing", lambda _: self.capturing)
        probe = scaled_mm._probe
        patch.setattr(scaled_mm, "_probe", lambda *args: self._probed(probe, args))
        # A copy to the host is complete when the host waits for it.
        patch.setattr(roll_gpu.LayerStack, "_ask", lambda stack, rolled: self._ask(stack, rolled))
        for name, value in {
            "is_available": lambda: True,
            "is_current_stream_capturing": lambda: self.capturing,
            "Stream": Stream,
            "current_stream": Stream,
            "stream": lambda _: self._stretch(False),
            "set_stream": lambda _: None,
            "synchronize": self._wait,
            "CUDAGraph": Graph,
            "graph": lambda graph, stream: self._stretch(True),
        }.items():
            patch.setattr(torch.cuda, name, value)

    def _compiled(self, launch: launch.KernelLaunch, tensors: Any, numbers: Any) -> Any:
        kernel = launch.kernel
        if kernel not in self.loaded:
            if self.capturing:
                raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({launch.fn})")
            self.loaded.add(kernel)
        dtypes = [None if t is None else read_as(t) for t in tensors]
        constants = {name: launch.constants[name] for name in launch.fn.arg_names[len(dtypes) + len(numbers) :]}
        run = interpreter.run(launch.fn, launch.grid, dtypes, numbers, constants)

        def recorded(*given: Any) -> None:
            self.launched.append(kernel)
            for name, tensor in zip(launch.fn.arg_names, given, strict=False):
                # The kernel is compiled for aligned accesses; a misaligned one would crash a real GPU process.
                assert name not in launch.divisible or tensor.data_ptr() % 16 == 0, f"{launch.fn.__name__}: {name}"
            if self.runs:
                # Operations of the interpreter itself are not launches of the step.
                with _disable_current_modes():
                    run(*given)

        return recorded

    def _ask(self, stack: roll_gpu.LayerStack, rolled: Tensor) -> None:
        self.waited = False
        stack._host, stack._arrived = rolled, self

    def _probed(self, probe: Any, args: Any) -> str:
        assert not self.capturing, "no probe goes into a graph"
        before, launched, self.runs = self.runs, len(self.launched), True
        try:
            why: str = probe(*args)
        finally:
            self.runs = before
            del self.launched[launched:]
        return why

    def query(self) -> bool:
        """Return the state of the event after the copy."""
        return self.waited

    def _wait(self, *_: Any) -> None:
        self.waited = True

    @contextmanager
    def _stretch(self, capturing: bool) -> Iterator[None]:
        self.capturing = capturing
        try:
            yield
        finally:
            self.capturing = False


class Stream:
    """A CUDA stream of the one device that there is."""

    device = torch.device("cpu")

    def wait_stream(self, other: object) -> None: ...


class Graph:
    """A captured graph; replay does nothing, since the captured code has already run."""

    def replay(self) -> None: ...
