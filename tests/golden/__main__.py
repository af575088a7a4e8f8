"""Run the cases and compare: `python -m tests.golden`, `--base COMMIT`, `--write`.

Ranks, recorded kernel launches and capture have no cases yet.
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

import numpy as np

from tests.golden.cases import GROUPS
from tests.golden.record import Record, digest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DIGESTS = HERE / "digests.json"
#: By case, a reason: what a later commit means to change. Codes and scales are never among them.
INTENDED = HERE / "intended.json"
#: How far sums of an intended difference may lie apart, relative RMS.
APART = 1e-6


def run_group(group: str, only: str, out: Path) -> int:
    """Run one group's cases in this process and save what they gave."""
    import torch

    torch.set_num_threads(1)
    record, failed = Record(), {}
    for name, case in importlib.import_module(f"tests.golden.cases.{group}").cases().items():
        record.case = f"{group}, {name}"
        if fnmatch.fnmatch(record.case, only):
            torch.manual_seed(0)
            try:
                case(record)
            except Exception:
                failed[record.case] = traceback.format_exc()
    np.savez(out.with_suffix(".fixed.npz"), **record.fixed)  # type: ignore[arg-type]
    np.savez(out.with_suffix(".sums.npz"), **record.sums)  # type: ignore[arg-type]
    out.write_text(json.dumps(failed))
    return 0


def run(tree: Path, only: str, folder: Path, groups: list[str]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """All groups on a tree's sources with this tree's cases. Raises: SystemExit, with the cases that failed."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tree / "src"), str(ROOT))),
        **{"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    }

    def one(group: str) -> Path:
        out = folder / f"{group}.json"
        command = [sys.executable, "-m", "tests.golden", "--group", group, "--only", only, "--out", str(out)]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        return out

    with ThreadPoolExecutor(2) as pool:
        outs = list(pool.map(one, groups))
    failed = {name: why for out in outs for name, why in json.loads(out.read_text()).items()}
    for name, why in failed.items():
        print(f"{name} failed:\n{why}")
    if failed:
        raise SystemExit(f"{len(failed)} cases failed on {tree}")
    found = []
    for kind in ("fixed", "sums"):
        arrays = [dict(np.load(out.with_suffix(f".{kind}.npz"))) for out in outs]
        found.append({name: value for of in arrays for name, value in of.items()})
    return found[0], found[1]


def differences(ours: dict[str, np.ndarray], base: dict[str, np.ndarray], intended: dict[str, str]) -> list[str]:
    """What differs or has no counterpart, a line each."""
    lines = [f"{name}: only {'here' if name in ours else 'on the base'}" for name in ours.keys() ^ base.keys()]
    for name in sorted(ours.keys() & base.keys()):
        a, b = ours[name], base[name]
        if digest(a) != digest(b):
            reason = next((why for case, why in intended.items() if fnmatch.fnmatch(name, case)), "")
            if not (reason and near(a, b)):
                lines.append(f"{name}: {a.dtype} {a.shape} differs in {np.count_nonzero(a != b)} elements")
    return lines


def near(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.dtype.kind != "f":
        return False
    x, y = a.astype(np.float64), b.astype(np.float64)
    return bool(np.linalg.norm(x - y) <= APART * np.linalg.norm(y))


def read(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return found


def chosen_by(name: str, only: str) -> bool:
    """Whether a result is of a case that was asked for."""
    return fnmatch.fnmatch(name.partition(":")[0], only)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--base", metavar="COMMIT", help="compare sums, too, with this commit's on this machine")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases whose name matches")
    parser.add_argument("--write", action="store_true", help="write digests.json")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.group:
        return run_group(chosen.group, chosen.only, chosen.out)
    groups = [g for g in GROUPS if fnmatch.fnmatch(g, chosen.only.partition(",")[0])]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "here").mkdir()
        fixed, sums = run(ROOT, chosen.only, Path(folder) / "here", groups)
        if chosen.write:
            kept = {name: value for name, value in read(DIGESTS).items() if not chosen_by(name, chosen.only)}
            found = kept | {name: digest(value) for name, value in fixed.items()}
            DIGESTS.write_text(json.dumps(dict(sorted(found.items())), indent=0) + "\n")
        known = {name: value for name, value in read(DIGESTS).items() if chosen_by(name, chosen.only)}
        lines = [f"{name}: is not in digests.json" for name in fixed.keys() - known.keys()]
        lines += [f"{name}: is gone" for name in known.keys() - fixed.keys()]
        lines += [f"{n}: differs" for n in sorted(fixed.keys() & known.keys()) if digest(fixed[n]) != known[n]]
        if chosen.base:
            tree = Path(folder) / "base"
            subprocess.run(["git", "worktree", "add", "--detach", tree, chosen.base], cwd=ROOT, check=True)
            try:
                (Path(folder) / "there").mkdir()
                _, before = run(tree, chosen.only, Path(folder) / "there", groups)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
            lines += differences(sums, before, read(INTENDED))
    print(*lines[:200], sep="\n")
    print(f"{len(fixed)} exact results, {len(sums)} sums, {len(lines) or 'none'} different")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
