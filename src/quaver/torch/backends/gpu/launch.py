"""Launching a kernel at the cost of one call into C: compiled once, kept with its grid and its numbers.

`launcher` compiles a kernel for tensors of given dtypes and alignments and for given numbers, and returns a function of
the tensors alone. `quaver.torch.backends.gpu.launch_plan` keeps it under all that decides it. Triton's own
`kernel[grid](...)` finds out anew at each call what it was called with, which takes as long as a small layer.

Under `recording` nothing runs: what would be compiled is noted, so that a machine without a GPU compiles just what one
with a GPU runs. With TRITON_INTERPRET=1 kernels run in Triton's interpreter, mended where it rounds wrongly.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from quaver.kernels.hashing import hash_callees_first
from quaver.torch.backends.gpu import capture, device, interpreter
from quaver.torch.backends.gpu.capture import raw_stream

_C: Any = torch._C
#: () to the index of the current GPU. Builds of torch for a CPU lack the name, and nothing calls it there.
current_gpu: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)
#: What Triton calls the dtypes.
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
#: Dtypes that Triton knows from Ada on; before, kernels take codes as bytes.
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Passes of a kind before they start anew: a run with ever new shapes must not grow for ever.
MOST_KEPT = 4096

Run = Callable[..., None]


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel as it would be compiled, and the grid it would run on."""

    fn: Any
    grid: tuple[int, int, int]
    signature: dict[str, str]
    constants: dict[str, Any]
    #: Names of the arguments that are known to be multiples of 16: addresses and strides that allow wide accesses.
    divisible: tuple[str, ...]
    warps: int
    #: The most registers of a thread, or None for as many as the compiler likes.
    registers: int | None = None
    #: By argument, the bytes of each tensor.
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hash_callees_first(self.fn, *self.constants.values())

    @property
    def options(self) -> dict[str, Any]:
        """What `triton.compile` takes besides the source.

        Products and sums become no one operation, rounded once: its bits are not plain torch's, nor the interpreter's.
        """
        most = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "enable_fp_fusion": False, **most}

    @property
    def kernel(self) -> tuple[Any, ...]:
        """The key of the compiled kernel: launches of one kernel may differ in their grid and their numbers."""
        parts = (self.signature.items(), self.constants.items(), self.divisible, self.options.items())
        return (self.fn, *map(tuple, parts))

    @property
    def source(self) -> ASTSource:
        names = self.fn.arg_names
        attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in self.divisible}
        constants = {(names.index(name),): value for name, value in self.constants.items()}
        return ASTSource(fn=self.fn, signature=self.signature, constexprs=constants, attrs=attrs)


_recorded: list[KernelLaunch] | None = None


@contextmanager
def recording(arch: int) -> Iterator[list[KernelLaunch]]:
    """Note what would be launched on a GPU of this architecture (80, 86, 89, 90, 100, 120), and launch nothing."""
    global _recorded
    before = _recorded
    launches: list[KernelLaunch] = []
    _forget()
    _recorded = launches
    device.recorded.append(arch)
    try:
        yield launches
    finally:
        _recorded = before
        device.recorded.pop()
        _forget()


def _forget() -> None:
    for kept in device.tables:
        kept.clear()


def interpreted(fn: Any) -> bool:
    """True if Triton interprets a kernel instead of compiling it."""
    return isinstance(fn, InterpretedFunction)


def launcher(
    fn: Any,
    grid: Sequence[int],
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int | float] = (),
    constants: dict[str, Any] | None = None,
    warps: int = 4,
    registers: int | None = None,
) -> Run:
    """The launch of a kernel as a function of tensors like these.

    Args:
        fn: a triton.jit function whose arguments are tensors, then numbers, then constants.
        grid: programs along up to three axes.
        tensors: all on one device; None where a kernel takes nothing, and then always None.
        numbers: fixed; whether one is a multiple of 16 is compiled in.
        constants: by name.
        warps: of a program.
        registers: as that of `Launch`.
    Returns:
        A function of the tensors: the same device, addresses that are multiples of 16 where these are, and the same
        dtypes or others of the same memory: four codes may go for an int32.
    """
    constants = constants or {}
    x, y, z = (*grid, 1, 1)[:3]
    triple = (x, y, z)
    if interpreted(fn):
        return interpreter.run(fn, triple, [None if t is None else read_as(t) for t in tensors], numbers, constants)
    described = describe(fn, triple, tensors, numbers, constants, warps, registers)
    if _recorded is not None:
        _recorded.append(described)
        return lambda *_: None
    return _compiled(described, tensors, numbers)


