"""The page of names agrees with the lists and the packages; every name exists or is refused with a reason."""

import importlib
from collections.abc import Callable

import pytest

from quaver.compat import stand_in
from tests.compat import names

#: Files of theirs that no file of ours stands for: Python's own sentence is that there is no such module.
NO_FILES = ("torchao.float8.distributed_utils",)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", names.TABLES)
def test_the_page_is_current(title: str) -> None:
    table: Callable[[], list[str]] = names.TABLES[title]
    if title.startswith("torchao"):
        torchao = pytest.importorskip("torchao")
        if f"torchao {torchao.__version__.partition('+')[0]}" not in names.PAGE.read_text():
            pytest.skip(f"the page is of another torchao than {torchao.__version__}")
    page = names.PAGE.read_text()
    assert names.written(page, title, table()) == page, "python -m tests.compat.names writes it anew"


def test_reasons_are_of_names_that_are_listed_and_not_there() -> None:
    for module, (listed, reasons) in names.TRANSFORMER_ENGINE.items():
        beyond = set(reasons) - set(listed.split()) - {"dense"}
        assert not beyond, f"{module}: {beyond} are refused, and are no names of the library's list"
        assert "there |" in names.row(f"transformer_engine.{module}", sorted(listed.split()), reasons)[0]


def test_a_name_without_a_reason_is_an_error() -> None:
    with pytest.raises(LookupError, match="brand_new is neither there nor named"):
        names.row("transformer_engine.pytorch", ["Linear", "brand_new"], stand_in.PYTORCH)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", names.TABLES)
def test_supported_names_import_and_others_say_why_not(title: str) -> None:
    if title.startswith("torchao"):
        pytest.importorskip("torchao")
    for line in names.TABLES[title]():
        module, listed, why = (cell.strip() for cell in line.strip("|").split(" | "))
        for name in listed.replace("`", "").split(", "):
            command = f"from quaver.compat.{module} import {name}"
            if why == "there":
                exec(command)
                continue
            with pytest.raises(ImportError) as refused:
                exec(command)
            if module in NO_FILES:
                continue
            assert str(refused.value) == f"quaver.compat.{module} has no {name!r}: {why.removeprefix('refused: ')}"
            with pytest.raises(AttributeError, match=f"has no {name!r}: "):
                getattr(importlib.import_module(f"quaver.compat.{module}"), name)


def test_importing_a_misspelt_name_suggests_the_nearest() -> None:
    with pytest.raises(ImportError, match="has no 'LayerNormLinar': did you mean 'LayerNormLinear'"):
        exec("from quaver.compat.transformer_engine.pytorch import LayerNormLinar")
    assert not hasattr(importlib.import_module("quaver.compat.transformer_engine.pytorch"), "ops")
