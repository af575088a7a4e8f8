"""torchao's `precompute_float8_dynamic_scale_for_fsdp`, which is not needed here."""

from torch import nn

from quaver.compat.stand_in import TORCHAO, unknown


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Do nothing: Quaver itself all-reduces the amaxes of all weights once per step.

    Args:
        module: a model sharded by fully_shard.
    Raises:
        ValueError: the model is not sharded, as in torchao.
    """
    if not any(hasattr(p, "device_mesh") for p in module.parameters()):
        raise ValueError(
            "precompute_float8_dynamic_scale_for_fsdp needs a model whose parameters fully_shard has "
            "sharded: call fully_shard(module) first, or leave this call out"
        )


__getattr__ = unknown(__name__, ("precompute_float8_dynamic_scale_for_fsdp",), TORCHAO)
