"""A launch's key depends on all that decides its machine code, in any module, and on nothing else."""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from quaver.torch.backends.gpu.launch import KernelLaunch
from tests.kernels.cases import Case
from tests.kernels.gate import bad, keys, measured
from tests.kernels.gate.record import Recorded

KERNEL = '''
import triton
import triton.language as tl
from toy_package import numbers
from toy_package.tiles import store

GAIN = tl.constexpr(2.0)
UNREAD = tl.constexpr(1)


@triton.jit
def doubled(x, out, n, BLOCK: tl.constexpr, OF: tl.constexpr):
    """Twice of x."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = numbers.widened(tl.load(x + at, mask=at < n)) * GAIN
    store(out + at, OF(v), at < n)


@triton.jit
def negated(v):
    return -v


@triton.jit
def same(v):
    return v
'''
NUMBERS = '''
import triton
import triton.language as tl

HALF, NAMES = tl.constexpr(0.5), (1, "one", None)


@triton.jit
def widened(v):
    return v.to(tl.float32) + shifted(v) * numbers_of(v)


@triton.jit
def shifted(v):
    # Half of it.
    return v * HALF


@triton.jit
def numbers_of(v):
    """Calls itself by way of another."""
    if NAMES[0] == 2:
        return widened(v)
    return v
'''
TILES = """
import triton
import triton.language as tl


@triton.jit
def store(at, v, inside):
    tl.store(at, v, mask=inside)
"""
FILES = {"kernel.py": KERNEL, "numbers.py": NUMBERS, "tiles.py": TILES}
Key = Callable[..., str]


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Key]:
    """The key of `doubled`, in modules where one text replaces another, launched with other parameters."""
    versions = count()

    def key_of(file: str = "kernel.py", old: str = "", new: str = "", **how: Any) -> str:
        arch, of, trips = how.pop("arch", 90), how.pop("of", "same"), how.pop("trips", ())
        assert old in FILES[file]
        toy_package = tmp_path / str(next(versions)) / "toy_package"
        toy_package.mkdir(parents=True)
        (toy_package / "__init__.py").touch()
        for name, text in FILES.items():
            (toy_package / name).write_text(text.replace(old, new) if name == file and old else text)
        for name in [name for name in sys.modules if name.partition(".")[0] == "toy_package"]:
            del sys.modules[name]
        with monkeypatch.context() as patch:
            patch.syspath_prepend(toy_package.parent)
            kernel = importlib.import_module("toy_package.kernel")
        signature = {"x": "*bf16", "out": "*fp32", "n": "i32", "BLOCK": "constexpr", "OF": "constexpr"}
        constants = {"BLOCK": 1024, "OF": getattr(kernel, of)}
        launch = KernelLaunch(kernel.doubled, (8, 1, 1), signature, constants, ("x", "out"), 4)
        changed = replace(launch, **{name: change(getattr(launch, name)) for name, change in how.items()})
        return keys.key(Recorded(Case(name="row", launch=lambda: None, trips=trips), "row: doubled", changed), arch)

    yield key_of
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_package"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kernel.py", "* GAIN", "* GAIN * 1.0"),
        ("kernel.py", "constexpr(2.0)", "constexpr(3.0)"),
        ("kernel.py", "constexpr(2.0)", "constexpr(2)"),
        ("kernel.py", "tl.constexpr(2.0)", "2.0"),
        ("kernel.py", "    return v\n", "    return v + 0\n"),
        ("kernel.py", "@triton.jit\ndef doubled", "@triton.jit(do_not_specialize=['n'])\ndef doubled"),
        # Called in another module, and from there.
        ("tiles.py", "mask=inside)", "mask=inside, cache_modifier='.cs')"),
        ("numbers.py", "+ shifted(v)", "- shifted(v)"),
        ("numbers.py", "v * HALF", "v * (HALF + 1.0)"),
        ("numbers.py", "constexpr(0.5)", "constexpr(0.25)"),
        ("numbers.py", "(1, ", "(2, "),
        ("numbers.py", '"one"', '"two"'),
        ("numbers.py", "@triton.jit\ndef shifted", "@triton.jit(noinline=True)\ndef shifted"),
    ],
)
def test_a_key_changes_with_the_kernel_its_callees_and_their_globals(key: Key, file: str, old: str, new: str) -> None:
    assert key(file, old, new) != key()


@pytest.mark.parametrize(
    "how",
    [
        {"arch": 89},
        {"of": "negated"},
        {"trips": (4,)},
        {"warps": lambda warps: 8},
        {"registers": lambda registers: 128},
        {"constants": lambda constants: {**constants, "BLOCK": 2048}},
        {"constants": lambda constants: {**constants, "BLOCK": 1024.0}},
        {"constants": lambda constants: {**constants, "BLOCK": True}},
        {"signature": lambda signature: {**signature, "x": "*fp16"}},
        {"signature": lambda signature: {**signature, "n": "i64"}},
        {"divisible": lambda names: names[:1]},
        {"divisible": lambda names: (*names, "n")},
    ],
    ids=lambda how: next(iter(how)),
)
def test_a_key_changes_with_how_a_kernel_is_launched(key: Key, how: dict[str, Any]) -> None:
    assert key(**how) != key()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kernel.py", "Twice of x.", "Two x.\n\n    In two lines."),
        ("kernel.py", "    at = ", "    # Where.\n\n    at = "),
        ("kernel.py", "UNREAD = tl.constexpr(1)", "UNREAD = tl.constexpr(2)\n\n\n# Moved down."),
        ("kernel.py", "    return -v", "    return v - v"),
        ("numbers.py", "# Half of it.", "# A half."),
        ("numbers.py", "* numbers_of(v)\n", "* numbers_of(v)  # type: ignore\n"),
    ],
)
def test_a_key_stays_where_no_machine_code_changes(key: Key, file: str, old: str, new: str) -> None:
    assert key(file, old, new) == key()


def test_a_key_stays_on_another_grid_and_for_tensors_of_another_size(key: Key) -> None:
    """What depends on these is computed at each run."""
    assert key(grid=lambda grid: (16, 1, 1), sizes=lambda sizes: {"x": 5}) == key()


def test_values_without_a_stable_text_are_refused(key: Key) -> None:
    with pytest.raises(TypeError, match="GAIN is a object"):
        key("kernel.py", "tl.constexpr(2.0)", "object()")


def test_keys_are_equal_in_other_processes_and_for_interpreted_kernels() -> None:
    """measured.json was written by a process that compiled; names are hashed by another seed in each."""
    stored = measured.load()
    if not stored.applies:
        pytest.skip(f"measured.json is of triton {stored.triton}")
    names = {one.name for one in bad.recorded()}
    assert all(codes.keys() == names for codes in bad.known(stored).values())


def test_every_option_of_the_compiler_is_in_a_key(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    before, options = key(), KernelLaunch.options.fget
    for more in ({"num_stages": 2}, {"enable_fp_fusion": True}, {"num_warps": 8}):
        monkeypatch.setattr(KernelLaunch, "options", property(lambda launch, more=more: options(launch) | more))
        assert key() != before


def test_a_key_changes_with_the_triton_version_and_the_machine_code_reader(
    key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key()
    monkeypatch.setattr(keys.triton, "__version__", "3.6.1")
    other = key()
    monkeypatch.undo()
    monkeypatch.setattr(keys, "READERS", keys.READERS[:-1])
    keys._readers.cache_clear()
    assert len({before, other, key()}) == 3
    keys._readers.cache_clear()
