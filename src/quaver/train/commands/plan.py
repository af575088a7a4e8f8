"""`quaver plan`: predict the speed-up of a model's layers under a recipe on a GPU; needs neither the GPU nor torch.

Costs come from `quaver.costs.ledger`. Every matrix quantizes its own input, like the layers that `convert` makes of
nn.Linear. Embedding, head and everything between matrices are not included. Each expert of a layer counts as a layer of
its own with an even share of the tokens.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quaver.costs import decoder, hardware, ledger
from quaver.costs.hardware import Gpu
from quaver.costs.ledger import LinearCost
from quaver.recipes.spec import GemmSpec, Recipe
from quaver.recipes.text import shown, suggest
from quaver.reference.optimizer_state import PRESETS, matrix_footprint, plain
from quaver.train import config as optimizer_name
from quaver.train import config as recipe_name
from quaver.train.memory import flat_shape, matrices, projections
from quaver.train.model_config import KNOWN, ModelConfig

#: Descriptions of the ledger's kinds of GEMM.
KINDS = {
    "tensor": "one scale a tensor",
    "row": "a scale a row",
    "block": "blocks of 128",
    "mx": "MXFP8's blocks of 32",
    "nvfp4": "NVFP4's blocks of 16",
}
#: Largest accepted number of tokens or micro-batches.
MOST = 10**12
#: Fields of a matrix in the JSON output.
OF_A_MATRIX = ("in_features", "out_features", "flops", "bf16_seconds", "seconds", "bytes", "speedup")


@dataclass(frozen=True)
class PlanRow:
    """Matrices of one shape in some layers, and the cost of one of them."""

    names: list[str]
    cost: LinearCost
    #: Number of layers with these matrices, and number of experts in each.
    layers: int
    experts: int = 1

    @property
    def gains(self) -> bool:
        return self.cost.speedup > 1


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """Costs of a model under a recipe on a GPU."""

    model: str
    config: ModelConfig
    recipe: Recipe
    gpu: Gpu
    rows: list[PlanRow]
    #: Micro-batches that share one quantization of the weights.
    micro_batches: int
    #: True if the preceding kernels quantize inputs and gradients.
    fused: bool
    #: Name of the optimizer, as for `quaver train`.
    optimizer: str = optimizer_name.TORCH_ADAMW
    tokens: int

    @property
    def bf16_seconds(self) -> float:
        """Seconds of the matrices of one layer for one micro-batch; the mean if layers differ."""
        return sum(self.times(row) * row.cost.bf16_seconds for row in self.rows)

    @property
    def seconds(self) -> float:
        return sum(self.times(row) * row.cost.seconds for row in self.rows)

    @property
    def bytes(self) -> float:
        return sum(self.times(row) * row.cost.bytes for row in self.rows)

    @property
    def even(self) -> bool:
        """True if all layers have the same matrices."""
        return all(row.layers == self.config.layers for row in self.rows)

    def times(self, row: PlanRow) -> float:
        """Return how many matrices of a row a layer has on average."""
        return len(row.names) * row.experts * row.layers / self.config.layers

    @property
    def speedup(self) -> float:
        return self.bf16_seconds / self.seconds


def plan(
    model: str,
    recipe: str,
    gpu: str,
    *,
    tokens: int = 8192,
    micro_batches: int = 1,
    fused: bool = False,
    optimizer: str = optimizer_name.TORCH_ADAMW,
) -> ModelPlan:
    """Predict the cost of a model's matrices.

    Args:
        model: a row of `quaver.train.model_config.MODELS` or `PLANNED`.
        recipe: recipe as the user writes it.
        gpu: a row of `quaver.costs.hardware.GPUS`.
        tokens: tokens per micro-batch.
        micro_batches: micro-batches that share one quantization of the weights.
        fused: the preceding kernels quantize inputs and gradients.
        optimizer: as for `quaver train`; its memory is listed next to that of others.
    Raises:
        ValueError: an unknown model, recipe or GPU, with the nearest known one; a number below 1 or above `MOST`.
    """
    if model not in KNOWN:
        raise ValueError(f"no model {shown(model)}; {suggest(model[:100], KNOWN)}")
    for name, value in (("tokens", tokens), ("micro_batches", micro_batches)):
        if not 1 <= value <= MOST:
            raise ValueError(f"{name} is {shown(value)}; give a number from 1 to {MOST}")
    config, chosen, card = KNOWN[model], recipe_name.find_recipe(recipe), hardware.get(gpu)
    optimizer_name.check_optimizer(optimizer, chosen)
    rows = []
    for (shape, layers), names in _group_by_shape(config).items():
        *stack, n, k = shape
        each, experts = tokens, math.prod(stack)
        if stack and config.experts is not None:
            each = math.ceil(tokens * config.experts.chosen / experts)
        cost = ledger.layer(chosen, each, k, n, card, micro_batches=micro_batches, produced=fused)
        rows.append(PlanRow(names, cost, layers, experts))
    return ModelPlan(
        model=model,
        config=config,
        recipe=chosen,
        gpu=card,
        rows=rows,
        micro_batches=micro_batches,
        fused=fused,
        optimizer=optimizer,
        tokens=tokens,
    )


def _group_by_shape(config: ModelConfig) -> dict[tuple[tuple[int, ...], int], list[str]]:
    """Return the names of matrices by shape and number of layers that have them."""
    layers: dict[tuple[str, tuple[int, ...]], int] = {}
    for layer in range(config.layers):
        for part, own in matrices(config, layer).items():
            first = f"{part.partition('.')[2]}." if "." in part else ""
            for name, shape in own.items():
                layers[first + name, shape] = layers.get((first + name, shape), 0) + 1
    by_shape: dict[tuple[tuple[int, ...], int], list[str]] = {}
    for (name, shape), count in layers.items():
        by_shape.setdefault((shape, count), []).append(name)
    return by_shape


def cells(planned: ModelPlan) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table as text, totals last."""
    for row in planned.rows:
        cost = row.cost
        sizes = (_names(planned, row), f"{cost.in_features}", f"{cost.out_features}")
        yield (*sizes, *_numbers(cost.bf16_seconds, cost.seconds, cost.bytes), "yes" if row.gains else "no")
    one = planned.bf16_seconds, planned.seconds, planned.bytes
    yield ("one layer" if planned.even else "a layer, the mean", "", "", *_numbers(*one), "")
    layers = planned.config.layers
    yield (f"{layers} layers", "", "", *_numbers(*(layers * number for number in one)), "")


