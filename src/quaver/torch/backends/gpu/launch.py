"""Kernel launches at the cost of one C call: compiled once, cached with grid and scalar arguments.

`launcher` compiles a kernel for tensors of given dtypes and alignments and for given scalars, and returns a function of
the tensors alone. `LaunchPlanCache` caches these functions. Triton's own `kernel[grid](...)`
analyses its arguments at each call, which takes as long as a small layer.

Under `recording` nothing runs: launches are only recorded, so that a machine without a GPU can compile exactly what a
GPU runs. With TRITON_INTERPRET=1 kernels run in Triton's interpreter, with the fixes of `interpreter`.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from quaver.kernels.hashing import hash_callees_first
from quaver.torch.backends.gpu import capture, device, interpreter
from quaver.torch.backends.gpu.buffers import PACKED4, BufferSpec, empty, example_argument, pattern
from quaver.torch.backends.gpu.capture import raw_stream

_C: Any = torch._C
#: Returns the index of the current GPU. CPU builds of torch lack the function and never call it.
current_gpu: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)
#: Triton's names of the dtypes.
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
#: dtypes that Triton supports from Ada on; on older GPUs kernels take the codes as bytes.
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Largest number of plans of a kind; a full cache is cleared, so that ever new shapes do not fill memory.
MAX_CACHED = 4096

Run = Callable[..., None]


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel with everything needed to compile it, and its grid."""

    fn: Any
    grid: tuple[int, int, int]
    signature: dict[str, str]
    constants: dict[str, Any]
    #: Names of arguments that are multiples of 16: addresses and strides that allow wide accesses.
    divisible: tuple[str, ...]
    warps: int
    #: Maximum number of registers per thread; None leaves it to the compiler.
    registers: int | None = None
    #: Size of each tensor in bytes, by argument name.
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hash_callees_first(self.fn, *self.constants.values())

    @property
    def options(self) -> dict[str, Any]:
        """Options for `triton.compile`.

        Floating-point fusion is off: a fused multiply-add rounds once and would differ from plain torch and the
        interpreter.
        """
        most = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "enable_fp_fusion": False, **most}

    @property
    def kernel(self) -> tuple[Any, ...]:
        """Key of the compiled kernel; launches of one kernel may differ in grid and scalars."""
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
    """Record the launches for a GPU of this architecture (80, 86, 89, 90, 100, 120) instead of running them."""
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
    for table in device.tables:
        table.clear()


def interpreted(fn: Any) -> bool:
    """Return True if Triton interprets a kernel instead of compiling it."""
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
    """Return a kernel launch as a function of tensors like the given ones.

    Args:
        fn: a triton.jit function whose arguments are tensors, then numbers, then constants.
        grid: numbers of programs along up to three axes.
        tensors: example arguments on one device; None for an argument that is always None.
        numbers: fixed scalars; divisibility by 16 is compiled in.
        constants: constexpr arguments by name.
        warps: warps per program.
        registers: maximum number of registers per thread, or None.

    Returns:
        A function of tensors on the same device, with addresses that are multiples of 16 where the examples' are. Their
        dtypes are the same, or others for the same memory: an int32 may be four codes.
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
    """Return the dtype as which a kernel reads a tensor's elements: see triton-lang/triton#8929."""
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
    """Return the `KernelLaunch` that `launcher` compiles for these arguments."""
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
            # One-element tensors may have any address and gain nothing from alignment.
            if value.numel() > 1 and aligned(value):
                divisible.append(name)
        elif isinstance(value, int):
            # Kernels multiply strides by up to 3 before they widen them to int64.
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
    """Return a GPU's index, and functions for the current index, for its stream, and for a context that enters it.

    Launches call CUDA through these only, so that a stub can measure host time without a GPU.
    """
    return device.index, current_gpu, raw_stream, torch.cuda.device