def read_as(x: Tensor) -> torch.dtype:
    """What a kernel takes a tensor's elements for: triton-lang/triton#8929."""
    return torch.uint8 if x.dtype in FP8 and device.architecture(x.device) < 89 else x.dtype


def describe(
    fn: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int | float],
    constants: dict[str, Any],
    warps: int,
    registers: int | None = None,
) -> KernelLaunch:
    """What `launcher` compiles for these arguments."""
    signature: dict[str, str] = {}
    divisible: list[str] = []
    absent: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for name, value in zip(fn.arg_names, (*tensors, *numbers), strict=False):
        if value is None:
            signature[name], absent[name] = "constexpr", None
        elif isinstance(value, Tensor):
            signature[name] = "*" + TYPES[read_as(value)]
            sizes[name] = value.numel() * value.element_size()
            # Single numbers may lie anywhere, and gain nothing from a known address.
            if value.numel() > 1 and aligned(value):
                divisible.append(name)
        elif isinstance(value, int):
            # Kernels multiply strides by up to 3 before they widen them.
            most = 2**29 if "stride" in name else 2**31
            signature[name] = "i32" if -most <= value < most else "i64"
            if value % 16 == 0:
                divisible.append(name)
        else:
            signature[name] = "fp32"
    signature |= dict.fromkeys(constants, "constexpr")
    missing = set(fn.arg_names) - set(signature)
    assert not missing, f"{fn.__name__} is launched without {sorted(missing)}"
    return KernelLaunch(fn, grid, signature, {**absent, **constants}, tuple(divisible), warps, registers, sizes)


def card(device: torch.device) -> tuple[int, Callable[[], int], Callable[[int], int], Callable[[int], Any]]:
    """A GPU's index, a function for the current one's index, a function for its stream, and a context that enters it.

    A launch asks CUDA for these alone: a stub in their place counts a launch's host time without a GPU.
    """
    return device.index, current_gpu, raw_stream, torch.cuda.device


def _compiled(launch: KernelLaunch, tensors: Sequence[Tensor | None], numbers: Sequence[int | float]) -> Run:
    devices = sorted({str(t.device) for t in tensors if t is not None})
    if len(devices) > 1:
        # A kernel is told addresses: on a GPU another device's address is no memory, or the memory of another tensor.
        raise RuntimeError(f"{launch.fn.__name__} is given tensors on {' and '.join(devices)}; move them to one device")
    index, current, stream_of, entering = card(next(t.device for t in tensors if t is not None))
    with entering(index):
        _, start, function, middle = _loaded(launch, index)
    order = [launch.constants.get(name) for name in launch.fn.arg_names[len(tensors) + len(numbers) :]]
    tail = (*numbers, *order)
    x, y, z = launch.grid

    def run(*given: Tensor | None) -> None:
        # Addresses, since of a tensor the launcher asks Python for its address and the driver whether it is a GPU's.
        # Between function and arguments go hooks of profilers that wrap launches; those that watch the driver see them.
        addresses = [None if t is None else t.data_ptr() for t in given]
        if current() == index:
            start(x, y, z, stream_of(index), function, *middle, *addresses, *tail)
        else:
            with entering(index):
                start(x, y, z, stream_of(index), function, *middle, *addresses, *tail)

    #: On a stream of the current GPU: start(*head, *addresses, *tail) is the launch.
    run.on = lambda stream: (start, (x, y, z, stream, function, *middle), tail)  # type: ignore[attr-defined]
    return run


