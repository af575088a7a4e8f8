"""Test that ranks with nonfinite numbers stop together, report once, and finish a started save."""

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from quaver.train import checkpoint
from quaver.train.config import TrainConfig, read_toml, to_toml
from quaver.train.loop import run_training
from quaver.train.mesh import OtherRankFailed
from quaver.train.torch import sharding
from tests import forked
from tests.conftest import ROOT
from tests.train.conftest import MakeConfig
from tests.train.test_ranks import PAIR, ended, rank_environment

#: The step in which numbers fail on rank 1, after a checkpoint of step 2 was begun.
FAILS = 3
#: Seconds that a rank takes to write its part.
SLOW = 2.0


def poison(weights: bool) -> Any:
    """Have a parameter of this rank become NaN after step 2, or its logits in step 3; returns what takes it back."""
    seen = {"steps": 0}

    def stepped(optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        seen["steps"] += 1
        if weights and seen["steps"] == FAILS - 1:
            parameter: Any = optimizer.param_groups[0]["params"][0]
            parameter.detach().to_local().fill_(math.nan)

    def forward(module: nn.Module, inputs: Any, output: Any) -> Any:
        reached = seen["steps"] == FAILS - 1 and torch.is_grad_enabled()
        return output * math.nan if reached and type(module).__name__.endswith("Decoder") and not weights else None

    hooks = [
        register_optimizer_step_post_hook(stepped),
        nn.modules.module.register_module_forward_hook(forward),
    ]
    return lambda: [hook.remove() for hook in hooks]


def main() -> None:
    """Train the runs of a folder as one of the ranks, and write how each ends."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    write = sharding.HuggingFaceStorageWriter.write_data

    def slowly(*given: Any) -> Any:
        time.sleep(SLOW)
        return write(*given)

    for path in sorted(folder.glob("*.toml")):
        config = TrainConfig(**read_toml(path))
        sharding.HuggingFaceStorageWriter.write_data = slowly if config.async_save else write
        restore = poison(config.pp > 1) if rank == "1" else lambda: None
        outcome = ""
        try:
            run_training(config)
        except OtherRankFailed:
            outcome = "told"
        except ValueError as error:
            outcome = str(error)
        restore()
        path.with_suffix(f".{rank}").write_text(outcome, encoding="utf-8")


def ends(configs: Sequence[TrainConfig], folder: Path) -> list[str]:
    """Train the runs; return the error of each, that of the first rank, then "|" and that of the second."""
    folder.mkdir()
    for number, config in enumerate(configs):
        (folder / f"{number}.toml").write_text(to_toml(config), encoding="utf-8")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(2):
        environment = {**os.environ, **rank_environment(rank, 2, store.port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.train.test_stopping_ranks", str(folder)]
        processes.append(forked.quick.Popen(command, cwd=ROOT, env=environment, stderr=forked.quick.PIPE))
    codes, errors = ended(processes)
    assert codes == [0, 0], errors
    return ["|".join((folder / f"{number}.{rank}").read_text() for rank in range(2)) for number in range(len(configs))]


@pytest.mark.ranks
def test_ranks_stop_together_where_only_one_has_a_nan(make_config: MakeConfig, tmp_path: Path) -> None:
    common: dict[str, Any] = {"dtype": "float32", "model": PAIR, "checkpoint_every": 2, "validate_every": 0}
    layers = make_config("layers", tp=2, timeout=30, **common)
    stages = replace(layers, tp=1, pp=2, accumulate=2, out=str(tmp_path / "stages"))
    behind = make_config("behind", fsdp=2, async_save=True, timeout=30, **common)
    outcomes = ends([layers, stages, behind], tmp_path / "runs")
    beginning = "stopped at step 3: the loss is nan; it comes from "
    for sentence, config, cause in (
        (outcomes[0], layers, "rank 1; every module's output is finite; "),
        (outcomes[1], stages, "all ranks; the parameter "),
        (outcomes[2], behind, "rank 1; "),
    ):
        first, second = sentence.split("|")
        assert first.startswith(beginning + cause) and second == "told", sentence
        last = checkpoint.latest(Path(config.out))
        assert last is not None and last.name == "step-000002" and f"checkpoint is {last};" in first, sentence
        assert checkpoint.load(last, {}).model


if __name__ == "__main__":
    main()
