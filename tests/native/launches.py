"""Launches of Python's front end as a driver sees them: described, or through Triton's compiler and launcher."""

import ctypes as ct
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from quaver.capi.variants import Variant, key_of
from quaver.torch.backends.gpu import launch
from tests.native.library import Log


class Launch(NamedTuple):
    """A launch as a driver sees it."""

    kernel: str
    grid: list[int]
    threads: int
    #: Arguments by name.
    values: dict[str, int]
    #: Rows and columns of a program.
    block: tuple[int, int]
    #: Constants that select a kernel, as `quaver.capi.variants.key_of` encodes them.
    key: int
    #: Checksum of the machine code; 0 if nothing was compiled.
    image: int = 0


def arguments_of(described: launch.KernelLaunch) -> list[str]:
    return [name for name in described.fn.arg_names if described.signature[name] != "constexpr"]


def block_of(described: launch.KernelLaunch) -> tuple[int, int]:
    return Variant(described, 0).block


class Described:
    """Python's launches as it describes them, without compiling."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        launch._compiled = self._compiled  # type: ignore[assignment]

    def _compiled(self, described: launch.KernelLaunch, tensors: Any, numbers: Any) -> Callable[..., None]:
        def run(*tensors_in: Tensor | None) -> None:
            given = [None if t is None else t.data_ptr() for t in tensors_in] + [_bits(n) for n in numbers]
            values = dict(zip(described.fn.arg_names, given, strict=False))
            used = {name: values[name] & _mask(described.signature[name]) for name in arguments_of(described)}
            grid, threads = list(described.grid), 32 * described.warps
            key = key_of(described)
            self.launches.append(Launch(described.fn.__name__, grid, threads, used, block_of(described), key))

        return run

    def take(self) -> list[Launch]:
        taken, self.launches = self.launches, []
        return taken


def _mask(kind: str) -> int:
    return 2 ** (32 if kind in ("i32", "fp32") else 64) - 1


def _bits(number: int | float) -> int:
    """Return a number as a kernel gets it: a float as float32."""
    return number if isinstance(number, int) else struct.unpack("<i", struct.pack("<f", number))[0]


class Launched:
    """Python's launches through Triton's compiler and launcher, as the stub driver logs them."""

    def __init__(self, log: Log) -> None:
        from benchmarks.gpu.ahead import standin
        from benchmarks.measuring import stub_driver

        self.log, self.described = log, []
        self.images: list[bytes] = []
        stub = ct.CDLL("libcuda.so.1")

        def load_binary(name: str, code: bytes, shared: int, device: int) -> tuple[Any, ...]:
            module, function = ct.c_void_p(), ct.c_void_p()
            self.images.append(code)
            assert stub.cuModuleLoadData(ct.byref(module), code) == 0
            assert stub.cuModuleGetFunction(ct.byref(function), module, name.encode()) == 0
            stub.cuFuncSetAttribute(function, 8, shared)
            return module.value, function.value, 32, 0, 1024

        stub_driver._Utils.load_binary = staticmethod(load_binary)  # type: ignore[assignment]
        stub_driver.make_launchers_quickly()
        standin.become(90)
        describe = launch.describe

        def noting(*given: Any, **more: Any) -> launch.KernelLaunch:
            self.described.append(describe(*given, **more))
            return self.described[-1]

        launch.describe = noting

    def take(self) -> list[Launch]:
        described, self.described = self.described, []
        entries = self.log.read()
        assert len(described) == len(entries), (len(described), len(entries))
        return [
            named(entry, arguments_of(one), block_of(one), key_of(one))
            for one, entry in zip(described, entries, strict=True)
        ]


def named(entry: dict[str, Any], names: list[str], block: tuple[int, int], key: int) -> Launch:
    """Name the arguments of a logged launch; scratch pointers must be NULL."""
    names = [*names, "global_scratch", "profile_scratch"]
    assert len(names) == len(entry["parameters"]), (names, entry)
    values = {name: int(text, 16) for name, text in zip(names, entry["parameters"], strict=True)}
    for scratch in ("global_scratch", "profile_scratch"):
        assert values.pop(scratch) == 0
    return Launch(entry["kernel"], entry["grid"], entry["threads"], values, block, key, entry["image"])
