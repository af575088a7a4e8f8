"""Test that a stand-in serves imports and `importlib.metadata` until removed, and reports when it comes too late."""

import importlib
import importlib.metadata as metadata
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest

import quaver.compat
from quaver.compat import stand_in
from quaver.compat.stand_in import LIBRARIES


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate a process that has not imported the libraries."""
    amax_values = {name for library in LIBRARIES for name in (library, *LIBRARIES[library].readers)}
    for name in list(sys.modules):
        if name.partition(".")[0] in amax_values:
            monkeypatch.delitem(sys.modules, name)
    yield
    quaver.compat.uninstall()


def test_modules_are_ours_by_both_names() -> None:
    quaver.compat.install("transformer_engine")
    recipe = importlib.import_module("transformer_engine.common.recipe")
    ours = importlib.import_module("quaver.compat.transformer_engine.common.recipe")
    assert recipe is ours and ours.__spec__.name == ours.__name__ == "quaver.compat.transformer_engine.common.recipe"
    top = importlib.import_module("transformer_engine")
    assert top.pytorch is importlib.import_module("transformer_engine.pytorch")
    assert importlib.import_module("transformer_engine.pytorch.fp8").check_mxfp8_support() == (True, "")
    assert find_spec("transformer_engine") is not None and find_spec("transformer_engine.debug") is None
    with pytest.raises(ModuleNotFoundError, match=r"transformer_engine\.debug"):
        importlib.import_module("transformer_engine.debug")


def test_metadata_has_a_version_until_the_stand_in_is_removed() -> None:
    quaver.compat.install("transformer_engine")
    for name in ("transformer_engine", "transformer-engine", "Transformer.Engine"):
        assert metadata.version(name) == LIBRARIES["transformer_engine"].version
    assert "transformer_engine" in metadata.packages_distributions()
    assert "quaver" in metadata.metadata("transformer-engine")["Summary"]
    assert metadata.version("torch")
    quaver.compat.uninstall()
    assert find_spec("transformer_engine") is None
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("transformer_engine")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_engine.common")


def test_an_installed_library_is_hidden_until_removal() -> None:
    before = find_spec("torchao")
    quaver.compat.install("torchao")
    quaver.compat.install("torchao")
    assert importlib.import_module("torchao.float8").__name__ == "quaver.compat.torchao.float8"
    assert metadata.version("torchao") == LIBRARIES["torchao"].version
    quaver.compat.uninstall()
    after = find_spec("torchao")
    assert getattr(after, "origin", None) == getattr(before, "origin", None)
    assert not [finder for finder in sys.meta_path if isinstance(finder, stand_in._Finder)]


def test_the_stand_in_can_be_removed_and_bound_names_stay() -> None:
    bound = []
    for _ in range(2):
        quaver.compat.install("transformer_engine")
        quaver.compat.install("transformer_engine")
        quaver.compat.install("torchao")
        bound.append(importlib.import_module("transformer_engine.pytorch").Linear)
        quaver.compat.install("transformer_engine")
        assert len([finder for finder in sys.meta_path if isinstance(finder, stand_in._Finder)]) == 2
        quaver.compat.uninstall()
        quaver.compat.uninstall()
        assert "transformer_engine.pytorch" not in sys.modules and find_spec("transformer_engine") is None
    assert bound[0] is bound[1] and bound[0](8, 8).weight.shape == (8, 8)


def test_threads_import_one_module() -> None:
    quaver.compat.install("transformer_engine")
    names = ["transformer_engine.pytorch", "transformer_engine.common.recipe", "transformer_engine.pytorch.module"]
    ours = [f"quaver.compat.{name}" for name in names]
    with ThreadPoolExecutor(8) as pool:
        modules = list(pool.map(importlib.import_module, (names + ours) * 8))
    assert all(modules[i] is modules[i % 3] for i in range(len(modules)))


@pytest.mark.parametrize("library, other", [("transformer_engine", "accelerate"), ("torchao", "transformers")])
def test_libraries_imported_earlier_are_named(library: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, other, sys)
    with pytest.raises(RuntimeError, match=f"{other} is already imported, and has checked for {library}: call quaver"):
        quaver.compat.install(library)
    monkeypatch.setitem(sys.modules, library, sys)
    with pytest.raises(RuntimeError, match=f"{library} is already imported: call quaver"):
        quaver.compat.install(library)
    assert not [finder for finder in sys.meta_path if isinstance(finder, stand_in._Finder)]


def test_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no library 'transformer-engine'; did you mean 'transformer_engine'"):
        quaver.compat.install("transformer-engine")
