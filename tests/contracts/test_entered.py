"""How many files a reader of a warm step or a conversion opens; a change that adds one must raise a ceiling."""

from tests.contracts.entered import blocks, linear, transformer

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


#: `convert(blocks=True)` on a Llama, whose modules are known by their code.
BLOCKS = 24


def test_a_conversion_with_blocks_enters_few_files() -> None:
    files = blocks("tensorwise")
    assert len(files) <= BLOCKS, files
    assert "torch/conversion/convert.py" in files and "torch/conversion/probe.py" not in files
