"""`quaver plan --gpus 512`: predict the time of a training step on many GPUs, compared with bf16.

Costs come from `quaver.costs.steps`. This module converts a model's configuration for it and formats the result.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from quaver.costs import hardware, steps
from quaver.costs.decoder import DecoderBlock, DecoderShape, WeightMatrix, deepseek_v3_like, dense, latent
from quaver.costs.steps import StepCost
from quaver.recipes.spec import Recipe
from quaver.recipes.text import shown, suggest
from quaver.reference.optimizer_state import matrix_footprint, plain
from quaver.train import config as optimizer_name
from quaver.train import config as recipe_name
from quaver.train.memory import projections
from quaver.train.model_config import KNOWN, Kind, ModelConfig

#: Default size of the vocabulary: Llama 3's.
VOCAB = 128_256
#: Models with predicted costs that the trainer does not know.
OTHERS = {"deepseek-v3-like": deepseek_v3_like}
CHECKPOINTS = "none", "selective", "full"
#: Descriptions of the parts of a step.
PARTS = {
    "gemms": "GEMMs and quantization",
    "attention": "attention",
    "elementwise": "norms, activations, sums",
    "tensor": "tensor parallelism, shown",
    "context": "context parallelism",
    "experts": "tokens to experts and back",
    "sharding": "weights and gradients, shown",
    "head": "head and loss",
    "pipeline": "pipeline's idle time",
    "optimizer": "optimizer, first and last unit",
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Number of GPUs, parallelism and communication; each field is an option of `quaver plan`."""

    gpus: Annotated[int, "predict a whole step on so many GPUs; 0: the layers on one"] = 0
    fsdp: Annotated[int, "ranks that share weights; 0: all that are left"] = 0
    tp: Annotated[int, "ranks of tensor parallelism"] = 1
    cp: Annotated[int, "ranks of context parallelism"] = 1
    pp: Annotated[int, "stages of the pipeline"] = 1
    ep: Annotated[int, "ranks of expert parallelism"] = 1
    interconnect: Annotated[str, "hgx-h100, hgx-a100, hgx-b200, nvl72, ethernet, pcie"] = "hgx-h100"
    sequence: Annotated[int, "tokens of a sequence"] = 8192
    checkpoints: Annotated[str, "what backward computes again: none, selective, full"] = "selective"
    overlap: Annotated[bool, "tensor parallelism beside GEMMs, experts' tokens beside other work"] = False
    interleaved: Annotated[int, "parts of a stage that take turns"] = 1

    @property
    def mesh(self) -> hardware.Mesh:
        """Mesh of the GPUs. Raises: ValueError if the axes do not multiply to the number of GPUs."""
        return hardware.over(self.gpus, fsdp=self.fsdp, tp=self.tp, cp=self.cp, pp=self.pp, ep=self.ep)


@dataclass(frozen=True)
class Scaling:
    """Predicted step under a recipe and in bf16."""

    recipe: StepCost
    bf16: StepCost
    #: Name of the optimizer, as for `quaver train`.
    optimizer: str = optimizer_name.TORCH_ADAMW

    @property
    def speedup(self) -> float:
        return self.recipe.tokens_per_second / self.bf16.tokens_per_second

    @property
    def overlap_gain(self) -> float:
        """Tokens a second with `--overlap` over those without."""
        overlapped, apart = (steps.step(replace(self.recipe.plan, overlapped=each)) for each in (True, False))
        return overlapped.tokens_per_second / apart.tokens_per_second


def decoder(model: str) -> DecoderShape:
    """Return the shape of a model for cost predictions: a row of `MODELS`, `PLANNED` or `OTHERS`.

    Raises:
        ValueError: an unknown model, with the nearest known one, or one with layers of unknown cost.
    """
    if model in OTHERS:
        return OTHERS[model]()
    if model not in KNOWN:
        raise ValueError(f"no model {shown(model)}; {suggest(model[:100], [*KNOWN, *OTHERS])}")
    config = KNOWN[model]
    if config.state is not None:
        raise ValueError(
            f"{model} has state-space layers, and what their scans take of a step on many GPUs is not known; leave out "
            "--gpus, which prices the matrices"
        )
    kinds: dict[Kind, int] = {}
    for layer in range(config.layers):
        kinds[config.kind(layer)] = kinds.get(config.kind(layer), 0) + 1
    blocks = tuple((count, _block(config, kind)) for kind, count in kinds.items())
    return DecoderShape(name=model, blocks=blocks, dim=config.dim, vocab=config.vocab or VOCAB, tied=config.tied)


