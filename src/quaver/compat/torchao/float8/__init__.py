"""Public names of torchao.float8, each in the same file as in torchao; without prototypes and tensor subclasses."""

from quaver.compat.stand_in import TORCHAO, unknown
from quaver.compat.torchao.float8 import config
from quaver.compat.torchao.float8.config import *  # noqa: F403
from quaver.compat.torchao.float8.float8_linear_utils import _auto_filter_for_recipe, convert_to_float8_training
from quaver.compat.torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
from quaver.compat.torchao.float8.fsdp_utils import precompute_float8_dynamic_scale_for_fsdp

__all__ = ["_auto_filter_for_recipe", "convert_to_float8_training", "precompute_float8_dynamic_scale_for_fsdp"]
__all__ += ["LinearMMConfig", "ScaledMMConfig"]
__all__ += config.__all__

__getattr__ = unknown(__name__, __all__, TORCHAO)