def _start_of(kernel: Any) -> tuple[Callable[..., None], Any, tuple[Any, ...]]:
    """What starts a kernel, its handle, and what goes between that and the arguments."""
    run, function, hooks = kernel.run, kernel.function, (kernel.packed_metadata, None, None, None)
    scratch = [getattr(run, f"{name}_scratch_size", 1) for name in ("global", "profile")]
    if triton.__version__.startswith("3.6.") and scratch == [0, 0]:
        # What its Python would do at each launch is to allocate nothing.
        return run.launch, function, (run.launch_cooperative_grid, run.launch_pdl, None, None, *hooks)
    return run, function, hooks


#: What is on a GPU, for good: `triton.compile` puts the same code there again each time, and later versions of Triton
#: take it away, under a launch that still has its address, when what was compiled is let go.
_kernels: "dict[Any, _LoadedKernel]" = {}
#: Held while a kernel is compiled and put on a GPU: a second thread would put it there once more, and what it replaces
#: would be let go under the first one's launches.
_loading = Lock()


class _LoadedKernel(NamedTuple):
    #: Held, since it owns what is on the GPU.
    kernel: Any
    #: As `_start_of`.
    start: Callable[..., None]
    function: Any
    middle: tuple[Any, ...]


def _loaded(launch: KernelLaunch, index: int) -> _LoadedKernel:
    """The kernel on the current GPU, of this index: one for all shapes that are compiled alike."""
    key = index, launch.kernel
    loaded = _kernels.get(key)
    if loaded is not None:
        return loaded
    with _loading:
        loaded = _kernels.get(key)
        if loaded is None:
            kernel = _load(launch)
            # Triton puts it on the GPU when it is first asked for what starts it.
            loaded = _kernels[key] = _LoadedKernel(kernel, *_start_of(kernel))
    return loaded


def _load(launch: KernelLaunch) -> Any:
    target = triton.runtime.driver.active.get_current_target()
    return triton.compile(launch.source, target=target, options=launch.options)


#: Meeting places of a device, and the row that each stream has of them.
_rooms: dict[torch.device, Tensor] = {}
_workspaces: dict[tuple[torch.device, int], Tensor] = {}
STREAMS = 256


_making = Lock()


def workspace(device: torch.device) -> Tensor:
    """int32 [4] of zeros where the programs of a launch meet: each kernel leaves them zero, each stream has its own.

    All of a device's are made at once. CUDA graphs keep the row of the stream that they are captured on: two captured
    on one stream must not be replayed at the same time.
    """
    stream = capture.stream_of(device)
    words = _workspaces.get((device, stream))
    return _row(device, stream) if words is None else words


def _row(device: torch.device, stream: int) -> Tensor:
    with _making, torch.inference_mode(False):
        buffer = _rooms.get(device)
        if buffer is None and capture.capturing(device):
            # Memory of the graph, filled at each replay: of no use to anything else.
            return torch.zeros(4, dtype=torch.int32, device=device)
        if buffer is None:
            buffer = torch.zeros((STREAMS, 32), dtype=torch.int32, device=device)
            if device.type == "cuda":
                # Other streams do not wait for this one.
                torch.cuda.current_stream(device).synchronize()
            _rooms[device] = buffer
        taken = sum(known == device for known, _ in _workspaces)
        if taken == STREAMS:
            raise RuntimeError(f"more than {STREAMS} streams quantize on {device}; use fewer CUDA streams")
        # Rows of their own cache line. Another thread may have taken one for this stream.
        return _workspaces.setdefault((device, stream), buffer[taken, :4])


def aligned(x: Tensor) -> bool:
    """True if a tensor's address is a multiple of 16, as wide loads need."""
    return x.is_meta or x.data_ptr() & 15 == 0


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs a GPU runs side by side, at least; 132 where there is none."""
    if device.type != "cuda":
        return 132
    number: int = torch.cuda.get_device_properties(device).multi_processor_count
    return number


def power_above(n: int) -> int:
    """The smallest power of two that is not below n, and 1 for none."""
    return 1 << max(0, n - 1).bit_length()
