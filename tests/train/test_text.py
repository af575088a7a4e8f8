from pathlib import Path

import pytest

from quaver.train.data import Document, read_text, split


def test_the_library_is_there_and_the_same_twice() -> None:
    documents = read_text(())
    assert sum(len(document.data) for document in documents) > 1_000_000
    assert documents == read_text(())


def test_the_parts_are_disjoint_and_whole(text: Path) -> None:
    documents = read_text([str(text)])
    train, validation = split(documents)
    assert len(validation) == 1 and len(train) == 24
    assert {d.path for d in train}.isdisjoint(d.path for d in validation)
    assert {d.path for d in train + validation} == {d.path for d in documents}


def test_a_single_file_is_cut_between_characters() -> None:
    for length in range(10, 60):
        data = ("é" * length).encode()
        (train,), (validation,) = split([Document(Path("a"), data)])
        assert train.data + validation.data == data
        train.data.decode(), validation.data.decode()


def test_a_file_named_twice_is_read_once(text: Path) -> None:
    assert len(read_text([str(text), str(text / "00.txt")])) == 25


def test_a_folder_skips_files_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "c.txt").write_text("")
    (tmp_path / ".hidden").write_text("no")
    assert [document.path.name for document in read_text([str(tmp_path)])] == ["a.txt"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "there is no text file"),
        (b"", "is empty"),
        (b"\xff\xfe", "is not text"),
        (b"a\0b", "is not text"),
    ],
)
def test_a_bad_file_gives_one_clear_error(tmp_path: Path, data: bytes | None, message: str) -> None:
    path = tmp_path / "x"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_text([str(path)])


def test_a_folder_without_text_gives_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no text"):
        read_text([str(tmp_path)])
