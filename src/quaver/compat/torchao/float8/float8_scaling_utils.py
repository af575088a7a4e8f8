"""torchao's casts: nothing of them is here, and each name says why."""

from quaver.compat.stand_in import TORCHAO, unknown

__getattr__ = unknown(__name__, (), TORCHAO)
