"""Hash kernels so that each has the same name in Triton's cache in every process, whatever was launched before.

Triton adds the constants of a called function to its caller's hash only if that function was hashed earlier: versions
3.6 and 3.7 merge dependencies (`DependenciesFinder._update_hash`) before they request the function's own hash. Without
this module kernels that share functions would have names that depend on the order of launches, and a cache built
elsewhere would miss.
"""

from threading import Lock
from typing import Any

from triton import JITFunction

#: Lock, because a second thread must not see a function as hashed while its hash is a placeholder.
_hashing = Lock()


def hash_callees_first(*values: Any) -> None:
    """Hash functions after all that they call. Call it before anything that requests a hash, such as a dict key.

    Args:
        values: triton.jit functions; anything else, including interpreted functions, is ignored.
    """
    with _hashing:
        for value in values:
            _hash(value, ())


def _hash(value: Any, callers: tuple[Any, ...]) -> None:
    # A Triton version without the attribute stores no hash, or stores it elsewhere; its own order then applies.
    if not isinstance(value, JITFunction) or getattr(value, "hash", "") is not None:
        return
    if any(value is caller for caller in callers):
        return
    # Kernels refer to callees by name, never through a module.
    for name in value.fn.__code__.co_names:
        _hash(value.fn.__globals__.get(name), (*callers, value))
    _ = value.cache_key
