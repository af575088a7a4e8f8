"""What makes a decoder the decoder of many ranks, in the order in which it is done."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from quaver.core.converting.conversion import Report
from quaver.core.spec import Recipe
from quaver.torch.blocks.norm import Norm
from quaver.torch.blocks.transformer import TransformerLayer
from quaver.torch.parallel import Column, Heads, Row, Sequence, context_parallel, gather_quantized
from quaver.train.configuration.config import TrainConfig
from quaver.train.learning.torch.decoder import Decoder, quantize_layers
from quaver.train.learning.torch.parallel.group import Group
from quaver.train.learning.torch.parallel.pipeline import Part, Pipeline, keep_stage


def parallelize(model: Decoder, recipe: Recipe, config: TrainConfig, group: Group) -> Report:
    """Give a decoder its recipe and divide it among the ranks.

    1. `convert`: the layers' matrices get the recipe.
    2. `parallelize_module`, where tp is given: each rank computes some heads and some features of every layer, and with
       sp some tokens of what is between them. Embedding, last norm and head stay whole.
    3. `context_parallel`, where cp is given: each rank has some tokens of a sequence, and attention goes across them.
    4. `stage`, where pp is given: each rank keeps the layers of a stage.
    5. `gather_quantized`: torch's fully_shard will gather the layers' weights as codes and scales, in parts or whole.
    6. `fully_shard`, layer by layer and then what is left: weights, gradients and moments are divided among the ranks
       of fsdp and of cp.

    Args:
        model: with the same values on every rank.
        group: the ranks.
    Returns:
        What the recipe was applied to.
    """
    report = quantize_layers(model, recipe, config.seed)
    if group.sizes.tp > 1:
        parallelize_module(model, group.mesh["tp"], plan(model, config.sp), src_data_rank=None)
        if config.sp:
            divide_tokens(model.embedding, group.mesh["tp"])
    if group.across is not None:
        group.cut = context_parallel(model, group.across["cp"], config.cp_how).cut
    whole: nn.Module = model
    if group.sizes.pp > 1:
        keep_stage(model, group.mesh.get_local_rank("pp"), group.sizes.pp)
        whole = Part(model, config)
        group.pipeline = Pipeline(whole, recipe, config, group)
    if travels(recipe):
        gather_quantized(model, mesh=group.mesh["data"])
    for layer in model.layers:
        fully_shard(layer, mesh=group.mesh["data"])
    fully_shard(whole, mesh=group.mesh["data"])
    return report


def plan(model: Decoder, sequence: bool) -> dict[str, ParallelStyle]:
    """How each module lies on the ranks of tp; what is not named is whole on all of them.

    Args:
        sequence: each rank has some tokens of the residual stream, which norms work on and layers gather.
    """
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if isinstance(module, TransformerLayer):
            styles[f"{name}.attention"] = Heads(sequence=sequence)
            if model.config.gated:
                styles[f"{name}.mlp.gate_proj"] = Column(sequence=sequence)
            styles[f"{name}.mlp.up_proj"] = Column(sequence=sequence)
            styles[f"{name}.mlp.down_proj"] = Row(sequence=sequence)
        elif sequence and isinstance(module, Norm) and not name.endswith(("q_norm", "k_norm")):
            # The last norm gives the head, which is whole, all tokens.
            styles[name] = Sequence(gives_whole=name == "norm")
    return styles


def divide_tokens(embedding: nn.Module, mesh: Any) -> None:
    """Leave each rank some tokens of what an embedding gives; its gradient is of all tokens, as that of a tied head."""
    own = nn.Identity()
    parallelize_module(own, mesh, Sequence(takes_whole=True))
    embedding.register_forward_hook(lambda module, ids, output: own(output))


def travels(recipe: Recipe) -> bool:
    """Whether both operands that a recipe makes of a weight can travel as codes."""
    specs = recipe.fprop.b, recipe.dgrad.b
    return recipe.quantizes and all(spec is not None and not spec.hadamard for spec in specs)
