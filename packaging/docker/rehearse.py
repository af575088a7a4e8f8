"""Run a Dockerfile's commands in a Debian root made by debootstrap, where no container engine runs. Needs root.

    make dist && python packaging/docker/rehearse.py packaging/docker/cpu.Dockerfile build/root doctor

The last arguments are those of the image's entry point. Variables whose names begin with PIP_ are passed on, and
`--bind PATH` makes a folder of this machine visible, such as one of wheels.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile with their arguments, without comments and line ends."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name, rest.strip()


def mount(source: str, target: Path, stack: ExitStack) -> None:
    """Mount a folder of this machine until the stack is closed, read-only so that no command can change it."""
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--bind", source, str(target)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(target)], check=True)
    stack.callback(subprocess.run, ["umount", "--lazy", str(target)], check=True)


class Image:
    """A root file system, and what the instructions before have set."""

    def __init__(self, root: Path) -> None:
        self.root, self.user, self.folder = root, "0", "/"
        self.variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.variables |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self.entry: list[str] = []

    def run(self, *command: str) -> None:
        inside = ["env", "-i", f"--chdir={self.folder}", *(f"{name}={value}" for name, value in self.variables.items())]
        subprocess.run(["chroot", f"--userspec={self.user}", str(self.root), *inside, *command], check=True)

    def follow(self, name: str, rest: str) -> None:
        """Follow one instruction after FROM."""
        if name == "RUN":
            self.run("/bin/sh", "-c", rest)
        elif name == "COPY":
            *sources, target = rest.split()
            for path in [path for source in sources for path in ROOT.glob(source)]:
                place = self.root / target.lstrip("/") / path.name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, place)
        elif name in ("ENV", "ARG"):
            key, _, value = rest.partition("=")
            self.variables[key] = value.replace("$PATH", self.variables["PATH"])
        elif name == "USER":
            self.user = rest
        elif name == "WORKDIR":
            self.folder = rest
            (self.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "ENTRYPOINT":
            self.entry = json.loads(rest)
        elif name != "CMD":
            raise ValueError(
                f"{name} cannot be rehearsed; supported are RUN, COPY, ENV, ARG, USER, WORKDIR, ENTRYPOINT"
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python packaging/docker/rehearse.py")
    parser.add_argument("file", type=Path, help="the Dockerfile")
    parser.add_argument("root", type=Path, help="new folder for the file system")
    parser.add_argument("arguments", nargs="*", help="of the entry point")
    parser.add_argument("--bind", action="append", default=[], metavar="PATH", help="folder of this machine to mount")
    parser.add_argument("--certificates", type=Path, help="certificates of a package index, for pip")
    given = parser.parse_args()
    (first, base), *rest = instructions(given.file.read_text(encoding="utf-8"))
    suite = re.fullmatch(r"debian:([a-z]+)-slim", base)
    if first != "FROM" or suite is None:
        raise ValueError(f"{given.file} begins with {first} {base}; only FROM debian:SUITE-slim can be rehearsed")
    if given.root.exists():
        # Folders of this machine may still be mounted there.
        raise ValueError(f"{given.root} exists: give a folder that does not, or unmount and delete what is in it")
    subprocess.run(["debootstrap", "--variant=minbase", suite[1], str(given.root)], check=True)
    image = Image(given.root.resolve())
    with ExitStack() as stack:
        for path in ("/proc", "/dev", *given.bind):
            mount(path, image.root / path.lstrip("/"), stack)
        # A container engine provides these two files.
        for name in ("resolv.conf", "hosts"):
            shutil.copy(f"/etc/{name}", image.root / "etc" / name)
        if given.certificates is not None:
            shutil.copy(given.certificates, image.root / "certificates.pem")
            image.variables["PIP_CERT"] = "/certificates.pem"
        for name, text in rest:
            print(f"{name} {text}", flush=True)
            image.follow(name, text)
        image.run(*image.entry, *given.arguments)


if __name__ == "__main__":
    main()
