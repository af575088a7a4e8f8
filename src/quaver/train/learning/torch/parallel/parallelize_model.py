"""What makes a decoder the decoder of many ranks, in the order in which it is done."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from quaver.core.converting.conversion import Report
from quaver.core.spec import Recipe
from quaver.torch.blocks.prologues.norm import Norm
from quaver.torch.blocks.transformer import TransformerLayer
from quaver.torch.parallel import (
    Column,
    Heads,
    Row,
    Sequence,
    Vocabulary,
    context_parallel,
    gather_again,
    gather_quantized,
)
from quaver.train.configuration.config import TrainConfig
from quaver.train.configuration.pipelines import ORDERS
from quaver.train.learning.mesh import check_words
from quaver.train.learning.torch.model.decoder import Decoder, change_layers, prepare
from quaver.train.learning.torch.parallel.group import Group
from quaver.train.learning.torch.parallel.pipeline import Pipeline


def parallelize(model: Decoder, recipe: Recipe, config: TrainConfig, group: Group, codes: bool) -> Report:
    """Give a decoder its recipe and divide it among the ranks.

    1. `convert`: the layers' matrices get the recipe, and exist only as its codes where the optimizer keeps them so.
    2. `parallelize_module`, where tp is given: each rank computes some heads and some features of every layer, has some
       words of the embedding and of the head, and with sp some tokens of what is between them.
    3. `context_parallel`, where cp is given: each rank has some tokens of a sequence, and attention goes across them.
    4. `stage`, where pp is given: each rank keeps the layers of its stages, which are one or several.
    5. `gather_quantized`: torch's fully_shard will gather the layers' weights as codes and scales, in parts or whole.
    6. `fully_shard`, layer by layer and then what is left: weights, gradients and moments are divided among the ranks
       of fsdp and of cp. Where the optimizer keeps matrices in bfloat16, norms and embedding are units of their own.

    Args:
        model: with the same values on every rank.
        group: the ranks.
        codes: whether the optimizer may keep matrices as codes, under tensor parallelism never.
    Returns:
        What the recipe was applied to.
    """
    report = prepare(model, recipe, config, codes, in_parts=True)
    if group.sizes.tp > 1:
        check_words(model.embedding.num_embeddings, group.sizes.tp)
        parallelize_module(model, group.mesh["tp"], plan(model, config.sp), src_data_rank=None)
    if group.across is not None:
        group.cut = context_parallel(model, group.across["cp"], config.cp_how).cut
    wholes: list[nn.Module] = [model]
    if group.sizes.pp > 1:
        group.pipeline = pipeline = Pipeline(model, recipe, config, group)
        wholes = [*pipeline.parts]
    if travels(recipe) or any(getattr(module, "weight_spec", None) is not None for module in model.modules()):
        gather_quantized(model, mesh=group.mesh["data"])
    # Parts of a backward that are run apart would each gather a layer anew: it stays gathered until its stage is done.
    reshards = False if group.sizes.pp > 1 and ORDERS[config.pp_schedule].splits else None
    for unit in (*model.layers, *wholes):
        shard(unit, group, reshards)
    for whole in wholes:
        group.watch(whole)
    return report


def shard(unit: nn.Module, group: Group, reshards: bool | None) -> None:
    """fully_shard what it has not of a module yet. It wants gradients of one dtype in a unit: beside matrices in
    bfloat16 each module of float32 is a unit of its own, and biases become bfloat16."""
    mesh, held = group.mesh["data"], set()
    for name, module in unit.named_modules():
        if name and (isinstance(module, FSDPModule) or name.rpartition(".")[0] in held):
            held.add(name)
    left = [(module, p) for name, module in unit.named_modules() if name not in held for p in own(module)]
    dtypes = {p.dtype for _, p in left}
    if len(dtypes) > 1:
        for module in dict.fromkeys(module for module, _ in left):
            kinds = {p.dtype for p in own(module)}
            if torch.bfloat16 not in kinds:
                fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
            elif len(kinds) > 1:
                narrow(module)
    # Sums of gradients over ranks are in float32 all the same.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32) if torch.bfloat16 in dtypes else MixedPrecisionPolicy()
    fully_shard(unit, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy)


def own(module: nn.Module) -> list[nn.Parameter]:
    """A module's own parameters."""
    return [p for p in module._parameters.values() if p is not None]


def narrow(module: nn.Module) -> None:
    """Make a module's parameters bfloat16; an optimizer in few bits keeps of small ones what float32 has more."""
    for name, p in module._parameters.items():
        if p is not None and p.dtype is torch.float32:
            module._parameters[name] = nn.Parameter(p.detach().bfloat16())


def change_recipe(model: Decoder, recipe: Recipe, config: TrainConfig, group: Group) -> Report:
    """Give the decoder of many ranks another recipe between two steps; all ranks call it.

    Weights are gathered in the new recipe's codes from here on, or in high precision where they cannot be.
    """
    report = change_layers(model, recipe, config.seed)
    if isinstance(group.pipeline, Pipeline):
        group.pipeline.recipe = recipe
    gather_again(model, mesh=group.mesh["data"])
    return report


def plan(model: Decoder, sequence: bool) -> dict[str, ParallelStyle]:
    """How each module lies on the ranks of tp; what is not named is whole on all of them.

    Args:
        sequence: each rank has some tokens of the residual stream, which norms work on and layers gather.
    """
    styles: dict[str, ParallelStyle] = {"embedding": Vocabulary(sequence=sequence)}
    if model.head is not None:
        styles["head"] = Column(sequence=sequence)
    for name, module in model.named_modules():
        if isinstance(module, TransformerLayer):
            styles[f"{name}.attention"] = Heads(sequence=sequence)
            if model.config.gated:
                styles[f"{name}.mlp.gate_proj"] = Column(sequence=sequence)
            styles[f"{name}.mlp.up_proj"] = Column(sequence=sequence)
            styles[f"{name}.mlp.down_proj"] = Row(sequence=sequence)
        elif sequence and isinstance(module, Norm) and not name.endswith(("q_norm", "k_norm")):
            styles[name] = Sequence()
    return styles


def travels(recipe: Recipe) -> bool:
    """Whether both operands that a recipe makes of a weight can travel as codes."""
    specs = recipe.fprop.b, recipe.dgrad.b
    return recipe.quantizes and all(spec is not None and not spec.hadamard for spec in specs)
