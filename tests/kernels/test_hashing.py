"""The hash of a kernel names it in Triton's cache: it must not depend on earlier hashes in the process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from triton import JITFunction

from quaver.kernels.hashing import hash_callees_first
from quaver.kernels.tensorwise import amax

ROOT = Path(__file__).parents[2]
#: Prints the hashes of all functions of quaver.kernels, hashed in the order of their names, or in the reverse one;
#: those whose callees were not hashed before; and the names that stand for two values in one kernel, which Triton
#: hashes in the order of their modules' addresses.
HASHES = """
import importlib, json, pkgutil, sys
from triton import JITFunction
import quaver.kernels
from quaver.kernels.hashing import hash_callees_first

functions = {}
for found in pkgutil.walk_packages(quaver.kernels.__path__, "quaver.kernels."):
    for value in vars(importlib.import_module(found.name)).values():
        if isinstance(value, JITFunction):
            functions[f"{value.__module__}.{value.__name__}"] = value
order = sorted(functions, reverse="reverse" in sys.argv)
for name in order:
    hash_callees_first(functions[name])
late = [name for name in order if JITFunction(functions[name].fn).cache_key != functions[name].cache_key]
twice = []
for name in order:
    values = {}
    for (known, _), (value, _) in functions[name].used_global_vals.items():
        if repr(values.setdefault(known, value)) != repr(value):
            twice.append(f"{known} in {name}")
print(json.dumps([{name: functions[name].cache_key for name in functions}, late, twice]))
"""


def hashes_in(order: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
    return subprocess.Popen([sys.executable, "-c", HASHES, order], env=environment, stdout=subprocess.PIPE, text=True)


def test_a_kernel_hash_does_not_depend_on_earlier_hashes() -> None:
    processes = [hashes_in("forward"), hashes_in("reverse")]
    forward, backward = [json.loads(process.communicate()[0]) for process in processes]
    hashes, late, twice = forward
    assert len(hashes) > 100
    assert hashes == backward[0]
    assert not late and not twice and backward[1:] == [[], []]


def test_objects_without_a_hash_are_left_unchanged() -> None:
    """Values that are no functions, and functions of a Triton without this attribute: Triton's own order remains."""
    fn: Any = JITFunction(amax.fn)
    del fn.hash
    hash_callees_first(None, 3, "NONE", amax, fn)
    assert not hasattr(fn, "hash")
