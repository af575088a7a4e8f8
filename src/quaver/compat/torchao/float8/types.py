"""torchao's protocol of float8 tensors: it is not here."""

from quaver.compat.missing import TORCHAO, unknown

__getattr__ = unknown(__name__, (), TORCHAO)