@dataclass(frozen=True)
class CompiledLaunch:
    """A kernel loaded on a GPU with everything but the tensors' addresses; called with tensors."""

    #: Result of `card`.
    card: tuple[int, Callable[[], int], Callable[[int], int], Callable[[int], Any]]
    start: Callable[..., None]
    grid: tuple[int, int, int]
    function: Any
    #: Arguments between kernel and addresses: hooks of profilers that wrap launches, among others. Profilers of the
    #: driver work without them.
    middle: tuple[Any, ...]
    #: Arguments after the addresses.
    tail: tuple[Any, ...]

    def on(self, stream: int) -> tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...]]:
        """Return (start, head, tail) for a stream of the current GPU: start(*head, *addresses, *tail) launches."""
        return self.start, (*self.grid, stream, self.function, *self.middle), self.tail

    def __call__(self, *tensors: Any) -> None:
        index, _, stream_of, entering = self.card
        with entering(index):
            start, head, tail = self.on(stream_of(index))
            # Addresses, because for a tensor the launcher would ask Python for the address and the driver for its
            # device.
            start(*head, *(None if t is None else t.data_ptr() for t in tensors), *tail)


def _compiled(launch: KernelLaunch, tensors: Sequence[Tensor | None], numbers: Sequence[int | float]) -> Run:
    devices = sorted({str(t.device) for t in tensors if t is not None})
    if len(devices) > 1:
        # Kernels get raw addresses: one of another device would be invalid, or memory of another tensor.
        raise RuntimeError(f"{launch.fn.__name__} got tensors on {' and '.join(devices)}; move them to one device")
    on_card = card(next(t.device for t in tensors if t is not None))
    index, _, _, entering = on_card
    with entering(index):
        _, start, function, middle = _loaded(launch, index)
    order = [launch.constants.get(name) for name in launch.fn.arg_names[len(tensors) + len(numbers) :]]
    return CompiledLaunch(on_card, start, launch.grid, function, middle, (*numbers, *order))


def _start_of(kernel: Any) -> tuple[Callable[..., None], Any, tuple[Any, ...]]:
    """Return the C function that starts a kernel, the kernel's handle, and the arguments between handle and tensors."""
    run, function, hooks = kernel.run, kernel.function, (kernel.packed_metadata, None, None, None)
    scratch = [getattr(run, f"{name}_scratch_size", 1) for name in ("global", "profile")]
    if triton.__version__.startswith("3.6.") and scratch == [0, 0]:
        # Triton 3.6's Python wrapper would allocate nothing at each launch, so it is skipped.
        return run.launch, function, (run.launch_cooperative_grid, run.launch_pdl, None, None, *hooks)
    return run, function, hooks


#: Kernels loaded on a GPU, cached forever. `triton.compile` loads the same code again each time, and later versions of
#: Triton unload it when the compiled object is freed, even if a launch still has its address.
_kernels: "dict[Any, _LoadedKernel]" = {}
#: Lock for compiling and loading a kernel: a second thread would load it again, and the replaced kernel would be
#: unloaded under the launches of the first.
_loading = Lock()


class _LoadedKernel(NamedTuple):
    #: Referenced because it owns the code on the GPU.
    kernel: Any
    #: Results of `_start_of`.
    start: Callable[..., None]
    function: Any
    middle: tuple[Any, ...]


def _loaded(launch: KernelLaunch, index: int) -> _LoadedKernel:
    """Return the kernel loaded on GPU `index`, the current one; shapes that compile to the same code share it."""
    key = index, launch.kernel
    loaded = _kernels.get(key)
    if loaded is not None:
        return loaded
    with _loading:
        loaded = _kernels.get(key)
        if loaded is None:
            kernel = _load(launch)
            # Triton loads the kernel when its start function is first requested.
            loaded = _kernels[key] = _LoadedKernel(kernel, *_start_of(kernel))
    return loaded


def _load(launch: KernelLaunch) -> Any:
    target = triton.runtime.driver.active.get_current_target()
    return triton.compile(launch.source, target=target, options=launch.options)


# ---- launch plans: the kernels, scalars and output buffers for tensors of one layout, worked out once and cached ----
# A call then only allocates the results and launches with addresses.

#: Function to map over tensors in C loops.
address_of = torch.Tensor.data_ptr


class LaunchSpec(NamedTuple):
    """One launch of a plan, with the arguments of `launcher`."""

    kernel: Any
    grid: Sequence[int]
    #: Tensors and buffer specs of the plan in the kernel's order; None for an absent argument.
    tensors: Sequence[Tensor | BufferSpec | None]
    numbers: Sequence[int | float]
    constants: dict[str, Any]
    warps: int
    #: Maximum number of registers per thread, or None.
    registers: int | None = None

    def compiled(self, device: torch.device) -> Run:
        """Compile the launch; return a function of its tensors."""
        kernel_args = [example_argument(x, device) if isinstance(x, BufferSpec) else x for x in self.tensors]
        return launcher(self.kernel, self.grid, kernel_args, *self[3:])


