"""torchao's class of tensors: it is not here, and each name says why."""

from quaver.compat.missing import TORCHAO, unknown

__getattr__ = unknown(__name__, (), TORCHAO)
