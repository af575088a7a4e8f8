"""What no kernel may do, on any architecture and with any version of Triton: a rule says what is wrong, or nothing."""

from collections.abc import Callable

from quaver.torch.backends.gpu.launching.launch import Launch
from tests.kernels.gate.machine_code import Code

#: Of the bytes that a thread moves, how many must move 16 at a time: a scale or an amax may go alone.
WIDE_SHARE = 0.75


def local_memory(code: Code, launch: Launch) -> str:
    if code.stack or code.local:
        return f"{code.stack} bytes of local memory a thread and {code.local} accesses to it: registers do not suffice"
    return ""


def wide_loads(code: Code, launch: Launch) -> str:
    return _narrow(code.loads, "loaded", launch)


def wide_stores(code: Code, launch: Launch) -> str:
    return _narrow(code.stores, "stored", launch)


def shared_bytes(code: Code, launch: Launch) -> str:
    bytewise = code.shared_loads.get(1, 0)
    return f"{bytewise} loads of single bytes from shared memory; pack four rows into an int32" if bytewise else ""


def rounding(code: Code, launch: Launch) -> str:
    if code.truncating:
        return f"{code.truncating} cvt.rz.f16.f32: FP8 is rounded twice; encode with INTEGERS where Triton casts so"
    return ""


def passing_nan(code: Code, launch: Launch) -> str:
    """triton-lang/triton#11111."""
    if code.passing_nan and code.exchanged_bytes:
        return f"{code.passing_nan} maxima or minima pass NaN on beside bytes that change threads: these may be garbled"
    return ""


#: By name, as exceptions have it.
RULES: dict[str, Callable[[Code, Launch], str]] = {
    "local memory": local_memory,
    "wide loads": wide_loads,
    "wide stores": wide_stores,
    "shared bytes": shared_bytes,
    "rounding": rounding,
    "passing NaN": passing_nan,
}


def even(launch: Launch) -> bool:
    """Whether blocks cover the data: no constant called EVEN, or none that is false."""
    return all(value for name, value in launch.constants.items() if name.startswith("EVEN"))


def _narrow(widths: dict[int, int], moved: str, launch: Launch) -> str:
    total = sum(width * count for width, count in widths.items())
    wide = sum(width * count for width, count in widths.items() if width >= 16)
    if not even(launch) or not total or wide >= WIDE_SHARE * total:
        return ""
    by_width = ", ".join(f"{count} of {width}" for width, count in sorted(widths.items(), reverse=True))
    return (
        f"{wide} of {total} bytes are {moved} 16 at a time ({by_width}); are strides and addresses known to be aligned?"
    )