class LaunchPlan:
    """Launches for tensors of one layout.

    Args:
        tensors_in: example tensors, each a distinct object; the first is not None.
        results: specs of the outputs, which may repeat or be in `tensors_in`; None for one that no kernel writes.
        launches: in order; specs that are no results are those of temporaries.
    """

    __slots__ = ("buffers", "card", "packed4", "parts", "patterns", "results", "runs", "specs")

    def __init__(
        self, tensors_in: Sequence[Any], results: Sequence[BufferSpec | None], launches: Sequence[LaunchSpec]
    ) -> None:
        device = tensors_in[0].device
        self.card, known = card(device), {id(x) for x in tensors_in}
        named = [x for each in (results, *(one.tensors for one in launches)) for x in each if id(x) not in known]
        self.buffers = list({id(x): x for x in named if isinstance(x, BufferSpec)}.values())
        #: Functions that allocate the buffers, and their arguments.
        self.patterns = [(torch.zeros_like if b.zeros else torch.empty_like, pattern(b, device)) for b in self.buffers]
        #: True if packed4 codes are among them, which torch cannot fill, as it does in deterministic mode.
        self.packed4 = any(buffer.dtype is PACKED4 for buffer in self.buffers)
        every = (*tensors_in, *self.buffers)
        #: Specs among the arguments, and of the outputs.
        self.specs = [x if isinstance(x, BufferSpec) else None for x in every]
        places = {id(x): i for i, x in enumerate(every) if x is not None}
        places[id(None)] = -1
        #: Picks the results from all tensors with None appended.
        self.results = _select(results, places)
        #: Compiled launches, and functions that pick the tensors of each.
        self.runs: list[tuple[Run, Callable[..., Any]]] = []
        for one in launches:
            self.runs.append((one.compiled(device), _select(one.tensors, places)))
        #: Start functions with their arguments, by stream; None if launches take tensors instead of addresses.
        self.parts: dict[int, list[Any]] | None = (
            {} if all(isinstance(run, CompiledLaunch) for run, _ in self.runs) else None
        )

    def __call__(
        self, tensors_in: Sequence[Tensor | None], addresses: Sequence[int | None], stream: int | None = None
    ) -> Sequence[Any]:
        """Allocate the outputs and run the launches; returns the outputs, None where a spec is None.

        Args:
            tensors_in: read only if `parts` is None, or for results.
            addresses: those of the tensors.
            stream: the stream of the current GPU, if the caller knows it.
        """
        index, current, stream_of, entering = self.card
        parts = self.parts
        if parts is not None and current() != index:
            with entering(index):
                return self(tensors_in, addresses)
        written: Sequence[Tensor] = ()
        if self.packed4 and torch.are_deterministic_algorithms_enabled():
            written = [empty(buffer, self.patterns[0][1].device) for buffer in self.buffers]
        elif self.patterns:
            written = [allocate(like) for allocate, like in self.patterns]
        if parts is None:
            kernel_args = [
                x if spec is None or x is None else spec.kernel_args(x)
                for x, spec in zip((*tensors_in, *written), self.specs, strict=True)
            ]
            for run, select_arguments in self.runs:
                run(*select_arguments((*kernel_args, None)))
            return self.results((*tensors_in, *written, None))
        every = (*addresses, *map(address_of, written), None)
        if stream is None:
            stream = stream_of(index)
        for start, head, tail, select_arguments in parts.get(stream) or self._parts_on(stream):
            start(*(head + select_arguments(every) + tail))
        return self.results((*tensors_in, *written, None))

    def _parts_on(self, stream: int) -> list[Any]:
        parts = [(*run.on(stream), select) for run, select in self.runs]  # type: ignore[attr-defined]
        self.parts[stream] = parts  # type: ignore[index]
        return parts


