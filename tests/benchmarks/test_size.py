"""Lines of code are counted without comments, docstrings and blank lines."""

from benchmarks.pages import size

SOURCE = '''"""A module
of two lines."""

# A comment.
VALUE = """text
of two lines"""


def function() -> int:
    """One line."""
    return 1  # with a comment
'''


def test_code_excludes_comments_docstrings_and_blank_lines() -> None:
    assert size.measured(SOURCE) == size.Size(files=1, lines=11, code=4, docstrings=3, tokens=12)


def test_the_table_sums_all_packages() -> None:
    *packages, total = size.rows(size.sizes())
    assert {"`quaver.torch`", "`quaver.kernels`", "`quaver`"} <= {row[0] for row in packages}
    for column in range(1, 5):
        assert sum(int(row[column].replace(",", "")) for row in packages) == int(total[column].replace(",", ""))


def test_every_file_of_the_front_end_has_one_subject() -> None:
    counted = sum(int(row[2].replace(",", "")) for row in size.subjects(size.sizes()))
    assert counted == sum(s.code for path, s in size.sizes().items() if size.SOURCES / "torch" in path.parents)


def test_the_page_has_its_markers() -> None:
    page = size.PAGE.read_text(encoding="utf-8")
    assert page.count(size.BEGIN) == page.count(size.END) == 1
    assert size.written(size.written(page)) == size.written(page)
