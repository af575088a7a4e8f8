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


def run(tree: Path, only: str, folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
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
        outs = list(pool.map(one, GROUPS))
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


def differences(ours: dict[str, np.ndarray], base: dict[str, np.ndarray]) -> list[str]:
    """Results that differ or that only one side has, a line each."""
    lines = [f"{name}: only {'here' if name in ours else 'on the base'}" for name in sorted(ours.keys() ^ base.keys())]
    for name in sorted(ours.keys() & base.keys()):
        a, b = ours[name], base[name]
        if digest(a) != digest(b):
            where = f" in {np.count_nonzero(a != b)} elements" if a.shape == b.shape and a.dtype == b.dtype else ""
            lines.append(f"{name}: {a.dtype} {a.shape} differs{where} from {b.dtype} {b.shape}")
    return lines


def read(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return found


def matches(name: str, only: str) -> bool:
    """Whether a result is one of a case that --only selects."""
    return fnmatch.fnmatch(name.partition(":")[0], only)


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
        fixed, sums = run(ROOT, chosen.only, folder / "here")
        if not fixed:
            parser.error(f"no case matches {chosen.only!r}; names begin with {', '.join(GROUPS)}")
        lines = []
        if chosen.base:
            tree = folder / "base"
            subprocess.run(["git", "worktree", "add", "--detach", tree, chosen.base], cwd=ROOT, check=True)
            try:
                (folder / "there").mkdir()
                base_fixed, base_sums = run(tree, chosen.only, folder / "there")
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
            lines += differences(fixed | sums, base_fixed | base_sums)
    found = {name: digest(value) for name, value in fixed.items()}
    known = {name: value for name, value in read(DIGESTS).items() if matches(name, chosen.only)}
    if chosen.write:
        others = {name: value for name, value in read(DIGESTS).items() if not matches(name, chosen.only)}
        DIGESTS.write_text(json.dumps(dict(sorted((others | found).items())), indent=0) + "\n")
    else:
        names = sorted(found.keys() | known.keys())
        lines += [f"{name}: differs from digests.json" for name in names if found.get(name) != known.get(name)]
    for line in lines:
        print(line)
    print(f"{len(fixed)} exact results, {len(sums)} sums, {len(lines) or 'none'} different")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
