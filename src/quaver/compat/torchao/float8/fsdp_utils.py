"""What torchao asks to be called after an optimizer's step, and what is here done without it."""

from torch import nn

from quaver.compat.stand_in import TORCHAO, unknown


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Nothing: ranks agree on the amaxes of all weights in one all-reduce a step by themselves.

    Args:
        module: a model that fully_shard has sharded.
    Raises:
        ValueError: a model that is not sharded; torchao raises there, too.
    """
    if not any(hasattr(p, "device_mesh") for p in module.parameters()):
        raise ValueError(
            "precompute_float8_dynamic_scale_for_fsdp is for a model whose parameters fully_shard has sharded: call "
            "fully_shard(module) before, or leave this call out"
        )


__getattr__ = unknown(__name__, ("precompute_float8_dynamic_scale_for_fsdp",), TORCHAO)