def _names(planned: ModelPlan, row: PlanRow) -> str:
    experts = f"{row.experts} x " if row.experts > 1 else ""
    layers = "" if planned.even else f" ({row.layers} of {planned.config.layers} layers)"
    return experts + ", ".join(row.names) + layers


def _numbers(bf16: float, predicted: float, moved: float) -> tuple[str, str, str, str]:
    return f"{bf16 * 1e3:.3f}", f"{predicted * 1e3:.3f}", f"{moved / 1e6:,.0f}", f"{bf16 / predicted:.2f}"


def columns(_: ModelPlan) -> tuple[str, ...]:
    """Return the columns of the table; "more MB" is the traffic beyond that of a bf16 layer."""
    return "layer", "K", "N", "bf16, ms", "predicted", "more MB", "speed-up", "gains"


def title(planned: ModelPlan) -> str:
    tokens = planned.tokens
    batch = f"a micro-batch of {tokens} tokens" + (
        f", one of {planned.micro_batches}" if planned.micro_batches > 1 else ""
    )
    fused = ", quantized by the kernels before" if planned.fused else ""
    return f"{planned.model}, {planned.recipe}, {planned.gpu.about}: {batch}{fused}; predicted, not measured"


def verdict_text(planned: ModelPlan) -> list[str]:
    """Return sentences that interpret the table."""
    recipe, gpu = str(planned.recipe), planned.gpu.name
    losers = [name for row in planned.rows if not row.gains for name in row.names]
    parts = []
    if not planned.recipe.quantizes:
        parts.append(f"{recipe} quantizes nothing, so nothing gains.")
    elif not losers:
        parts.append(f"Every matrix gains under {recipe} on {gpu}.")
    else:
        which = "No matrix gains" if len(losers) == sum(len(r.names) for r in planned.rows) else "These do not gain"
        parts.append(
            f"{which} under {recipe} on {gpu}: {', '.join(losers)}. "
            f"convert(..., skip=quaver.rules.unprofitable({gpu!r}, tokens={planned.tokens})) "
            "leaves such layers in bf16."
        )
    emulated = planned.rows[0].cost.emulated
    if emulated:
        kinds = sorted({missing_text(planned.recipe, name, planned.rows[0].cost.gemms[name].kind) for name in emulated})
        parts.append(
            f"{gpu} has no GEMM for {' or '.join(kinds)}: {', '.join(emulated)} decode their operands and run in "
            "bf16, exact but slower."
        )
    return parts


def missing_text(recipe: Recipe, gemm: str, kind: str) -> str:
    """Describe what a GPU has no GEMM for: the kind of scales, or the operands if no GPU supports their kind."""
    spec: GemmSpec = getattr(recipe, gemm)
    return KINDS.get(kind) or " by ".join(dict.fromkeys(str(operand) for operand in (spec.a, spec.b)))


