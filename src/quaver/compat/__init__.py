"""Names of other libraries that users type already, a thin layer over ours, and their files; no number of its own."""

from quaver.compat.stand_in import install, uninstall

__all__ = ["install", "uninstall"]
