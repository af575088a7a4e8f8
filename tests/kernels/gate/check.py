"""Check the launches of one architecture: rules, ceilings, and the fewest instructions that were reached before."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import triton

from tests.kernels.gate import ceilings, measured
from tests.kernels.gate.best import ARCHITECTURE, BEHIND, BEST
from tests.kernels.gate.ceilings import Ceilings, Row, above
from tests.kernels.gate.machine_code import Code, compiled, read
from tests.kernels.gate.measured import Measured
from tests.kernels.gate.record import Recorded
from tests.kernels.gate.rules import RULES

UPDATE = "python -m tests.kernels.gate --update"


@dataclass(frozen=True)
class Checked:
    """One launch on one architecture: its figures, and errors that do not depend on the table."""

    name: str
    row: Row
    broken: tuple[str, ...]
    #: As in measured.json; {} where it does not compile.
    figures: measured.Figures = field(default_factory=dict)


def measure(launches: Sequence[Recorded], arch: int) -> list[Checked]:
    """Compile these launches for sm_`arch`, and check their machine code."""
    read_of, kernels, failed = [], [], []
    for recorded in launches:
        try:
            kernels.append(compiled(recorded.launch, arch))
            read_of.append(recorded)
        except Exception as error:
            # A compiler raises errors of any kind; the other kernels are still checked.
            message = f"does not compile: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            failed.append(Checked(recorded.name, {}, (message,)))
    codes = read(kernels, arch)
    return failed + [judge(recorded, code) for recorded, code in zip(read_of, codes, strict=True)]


def judge(recorded: Recorded, code: Code) -> Checked:
    """Judge a launch by its machine code, compiled now or recorded."""
    broken = tuple(broken_rules(recorded, code))
    return Checked(recorded.name, ceilings.figures(recorded, code), broken, measured.figures(code, recorded))


def check_launches(
    launches: Sequence[Recorded], compiling: Sequence[Recorded], keys: Mapping[str, str], arch: int, stored: Measured
) -> tuple[list[Checked], list[str]]:
    """Check launches, some by compiling them and the others by the figures in measured.json.

    Args:
        compiling: those of the launches that are compiled.
        keys: of all launches, by their names.

    Returns:
        The checked launches, and messages for those that differ from measured.json. A launch that is neither compiled
        nor in the file is not checked, and reported.
    """
    fresh = {c.name: c for c in measure(compiling, arch)}
    current = stored.current(keys, arch)
    unchanged = [r for r in launches if r.name in current and r.name not in fresh]
    known = [judge(r, measured.code(current[r.name], arch)) for r in unchanged]
    return [*known, *fresh.values()], changed_launches(fresh, keys, arch, stored)


def changed_launches(fresh: Mapping[str, Checked], keys: Mapping[str, str], arch: int, stored: Measured) -> list[str]:
    """Names of launches that are missing in measured.json or changed, and messages for those with other figures.

    Args:
        fresh: those that were compiled just now; of the others only the seal is compared.
        keys: of all launches, by their names.
    """
    current = stored.current(keys, arch)
    messages = [name for name in keys if name not in current] if stored.applies else []
    for name, before in current.items():
        now = fresh[name].figures if name in fresh else before
        other = sorted(figure for figure in {*now, *before} if now.get(figure) != before.get(figure))
        changes = ", ".join(f"{figure} {now.get(figure, 0)} and not {before.get(figure, 0)}" for figure in other)
        messages += [f"{name} is as it was, and compiles to {changes}"] if changes else []
    return messages


def broken_rules(recorded: Recorded, code: Code) -> list[str]:
    """The rules that a launch breaks and that its row does not except."""
    unknown = set(recorded.case.exceptions) - set(RULES)
    if unknown:
        return [f"its row excepts {', '.join(sorted(unknown))}; the rules are {', '.join(RULES)}"]
    offences = {name: rule(code, recorded) for name, rule in RULES.items() if name not in recorded.case.exceptions}
    return [f"{name}: {what}" for name, what in offences.items() if what]


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
