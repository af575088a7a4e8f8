"""Drop-in replacement for torchao's float8 training API; without its optimizers and inference."""

from quaver.compat.stand_in import TORCHAO_TOP, unknown

__getattr__ = unknown(__name__, ("float8",), TORCHAO_TOP)
