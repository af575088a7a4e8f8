"""A hash of all that decides the figures of a launch: the same in any process, checkout and version of Python.

It covers the source of the kernel and of every function that it calls, in any module; the values that these read;
signature, constants, known alignments and options; the architecture; loop counts; Triton's version; and
the source of the modules that read machine code. Comments, docstrings and empty lines are left out, and so are grids
and sizes of tensors: no machine code depends on
them, and figures per byte are computed at each run.

Triton's own keys do not suffice: a function's key contains its line number, and constants of the functions that it
calls only if those were hashed before (3.6, `DependenciesFinder._update_hash`).
"""

import ast
import inspect
import io
import json
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import triton
import triton.language as tl

from tests.kernels.gate.record import Recorded

#: The modules that compute figures from machine code.
READERS = "machine_code.py", "flow.py", "layouts.py"
PLAIN = bool, int, float, str, type(None)


def key(recorded: Recorded, arch: int) -> str:
    """64 hexadecimal digits: launches that have the same have the same figures, except those per byte.

    Raises:
        TypeError: a value that the kernel or a function reads has a type without a known text.
    """
    launch = recorded.launch
    functions = _Functions()
    parts = [
        triton.__version__,
        _readers(),
        arch,
        functions.describe(launch.fn, launch.fn.__name__),
        launch.signature,
        [(name, functions.describe(value, name)) for name, value in launch.constants.items()],
        launch.divisible,
        launch.options,
        recorded.trips,
        functions.parts,
    ]
    return digest(parts)


def digest(parts: object) -> str:
    """The hash of numbers, strings, lists and dictionaries; the order of dictionaries does not matter."""
    return sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@cache
def bare(source: str) -> str:
    """Source without comments, docstrings, empty lines and blanks at the ends of lines."""
    lines = [list(line) for line in source.splitlines()]
    ends, pending = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}, None
    before = tokenize.ENCODING
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            _blank(lines, token.start, token.end)
        elif token.type == tokenize.NL:
            continue
        else:
            if pending is not None and token.type == tokenize.NEWLINE:
                _blank(lines, *pending)
            pending = (token.start, token.end) if token.type == tokenize.STRING and before in ends else None
            before = token.type
    stripped = ("".join(line).rstrip() for line in lines)
    return "\n".join(line for line in stripped if line)


def _blank(lines: list[list[str]], start: tuple[int, int], end: tuple[int, int]) -> None:
    for number in range(start[0], end[0] + 1):
        line = lines[number - 1]
        first, last = start[1] if number == start[0] else 0, end[1] if number == end[0] else len(line)
        line[first:last] = " " * (last - first)


@cache
def _readers() -> str:
    here = Path(__file__).parent
    return digest([bare((here / name).read_text(encoding="utf-8")) for name in READERS])


class _Functions:
    """A kernel and all functions that it calls, numbered in the order of their first use."""

    def __init__(self) -> None:
        #: For each function its bare source, and by name the values that it reads from outside.
        self.parts: list[Any] = []
        self._numbers: dict[int, int] = {}

    def describe(self, value: Any, name: str) -> Any:
        """A value as text; a function as its number."""
        fn = _function(value)
        if fn is not None:
            return ["function", self._number(fn)]
        if isinstance(value, tl.constexpr):
            return ["constexpr", self.describe(value.value, name)]
        if isinstance(value, tuple):
            return [self.describe(one, name) for one in value]
        if isinstance(value, tl.dtype):
            return ["dtype", str(value)]
        if isinstance(value, PLAIN):
            # 1, 1.0 and True are three values, and JSON has no infinity.
            return [type(value).__name__, repr(value)]
        raise TypeError(f"{name} is a {type(value).__name__}: say in {Path(__file__).name} what its value is")

    def _number(self, fn: FunctionType) -> int:
        number = self._numbers.get(id(fn))
        if number is None:
            number = self._numbers[id(fn)] = len(self.parts)
            # Reserve its place before the functions that it calls are added: they may call it again.
            self.parts.append(None)
            read = {name: self.describe(value, name) for name, value in _reads(fn) if not _of_triton(value)}
            self.parts[number] = [_bare_source(fn), read]
        return number


@cache
def _bare_source(fn: Callable[..., Any]) -> str:
    return bare(textwrap.dedent(inspect.getsource(fn)))


def _reads(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reads from its module, from functions around it and from other modules, by name, sorted."""
    around = {**fn.__globals__, **inspect.getclosurevars(fn).nonlocals}
    own = set(fn.__code__.co_varnames)
    for name in _names(fn):
        first, *rest = name.split(".")
        if first in own or first not in around:
            continue
        value = around[first]
        for attribute in rest:
            if not isinstance(value, ModuleType):
                break
            value = getattr(value, attribute)
        if not isinstance(value, ModuleType):
            yield name, value


@cache
def _names(fn: FunctionType) -> list[str]:
    tree = ast.parse(_bare_source(fn))
    dotted = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))
    return sorted({name for name in dotted if all(part.isidentifier() for part in name.split("."))})


def _function(value: Any) -> FunctionType | None:
    """The compiled or interpreted Triton function behind a wrapper."""
    fn = getattr(value, "fn", None)
    return fn if isinstance(fn, FunctionType) else None


def _of_triton(value: Any) -> bool:
    """Whether a value is determined by the Triton version."""
    module = getattr(_function(value) or value, "__module__", None) or ""
    return module.partition(".")[0] == "triton" and not isinstance(value, tl.constexpr | tl.dtype)
