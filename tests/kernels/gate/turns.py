"""Which launches `make test` compiles."""

from collections.abc import Collection, Mapping, Sequence

from tests.kernels.cases import CASES, Case
from tests.kernels.gate.best import ARCHITECTURE, BEHIND, BEST
from tests.kernels.gate.ceilings import Row, Table
from tests.kernels.gate.record import ARCHITECTURES, Recorded

#: Before Hopper, where codes are rounded on the bits, and from it on, where a cast rounds them.
SIDES = ARCHITECTURES[:3], ARCHITECTURES[3:]
#: Instructions up to which launches compile in less than half of a second, and above which in more than one and a half.
SHORT, LONG = 600, 1600
#: By architecture, a launch that is compiled at each run: measured.json must have what becomes of it.
SAMPLES = {80: "fold with a bias: fold", 89: "planted: casts", 90: "transpose: transpose", 120: "RMSNorm: norm"}
#: Launches that are all compiled where they are not as they were; of more, those of `in_turn`.
MOST = 60


def chosen(
    launches: Mapping[int, Sequence[Recorded]], left: Mapping[int, Collection[str]], table: Table, measured: bool
) -> dict[int, list[Recorded]]:
    """Launches for each architecture: samples, and those that are not as they were when they were measured.

    Of very many, and of all with a version of Triton that nothing was measured with, those of `in_turn`. Rare ones not.

    Args:
        left: by architecture, names of launches that are not as they were.
        table: of ceilings. What it does not know is compiled everywhere, and reported.
        measured: whether anything was, with this version of Triton.
    """
    out = {arch: [r for r in of if r.name in left[arch] and not r.case.rare] for arch, of in launches.items()}
    if not measured or sum(map(len, out.values())) > MOST:
        turns = in_turn(table, CASES)
        passed = {arch: table.keys() - names for arch, names in turns.items()}
        out = {arch: [r for r in of if r.name not in passed[arch]] for arch, of in out.items()}
    if measured:
        for arch, of in launches.items():
            out[arch] += [r for r in of if r.name == SAMPLES.get(arch) and r not in out[arch]]
    return out


def in_turn(table: Table, cases: Sequence[Case]) -> dict[int, set[str]]:
    """Launches for each architecture, a ninth of the whole: each row of short launches on one architecture, by turns
    on one before Hopper and on one from it on; every kernel on both sides, those whose shortest launch is long on one;
    and on its own what best.py bounds. What is launched from Blackwell on alone is compiled on a later side.

    Args:
        table: of ceilings, which says what each architecture launches, and how many instructions that takes.
    """
    late = {case.name for case in cases if case.since in SIDES[1]}
    order = {case.name: at for at, case in enumerate(case for case in cases if not case.rare)}
    rows: dict[str, dict[str, Mapping[str, Row]]] = {}
    kernels: dict[str, dict[str, Mapping[str, Row]]] = {}
    for name, by_arch in table.items():
        row, kernel = parted(name)
        if row in order:
            rows.setdefault(row, {})[name] = by_arch
            kernels.setdefault(kernel, {})[name] = by_arch
    turns: dict[int, set[str]] = {arch: set() for arch in ARCHITECTURES}
    for row, launches in rows.items():
        if all(length(by_arch) <= SHORT for by_arch in launches.values()):
            turns[SIDES[order[row] % 2][order[row] // 2 % 3]] |= set(launches)
    turns[ARCHITECTURE] |= (BEST | BEHIND).keys() & table.keys()
    long = 0
    for at, (kernel, launches) in enumerate(kernels.items()):
        shortest = min(launches, key=lambda name: length(launches[name]))
        sides = SIDES
        if length(launches[shortest]) > LONG:
            long += 1
            sides = SIDES[long % 2 :][:1]
        if all(parted(name)[0] in late for name in launches):
            sides = SIDES[1:]
        for side in sides:
            if kernel not in {parted(name)[1] for arch in side for name in turns[arch]}:
                turns[side[at % 3]].add(shortest)
    return turns


def parted(name: str) -> tuple[str, str]:
    """The row and the kernel of a launch."""
    row, _, kernel = name.partition(": ")
    return row, kernel.split()[0]


def length(by_arch: Mapping[str, Row]) -> float:
    """Instructions of a launch, the mean of its architectures."""
    return sum(row["instructions"] for row in by_arch.values()) / len(by_arch)
