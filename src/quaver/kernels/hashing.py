"""Hashing kernels so that each has the same name in Triton's cache in every process, whatever was launched before.

Triton adds the constants of a called function to its caller's hash only if that function was hashed earlier: versions
3.6 and 3.7 merge what it uses (`DependenciesFinder._update_hash`) before they ask for its own hash. Kernels that share
functions would have other names from one order of launches to the next, and a cache made elsewhere would lack some.
"""

from threading import Lock
from typing import Any

from triton import JITFunction

#: A second thread must not see a function as hashed while its hash is a placeholder.
_hashing = Lock()


def hash_callees_first(*values: Any) -> None:
    """Hash functions after all that they call. It comes before anything that asks for a hash, as a dict's key does.

    Args:
        values: triton.jit functions; anything else, an interpreted function too, is left as it is.
    """
    with _hashing:
        for value in values:
            _hash(value, ())


def _hash(value: Any, callers: tuple[Any, ...]) -> None:
    # Without the attribute a version of Triton keeps no hash, or keeps it elsewhere: its own order stays.
    if not isinstance(value, JITFunction) or getattr(value, "hash", "") is not None:
        return
    if any(value is caller for caller in callers):
        return
    # Kernels name what they call: nothing of ours is reached through a module.
    for name in value.fn.__code__.co_names:
        _hash(value.fn.__globals__.get(name), (*callers, value))
    _ = value.cache_key
