"""How many files a reader of a warm step opens: fewer is better, and a change that adds one must raise a ceiling."""

from tests.contracts.entered import linear, transformer

#: On a CPU, forward: the files of src/quaver in which a function runs; one says whether a compiler traces.
LINEAR, TENSORWISE, TRANSFORMER = 10, 10, 23


def test_a_warm_forward_enters_few_files() -> None:
    for files, most in (
        (linear("rowwise"), LINEAR),
        (linear("tensorwise"), TENSORWISE),
        (transformer("mxfp8"), TRANSFORMER),
    ):
        assert len(files) <= most, files
        assert "torch/linear/linear.py" in files
