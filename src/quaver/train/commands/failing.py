"""Where torchrun looks for what a rank has to say about its end: the error file that it names in the environment."""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

#: Set by torchrun for each rank; torch's `record` writes into the same file, a stack where we have a sentence.
VARIABLE = "TORCHELASTIC_ERROR_FILE"


def recorded(main: Callable[[], None]) -> Callable[[], object]:
    """A program whose unexpected end leaves its stack there, by torch's own `record`; itself without torchrun."""
    if VARIABLE not in os.environ:
        return main
    from torch.distributed.elastic.multiprocessing.errors import record as of_torch

    return of_torch(main)


def record(sentence: str) -> None:
    """Write a sentence where torchrun takes it into its summary; nothing without torchrun."""
    if path := os.environ.get(VARIABLE):
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}), encoding="utf-8")
