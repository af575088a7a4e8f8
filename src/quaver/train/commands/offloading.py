"""`quaver plan --offload`: predict what moving saved activations to the host saves and costs on a GPU.

Costs come from `quaver.costs.offload` and `quaver.costs.ledger`. The tensors are those that the layers of
`quaver.torch` save. The predicted time of a layer has only its GEMMs, quantization and attention. The real one is
longer, so a bit more of the copies is hidden than predicted.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quaver.costs import decoder, hardware, ledger
from quaver.costs.hardware import Gpu
from quaver.costs.offload import LayerOffload, SavedActivation, place
from quaver.costs.steps import ATTENTION, TRAINED
from quaver.recipes.spec import Recipe
from quaver.recipes.text import shown, suggest
from quaver.train import config as recipe_name
from quaver.train.memory import RESIDUAL_WRITERS, matrices, projections
from quaver.train.model_config import KNOWN, Kind, ModelConfig

#: Offloading saves little if all saved tensors have less than this fraction of the bytes of weights, gradients and
#: optimizer states.
LITTLE = 0.1


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """Choices for each kind of layer of a model."""

    model: str
    recipe: Recipe
    gpu: Gpu
    tokens: int
    #: By kind of layer: number of layers, and the choices for one of them.
    layers: dict[Kind, tuple[int, LayerOffload]]

    def bytes(self, *choices: Any) -> float:
        """Return the bytes of all layers' tensors with one of these choices; without arguments, of all tensors."""
        return sum(count * layer.bytes(*choices) for count, layer in self.layers.values())

    def total(self, name: str) -> float:
        """Return the sum over all layers of a field or property of `LayerOffload`."""
        return sum(count * getattr(layer, name) for count, layer in self.layers.values())


def price(model: str, recipe: str, gpu: str, *, tokens: int, sequence: int, micro_batches: int = 1) -> OffloadPlan:
    """Choose for each saved tensor whether to keep, move or recompute it, and predict the cost.

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
    """Return the tensors that a layer saves, and its seconds forward and backward."""
    wide, copy = ledger.WIDE, gpu.copy.value * 1e12
    forward = backward = 0.0
    saved = [SavedActivation("input", wide * tokens * config.dim)]
    parts = matrices(config, number)
    for part, own in parts.items():
        shared = False
        # `stack` is [experts] or empty.
        for name, (*stack, n, k) in own.items():
            experts, tokens_each = math.prod(stack), tokens
            if stack and config.experts is not None:
                tokens_each = math.ceil(tokens * config.experts.chosen / experts)
            cost = ledger.layer(recipe, tokens_each, k, n, gpu, micro_batches=micro_batches)
            gemms = {gemm: experts * (c.seconds + c.decoding.seconds) for gemm, c in cost.gemms.items()}
            quantizing = experts * cost.tensors["input"].seconds
            fprop = gemms["fprop"] + quantizing + experts * cost.tensors["weight"].seconds
            forward += fprop
            backward += gemms["dgrad"] + gemms["wgrad"] + experts * cost.tensors["grad_output"].seconds
            rows, last = tokens_each * experts, f".{name}.weight" in RESIDUAL_WRITERS
            # Matrices of the layer's width, such as q, k and v, have one input. A quantized MLP does not save the input
            # of its last matrix, but recomputes it.
            recomputed = last and part.startswith("mlp") and recipe.quantizes
            if not recomputed and (last or k != config.dim or not shared):
                size = ledger.saved_bytes(recipe, rows, k)
                saved.append(
                    SavedActivation(f"{part}: input of {name}", size, (wide * rows * k + size) / copy + quantizing)
                )
            if not last:
                saved.append(SavedActivation(f"{part}: result of {name}", wide * rows * n, fprop))
            shared |= k == config.dim
        if part == "attention":
            seconds, backward_seconds, result = _attention(config, gpu, tokens, sequence)
            forward, backward = forward + seconds, backward + backward_seconds
            saved.append(result)
        if not part.startswith("mlp") and part != list(parts)[-1]:
            # The sum is recomputed by the last matrix.
            saved.append(SavedActivation(f"{part}: sum with the input", wide * tokens * config.dim, fprop))
    return saved, forward, backward


def _attention(config: ModelConfig, gpu: Gpu, tokens: int, sequence: int) -> tuple[float, float, SavedActivation]:
    """Return seconds of causal attention forward and backward, and its saved result with the float32 log-sum-exps."""
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


def columns(_: OffloadPlan) -> tuple[str, ...]:
    """Return the columns of the table."""
    return "saved tensor", "MB a layer", "copy, ms", "recompute, ms", "choice"


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
    if whole < LITTLE * states:
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
