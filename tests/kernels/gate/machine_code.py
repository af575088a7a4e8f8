"""Compiling a recorded launch, and what its machine code says, by the tools inside Triton's own package.

Nothing here needs a driver: `triton.compile` with an explicit target stops at the cubin.
"""

import json
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

from quaver.torch.backends.gpu.launching.launch import Launch

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
#: Raised when what is read changes: kept figures of other readers are not believed.
READER = 3
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
USAGE = re.compile(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:\d+\s+LOCAL:(\d+)")
#: Eight-bit data that threads exchange, in Triton's own language.
EXCHANGED_BYTES = re.compile(r"ttg\.convert_layout [^:\n]*: tensor<[^>]*x(?:i8|f8\w*), ")
BITS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "16": 2, "U8": 1, "S8": 1, "8": 1}
LOADS, STORES, SHARED_LOADS, LOCAL = ("LDG", "LD", "LDGSTS"), ("STG", "ST"), ("LDS",), ("LDL", "STL")


@dataclass(frozen=True)
class Code:
    """What was read from the machine code of one kernel for one architecture; access widths are counted by bytes."""

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


def read(launch: Launch, arch: int) -> Code:
    """Compile one launch for sm_`arch` and read it; kept in Triton's own cache beside what it is read from."""
    kernel = triton.compile(launch.source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    kept = get_cache_manager(sha256(f"{kernel.hash} read by {READER}".encode()).hexdigest())
    file = kept.get_file("code.json")
    if file is None:
        code = _read(kernel)
        kept.put(json.dumps(code), "code.json", binary=False)
    else:
        code = json.loads(Path(file).read_text())
    widths = {name: {int(w): n for w, n in value.items()} for name, value in code.items() if isinstance(value, dict)}
    return Code(**{**code, **widths})


def _read(kernel: Any) -> dict[str, Any]:
    listing = _listing(kernel.asm["cubin"])
    usage = USAGE.search(listing)
    assert usage is not None, f"cuobjdump says nothing of the registers:\n{listing[:500]}"
    registers, stack, local = map(int, usage.groups())
    instructions = Counter(INSTRUCTION.findall(listing))
    assert instructions, f"cuobjdump lists no instruction:\n{listing[:500]}"
    return {
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
    }


def _listing(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # cuobjdump -sass would start nvdisasm too, and let it follow the flow of data, which nobody reads here.
        commands = [TOOLS / "cuobjdump", "-res-usage", file.name], [TOOLS / "nvdisasm", "-ndf", "-c", file.name]
        done = [subprocess.run(command, capture_output=True, text=True, check=True) for command in commands]
    # The usage comes on either stream, depending on the version.
    return "".join(one.stdout + one.stderr for one in done)


def _widths(instructions: Counter[str], kinds: tuple[str, ...]) -> dict[int, int]:
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
