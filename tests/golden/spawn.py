"""Start a module on several gloo ranks, outside of pytest: `tests.two_ranks.run` needs the processes of a test run."""

import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

from tests.conftest import ROOT


def run(module: str, folder: Path, ranks: int = 2, environment: dict[str, str] | None = None) -> None:
    """Run a module that calls `tests.two_ranks.main` once per rank.

    Raises:
        RuntimeError: with the error output of the ranks, where one fails.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, files = [], []
    for rank in range(ranks):
        file = (folder / f"rank{rank}.txt").open("w+")
        command = [sys.executable, "-m", module, str(rank), str(store.port), str(ranks), str(folder), ""]
        processes.append(subprocess.Popen(command, cwd=ROOT, stderr=file, env=environment))
        files.append(file)
    try:
        while any(each.poll() is None for each in processes) and not any(each.poll() for each in processes):
            time.sleep(0.02)
    finally:
        for each in processes:
            each.terminate()
            each.wait()
    said = []
    for file in files:
        file.seek(0)
        said.append(file.read())
        file.close()
    if any(each.returncode for each in processes):
        raise RuntimeError("\n".join(said))
