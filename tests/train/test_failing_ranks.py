"""A run with a rank that is killed, stopped or NaN ends with one sentence, in time, and its checkpoint is complete."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quaver.train import checkpoint
from quaver.train.config import TrainConfig, to_toml
from quaver.train.loop import run_training
from quaver.train.metrics import losses, read
from tests import forked
from tests.conftest import ROOT
from tests.train.conftest import MakeConfig
from tests.train.test_ranks import rank_environment

#: Seconds that ranks wait, and that naming may take beyond it.
TIMEOUT, LATER = 6, 10
#: And that a start takes at most.
LONGEST = 240
#: In which step rank 1 fails, after a checkpoint of step 5.
FAILS = 7


def fail(how: str) -> None:
    """Have this process fail in a way in step `FAILS`, in a forward or in a backward."""
    seen = {"steps": 0}

    def forward(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not type(module).__name__.endswith("Decoder") or not torch.is_grad_enabled():
            return None
        seen["steps"] += 1
        if seen["steps"] != FAILS:
            return None
        print(f"fails {time.time()}", flush=True)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "raise":
            raise RuntimeError("the disk of this test is on fire")
        return {"loss": lambda y: y * torch.nan, "gradient": poisoned}[how](output)

    nn.modules.module.register_module_forward_hook(forward)


def poisoned(output: Tensor) -> Tensor:
    """Output with a NaN gradient."""
    output.register_hook(lambda g: g * torch.nan)
    return output


def main() -> None:
    """Run the command line on one rank with the requested failure."""
    from quaver.train.__main__ import main as command

    how, errors, config = sys.argv[1:]
    # As torchrun does.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_ERROR_FILE": errors}
    if os.environ["RANK"] == "1" and how:
        fail(how)
    sys.argv[1:] = ["train", "--config", config, *(["--resume"] if not how else [])]
    command()


class Start:
    """Two ranks with a store in this process; rank 1 fails as requested; "" resumes from a checkpoint."""

    def __init__(self, how: str, config: TrainConfig, folder: Path) -> None:
        self.config, self.terminated = config, False
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path = folder / f"{how or 'again'}.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        self.errors = [folder / f"{how}-{rank}.json" for rank in range(2)]
        self.processes = []
        for rank, errors in enumerate(self.errors):
            environment = {**os.environ, **rank_environment(rank, 2, self.store.port), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "tests.train.test_failing_ranks", how, str(errors), str(path)]
            pipes = {"stdout": forked.quick.PIPE, "stderr": forked.quick.PIPE}
            self.processes.append(forked.quick.Popen(command, cwd=ROOT, env=environment, **pipes))

        #: The moment at which the first rank has ended, which it does after it has printed its error.
        self.ended = 0.0

    def going(self, patient: bool) -> bool:
        """Whether the first rank, or any if patient, is still running."""
        codes = [each.poll() for each in self.processes]
        if codes[0] is None and (codes[1] or 0) < 0 and not self.terminated:
            # torchrun terminates the other ranks once one has died.
            self.terminated = True
            time.sleep(0.3)
            self.processes[0].terminate()
        if codes[0] is not None and not self.ended:
            self.ended = time.time()
        return None in (codes if patient else codes[:1])

    def results(self) -> tuple[int | None, str, str]:
        """The first rank's exit code, what rank 1 printed, and the stderr of both."""
        for each in self.processes:
            if each.poll() is None:
                os.kill(each.pid, signal.SIGKILL)
        (_, first), (printed, second) = (each.communicate() for each in self.processes)
        return self.processes[0].poll(), printed.decode(), f"{first.decode()}\n{second.decode()}"


def outcomes(starts: dict[str, Start], patient: bool = True) -> dict[str, tuple[int | None, str, str]]:
    """The results of all once they have ended, or once the first rank of each has ended if not patient."""
    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        going = [start.going(patient) for start in starts.values()]
        if not any(going):
            break
        time.sleep(0.02)
    return {how: start.results() for how, start in starts.items()}


def check(start: Start, outcome: tuple[int | None, str, str], sentence: str, within: float) -> None:
    """Check that the sentence is printed once and in time, and that the checkpoint of step 5 is complete."""
    code, printed, errors = outcome
    # torchrun, as `going` does, may end a rank that has already printed the reason.
    assert code in (1, -signal.SIGTERM) and "fails " in printed, errors
    assert len([line for line in errors.splitlines() if re.search(sentence, line)]) == 1, errors
    assert start.ended - float(printed.split("fails ")[1].split()[0]) < within, errors
    last = checkpoint.latest(Path(start.config.out))
    # Every file is compared with its digest.
    assert last is not None and last.name == "step-000005" and checkpoint.load(last, {}).model


def begun(make_config: MakeConfig, folder: Path, ways: Iterable[str], **options: Any) -> dict[str, Start]:
    """One start for each way to fail, all at the same time."""
    common: dict[str, Any] = {"recipe": "mxfp8", "dtype": "float32", "batch": 4, "clip": 0.0, **options}
    return {how: Start(how, make_config(how, **common), folder) for how in ways}


LOST = r"another rank ended, of memory or a signal perhaps, or did not answer for --timeout seconds \(.*; continue with"
QUICK = {
    "kill": LOST,
    "loss": "stopped at step 7: the loss is nan; it comes from rank 1; ",
    "gradient": "stopped at step 7: the gradient's norm is nan; the first gradient",
}


@pytest.mark.ranks
def test_a_rank_that_dies_or_has_a_nan_ends_the_run_which_resumes(make_config: MakeConfig, tmp_path: Path) -> None:
    starts = begun(make_config, tmp_path, [*QUICK, "raise"])
    seen = outcomes(starts)
    for how, sentence in QUICK.items():
        check(starts[how], seen[how], sentence, 10)
    nan_error, stack_error = (
        json.loads(starts[how].errors[rank].read_text()) for how, rank in (("loss", 0), ("raise", 1))
    )
    assert nan_error["message"].startswith("stopped at step 7: the loss is nan; it comes from rank 1; ")
    assert "the disk of this test is on fire" in json.dumps(stack_error) and "Traceback" in json.dumps(stack_error)

    killed = starts["kill"].config
    before = losses(read(Path(killed.out) / "metrics.jsonl"))
    code, _, errors = outcomes({"": Start("", killed, tmp_path)})[""]
    assert code == 0, errors
    records = read(Path(killed.out) / "metrics.jsonl")
    after = losses(records)
    assert {step: after[step] for step in before} == before and len(after) == 10
    # Half of the batch twice is the same sums.
    alone = make_config("alone", recipe="mxfp8", dtype="float32", batch=2, accumulate=2, clip=0.0)
    assert run_training(alone).losses == after


@pytest.mark.ranks
def test_a_rank_that_is_stopped_ends_the_run_after_the_timeout(make_config: MakeConfig, tmp_path: Path) -> None:
    starts = begun(make_config, tmp_path, ["stop"], timeout=TIMEOUT)
    check(starts["stop"], outcomes(starts, patient=False)["stop"], LOST, TIMEOUT + LATER)


if __name__ == "__main__":
    main()
