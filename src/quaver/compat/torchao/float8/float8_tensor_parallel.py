"""torchao's styles of tensor parallelism: none is here, and each name says why."""

from quaver.compat.stand_in import TORCHAO, unknown

__getattr__ = unknown(__name__, (), TORCHAO)