def notes(planned: ModelPlan) -> list[str]:
    """Return sentences on the table's meaning, its omissions and its columns."""
    return [*verdict_text(planned), memory_note(planned), *_left_out(planned)]


def optimizers(planned: ModelPlan) -> dict[str, int]:
    """Return the bytes by optimizer of the model's matrices in training: weights, gradients and optimizer states."""
    shapes = [flat_shape(shape) for shape in projections(planned.config).values()]
    recipe, bytes_by_optimizer = planned.recipe, {}
    bytes_by_optimizer[optimizer_name.TORCH_ADAMW] = sum(plain(n * k).total for n, k in shapes)
    for name in dict.fromkeys((*PRESETS, planned.optimizer)):
        chosen = optimizer_name.find_optimizer(name)
        if chosen.preset is None:
            continue
        with suppress(ValueError):  # the recipe may have no codes for this optimizer
            optimizer_name.check_optimizer(name, recipe)
            how, moments = chosen.weights(recipe, "bfloat16"), chosen.moments[0]
            bytes_by_optimizer[name] = sum(
                matrix_footprint(chosen.preset, shape, how, recipe.fprop.b, moments).total for shape in shapes
            )
    return bytes_by_optimizer


def memory_note(planned: ModelPlan) -> str:
    """Return a sentence on the memory of the matrices with several optimizers."""
    number = sum(map(math.prod, projections(planned.config).values()))
    parts = (
        f"{name} {total / 1e9:.3g} GB ({total / number:.2f})"
        for name, total in optimizers(planned).items()
        if name in ("adamw", "exact", "balanced", "lean", planned.optimizer)
    )
    return (
        f"In training the {number / 1e6:,.1f} million parameters of these matrices take, with gradients and optimizer "
        f"states (in brackets, bytes a parameter): {', '.join(parts)}; quaver train --optimizer takes the names."
    )


def _left_out(planned: ModelPlan) -> list[str]:
    config = planned.config
    head = "embedding and head" if not config.tied else "embedding, which is the head too"
    four = "its four projections are in the table" if config.latent is None else "its projections are in the table"
    attention = f"attention's own products ({four}), " if config.numbers("attention", "experts") else ""
    others = "routers and what lays tokens by their experts, " if config.experts is not None else ""
    return [
        f"Left out: {attention}{others}norms, activations, {head}, the optimizer: of a whole step, less is gained.",
        *_scans(planned),
        '"more MB" is what quantizing reads and writes beyond what a bf16 layer does, forward and backward.',
    ]


def _scans(planned: ModelPlan) -> list[str]:
    """Return a sentence on the cost of the scans of state-space layers, or nothing."""
    sizes, layers = planned.config.state, len(planned.config.numbers("state", "state-mlp"))
    if sizes is None:
        return []
    one = decoder.priced(planned.tokens, sizes.heads, sizes.head_dim, sizes.groups, sizes.state, planned.gpu)
    return [
        f"Left out, too, the convolutions and scans of {layers} layers, which stay in high precision: a scan's forward "
        f"multiplies {one.flops / 1e12:.3g} TFLOP and moves {one.bytes / 1e6:,.0f} MB, {one.seconds * 1e3:.3f} ms at "
        "least (arXiv:2405.21060, section 6)."
    ]


def as_json(planned: ModelPlan) -> dict[str, Any]:
    """Return the plan as JSON data in seconds and bytes, with the rates and their sources."""
    rates = {"copy": planned.gpu.copy, **planned.gpu.rates}
    return {
        "model": planned.model,
        "recipe": str(planned.recipe),
        "gpu": planned.gpu.name,
        "tokens": planned.tokens,
        "micro_batches": planned.micro_batches,
        "fused": planned.fused,
        "layers": planned.config.layers,
        "matrices": [_matrix(row) for row in planned.rows],
        "optimizer_bytes": optimizers(planned),
        "layer": {name: getattr(planned, name) for name in ("bf16_seconds", "seconds", "bytes", "speedup")},
        "rates": {
            name: {"value": f.value, "unit": "TB/s" if name == "copy" else "TFLOP/s", "how": f.how, "source": f.source}
            for name, f in rates.items()
        },
    }


def _matrix(row: PlanRow) -> dict[str, Any]:
    cost = row.cost
    return {
        "names": row.names,
        "layers": row.layers,
        "experts": row.experts,
        "tokens": cost.tokens,
        **{name: getattr(cost, name) for name in OF_A_MATRIX},
        "gains": row.gains,
        "gemms": {name: {"kind": g.kind, "native": g.native, "seconds": g.seconds} for name, g in cost.gemms.items()},
        "quantization": {name: {"bytes": c.bytes, "seconds": c.seconds} for name, c in cost.tensors.items()},
    }
