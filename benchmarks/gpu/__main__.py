"""The command line. `main` sets variables before Triton is imported, so all imports of Quaver are inside it."""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def parser() -> argparse.ArgumentParser:
    argument_parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=sys.modules["benchmarks.gpu"].__doc__
    )
    argument_parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    argument_parser.add_argument(
        "--dry-run", action="store_true", help="toy sizes on a CPU, interpreted; 1 where a case gives no figure"
    )
    argument_parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="with --dry-run: that many cases at a time"
    )
    argument_parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="SECTION",
        help="this section; repeat it for several, in their order",
    )
    argument_parser.add_argument("--seconds", type=float, default=480.0, help="of the whole run")
    argument_parser.add_argument("--no-write", action="store_true", help="keep no results")
    argument_parser.add_argument(
        "--results", type=Path, metavar="DIR", help="where they are kept; those of a dry run nowhere else"
    )
    argument_parser.add_argument("--commit", default="", help="shown where there is no git to ask")
    argument_parser.add_argument(
        "--compile", nargs="+", default=[], metavar="sm_90", help="no measuring: fill --cache for these architectures"
    )
    argument_parser.add_argument(
        "--check",
        action="store_true",
        help="with --compile: check the machine code, and launch from a copy, which must compile nothing",
    )
    argument_parser.add_argument("--cache", type=Path, metavar="DIR", help="of compiled kernels, made by --compile")
    argument_parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return argument_parser


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    if importlib.util.find_spec("quaver") is None:
        # A checkout works without installation.
        sys.path.insert(0, str(ROOT / "src"))
    if given.compile or given.check:
        return compile_ahead(given)
    if given.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    if given.cache is not None:
        use(given.cache)
    from benchmarks.gpu import run
    from benchmarks.gpu.options import Options
    from benchmarks.measuring import results

    folder = None if given.no_write else given.results or (None if given.dry_run else results.FOLDER)
    options = Options(
        quick=given.quick,
        dry=given.dry_run,
        processes=given.processes,
        only=tuple(given.only),
        seconds=given.seconds,
        folder=folder,
        commit=given.commit,
    )
    if given.serve:
        return run.serve(options)
    try:
        done = run.run(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    # A dry run fails if any case is missing; figures of a GPU are useful even if others are missing.
    return 1 if given.dry_run and run.missing(run.chosen(options.only), options, done) else 0


def use(folder: Path) -> None:
    """Take kernels from there, wherever the folder was made, and leave what is compiled there."""
    from benchmarks.gpu.ahead import cache

    kernels = cache.settle(folder)
    print(f"{folder}: {kernels} kernels compiled beforehand", flush=True)
    os.environ["TRITON_CACHE_DIR"] = str(folder.resolve())


def compile_ahead(given: argparse.Namespace) -> int:
    """Returns: 0 where all was built, and under --check where no machine code is wrong and nothing left to compile."""
    from benchmarks.gpu.ahead import building, cards

    try:
        archs = [cards.architecture(text) for text in given.compile]
        if given.cache is None or not archs:
            raise ValueError("name architectures by --compile sm_90 and the cache's folder by --cache DIR")
        if given.check and any(not list(path.parent.glob("*.ttgir")) for path in given.cache.glob("*/*.cubin")):
            raise ValueError(
                f"{given.cache} has kernels without the intermediate code that --check reads, as an unpacked archive: "
                "give --cache an empty folder"
            )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    building.build(archs, given.cache.resolve())
    if not given.check:
        return 0
    wrong = building.check_machine_code(archs, given.cache.resolve())
    left = building.check(archs, given.cache.resolve())
    print(f"compiled in a second process: {left['kernels compiled']} kernels, {left['launchers compiled']} launchers")
    return 1 if wrong or left["kernels compiled"] or left["launchers compiled"] else 0


if __name__ == "__main__":
    sys.exit(main())
