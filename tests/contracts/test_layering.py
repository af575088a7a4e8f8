"""Who may import whom: arrows point down only, no cycle, lazy imports inside functions counted."""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src"

#: Which parts of the library a part may import, its own files included. The longest prefix of a module's name decides.
OURS: dict[str, set[str]] = {
    "quaver": {"quaver.core", "quaver.recipes", "quaver.rules"},
    "quaver.core": {"quaver.core"},
    "quaver.recipes": {"quaver.core", "quaver.recipes"},
    "quaver.rules": {"quaver.core", "quaver.recipes"},
    "quaver.kernels": {"quaver.kernels"},
    "quaver.torch": {"quaver", "quaver.core", "quaver.recipes", "quaver.kernels", "quaver.torch"},
    "quaver.jax": {"quaver", "quaver.core", "quaver.recipes", "quaver.kernels", "quaver.jax"},
    "quaver.inspect": {"quaver", "quaver.core", "quaver.recipes", "quaver.inspect"},
}
OURS["quaver.torch.parallel"] = OURS["quaver.torch"] | {"quaver.torch.parallel"}
OURS["quaver.torch.optim"] = OURS["quaver.torch"] | {"quaver.torch.optim"}
OURS["quaver.inspect.plots"] = OURS["quaver.inspect"] | {"quaver.inspect.plots"}
OURS["quaver.compat"] = OURS["quaver.torch"] | OURS["quaver.jax"] | OURS["quaver.inspect"] | {"quaver.compat"}
#: It imports everything; that it is in nobody else's set means that nobody imports it.
OURS["quaver.train"] = set(OURS) | {"quaver.train"}

#: What else a part may import beyond the standard library; parts not named here may import anything but `NEVER`.
THEIRS = {
    "quaver": set(),
    "quaver.core": {"numpy", "ml_dtypes"},
    "quaver.recipes": set(),
    "quaver.rules": set(),
    "quaver.kernels": {"triton"},
}
NEVER = {"quaver.torch": {"jax", "jaxlib", "flax", "optax"}, "quaver.jax": {"torch", "torchao"}}

#: Names that say nothing about what is in a file.
EMPTY_NAMES = {"utils", "util", "common", "base", "helpers", "helper", "misc"}


