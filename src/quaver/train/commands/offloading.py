"""`quaver plan --offload`: predict what moving saved activations to the host saves and costs on a GPU.

Costs come from `quaver.costs.offload` and `quaver.costs.ledger`. The tensors are those that the layers of
`quaver.torch` save. The time of a layer counts its matrices and attention, so that copies are hidden in a bit more time
than predicted.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from quaver.costs import decoder, hardware, ledger
from quaver.costs.hardware import Gpu
from quaver.costs.offload import LayerOffload, SavedActivation, place
from quaver.costs.steps import ATTENTION, TRAINED
from quaver.recipes.spec import Recipe
from quaver.recipes.text import shown, suggest
from quaver.train import config as recipe_name
from quaver.train.memory import LAST, matrices, projections
from quaver.train.model_config import KNOWN, Kind, ModelConfig

#: Columns of the table.
COLUMNS = ("saved tensor", "MB a layer", "copy, ms", "recompute, ms", "choice")

#: Share of the bytes of weights, gradients and optimizer states below which saved tensors count as few.
SMALL = 0.1


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """Choices for each kind of layer of a model."""

    model: str
    recipe: Recipe
    gpu: Gpu
    tokens: int
    #: By kind of layer: number of layers, and the choices for one.
    layers: dict[Kind, tuple[int, LayerOffload]]

    def bytes(self, *choices: Any) -> float:
        """Return the bytes of all layers' saved tensors with these choices; of all without one."""
        return sum(count * layer.bytes(*choices) for count, layer in self.layers.values())

    def total(self, name: str) -> float:
        """Return the sum of a property over all layers."""
        return sum(count * getattr(layer, name) for count, layer in self.layers.values())


def price(model: str, recipe: str, gpu: str, *, tokens: int, sequence: int, micro_batches: int = 1) -> OffloadPlan:
    """Predict what to do with each saved tensor.

    Args:
        model, recipe, gpu, tokens, micro_batches: as for `quaver.train.commands.plan.plan`.
        sequence: tokens of a sequence.

    Raises:
        ValueError: an unknown model, recipe or GPU, or a number below 1.
    """
    if model not in KNOWN:
        raise ValueError(f"no model {shown(model)}; {suggest(model[:100], KNOWN)}")
    for name, value in (("tokens", tokens), ("sequence", sequence), ("micro_batches", micro_batches)):
        if value < 1:
            raise ValueError(f"{name} is {value}; pass 1 or more")
    config, chosen, card = KNOWN[model], recipe_name.find_recipe(recipe), hardware.get(gpu)
    kinds: dict[Kind, list[int]] = {}
    for number in range(config.layers):
        kinds.setdefault(config.kind(number), []).append(number)
    layers = {}
    for kind, numbers in kinds.items():
        saved, forward, backward = _layer(
            config, chosen, card, numbers[0], tokens, min(sequence, tokens), micro_batches
        )
        layers[kind] = len(numbers), place(saved, forward, backward, card.host.value * 1e12)
    return OffloadPlan(model=model, recipe=chosen, gpu=card, tokens=tokens, layers=layers)


def _layer(
    config: ModelConfig, recipe: Recipe, gpu: Gpu, number: int, tokens: int, sequence: int, micro_batches: int
) -> tuple[list[SavedActivation], float, float]:
    """Return what a layer saves, and its seconds forward and backward."""
    wide, copy = ledger.WIDE, gpu.copy.value * 1e12
    forward = backward = residual = 0.0
    saved = [SavedActivation("input", wide * tokens * config.dim)]
    for part, own in matrices(config, number).items():
        width = 0
        for name, (*stack, n, k) in own.items():
            experts, each = math.prod(stack), tokens
            if stack and config.experts is not None:
                each = math.ceil(tokens * config.experts.chosen / experts)
            cost = ledger.layer(recipe, each, k, n, gpu, micro_batches=micro_batches)
            gemms = {gemm: experts * (c.seconds + c.decoding.seconds) for gemm, c in cost.gemms.items()}
            quantizing = experts * cost.tensors["input"].seconds
            once = gemms["fprop"] + quantizing + experts * cost.tensors["weight"].seconds
            forward += once
            backward += gemms["dgrad"] + gemms["wgrad"] + experts * cost.tensors["grad_output"].seconds
            rows, last = each * experts, f".{name}.weight" in LAST
            # A quantized MLP recomputes what its last matrix reads. Matrices before the last one may share their input.
            recomputed = last and part.startswith("mlp") and recipe.quantizes
            if (last or k != width) and not recomputed:
                size = ledger.saved_bytes(recipe, rows, k)
                saved.append(
                    SavedActivation(f"{part}: input of {name}", size, (wide * rows * k + size) / copy + quantizing)
                )
            if last:
                residual = once if part in ("attention", "mixer") else residual
            else:
                saved.append(SavedActivation(f"{part}: result of {name}", wide * rows * n, once))
            width = k
        if part == "attention":
            ahead, back, result = _attention(config, gpu, tokens, sequence)
            forward, backward = forward + ahead, backward + back
            saved += [result, SavedActivation("attention: sum with the input", wide * tokens * config.dim, residual)]
    return saved, forward, backward


