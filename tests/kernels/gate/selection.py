"""Select the launches that `make test` compiles."""

from collections.abc import Collection, Mapping, Sequence

from tests.kernels.cases import CASES, Case
from tests.kernels.gate.best import ARCHITECTURE, BEHIND, BEST
from tests.kernels.gate.ceilings import Row, Table
from tests.kernels.gate.record import ARCHITECTURES, Recorded

#: Before Hopper, where codes are rounded on the bits, and from it on, where a cast rounds them.
SIDES = ARCHITECTURES[:3], ARCHITECTURES[3:]
#: Instructions up to which launches compile in less than half of a second, and above which in more than one and a half.
SHORT, LONG = 600, 1600
#: By architecture, a launch that is compiled at each run: its figures must be those in measured.json.
SAMPLES = {80: "fold with a bias: fold", 89: "planted: casts", 90: "transpose: transpose", 120: "RMSNorm: norm"}
#: At most so many changed launches are all compiled; of more, those that `sampled` selects.
MOST = 60


def select(
    launches: Mapping[int, Sequence[Recorded]],
    changed: Mapping[int, Collection[str]],
    table: Table,
    has_measurements: bool,
) -> dict[int, list[Recorded]]:
    """Launches to compile on each architecture: `SAMPLES`, and those that changed since they were measured.

    If more than `MOST` changed, or nothing was measured with this version of Triton, only those that `sampled` selects
    are compiled. Rare launches are never compiled here.

    Args:
        changed: by architecture, names of launches that changed since they were measured.
        table: the ceilings. A launch that it does not contain is compiled everywhere, and reported.
        has_measurements: whether measured.json was written with this version of Triton.
    """
    out = {
        arch: [r for r in records if r.name in changed[arch] and not r.case.rare] for arch, records in launches.items()
    }
    if not has_measurements or sum(map(len, out.values())) > MOST:
        selected = sampled(table, CASES)
        skipped = {arch: table.keys() - names for arch, names in selected.items()}
        out = {arch: [r for r in records if r.name not in skipped[arch]] for arch, records in out.items()}
    if has_measurements:
        for arch, records in launches.items():
            out[arch] += [r for r in records if r.name == SAMPLES.get(arch) and r not in out[arch]]
    return out


def sampled(table: Table, cases: Sequence[Case]) -> dict[int, set[str]]:
    """About a ninth of all launches, by architecture.

    A row of short launches is compiled on one architecture, alternately before Hopper and from Hopper on. Every kernel
    is compiled on both sides, or on one if even its shortest launch is long. The launches in best.py are compiled on
    their architecture. Kernels that are launched only from Blackwell on are compiled only on the later side.

    Args:
        table: the ceilings, which list the launches of each architecture and their numbers of instructions.
    """
    late = {case.name for case in cases if case.since in SIDES[1]}
    order = {case.name: at for at, case in enumerate(case for case in cases if not case.rare)}
    rows: dict[str, dict[str, Mapping[str, Row]]] = {}
    kernels: dict[str, dict[str, Mapping[str, Row]]] = {}
    for name, by_arch in table.items():
        row, kernel = split_name(name)
        if row in order:
            rows.setdefault(row, {})[name] = by_arch
            kernels.setdefault(kernel, {})[name] = by_arch
    selected: dict[int, set[str]] = {arch: set() for arch in ARCHITECTURES}
    for row, launches in rows.items():
        if all(length(by_arch) <= SHORT for by_arch in launches.values()):
            there = compiled_on(SIDES[order[row] % 2], launches.values())
            selected[there[order[row] // 2 % len(there)]] |= set(launches)
    selected[ARCHITECTURE] |= (BEST | BEHIND).keys() & table.keys()
    long = 0
    for at, (kernel, launches) in enumerate(kernels.items()):
        shortest = min(launches, key=lambda name: length(launches[name]))
        sides = SIDES
        if length(launches[shortest]) > LONG:
            long += 1
            sides = SIDES[long % 2 :][:1]
        if all(split_name(name)[0] in late for name in launches):
            sides = SIDES[1:]
        for side in sides:
            if kernel not in {split_name(name)[1] for arch in side for name in selected[arch]}:
                there = compiled_on(side, [launches[shortest]])
                selected[there[at % len(there)]].add(shortest)
    return selected


def compiled_on(side: Sequence[int], launches: Collection[Mapping[str, Row]]) -> list[int]:
    """The architectures of a side for which these launches compile."""
    return [arch for arch in side if all(f"sm_{arch}" in by_arch for by_arch in launches)]


def split_name(name: str) -> tuple[str, str]:
    """The row and the kernel of a launch."""
    row, _, kernel = name.partition(": ")
    return row, kernel.split()[0]


def length(by_arch: Mapping[str, Row]) -> float:
    """Instructions of a launch, the mean of its architectures."""
    return sum(row["instructions"] for row in by_arch.values()) / len(by_arch)
