"""The number of files that run in a warm step or a conversion; a change that adds one must raise a limit."""

import sys

from tests import forked
from tests.conftest import ROOT
from tests.contracts.entered import blocks, gathered, linear, transformer

#: On a CPU, forward: the files of src/quaver in which a function runs; one of them detects tracing compilers.
LINEAR, TENSORWISE, TRANSFORMER = 10, 10, 23
#: For the first step of AdamW with `lean`, for one matrix of floats.
OPTIMIZER_STEP = 12
#: With `gather_quantized` and `fully_shard`, the first forward and backward; 19 of them run for two layers alone.
GATHERED = 27


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


def test_a_first_optimizer_step_enters_few_files() -> None:
    # In a process of its own: layers register hooks of every optimizer's step when they are first used.
    command = "from tests.contracts.entered import optimizer_step; print(*optimizer_step('lean'))"
    files = forked.quick.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    entered = files.stdout.split()
    assert len(entered) <= OPTIMIZER_STEP, entered
    assert "torch/optim/step.py" in entered


def test_a_step_with_weights_gathered_as_codes_enters_few_files() -> None:
    files = gathered("mxfp8")
    assert len(files) <= GATHERED, files
    assert "torch/parallel/fsdp/shards.py" in files
