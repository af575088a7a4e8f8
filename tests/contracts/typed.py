"""mypy with one configuration and one cache for the tree and users' scripts, so that common imports are read once."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[2]
#: Options that --strict enables, from `mypy --help`.
STRICT = {
    "disallow_any_generics": True,
    "disallow_subclassing_any": True,
    "disallow_untyped_calls": True,
    "disallow_untyped_defs": True,
    "disallow_incomplete_defs": True,
    "check_untyped_defs": True,
    "disallow_untyped_decorators": True,
    "warn_redundant_casts": True,
    "warn_unused_ignores": True,
    "warn_return_any": True,
    "implicit_reexport": False,
    "strict_equality": True,
    "extra_checks": True,
}
#: Those that mypy only accepts for all modules; they are in pyproject.toml.
GLOBAL = ("warn_redundant_casts",)


def mypy(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run mypy in the tree, one process at a time, since the next one uses the cache of the first."""
    (ROOT / ".mypy_cache").mkdir(exist_ok=True)
    with FileLock(ROOT / ".mypy_cache" / "lock"):
        return subprocess.run(
            [sys.executable, "-m", "mypy", *arguments],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
        )


def strict(modules: list[str]) -> str:
    """The tree's configuration, in which these modules are checked as --strict checks them."""
    own = [f"{name} = {str(value).lower()}" for name, value in STRICT.items() if name not in GLOBAL]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return "\n".join([text, "[[tool.mypy.overrides]]", f"module = {modules!r}", *own, ""])
