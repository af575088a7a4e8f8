"""One architecture through the gate: rules, ceilings, and the fewest instructions that were reached before."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import triton

from tests.kernels.cases import Case
from tests.kernels.gate.best import ARCHITECTURE, BEHIND, BEST
from tests.kernels.gate.ceilings import Ceilings, Row, Table, above, figures
from tests.kernels.gate.machine_code import Code, compiled, read
from tests.kernels.gate.record import ARCHITECTURES, Recorded
from tests.kernels.gate.rules import RULES

UPDATE = "python -m tests.kernels.gate --update"
#: Before Hopper, where codes are rounded on the bits, and from it on, where a cast rounds them.
SIDES = ARCHITECTURES[:3], ARCHITECTURES[3:]
#: Instructions up to which launches compile in less than half of a second, and above which in more than one and a half.
SHORT, LONG = 600, 1600


@dataclass(frozen=True)
class Checked:
    """One launch on one architecture: its figures, and what is wrong with it whatever the table says."""

    name: str
    row: Row
    broken: tuple[str, ...]


def measure(launches: Sequence[Recorded], arch: int) -> list[Checked]:
    """Compile these launches for sm_`arch`, and read what became of them."""
    read_of, kernels, dead = [], [], []
    for recorded in launches:
        try:
            kernels.append(compiled(recorded.launch, arch))
            read_of.append(recorded)
        except Exception as error:
            # Whatever a compiler dies of; the others are still read.
            said = f"does not compile: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            dead.append(Checked(recorded.name, {}, (said,)))
    codes = read(kernels, arch)
    return dead + [
        Checked(recorded.name, figures(recorded, code), tuple(broken_rules(recorded, code)))
        for recorded, code in zip(read_of, codes, strict=True)
    ]


def broken_rules(recorded: Recorded, code: Code) -> list[str]:
    """The rules that a launch breaks and that its row does not except."""
    unknown = set(recorded.case.exceptions) - set(RULES)
    if unknown:
        return [f"its row excepts {', '.join(sorted(unknown))}; the rules are {', '.join(RULES)}"]
    said = {name: rule(code, recorded) for name, rule in RULES.items() if name not in recorded.case.exceptions}
    return [f"{name}: {what}" for name, what in said.items() if what]


def in_turn(table: Table, cases: Sequence[Case]) -> dict[int, set[str]]:
    """Launches for each architecture, a ninth of the whole: each row of short launches on one architecture, by turns
    on one before Hopper and on one from it on; every kernel on both sides, those whose shortest launch is long on one;
    and on its own what best.py bounds.

    Args:
        table: of ceilings, which says what each architecture launches, and how many instructions that takes.
    """
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


def failures(
    checked: Sequence[Checked], arch: int, table: Ceilings, launched: Collection[str] | None = None
) -> list[str]:
    """What is wrong on sm_`arch`, a sentence each; ceilings only with the version of Triton that they were taken with.

    Args:
        launched: names of all launches, so that rows of the tables that none launches are reported; None: `checked`
            holds them all.
    """
    names = {c.name for c in checked} if launched is None else launched
    sentences = [f"{c.name}: {offence}" for c in checked for offence in c.broken]
    if table.triton and table.triton != triton.__version__:
        return sentences
    key = f"sm_{arch}"
    for c in (c for c in checked if c.row):
        ceiling = table.rows.get(c.name, {}).get(key)
        if ceiling is None:
            sentences.append(f"{c.name}: has no ceilings; write them with `{UPDATE} --only {_pattern(c.name)}`")
        else:
            higher = above(c.row, ceiling)
            sentences += [
                f"{c.name}: {offence}; if this is meant, `{UPDATE} --only {_pattern(c.name)}`" for offence in higher
            ]
    stale = [name for name, row in table.rows.items() if key in row and name not in names]
    sentences += [f"{name}: is in ceilings.toml and launched by no row of cases.py; `{UPDATE}`" for name in stale]
    return sentences + (_behind(checked, names) if arch == ARCHITECTURE else [])


def _behind(checked: Sequence[Checked], launched: Collection[str]) -> list[str]:
    rows = {c.name: c.row for c in checked}
    sentences = []
    for name, (figure, best) in (BEST | BEHIND).items():
        if name not in rows:
            sentences += [] if name in launched else [f"{name}: is in best.py and launched by no row of cases.py"]
            continue
        reached = rows[name].get(figure, best + 1) <= best
        if reached and name in BEHIND:
            sentences.append(f"{name}: {figure} {best} is reached: move its row of best.py to BEST")
        elif not reached and name in BEST:
            sentences.append(f"{name}: {figure} {rows[name].get(figure)}, {best} was reached before")
    return sentences


def _pattern(name: str) -> str:
    return repr(name.partition(":")[0])
