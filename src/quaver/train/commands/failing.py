"""Error reports for torchrun, in the error file that it names in the environment."""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

#: Set by torchrun for each rank; torch's `record_error` writes a stack trace into the same file.
VARIABLE = "TORCHELASTIC_ERROR_FILE"


def record_crashes(main: Callable[[], None]) -> Callable[[], object]:
    """Wrap a program in torch's `record`, which writes the stack of an unexpected error; unchanged without torchrun."""
    if VARIABLE not in os.environ:
        return main
    from torch.distributed.elastic.multiprocessing.errors import record as of_torch

    return of_torch(main)


def record_error(sentence: str) -> None:
    """Write a sentence for torchrun's summary; does nothing without torchrun."""
    if path := os.environ.get(VARIABLE):
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}), encoding="utf-8")
