"""Whether a compiler traces what this thread runs.

`torch.compiler.is_compiling` reads a flag of the process, which torch.compile (since torch 2.13) and torch.export
hold while any thread compiles; two whose compilations overlap may even leave it behind. `is_tracing` is the thread's
own: torch keeps what belongs to a trace, Dynamo's, AOTAutograd's of a backward or torch.export's, in a context of the
thread that traces. A dispatch mode says less: an eager thread may have one of its user's.
"""

from collections.abc import Callable
from typing import Any

import torch._guards
from torch import compiler
from torch.compiler import is_compiling, is_dynamo_compiling


class _Asked:
    """The flag, by torch's public function."""

    def __getitem__(self, _: str) -> bool:
        return is_compiling()


def _no_context() -> bool:
    """What stands in for a context where torch keeps none: then the process's flag alone decides."""
    return True


_Context: Any = getattr(torch._guards, "TracingContext", None)
#: What has the process's flag: read without a call, which all of an eager layer's questions together would notice. No
#: module: Dynamo compiles a function by itself whose globals are torch's modules, and would make it always True.
flags: Any = vars(compiler) if hasattr(compiler, "_is_compiling_flag") else _Asked()
#: () to this thread's context, None where it traces nothing.
context: Callable[[], object] = getattr(_Context, "try_get", _no_context)


def is_tracing() -> bool:
    """True if a compiler traces what this thread runs: Dynamo, AOTAutograd for torch.compile, or torch.export.

    Dynamo takes it for True. False in every other thread, in `make_fx` alone, and when a compiled program runs.
    """
    return is_dynamo_compiling() or (flags["_is_compiling_flag"] and context() is not None)
