"""Compatibility with torchao and Transformer Engine: thin wrappers with their names, and readers of their
checkpoints.
"""

from quaver.compat.stand_in import install, uninstall

__all__ = ["install", "uninstall"]
