"""Public names that change, so that the same cases run on this tree and on an earlier commit's.

`names.json` has, for each module, the present names with the earlier ones in the order in which they are tried; an
earlier name is one of the same module, or "module:name". "modules" does the same for whole modules, "arguments" for
arguments of constructors. "kernels" and "constants" map earlier names in launches.json to present ones.
"""

import importlib
import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

TABLES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("names.json").read_text())


def find(module: str, name: str) -> Any:
    """An object by its present public name, under the name that the imported tree has for it."""
    places = [f"{module}:{name}"]
    places += [each if ":" in each else f"{module}:{each}" for each in TABLES.get(module, {}).get(name, ())]
    for place in places:
        where, _, called = place.partition(":")
        try:
            return getattr(importlib.import_module(where), called)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise AttributeError(f"the imported tree has none of {', '.join(places)}")


def find_module(name: str) -> ModuleType:
    """A module by its present name, under the name that the imported tree has for it."""
    for each in (name, *TABLES["modules"].get(name, ())):
        try:
            return importlib.import_module(each)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"the imported tree has no {name}")


def parallel(name: str, **arguments: Any) -> Any:
    """A style of `quaver.torch.parallel` with these arguments, each under the name that its constructor takes."""
    kind = find("quaver.torch.parallel", name)
    taken = inspect.signature(kind).parameters
    given = {}
    for argument, value in arguments.items():
        names = (argument, *TABLES["arguments"].get(argument, ()))
        given[next((each for each in names if each in taken), argument)] = value
    return kind(**given)


def kernel(name: str) -> str:
    """The present name of a kernel."""
    return str(TABLES["kernels"].get(name, name))


def constant(name: str) -> str:
    """The present name of a kernel's constant."""
    return str(TABLES["constants"].get(name, name))
