"""torchao's settings of a layer's three GEMMs; its tensor subclasses raise an error with the alternative."""

from typing import NamedTuple

from quaver.compat.stand_in import TORCHAO, unknown
from quaver.compat.torchao.float8.config import Float8LinearConfig


class ScaledMMConfig(NamedTuple):
    """Settings of one GEMM. Regardless of them, missing GEMMs are emulated and sizes are padded."""

    emulate: bool = False
    use_fast_accum: bool = False
    fp8_output: bool = False
    pad_inner_dim: bool = False


class LinearMMConfig(NamedTuple):
    """Settings of the three GEMMs of a layer."""

    output: ScaledMMConfig = ScaledMMConfig(use_fast_accum=True)
    grad_input: ScaledMMConfig = ScaledMMConfig()
    grad_weight: ScaledMMConfig = ScaledMMConfig()


def linear_mm_config(config: Float8LinearConfig) -> LinearMMConfig:
    """Return the `linear_mm_config` of a layer with this configuration."""
    gemms = config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight
    each = (ScaledMMConfig(config.emulate, gemm.use_fast_accum, False, config.pad_inner_dim) for gemm in gemms)
    return LinearMMConfig(*each)


__getattr__ = unknown(__name__, ("LinearMMConfig", "ScaledMMConfig"), TORCHAO)
