"""Run the cases and compare: `python -m tests.golden`, `--base COMMIT`, `--write`.

`differences.json` lists intended differences from the base, a case's pattern and the reason: of sums alone, and only up
to a relative RMS of 1e-6. Recorded kernel launches are compared with `launches.json`, on any base.
"""

import argparse
import fnmatch
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.golden.cases import GROUPS
from tests.golden.record import Record, digest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DIGESTS = HERE / "digests.json"
DIFFERENCES = HERE / "differences.json"
#: Of results that are intended to differ.
MOST = 1e-6
Results = dict[str, np.ndarray]


def run_group(group: str, only: str, out: Path) -> int:
    """Run one group's cases in this process and save what they gave."""
    import torch

    import quaver

    assert out.parent.name != "there" or ROOT not in Path(quaver.__file__).parents, (
        "the base's sources are not imported"
    )
    torch.set_num_threads(1)
    record, failed = Record(), {}
    module = importlib.import_module(f"tests.golden.cases.{group}")
    chosen = {name: case for name, case in module.cases().items() if fnmatch.fnmatch(f"{group}, {name}", only)}
    if group == "ranks":
        module.selected[:] = chosen
    for name, case in chosen.items():
        record.case = f"{group}, {name}"
        torch.manual_seed(0)
        try:
            case(record)
        except Exception:
            failed[record.case] = traceback.format_exc()
    np.savez(out.with_suffix(".fixed.npz"), **record.fixed)  # type: ignore[arg-type]
    np.savez(out.with_suffix(".sums.npz"), **record.sums)  # type: ignore[arg-type]
    out.write_text(json.dumps(failed))
    return 0


class Found(NamedTuple):
    """What the cases gave on a tree, and why the other cases failed."""

    fixed: Results
    sums: Results
    failed: dict[str, str]


def run(tree: Path, only: str, folder: Path) -> Found:
    """All groups on a tree's sources with this tree's cases."""
    environment = sources(tree) | {"TRITON_INTERPRET": "1"}

    def one(group: str) -> Path:
        out = folder / f"{group}.json"
        command = [sys.executable, "-m", "tests.golden", "--group", group, "--only", only, "--out", str(out)]
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            np.savez(out.with_suffix(".fixed.npz"))
            np.savez(out.with_suffix(".sums.npz"))
            out.write_text(json.dumps({group: f"the process of {group} ended"}))
        return out

    with ThreadPoolExecutor(2) as pool:
        outs = list(pool.map(one, groups(only)))
    failed = {name: why for out in outs for name, why in json.loads(out.read_text()).items()}
    found: list[Results] = []
    for kind in ("fixed", "sums"):
        arrays = [dict(np.load(out.with_suffix(f".{kind}.npz"))) for out in outs]
        found.append({name: value for of in arrays for name, value in of.items() if case_of(name) not in failed})
    return Found(found[0], found[1], failed)


def sources(tree: Path) -> dict[str, str]:
    """The environment of a process that imports a tree's sources and this tree's cases."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tree / "src"), str(ROOT))),
        **{"OMP_NUM_THREADS": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    }


def groups(only: str) -> tuple[str, ...]:
    """Those of which a pattern may name cases."""
    group = only.partition(",")[0]
    if group == "launches":
        return ()
    return (group,) if group in GROUPS else GROUPS


def differences(ours: Found, base: Found, intended: list[dict[str, str]]) -> list[str]:
    """Cases that fail, and results that differ or that only one side has, a line each."""
    lines = [f"{name}: fails on the base" for name in base.failed]
    either = ours.failed.keys() | base.failed.keys()
    here, there = (
        {name: value for name, value in (found.fixed | found.sums).items() if case_of(name) not in either}
        for found in (ours, base)
    )
    lines += [
        f"{name}: only {'here' if name in here else 'on the base'}" for name in sorted(here.keys() ^ there.keys())
    ]
    for name in sorted(here.keys() & there.keys()):
        a, b = here[name], there[name]
        if digest(a) == digest(b):
            continue
        listed = any(fnmatch.fnmatch(case_of(name), each["case"]) for each in intended)
        if listed and name in ours.sums and name in base.sums and distance(a, b) <= MOST:
            continue
        where = f" in {np.count_nonzero(a != b)} elements" if a.shape == b.shape and a.dtype == b.dtype else ""
        lines.append(f"{name}: {a.dtype} {a.shape} differs{where} from {b.dtype} {b.shape}")
    return lines


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The relative RMS of a difference; infinite where these are no floats of one shape."""
    if a.shape != b.shape or a.dtype != b.dtype or a.dtype.kind != "f" or not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    of_base = float(np.sqrt(np.square(np.nan_to_num(b).astype(np.float64)).sum()))
    apart = float(np.sqrt(np.square(np.nan_to_num(a).astype(np.float64) - np.nan_to_num(b)).sum()))
    return apart / of_base if of_base else float("inf")


def read(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return found


def case_of(name: str) -> str:
    """The case of a result."""
    return name.partition(":")[0]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--base", metavar="COMMIT", help="compare with this commit's results on this machine, sums too")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases whose name matches")
    parser.add_argument("--write", action="store_true", help="write digests.json")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.group:
        return run_group(chosen.group, chosen.only, chosen.out)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "here").mkdir()
        ours = run(ROOT, chosen.only, folder / "here")
        if not ours.fixed and not ours.failed and not fnmatch.fnmatch("launches", chosen.only):
            parser.error(f"no case matches {chosen.only!r}; names begin with {', '.join(GROUPS)}; or launches")
        lines = [f"{name}: fails here:\n{why}" for name, why in ours.failed.items()]
        if chosen.base:
            lines += differences(ours, of_base(chosen.base, chosen.only, folder), json.loads(DIFFERENCES.read_text()))
    found = {name: digest(value) for name, value in ours.fixed.items()}
    every = read(DIGESTS)
    known = {
        name: value
        for name, value in every.items()
        if fnmatch.fnmatch(case_of(name), chosen.only) and case_of(name) not in ours.failed
    }
    if chosen.write:
        others = {name: value for name, value in every.items() if name not in known}
        DIGESTS.write_text(json.dumps(dict(sorted((others | found).items())), indent=0) + "\n")
    else:
        names = sorted(found.keys() | known.keys())
        lines += [f"{name}: differs from digests.json" for name in names if found.get(name) != known.get(name)]
    for line in lines:
        print(line)
    print(f"{len(ours.fixed)} exact results, {len(ours.sums)} sums, {len(lines) or 'none'} different")
    failed = bool(lines)
    if fnmatch.fnmatch("launches", chosen.only):
        command = [sys.executable, "-m", "tests.golden.launches", *["--write"] * chosen.write]
        failed |= bool(subprocess.run(command, cwd=ROOT, env=sources(ROOT)).returncode)
    return int(failed)


def of_base(commit: str, only: str, folder: Path) -> Found:
    """The results of a commit, in a worktree that is removed afterwards."""
    tree = folder / "base"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
    try:
        (folder / "there").mkdir()
        return run(tree, only, folder / "there")
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