def modules(root: Path = ROOT) -> dict[str, str]:
    """Source text by dotted name."""
    found = {}
    for path in sorted((root / "quaver").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imports(name: str, source: str, known: set[str], is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, module) of every import statement anywhere in the file; names of our own are taken down to the module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".") + ([""] if is_package else [])
                base = ".".join([*parts[: -node.level], *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in known else base


def part(name: str) -> str:
    """The row of the table that a module belongs to."""
    while name not in OURS:
        name = name.rpartition(".")[0]
        assert name, "a module outside quaver"
    return name


def offences(sources: dict[str, str]) -> list[str]:
    """Every import that the map forbids."""
    found = []
    for name, source in sources.items():
        mine = part(name)
        for line, target in imports(name, source, set(sources), has_children(name, sources)):
            top = target.split(".")[0]
            if top == "quaver":
                wrong = part(target) not in OURS[mine]
            elif mine in THEIRS:
                wrong = top not in THEIRS[mine] | set(sys.stdlib_module_names)
            else:
                wrong = top in next((NEVER[p] for p in NEVER if f"{mine}.".startswith(f"{p}.")), set())
            if wrong:
                found.append(f"{name}:{line} imports {target}, which {mine} may not")
    return found


def has_children(name: str, sources: dict[str, str]) -> bool:
    return any(other.startswith(f"{name}.") for other in sources)


def cycle(sources: dict[str, str]) -> list[str]:
    """The modules of one import cycle in order, or nothing."""
    edges = {
        name: {t for _, t in imports(name, source, set(sources), has_children(name, sources)) if t in sources} - {name}
        for name, source in sources.items()
    }
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for target in sorted(edges[name]):
                if found := visit(target, [*path, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in sources if (found := visit(name, []))), [])


def test_every_import_points_down() -> None:
    found = offences(modules())
    assert not found, "\n".join(found)


def test_there_is_no_cycle_lazy_imports_counted() -> None:
    found = cycle(modules())
    assert not found, " → ".join(found)


def test_no_file_has_a_name_that_says_nothing() -> None:
    assert not [name for name in modules() if name.rpartition(".")[2].strip("_") in EMPTY_NAMES]


def test_every_folder_has_a_row_in_the_map() -> None:
    folders = {"quaver"} | {f"quaver.{p.name}" for p in (ROOT / "quaver").iterdir() if list(p.glob("*.py"))}
    assert folders <= set(OURS), f"who may import {folders - set(OURS)}, and whom may they?"


@pytest.mark.parametrize(
    "name, source",
    [
        ("quaver.core.x", "import torch"),
        ("quaver.core.x", "from quaver.recipes import get"),
        ("quaver.core.x", "from ..recipes import get"),
        ("quaver.recipes.x", "import numpy as np"),
        ("quaver.kernels.x", "from quaver.core.formats import E4M3"),
        ("quaver.kernels.x", "import torch"),
        ("quaver.torch.x", "def f():\n    import jax.numpy"),
        ("quaver.torch.x", "from quaver.torch.optim import AdamW"),
        ("quaver.torch.x", "from quaver import jax"),
        ("quaver.torch.optim.x", "from quaver.torch.parallel import fsdp"),
        ("quaver.jax.x", "import torch"),
        ("quaver.jax.x", "from quaver.torch import linear"),
        ("quaver.inspect.x", "from quaver.train import loop"),
        ("quaver.x", "import quaver.torch"),
    ],
)
def test_a_forbidden_import_is_found(name: str, source: str) -> None:
    around = ("core", "recipes", "torch", "torch.optim", "torch.parallel", "jax", "train", "train.loop", "kernels")
    sources = {f"quaver.{n}": "" for n in around} | {"quaver": "", name: source}
    assert len(offences(sources)) == 1


def test_what_the_map_allows_is_not_an_offence() -> None:
    allowed = {
        "quaver.core.a": "import math\nimport numpy as np\nfrom . import b\nfrom quaver.core.b import c",
        "quaver.core.b": "",
        "quaver.torch.a": "import torch, numpy\nfrom quaver import recipes\nfrom quaver.kernels import cast",
        "quaver.torch.optim.a": "from quaver.torch.a import x",
        "quaver.train.a": "import rich\nfrom quaver.torch.optim import a",
    }
    assert offences(allowed | dict.fromkeys(["quaver", "quaver.core", "quaver.recipes", "quaver.kernels"], "")) == []


def test_a_cycle_through_a_function_is_found() -> None:
    sources = {
        "quaver.torch.a": "from quaver.torch import b",
        "quaver.torch.b": "def f():\n    from quaver.torch.c import g",
        "quaver.torch.c": "from .a import h",
        "quaver.torch": "from quaver.torch.a import h",
    }
    assert cycle(sources) == ["quaver.torch.a", "quaver.torch.b", "quaver.torch.c", "quaver.torch.a"]
    assert cycle(sources | {"quaver.torch.c": ""}) == []


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_quaver_imports_no_framework() -> None:
    heavy = ["torch", "jax", "jaxlib", "ml_dtypes", "triton", "matplotlib", "rich"]
    assert run(f"import sys, quaver; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_importing_the_torch_front_end_takes_at_most_0_3_seconds_beyond_torch() -> None:
    # Processor time, so that whatever else runs on the machine does not count.
    code = "import time, torch; t = time.process_time(); import quaver.torch; print(time.process_time() - t)"
    seconds = [float(run(code)) for _ in range(3)]
    assert statistics.median(seconds) <= 0.3, f"{seconds} s"


def test_importing_the_torch_front_end_imports_no_jax() -> None:
    assert run("import sys, quaver.torch; print([m for m in ('jax', 'flax') if m in sys.modules])") == "[]"
