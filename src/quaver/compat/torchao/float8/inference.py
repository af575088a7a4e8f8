"""torchao's inference in float8: nothing of it is here, and each name says why."""

from quaver.compat.stand_in import TORCHAO, unknown

__getattr__ = unknown(__name__, (), TORCHAO)
