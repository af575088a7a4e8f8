"""Placeholder for torchao's casts: no name is provided, and each raises an error with the alternative."""

from quaver.compat.stand_in import TORCHAO, unknown

__getattr__ = unknown(__name__, (), TORCHAO)
