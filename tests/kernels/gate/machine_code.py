"""Compile a recorded launch and read its machine code, with the tools inside Triton's own package.

Nothing here needs a driver: `triton.compile` with an explicit target stops at the cubin.
"""

import json
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

from quaver.torch.backends.gpu.launch import KernelLaunch
from tests.kernels.gate import flow, layouts
from tests.kernels.gate.flow import Block, Instruction

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
#: Raised when the reading changes: cached figures of other readers are ignored.
READER = 6
#: Bytes of an instruction.
WIDTH = 16
USAGE = re.compile(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:\d+\s+LOCAL:(\d+)")
#: Eight-bit data that threads exchange, in Triton's own language.
EXCHANGED_BYTES = re.compile(r"ttg\.convert_layout [^:\n]*: tensor<[^>]*x(?:i8|f8\w*), ")
BITS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "16": 2, "U8": 1, "S8": 1, "8": 1}
LOADS, STORES, SHARED_LOADS, LOCAL = ("LDG", "LD", "LDGSTS"), ("STG", "ST"), ("LDS",), ("LDL", "STL")


@dataclass(frozen=True)
class Code:
    """What was read from the machine code of one kernel for one architecture; access widths are counted by bytes."""

    arch: int
    registers: int
    #: Bytes of a thread in local memory: stack frames and spills.
    stack: int
    #: Bytes of a program.
    shared: int
    #: As listed, padding included.
    instructions: int
    loads: dict[int, int]
    stores: dict[int, int]
    shared_loads: dict[int, int]
    #: Loads and stores of local memory.
    local: int
    #: Conversions to float16 that truncate.
    truncating: int
    #: Maxima and minima that pass NaN on.
    passing_nan: int
    #: Changes of eight-bit data from the threads that made them to others.
    exchanged_bytes: int
    #: Bytes loaded and stored, by the number of contiguous bytes in a warp's access (`layouts.runs`).
    load_runs: dict[int, int]
    store_runs: dict[int, int]
    #: The path of a program through the instructions (`flow.blocks`).
    way: tuple[Block, ...]


def compiled(launch: KernelLaunch, arch: int) -> Any:
    """Compile one launch for sm_`arch`."""
    return triton.compile(launch.source, target=GPUTarget("cuda", arch, 32), options=launch.options)


def read(kernels: Sequence[Any], arch: int) -> list[Code]:
    """Read compiled kernels of one architecture; cached in Triton's own cache with its source."""
    places = [get_cache_manager(sha256(f"{k.hash} read by {READER}".encode()).hexdigest()) for k in kernels]
    fresh = [(kernel, place) for kernel, place in zip(kernels, places, strict=True) if not place.get_file("code.json")]
    listings = _listings([kernel.asm["cubin"] for kernel, _ in fresh], arch)
    for (kernel, place), listing in zip(fresh, listings, strict=True):
        place.put(json.dumps(_read(kernel, listing, arch)), "code.json", binary=False)
    return [_code(json.loads(Path(place.get_file("code.json")).read_text())) for place in places]


def _code(kept: dict[str, Any]) -> Code:
    widths = {name: {int(w): n for w, n in value.items()} for name, value in kept.items() if isinstance(value, dict)}
    way = tuple(Block(count, moved, tuple(loops), tuple(after)) for count, moved, loops, after in kept["way"])
    return Code(**{**kept, **widths, "way": way})


def _read(kernel: Any, code: Sequence[Instruction], arch: int) -> dict[str, Any]:
    instructions = Counter(at.name for at in code)
    loaded, stored = layouts.runs(kernel.asm["ttgir"])
    moved = [sum(width * n for width, n in _widths({at.name: 1}, LOADS + STORES).items()) for at in code]
    said = _usage(kernel.asm["cubin"])
    usage = USAGE.search(said)
    assert usage is not None, f"cuobjdump says nothing of the registers:\n{said[:500]}"
    registers, stack, local = map(int, usage.groups())
    return {
        "arch": arch,
        "registers": registers,
        "stack": stack + local,
        "shared": kernel.metadata.shared,
        "instructions": sum(instructions.values()),
        "loads": _widths(instructions, LOADS),
        "stores": _widths(instructions, STORES),
        "shared_loads": _widths(instructions, SHARED_LOADS),
        "local": sum(_widths(instructions, LOCAL).values()),
        "truncating": kernel.asm["ptx"].count("cvt.rz.f16.f32"),
        "passing_nan": len(re.findall(r"\b(?:max|min)\.NaN\b", kernel.asm["ptx"])),
        "exchanged_bytes": len(EXCHANGED_BYTES.findall(kernel.asm["ttgir"])),
        "load_runs": loaded,
        "store_runs": stored,
        "way": [astuple(block) for block in flow.blocks(code, moved)],
    }


def _usage(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    # It comes on either stream, depending on the version.
    return done.stdout + done.stderr


def _listings(cubins: Sequence[bytes], arch: int) -> list[list[Instruction]]:
    """The instructions of each of these, by one nvdisasm: starting it takes as long as 40 kernels."""
    if not cubins:
        return []
    texts = [_instructions(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(texts))
        file.flush()
        # Triton's targets from Hopper on are those that run on no later architecture. Nobody reads the flow of data.
        command = [TOOLS / "nvdisasm", "-ndf", "-b", f"SM{arch}{'a' * (arch >= 90)}", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [match[0] for match in flow.LINE.finditer(listing)]
    assert len(lines) == sum(map(len, texts)) // WIDTH, f"nvdisasm lists {len(lines)} instructions:\n{listing[:500]}"
    starts = [0, *accumulate(len(text) // WIDTH for text in texts)]
    return [flow.instructions("\n".join(lines[start:end]), WIDTH, start * WIDTH) for start, end in pairwise(starts)]


def _instructions(cubin: bytes) -> bytes:
    """The one section of code in an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + at * size) for at in range(count)]
    names = sections[of_names][4]
    codes = [s for s in sections if cubin.startswith(b".text.", names + s[0])]
    assert len(codes) == 1, f"a cubin of {len(codes)} sections of code"
    _, _, _, _, start, length = codes[0]
    return cubin[start : start + length]


def _widths(instructions: Mapping[str, int], kinds: tuple[str, ...]) -> dict[int, int]:
    """Instructions by the bytes that a thread moves in one."""
    widths: Counter[int] = Counter()
    for name, count in instructions.items():
        kind, *suffixes = name.split(".")
        if kind in kinds:
            widths[next((BITS[s] for s in suffixes if s in BITS), 4)] += count
    return dict(widths)


@cache
def ptxas_version() -> str:
    """Of the assembler inside Triton's package."""
    done = subprocess.run([TOOLS / "ptxas", "--version"], capture_output=True, text=True, check=True)
    version = re.search(r"V([\d.]+)", done.stdout)
    return version.group(1) if version else "unknown"
