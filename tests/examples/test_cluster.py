"""Run the commands of docs/guides/cluster.md in order, on the processors of this machine."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from quaver.train.metrics import losses, read
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "guides" / "cluster.md"
#: What the commands begin with.
PROGRAMS = ("quaver", "torchrun")
#: The largest difference between losses of two ways to shard, in nats: another order of sums flips codes.
MOST_DIFFERENCE = 0.05


def commands() -> list[list[str]]:
    """The commands of the page, without the parts that need a cluster."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
    every = [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for words in every if words[0] in PROGRAMS]


def with_this_python(program: str) -> list[str]:
    """What runs a program of the page's."""
    return [sys.executable, "-m", "torch.distributed.run" if program == "torchrun" else "quaver.train"]


def test_the_page_has_a_command_for_each_parallelism() -> None:
    words_of_page = " ".join(word for words in commands() for word in words)
    for option in (
        "--fsdp",
        "--tp",
        "--sp",
        "--cp",
        "--pp",
        "--pp-schedule",
        "--optimizer",
        "--resume",
        "--async-save",
    ):
        assert option in words_of_page, option


@pytest.mark.ranks
@pytest.mark.slow
def test_the_page_commands_run(tmp_path: Path) -> None:
    for name, *words in commands():
        command = [*with_this_python(name), *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name} {shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    curves = {folder.name: losses(read(folder / "metrics.jsonl")) for folder in (tmp_path / "runs").iterdir()}
    assert {len(curve) for name, curve in curves.items() if name != "grid"} == {20}
    assert len(curves["grid"]) == 50, "three times resumed, on other ranks"
    for name in ("four", "grid"):
        difference = max(abs(curves[name][step] - curves["one"][step]) for step in range(1, 21))
        assert difference < MOST_DIFFERENCE, f"{name} is {difference} from one process"
