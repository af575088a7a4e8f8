"""Triton's interpreter, its language exchanged once a launch."""

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def exchange_once() -> None:
    """Spare the interpreter a third of its time, once for the process.

    It exchanges the functions of `triton.language` for its own at each launch, and searches them all again in each call
    of a function inside a kernel, where those are its own already.
    """
    exchange = interpreter._patch_lang
    if exchange.__module__ == __name__:
        return

    def once(fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if modules and not any(tl.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return exchange(fn)

    interpreter._patch_lang = once
