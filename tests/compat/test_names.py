"""The page of names is what the lists and the packages say of it, and every name is there or refused with a reason."""

from collections.abc import Callable

import pytest

from quaver.compat import missing
from tests.compat import names


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
        names.row("transformer_engine.pytorch", ["Linear", "brand_new"], missing.PYTORCH)
