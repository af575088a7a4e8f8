"""torchao's settings of a layer's three GEMMs; of its class of tensors each name says why it is not here."""

from typing import NamedTuple

from quaver.compat.stand_in import TORCHAO, unknown
from quaver.compat.torchao.float8.config import Float8LinearConfig


class ScaledMMConfig(NamedTuple):
    """How one GEMM runs; what a device lacks is emulated here, and sizes are padded, whatever it says."""

    emulate: bool = False
    use_fast_accum: bool = False
    fp8_output: bool = False
    pad_inner_dim: bool = False


class LinearMMConfig(NamedTuple):
    """How the three GEMMs of a layer run."""

    output: ScaledMMConfig = ScaledMMConfig(use_fast_accum=True)
    grad_input: ScaledMMConfig = ScaledMMConfig()
    grad_weight: ScaledMMConfig = ScaledMMConfig()


def linear_mm_config(config: Float8LinearConfig) -> LinearMMConfig:
    """What a layer of this configuration has as `linear_mm_config`."""
    gemms = config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight
    each = (ScaledMMConfig(config.emulate, gemm.use_fast_accum, False, config.pad_inner_dim) for gemm in gemms)
    return LinearMMConfig(*each)


__getattr__ = unknown(__name__, ("LinearMMConfig", "ScaledMMConfig"), TORCHAO)
