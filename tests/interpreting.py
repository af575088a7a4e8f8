"""Triton's interpreter without what it does over and over, or for nothing."""

import dataclasses
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def spare() -> None:
    """Halve the interpreter's time, once for the process.

    It exchanges the functions of `triton.language` for its own at each launch, and searches them all again in each call
    of a function inside a kernel, where those are its own already. And beside each sum and product of integers it
    computes, in 64 bits, whether that overflows, which an assertion looks at that only debugging switches on.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    exchange = interpreter._patch_lang
    if exchange.__module__ == __name__:
        return

    def once(fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if modules and not any(tl.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return exchange(fn)

    interpreter._patch_lang = once