def _block(config: ModelConfig, kind: Kind) -> DecoderBlock:
    block = dense(config.dim, config.heads, config.groups, config.head_dim, config.hidden, gated=config.gated)
    attention, mlp = block.matrices[:4], block.matrices[4:]
    if config.latent is not None:
        sizes, heads = config.latent, config.heads
        score = sizes.plain_dim + sizes.rope_dim
        attention = latent(
            config.dim, heads, sizes.q_rank, sizes.kv_rank, sizes.plain_dim, sizes.rope_dim, sizes.value_dim
        )
        attended = heads * (score + sizes.plain_dim + sizes.value_dim)
        block = replace(block, score_features=score, value_features=sizes.value_dim, attended=attended)
    if kind == "experts":
        own = config.experts
        assert own is not None
        shared = _mlp(config, own.shared) if own.shared else ()
        mlp = (*shared, *_mlp(config, own.hidden, own.number, own.chosen))
        block = replace(block, hidden=own.shared + own.chosen * own.hidden)
    return replace(block, matrices=(*attention, *mlp))


def _mlp(config: ModelConfig, hidden: int, experts: int = 1, chosen: int = 1) -> tuple[WeightMatrix, ...]:
    wide = WeightMatrix(out_features=hidden, in_features=config.dim, experts=experts, chosen=chosen)
    down = WeightMatrix(out_features=config.dim, in_features=hidden, cut="row", experts=experts, chosen=chosen)
    return *(wide,) * (1 + config.gated), down


def trained(optimizer: str, recipe: Recipe, codes: bool) -> tuple[float, float, float]:
    """Return the bytes in training per parameter of a layer's matrix, of the embedding and of the head.

    Args:
        optimizer: name of the optimizer.
        recipe: recipe of the run.
        codes: matrices may be stored as codes, which requires no tensor parallelism.
    """
    chosen, shape = optimizer_name.find_optimizer(optimizer), (4096, 4096)
    own, others = chosen.moments
    table = float(plain(1, others).total)
    if chosen.preset is None:
        return table, table, table
    formats = chosen.weights(recipe, "bfloat16", codes), chosen.others("bfloat16")
    matrix = matrix_footprint(chosen.preset, shape, formats[0], recipe.fprop.b, own).total / math.prod(shape)
    head = matrix_footprint(chosen.preset, shape, formats[1], None, others).total / math.prod(shape)
    return matrix, table, head


def price(
    model: str,
    recipe: str,
    gpu: str,
    cluster: Cluster,
    *,
    tokens: int = 8192,
    micro_batches: int = 1,
    optimizer: str = optimizer_name.TORCH_ADAMW,
) -> Scaling:
    """Predict the time of a step.

    Args:
        model: as in `decoder`.
        recipe: recipe as the user writes it.
        gpu: a row of `quaver.costs.hardware.GPUS`.
        cluster: the cluster of such GPUs.
        tokens: tokens per micro-batch of one data-parallel rank, in whole sequences.
        micro_batches: micro-batches per step.
        optimizer: as for `quaver train`; affects only memory, since time assumes AdamW in float32.
    Raises:
        ValueError: an unknown name, with the nearest known one, or a mesh that does not fit.
    """
    chosen, mesh = recipe_name.find_recipe(recipe), cluster.mesh
    codes, high = optimizer_name.allows_codes(1, mesh.tp), recipe_name.find_recipe("bf16")
    if mesh.gpus == 1:
        optimizer_name.check_optimizer(optimizer, chosen)
    shapes = projections(KNOWN[model]) if model in KNOWN else {}
    optimizer_name.check_sharded_optimizer(optimizer, shapes, mesh.fsdp * mesh.tp, mesh.tp)
    if cluster.sequence < 1 or tokens < 1 or tokens % cluster.sequence:
        sequences = f"whole sequences of {cluster.sequence}"
        raise ValueError(f"{tokens} tokens are not {sequences}; give --tokens a multiple of it")
    if cluster.checkpoints not in CHECKPOINTS:
        raise ValueError(
            f"checkpoints is {shown(cluster.checkpoints)}; {suggest(cluster.checkpoints[:100], CHECKPOINTS)}"
        )
    if cluster.interleaved < 1:
        raise ValueError(f"interleaved is {cluster.interleaved}; give 1 or more")
    priced = steps.predict(
        decoder(model),
        chosen,
        gpu,
        mesh,
        hardware.get_interconnect(cluster.interconnect),
        sequences=tokens // cluster.sequence,
        tokens=cluster.sequence,
        micro_batches=micro_batches,
        checkpoints=cluster.checkpoints,
        overlapped=cluster.overlap,
        interleaved=cluster.interleaved,
        trained=trained(optimizer, chosen, codes),
    )
    in_bf16 = replace(priced.plan, recipe=high, trained=trained(optimizer, high, codes))
    return Scaling(priced, steps.step(in_bf16), optimizer)


