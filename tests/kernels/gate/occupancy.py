"""How many programs of a kernel run on one multiprocessor at the same time.

Source: NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and the CUDA Occupancy
Calculator for the allocation of registers.
"""

from typing import NamedTuple


class Multiprocessor(NamedTuple):
    """Resources of one multiprocessor."""

    warps: int
    programs: int
    #: Bytes of shared memory, of which every program takes `RESERVED` more than it requested.
    shared: int


#: By architecture.
MULTIPROCESSORS = {
    80: Multiprocessor(64, 32, 164 * 1024),
    86: Multiprocessor(48, 16, 100 * 1024),
    89: Multiprocessor(48, 24, 100 * 1024),
    90: Multiprocessor(64, 32, 228 * 1024),
    100: Multiprocessor(64, 32, 228 * 1024),
    120: Multiprocessor(48, 24, 100 * 1024),
}
RESERVED, SHARED_STEP = 1024, 128
#: Registers of each of a multiprocessor's four parts, which a warp takes by steps.
REGISTERS, PARTS, STEP = 16384, 4, 256


def programs(registers: int, shared: int, warps: int, arch: int) -> int:
    """Programs of so many warps that fit, each thread with so many registers and each with so much shared memory."""
    resources = MULTIPROCESSORS[arch]
    registers_of_warp = -(-registers * 32 // STEP) * STEP
    by_registers = PARTS * (REGISTERS // registers_of_warp) // warps
    by_shared = resources.shared // (-(-shared // SHARED_STEP) * SHARED_STEP + RESERVED)
    return min(by_registers, by_shared, resources.warps // warps, resources.programs)
