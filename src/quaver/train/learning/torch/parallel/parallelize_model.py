"""What makes a decoder the decoder of many ranks, in the order in which it is done."""

from torch.distributed.fsdp import fully_shard

from quaver.core.converting.conversion import Report
from quaver.core.spec import Recipe
from quaver.torch.parallel import gather_quantized
from quaver.train.learning.torch.decoder import Decoder, quantize_layers
from quaver.train.learning.torch.parallel.group import Group


def parallelize(model: Decoder, recipe: Recipe, seed: int, group: Group) -> Report:
    """Give a decoder its recipe and divide it among the ranks.

    1. `convert`: the layers' matrices get the recipe.
    2. `gather_quantized`: torch's fully_shard will gather their weights as codes and scales.
    3. `fully_shard`, layer by layer and then what is left: weights, gradients and moments are divided.

    Args:
        model: with the same values on every rank.
        group: the ranks.
    Returns:
        What the recipe was applied to.
    """
    report = quantize_layers(model, recipe, seed)
    if travels(recipe):
        gather_quantized(model)
    for layer in model.layers:
        fully_shard(layer, mesh=group.mesh)
    fully_shard(model, mesh=group.mesh)
    return report


def travels(recipe: Recipe) -> bool:
    """Whether both operands that a recipe makes of a weight can travel as codes."""
    specs = recipe.fprop.b, recipe.dgrad.b
    return recipe.quantizes and all(spec is not None and not spec.hadamard for spec in specs)
