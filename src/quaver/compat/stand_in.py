"""One of these packages in the place of the library that has its names, in a process that asks for it.

An entry of `sys.meta_path` answers `import` and `importlib.metadata`; no other library is changed. Modules are the same
objects by both names.
"""

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from quaver.core.text.spelling import check_name

HERE = "quaver.compat"


@dataclass(frozen=True)
class Library:
    """A library that there are names of."""

    #: Whose names they are: what asks for a version is told this one.
    version: str
    #: What looks for the library when it is imported, or once and for all.
    readers: tuple[str, ...]
    #: Older names of modules.
    renamed: Mapping[str, str] = field(default_factory=dict)


_LIGHTNING = "lightning", "lightning_fabric", "pytorch_lightning"
LIBRARIES = {
    "transformer_engine": Library(
        "2.15.0",
        ("accelerate", "peft", *_LIGHTNING),
        {"transformer_engine.pytorch.fp8": f"{HERE}.transformer_engine.pytorch.quantization"},
    ),
    # Of torchao before 0.15 transformers takes nothing for inference, which there is nothing for here.
    "torchao": Library("0.14.1", ("accelerate", "peft", "torchtitan", "transformers", *_LIGHTNING)),
}


class _Same(Loader):
    """Loads a module of ours by another name: the module itself."""

    def __init__(self, own: ModuleSpec) -> None:
        self.own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self.own.name)

    def exec_module(self, module: ModuleType) -> None:
        # Being imported by another name gave it that name's.
        module.__spec__ = self.own


class _Installed(importlib.metadata.Distribution):
    """What `importlib.metadata` reads of a library that this stands in for."""

    def __init__(self, name: str, version: str) -> None:
        self.texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            f"Summary: Names that {HERE} has, in the place of this library.\n",
            "top_level.txt": f"{name}\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self.texts.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


class _Finder(importlib.metadata.DistributionFinder):
    def __init__(self, name: str) -> None:
        self.name, self.library = name, LIBRARIES[name]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self.name:
            return None
        own = importlib.util.find_spec(self.library.renamed.get(fullname, f"{HERE}.{fullname}"))
        return None if own is None else ModuleSpec(fullname, _Same(own))

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        asked = getattr(context, "name", None)
        if asked is None or re.sub(r"[-_.]+", "_", asked).lower() == self.name:
            yield _Installed(self.name, self.library.version)


def install(name: str) -> None:
    """Put one of these packages in the place of the library that has its names, until `uninstall`, in this process.

    `import` of it and of its modules gives ours, and `importlib.metadata` has a version of it, so that libraries which
    look for it use ours. One that is installed too is hidden, all of it.

    Args:
        name: "transformer_engine" or "torchao".
    Raises:
        ValueError: another name.
        RuntimeError: the library was imported before, or one that looks for it when it is imported.
    """
    check_name("library", name, LIBRARIES)
    if any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        return
    for other in (name, *LIBRARIES[name].readers):
        if other in sys.modules:
            why = "" if other == name else f", and has looked for {name}"
            raise RuntimeError(
                f"{other} is imported already{why}: call {HERE}.install({name!r}) before anything imports {other}"
            )
    sys.meta_path.insert(0, _Finder(name))


def uninstall() -> None:
    """Take all that `install` put away again: what is imported afterwards is the library itself, if it is installed.

    Modules that were imported before stay ours where they are bound already.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in LIBRARIES and getattr(module, "__name__", "").startswith(HERE):
            del sys.modules[name]
