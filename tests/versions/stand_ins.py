"""CUDA's libraries for a machine without a GPU: empty ones, so that torch's CUDA build of a version can be imported.

PyPI has torch for Linux with CUDA alone, and the libraries it loads are gigabytes that nothing here would call. Each is
replaced by one with the same name whose functions all return "no device". What is run this way runs on a CPU.
"""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

#: cudaErrorNoDevice.
ANSWER = 100
#: Of the system.
SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|gomp)\.so|ld-linux")
#: Names of functions without a version; the driver's own, cu and a capital, are nobody's here.
THEIRS = re.compile(r"cu[a-z]|cuFile|nccl|nv|_?_cu")
#: A library that no other library needs by name: it is loaded first.
UNVERSIONED = "libunversioned.so.1"
NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")


def make(libraries: Path, folder: Path) -> list[str]:
    """Stand-ins for all that the libraries in a folder need and that neither it nor the system has; returns names."""
    ours = sorted(libraries.glob("lib*.so*"))
    present = {path.name for path in ours}
    needed: set[str] = set()
    #: By version of a symbol, its library; and the functions of each version.
    owners: dict[str, str] = {}
    functions: dict[str, set[str]] = defaultdict(set)
    for path in ours:
        lacking = {n for n in NEEDED.findall(read("readelf", "-d", path)) if n not in present and not SYSTEM.match(n)}
        needed |= lacking - {"libcuda.so.1"}
        if lacking:
            owners |= {version: file for version, file in versions(path) if file in lacking}
            for name, version in undefined(path):
                functions[version].add(name)
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(needed):
        write(folder, name, {v: functions.get(v, set()) for v, file in owners.items() if file == name})
    # What has no version may be anyone's.
    write(folder, UNVERSIONED, {"": functions[""]})
    return [*sorted(needed), UNVERSIONED]


def read(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def versions(path: Path) -> Iterator[tuple[str, str]]:
    """(version, library) of the symbols that a library needs from others."""
    file = ""
    for line in read("readelf", "-W", "-V", path).partition("Version needs")[2].splitlines():
        file = match.group(1) if (match := re.search(r"File: (\S+)", line)) else file
        if match := re.search(r"Name: (\S+)", line):
            yield match.group(1), file


def undefined(path: Path) -> set[tuple[str, str]]:
    """Functions in C that a library takes from others, with their versions."""
    symbols = {line.split()[-1] for line in read("nm", "-D", "--undefined-only", path).splitlines()}
    pairs = {(s.partition("@")[0], s.rpartition("@")[2] if "@" in s else "") for s in symbols}
    return {(name, version) for name, version in pairs if version or THEIRS.match(name)}


def write(folder: Path, name: str, functions: Mapping[str, set[str]]) -> None:
    source, script = folder / f"{name}.c", folder / f"{name}.map"
    symbols = sorted(set().union(*functions.values())) if functions else []
    source.write_text("".join(f"long {symbol}(void) {{ return {ANSWER}; }}\n" for symbol in symbols))
    blocks = [f"{v} {{ {'global: ' + '; '.join(sorted(s)) + ';' if s else ''} }};" for v, s in functions.items()]
    script.write_text("\n".join(blocks) + "\n")
    options = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{name}"]
    options += [f"-Wl,--version-script={script}"] if any(functions) else []
    subprocess.run(["cc", *options, source, "-o", folder / name], check=True)


if __name__ == "__main__":
    print(" ".join(make(Path(sys.argv[1]), Path(sys.argv[2]))))