def title(planned: Scaling) -> str:
    plan = planned.recipe.plan
    mesh = plan.mesh
    axes = {"fsdp": mesh.fsdp, "tp": mesh.tp, "cp": mesh.cp, "pp": mesh.pp, "ep": mesh.ep, "replicas": mesh.replicas}
    used = " x ".join(f"{name} {ranks}" for name, ranks in axes.items() if ranks > 1) or "one GPU"
    return (
        f"{plan.decoder.name}, {plan.recipe}, {mesh.gpus} x {plan.gpu.name} ({used}), {plan.interconnect.full_name}: "
        f"{plan.micro_batches} x {plan.sequences} sequences of {plan.tokens} tokens a rank of data, "
        f"checkpoints {plan.checkpoints}; predicted, not measured"
    )


def cells(planned: Scaling) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table as text: seconds per step, bytes sent, memory, tokens per second."""
    for name, label in PARTS.items():
        seconds = planned.bf16.parts[name], planned.recipe.parts[name]
        if any(seconds):
            yield (f"{label}, s", *(f"{each:.3f}" for each in seconds))
    yield ("a step, s", f"{planned.bf16.seconds:.3f}", f"{planned.recipe.seconds:.3f}")
    for kind in {**planned.bf16.wire, **planned.recipe.wire}:
        sent = planned.bf16.wire.get(kind, 0.0), planned.recipe.wire.get(kind, 0.0)
        yield (f"{kind} on the wire, GB a GPU", *(f"{each / 1e9:.2f}" for each in sent))
    memory = sum(planned.bf16.memory.values()), sum(planned.recipe.memory.values())
    yield ("memory at least, GiB", *(f"{each / 2**30:.1f}" for each in memory))
    speeds = planned.bf16.tokens_per_second, planned.recipe.tokens_per_second
    yield ("tokens a second of a GPU", *(f"{each:,.0f}" for each in speeds))


def columns(planned: Scaling) -> tuple[str, ...]:
    """Return the columns of the table."""
    return "", "bf16", str(planned.recipe.plan.recipe)


def notes(planned: Scaling) -> list[str]:
    """Return sentences that interpret the table."""
    plan = planned.recipe.plan
    kind = "in the recipe's bits" if plan.narrow else "in bf16"
    overlap = [
        f"--overlap {'makes it' if plan.overlapped else 'would make it'} {planned.overlap_gain:.2f} times as fast as "
        "communication before and after GEMMs."
    ]
    return [
        f"{planned.speedup:.2f} times bf16's tokens a second. Weights are gathered {kind}; gradients are summed in "
        "float32.",
        *(overlap if plan.mesh.tp > 1 or plan.mesh.ep > 1 else []),
        memory_text(planned),
        '"Shown" is what the work beside it does not hide. A roofline: no stragglers, no failures, no data loading; '
        "docs/performance.md compares it with published runs.",
    ]


def memory_text(planned: Scaling) -> str:
    """Return a sentence on the memory of weights, gradients and optimizer states."""
    matrix, table, _ = planned.recipe.plan.trained
    here = planned.recipe.memory["weights and optimizer"] / 2**30
    return (
        f"Of the memory {here:.3g} GiB are weights, gradients and states of --optimizer {planned.optimizer}, "
        f"{matrix:.3g} bytes a parameter of the blocks' matrices and {table:.3g} of the embedding; ranks divide it."
    )


def as_json(planned: Scaling) -> dict[str, Any]:
    """Return the plan as JSON data in seconds and bytes, with the interconnect's rates and their sources."""
    plan = planned.recipe.plan
    link = plan.interconnect
    rates = {"inside": link.inside, "outside": link.outside}
    return {
        "model": plan.decoder.name,
        "parameters": plan.decoder.parameters,
        "recipe": str(plan.recipe),
        "gpu": plan.gpu.name,
        "mesh": {name: getattr(plan.mesh, name) for name in ("tp", "cp", "fsdp", "replicas", "pp", "ep", "gpus")},
        "interconnect": link.name,
        "optimizer": planned.optimizer,
        "speedup": planned.speedup,
        "overlap_gain": planned.overlap_gain,
        **{name: _step(step) for name, step in (("bf16", planned.bf16), ("predicted", planned.recipe))},
        "rates": {
            name: {"value": f.value, "unit": "GB/s", "how": f.how, "source": f.source} for name, f in rates.items()
        },
    }


def _step(step: StepCost) -> dict[str, Any]:
    return {
        "seconds": step.seconds,
        "tokens_per_second": step.tokens_per_second,
        "parts": step.parts,
        "wire": step.wire,
        "memory": step.memory,
    }
