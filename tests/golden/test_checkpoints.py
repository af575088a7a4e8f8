"""Checkpoints of an earlier commit load to the same bits, and so does the step after them."""

import json
import lzma
import tarfile

import pytest

from tests.conftest import ROOT
from tests.golden.checkpoints.__main__ import EXPECTED, loaded
from tests.golden.checkpoints.cases import FOLDER, cases


# torch warns where one process reads what ranks wrote.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", cases())
def test_checkpoint_loads_to_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The trainer compares the path of its text, which is relative.
    monkeypatch.chdir(ROOT)
    expected, found = json.loads(EXPECTED.read_text())[name], loaded(name)
    assert [key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)] == []


def test_no_file_names_a_class_of_this_package() -> None:
    found = []
    for file in FOLDER.iterdir():
        if file.name.endswith(".tar.xz"):
            with tarfile.open(file) as archive:
                members = [each for each in archive.getmembers() if each.name.endswith(".metadata")]
                content = b"".join(archive.extractfile(each).read() for each in members)  # type: ignore[union-attr]
        else:
            content = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
        found += [file.name] * (b"quaver" in content)
    assert found == []
