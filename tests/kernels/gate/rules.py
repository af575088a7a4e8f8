"""Rules for all kernels, on any architecture and with any version of Triton: a rule returns an error, or ""."""

from collections.abc import Callable

from quaver.torch.backends.gpu.launch import KernelLaunch
from tests.kernels.gate.ceilings import figures, instructions_a_byte
from tests.kernels.gate.floors import SMALL, share, share_of_products
from tests.kernels.gate.flow import executed
from tests.kernels.gate.machine_code import Code
from tests.kernels.gate.occupancy import programs
from tests.kernels.gate.record import Recorded

#: Share of the bytes that a thread must move 16 at a time: a scale or an amax may be moved alone.
WIDE_SHARE = 0.75
#: Bytes of one memory transaction.
SECTOR = 32
#: Programs on a multiprocessor: while one waits for memory, another computes. One with so many warps does both.
FEWEST, MANY_WARPS = 2, 32
#: Share of the bytes that the launch must move, which the longest path through the code must account for.
ACCOUNTED = 0.9


def local_memory(code: Code, recorded: Recorded) -> str:
    if code.stack or code.local:
        return f"{code.stack} bytes of local memory a thread and {code.local} accesses to it: registers do not suffice"
    return ""


def wide_loads(code: Code, recorded: Recorded) -> str:
    return _narrow(code.loads, "loaded", recorded.launch)


def wide_stores(code: Code, recorded: Recorded) -> str:
    return _narrow(code.stores, "stored", recorded.launch)


def whole_sectors_loaded(code: Code, recorded: Recorded) -> str:
    return _scattered(code.load_runs, "loaded")


def whole_sectors_stored(code: Code, recorded: Recorded) -> str:
    return _scattered(code.store_runs, "stored")


def overlap(code: Code, recorded: Recorded) -> str:
    """From Hopper on: before, codes are rounded on their bits, which takes many registers."""
    if code.arch < 90:
        return ""
    side_by_side = programs(code.registers, code.shared, recorded.launch.warps, code.arch)
    if side_by_side >= FEWEST or (side_by_side and recorded.launch.warps >= MANY_WARPS):
        return ""
    return (
        f"a multiprocessor runs {side_by_side} program: {code.registers} registers for each of {recorded.launch.warps} "
        f"warps' threads, {code.shared} bytes of shared memory; take smaller blocks, or fewer warps"
    )


def trips(code: Code, recorded: Recorded) -> str:
    """Whether the row knows how often loops go round."""
    _, moved = executed(code.way, recorded.trips)
    accounted = moved * recorded.threads / recorded.bytes
    if accounted >= ACCOUNTED or recorded.bytes < SMALL:
        return ""
    return (
        f"its instructions move {accounted:.0%} of the bytes of its tensors; how often do its loops go round (trips)?"
    )


def instructions(code: Code, recorded: Recorded) -> str:
    """On Hopper, against an H200's copy, or its products where they bound a kernel."""
    if code.arch != 90 or recorded.bytes < SMALL:
        return ""
    if recorded.products:
        allowed = share_of_products(figures(recorded, code), "H200")
        return "" if allowed >= 1 else f"its instructions allow {allowed:.0%} of an H200's rate of products"
    a_byte = instructions_a_byte(recorded, code)
    allowed = share(a_byte, "H200")
    return "" if allowed >= 1 else f"{a_byte} instructions a byte allow {allowed:.0%} of an H200's copy rate"


def shared_bytes(code: Code, recorded: Recorded) -> str:
    bytewise = code.shared_loads.get(1, 0)
    return f"{bytewise} loads of single bytes from shared memory; pack four rows into an int32" if bytewise else ""


def rounding(code: Code, recorded: Recorded) -> str:
    if code.truncating:
        return f"{code.truncating} cvt.rz.f16.f32: FP8 is rounded twice; encode with INTEGERS where Triton casts so"
    return ""


def passing_nan(code: Code, recorded: Recorded) -> str:
    """triton-lang/triton#11111."""
    if code.passing_nan and code.exchanged_bytes:
        return f"{code.passing_nan} maxima or minima pass NaN on beside bytes that change threads: these may be garbled"
    return ""


#: By name, as exceptions have it.
RULES: dict[str, Callable[[Code, Recorded], str]] = {
    "local memory": local_memory,
    "wide loads": wide_loads,
    "wide stores": wide_stores,
    "sectors loaded": whole_sectors_loaded,
    "sectors stored": whole_sectors_stored,
    "overlap": overlap,
    "trips": trips,
    "instructions": instructions,
    "shared bytes": shared_bytes,
    "rounding": rounding,
    "passing NaN": passing_nan,
}


def even(launch: KernelLaunch) -> bool:
    """Whether blocks cover the data: no constant called EVEN, or none that is false."""
    return all(value for name, value in launch.constants.items() if name.startswith("EVEN"))


def _scattered(side_by_side: dict[int, int], moved: str) -> str:
    total = sum(side_by_side.values())
    whole = sum(count for run, count in side_by_side.items() if run >= SECTOR)
    if whole >= WIDE_SHARE * total:
        return ""
    by_run = ", ".join(f"{count} by {run}" for run, count in sorted(side_by_side.items(), reverse=True))
    return (
        f"{whole} of a program's {total} bytes are {moved} {SECTOR} or more side by side ({by_run}); memory moves "
        f"{SECTOR} at once: are blocks that wide?"
    )


def _narrow(widths: dict[int, int], moved: str, launch: KernelLaunch) -> str:
    total = sum(width * count for width, count in widths.items())
    wide = sum(width * count for width, count in widths.items() if width >= 16)
    if not even(launch) or not total or wide >= WIDE_SHARE * total:
        return ""
    by_width = ", ".join(f"{count} of {width}" for width, count in sorted(widths.items(), reverse=True))
    return (
        f"{wide} of {total} bytes are {moved} 16 at a time ({by_width}); are strides and addresses known to be aligned?"
    )