def _select(tensors: Sequence[Any], places: dict[int, int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that picks some tensors, or their addresses, from all."""
    order = [places[id(x)] for x in tensors]
    return itemgetter(*order) if len(order) > 1 else lambda x: tuple(x[i] for i in order)


class LaunchPlanCache:
    """Decorator of a function that plans an operation for tensors of one layout; called with tensors, it runs the plan.

    Args:
        decide: (example tensors, *options) -> plan, which must depend only on the key computed below.
    """

    def __init__(self, decide: Callable[..., LaunchPlan]) -> None:
        self.decide = decide
        self.plans: dict[Any, LaunchPlan] = {}
        device.tables.append(self.plans)

    def __call__(
        self, tensors_in: Sequence[Tensor | None], *options: Hashable, own: Sequence[Tensor | None] = ()
    ) -> Any:
        """Run the plan for these tensors, made at the first call, and return its outputs.

        Args:
            tensors_in: tensors to read, with any strides; the first is not None.
            options: other values that the plan depends on.
            own: further tensors to read or write: new ones, whose shapes and strides follow from the others.
        """
        key_parts: list[Any] = [options, tensors_in[0].device]  # type: ignore[union-attr]
        addresses: list[int | None] = []
        for x in tensors_in:
            if x is None:
                key_parts.append(None)
                addresses.append(None)
                continue
            address = x.data_ptr()
            key_parts += x.shape, x.is_contiguous() or x.stride(), x.get_device(), x.dtype, address & 15
            addresses.append(address)
        for x in own:
            if x is None:
                key_parts.append(None)
                addresses.append(None)
                continue
            address = x.data_ptr()
            key_parts += x.dtype, address & 15
            addresses.append(address)
        key, tensors = tuple(key_parts), (*tensors_in, *own)
        known = self.plans.get(key) or self._make_plan(key, tensors, options)
        return known(tensors, addresses)

    def _make_plan(self, key: Any, tensors: Sequence[Tensor | None], options: tuple[Hashable, ...]) -> LaunchPlan:
        if len(self.plans) >= MAX_CACHED:
            self.plans.clear()
        like = [None if x is None else x.detach() for x in tensors]
        known = self.plans[key] = self.decide(like, *options)
        return known


# ---- workspaces ----

#: One buffer per device with a workspace for each stream.
_buffers: dict[torch.device, Tensor] = {}
#: Workspace, a row of that buffer, by device and stream.
_workspaces: dict[tuple[torch.device, int], Tensor] = {}
STREAMS = 256


_making = Lock()


def workspace(device: torch.device) -> Tensor:
    """Return int32 [4] zeros through which the programs of a launch synchronize; each stream has its own.

    Every kernel leaves them zero. All workspaces of a device are allocated at once. A CUDA graph keeps the row of its
    capture stream, so two graphs captured on one stream must not be replayed at the same time.
    """
    stream = capture.stream_of(device)
    words = _workspaces.get((device, stream))
    return _row(device, stream) if words is None else words


def _row(device: torch.device, stream: int) -> Tensor:
    with _making, torch.inference_mode(False):
        buffer = _buffers.get(device)
        if buffer is None and capture.capturing(device):
            # Memory of this graph, filled at each replay and useless to other work.
            return torch.zeros(4, dtype=torch.int32, device=device)
        if buffer is None:
            buffer = torch.zeros((STREAMS, 32), dtype=torch.int32, device=device)
            if device.type == "cuda":
                # Other streams do not wait for this one.
                torch.cuda.current_stream(device).synchronize()
            _buffers[device] = buffer
        workspace_count = sum(known == device for known, _ in _workspaces)
        if workspace_count == STREAMS:
            raise RuntimeError(f"more than {STREAMS} streams quantize on {device}; use fewer CUDA streams")
        # Rows are a cache line apart. Another thread may have taken one for this stream.
        return _workspaces.setdefault((device, stream), buffer[workspace_count, :4])


def aligned(x: Tensor) -> bool:
    """Return True if a tensor's address is a multiple of 16, as wide loads need."""
    return x.is_meta or x.data_ptr() & 15 == 0


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 132 without one."""
    if device.type != "cuda":
        return 132
    number: int = torch.cuda.get_device_properties(device).multi_processor_count
    return number


def power_above(n: int) -> int:
    """Return the smallest power of two that is at least n, and 1 for 0."""
    return 1 << max(0, n - 1).bit_length()
