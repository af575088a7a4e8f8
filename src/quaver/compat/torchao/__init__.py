"""torchao's names for training in float8, to be imported in its place; no optimizer, and nothing for inference."""

from quaver.compat.stand_in import TORCHAO_TOP, unknown

__getattr__ = unknown(__name__, ("float8",), TORCHAO_TOP)
