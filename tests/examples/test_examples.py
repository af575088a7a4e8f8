"""Every example runs, on a CPU, and is short."""

import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests import forked

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


#: Examples of other libraries, by the first part of their names: `make test-integrations` has the libraries.
NEEDS = {"lightning": "lightning", "accelerate": "accelerate", "peft": "peft", "huggingface": "accelerate"}
#: An example with options, which has its own test.
DOWNSTREAM = "downstream"


def needs_ranks(path: Path) -> bool:
    return "torchrun --nproc-per-node 2" in path.read_text()


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if not needs_ranks(path) and path.stem != DOWNSTREAM], ids=lambda p: p.stem
)
def test_an_example_runs_and_says_something(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    needed = NEEDS.get(path.stem.partition("_")[0])
    if needed is not None:
        pytest.importorskip(needed, reason=f"{needed} is not installed: make test-integrations")
        forget_accelerators()
    if "jax_num_cpu_devices" in path.read_text():
        # JAX counts its devices once in a process.
        forked.bare("jax").run([sys.executable, "-W", "error", str(path)], check=True)
    else:
        with warnings.catch_warnings():
            if needed is not None:
                # Of the libraries themselves.
                warnings.simplefilter("default")
            runpy.run_path(str(path), run_name="__main__")
        if needed is not None:
            forget_accelerators()
    assert capfd.readouterr().out.strip()


@pytest.mark.slow
def test_downstream_example_prints_an_accuracy_for_every_run() -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'lm-eval[hf]'")
    path = Path(__file__).parents[2] / "examples" / f"{DOWNSTREAM}.py"
    command = [sys.executable, str(path), "--steps", "5", "--seeds", "1", "--questions", "20"]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    rows = [line.strip("| ").split(" | ") for line in run.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["bf16", "bf16, weights nudged by 1e-5", "tensorwise", "mxfp8"]
    accuracies = [float(row[1].partition(" ")[0]) for row in rows]
    assert all(0 <= accuracy <= 1 and round(accuracy * 20, 6).is_integer() for accuracy in accuracies)


@pytest.mark.ranks
@pytest.mark.parametrize("path", [path for path in EXAMPLES if needs_ranks(path)], ids=lambda p: p.stem)
def test_an_example_of_ranks_runs_and_says_something(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    forked.bare("torch").run(command, check=True)
    assert capfd.readouterr().out.strip()


def test_examples_are_short() -> None:
    assert all(len(path.read_text().splitlines()) < 100 for path in EXAMPLES)


def forget_accelerators() -> None:
    """accelerate keeps the first one's settings for the whole process, and refuses others."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)
