"""torchao's `precompute_float8_dynamic_scale_for_fsdp`, by `quaver.torch.parallel.precompute_scales`."""

from torch import nn

from quaver.compat.stand_in import TORCHAO, unknown
from quaver.torch.parallel.fsdp.scales import precompute_scales


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Compute the scales of all weights that fully_shard gathers as codes, with one all-reduce.

    Unlike in torchao it is optional, and serves every recipe: without it the same begins in the optimizer's step.

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
    precompute_scales(module)


__getattr__ = unknown(__name__, ("precompute_float8_dynamic_scale_for_fsdp",), TORCHAO)