def _attention(config: ModelConfig, gpu: Gpu, tokens: int, sequence: int) -> tuple[float, float, SavedActivation]:
    """Return seconds of causal attention forward and backward, and the result that it saves, with its sums."""
    score = value = config.head_dim
    if config.latent is not None:
        score, value = config.latent.plain_dim + config.latent.rope_dim, config.latent.value_dim
    product = 2.0 * config.heads * (score + value) / 2 * tokens * (sequence + 1) / 2
    each = product / (gpu.rates["bf16"].value * 1e12 * ATTENTION)
    forward, backward = (count * each for count in decoder.PLAIN)
    size = tokens * config.heads * (ledger.WIDE * value + 4)
    return forward, backward, SavedActivation("attention: result", size, forward)


# ---- output ----


def title(planned: OffloadPlan) -> str:
    return (
        f"{planned.model}, {planned.recipe}, {planned.gpu.about}: saved tensors of a micro-batch of {planned.tokens} "
        f"tokens, and {planned.gpu.host.value * 1e3:.3g} GB/s to the host; predicted, not measured"
    )


def cells(planned: OffloadPlan) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table as text, sums of each kind of layer last."""
    for kind, (count, layer) in planned.layers.items():
        for p in layer.placements:
            a = p.activation
            again = "" if math.isinf(a.seconds) else f"{a.seconds * 1e3:.3f}"
            yield (a.name, f"{a.bytes / 1e6:,.1f}", f"{a.bytes / layer.rate * 1e3:.3f}", again, p.choice)
        yield f"each of {count} {kind} layers", f"{layer.bytes() / 1e6:,.1f}", f"{layer.copy_all * 1e3:.3f}", "", ""


def rich_table(planned: OffloadPlan) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column(COLUMNS[0])
    for name in COLUMNS[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in cells(planned):
        table.add_row(*row)
    return table


def notes(planned: OffloadPlan) -> list[str]:
    """Return sentences on what offloading saves and costs."""
    whole, forward, backward = planned.bytes(), planned.total("forward"), planned.total("backward")
    stall = planned.total("stall_all")
    lines = [
        f"All {whole / 1e9:.3g} GB take {planned.total('copy_all') * 1e3:,.1f} ms each way; forward takes at least "
        f"{forward * 1e3:,.1f} ms, and backward {backward * 1e3:,.1f}."
    ]
    if stall:
        lines.append(
            f"Copies of all are not hidden: quaver.torch.offload(model) makes a micro-batch {stall * 1e3:,.1f} ms "
            f"longer ({100 * stall / (forward + backward):.0f} %)."
        )
    else:
        lines.append("Copies of all are hidden: quaver.torch.offload(model) costs no time.")
    states = TRAINED * sum(map(math.prod, projections(KNOWN[planned.model]).values()))
    if whole < SMALL * states:
        lines.append(
            f"Offloading saves little: weights, gradients and AdamW's states take {states / 1e9:.3g} GB, if they are "
            "not sharded."
        )
    moved, again = planned.bytes("offload"), planned.bytes("recompute")
    lines.append(
        f"The choices above move {moved / 1e9:.3g} GB to pinned memory, recompute {again / 1e9:.3g} GB and keep "
        f"{planned.bytes('keep') / 1e9:.3g} GB, for {planned.total('seconds') * 1e3:,.1f} ms. A tensor is kept if "
        "removing it takes more time per byte than running its whole layer again."
    )
    return lines


def as_json(planned: OffloadPlan) -> dict[str, Any]:
    """Return the plan as JSON data in seconds and bytes."""
    host = planned.gpu.host
    return {
        "model": planned.model,
        "recipe": str(planned.recipe),
        "gpu": planned.gpu.name,
        "tokens": planned.tokens,
        "host": {"value": host.value, "unit": "TB/s", "how": host.how, "source": host.source},
        "layers": [
            {
                "kind": kind,
                "count": count,
                **{name: getattr(layer, name) for name in ("forward", "backward", "copy_all", "stall_all", "seconds")},
                "saved": [
                    {
                        "name": p.activation.name,
                        "bytes": p.activation.bytes,
                        "recompute_seconds": None if math.isinf(p.activation.seconds) else p.activation.seconds,
                        "choice": p.choice,
                        "seconds": p.seconds,
                    }
                    for p in layer.placements
                ],
            }
            for kind, (count, layer) in planned.layers.items()
        ],
    }
