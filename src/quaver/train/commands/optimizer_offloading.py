"""`quaver plan --optimizer-offload`: predict memory and time of optimizer states on the GPU and in host memory.

Costs come from `quaver.costs.host_optimizer`. Bytes are those of `quaver train` in bfloat16, without activations.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quaver.costs import hardware
from quaver.costs.hardware import Gpu, Mesh
from quaver.costs.host_optimizer import CPU_STEPS, HOST_MEMORY, PLACEMENTS, StatePlacement, TrainedParameter, place
from quaver.recipes.spec import Recipe
from quaver.recipes.text import shown, suggest
from quaver.reference.optimizer_state import SMALL
from quaver.train import config as optimizer_name
from quaver.train import config as recipe_name
from quaver.train.commands.scaling import VOCAB, Cluster
from quaver.train.memory import footprints, projections
from quaver.train.model_config import KNOWN, ModelConfig

#: Columns of the table.
LABELS = {"device": "on the GPU", "cpu": 'offload="cpu"', "stream": 'offload="stream"'}


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan:
    """Placements of an optimizer's states for one rank."""

    model: str
    recipe: Recipe
    optimizer: str
    gpu: Gpu
    mesh: Mesh
    #: Ranks that share a node's cores and memory.
    neighbours: int
    #: CPU cores of a node.
    cores: int
    placements: list[StatePlacement]
    #: Bytes a parameter of the layers' matrices: in all, and without states in host memory.
    matrices: tuple[float, float]

    def longer(self, placement: StatePlacement) -> float:
        """Return the seconds that a step gets longer than one with states on the GPU."""
        return placement.seconds - self.placements[0].seconds


def price(model: str, recipe: str, gpu: str, cluster: Cluster, *, optimizer: str, cores: int) -> OptimizerPlan:
    """Predict memory and time for each placement of an optimizer's states.

    Args:
        model, recipe, gpu: as for `quaver.train.commands.plan.plan`.
        cluster: GPUs, one if their number is 0; weights and states are sharded evenly over fsdp, tp and pp.
        optimizer: as for `quaver train`, with a preset of `CPU_STEPS`.
        cores: CPU cores of a node.
    Raises:
        ValueError: an unknown name, a mesh that does not fit, or an optimizer that the cost model does not have.
    """
    if model not in KNOWN:
        raise ValueError(f"no model {shown(model)}; {suggest(model[:100], KNOWN)}")
    if cores < 1:
        raise ValueError(f"host_cores is {cores}; give 1 or more")
    config, chosen, card = KNOWN[model], recipe_name.find_recipe(recipe), hardware.get(gpu)
    check_optimizer(optimizer)
    mesh = hardware.over(
        cluster.gpus or 1, fsdp=cluster.fsdp, tp=cluster.tp, cp=cluster.cp, pp=cluster.pp, ep=cluster.ep
    )
    if mesh.gpus == 1:
        optimizer_name.check_optimizer(optimizer, chosen)
    optimizer_name.check_sharded_optimizer(optimizer, projections(config), mesh.fsdp * mesh.tp, mesh.tp)
    neighbours = min(mesh.gpus, hardware.get_interconnect(cluster.interconnect).node)
    parameters, matrices = trained_parameters(config, optimizer, chosen, mesh)
    memory = HOST_MEMORY.value * 1e12 / neighbours
    return OptimizerPlan(
        model=model,
        recipe=chosen,
        optimizer=optimizer,
        gpu=card,
        mesh=mesh,
        neighbours=neighbours,
        cores=cores,
        placements=[place(w, parameters, card, cores=cores / neighbours, memory=memory) for w in PLACEMENTS],
        matrices=matrices,
    )


def check_optimizer(optimizer: str) -> None:
    """Raise a ValueError if the cost model does not have an optimizer."""
    chosen = optimizer_name.find_optimizer(optimizer)
    if chosen.preset is None or chosen.preset.name not in CPU_STEPS:
        why = (
            "is torch's, which has no states in host memory"
            if chosen.preset is None
            else "has an unknown time on a CPU"
        )
        raise ValueError(f"optimizer {optimizer} {why}; give --optimizer one of {', '.join(CPU_STEPS)}")
    if chosen.rule == "muon":
        raise ValueError(
            f"optimizer {optimizer} orthogonalizes matrices, and its time on a CPU is not known; give --optimizer "
            f"{chosen.preset.name}"
        )


def trained_parameters(
    config: ModelConfig, optimizer: str, recipe: Recipe, mesh: Mesh
) -> tuple[list[TrainedParameter], tuple[float, float]]:
    """Return a rank's parameters in the optimizer's order, and the bytes of a parameter of the layers' matrices."""
    codes, vocab = optimizer_name.allows_codes(1, mesh.tp), config.vocab or VOCAB
    layers, ranks = projections(config), mesh.fsdp * mesh.tp * mesh.pp
    groups: dict[str, list[TrainedParameter]] = {"matrices": [], "embedding": [], "vectors": []}
    elements = whole = here = 0.0
    for name, shape, preset, size in footprints(config, vocab, optimizer, recipe, "bfloat16", codes):
        number = math.prod(shape)
        kind = "vectors" if len(shape) < 2 else "embedding" if name.startswith("embedding.") else "matrices"
        groups[kind].append(
            TrainedParameter(
                preset=preset,
                elements=number / ranks,
                weight=size.weight / ranks,
                gradient=size.gradient / ranks,
                states=size.states / ranks,
                large=number >= SMALL,
            )
        )
        if name.removesuffix(".weight") in layers:
            elements, whole, here = elements + number, whole + size.total, here + size.weight + size.gradient
    return [p for group in groups.values() for p in group], (whole / elements, here / elements)


# ---- output ----


def title(planned: OptimizerPlan) -> str:
    mesh = planned.mesh
    axes = {"fsdp": mesh.fsdp, "tp": mesh.tp, "pp": mesh.pp, "replicas": mesh.replicas}
    used = " x ".join(f"{name} {ranks}" for name, ranks in axes.items() if ranks > 1)
    ranks = f", a rank of {mesh.gpus} ({used})" if used else ""
    return (
        f"{planned.model}, {planned.recipe}, --optimizer {planned.optimizer}, {planned.gpu.about}{ranks}: weights, "
        "gradients and optimizer states; predicted, not measured"
    )


def columns(_: OptimizerPlan) -> tuple[str, ...]:
    """Return the columns of the table."""
    return "optimizer states", *LABELS.values()


def cells(planned: OptimizerPlan) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table as text: memory, bytes and seconds of each placement."""
    every, neighbours = planned.placements, planned.neighbours
    yield "memory of the GPU, GB", *(f"{one.device / 1e9:.2f}" for one in every)
    yield "host memory, GB", *(f"{one.host / 1e9:.2f}" for one in every)
    if neighbours > 1:
        yield f"of the {neighbours} ranks of a node", *(f"{neighbours * one.host / 1e9:.2f}" for one in every)
    yield "copied to the host, GB", *(f"{one.to_host / 1e9:.2f}" for one in every)
    yield "copied to the GPU, GB", *(f"{one.to_device / 1e9:.2f}" for one in every)
    yield "copies, s", *(f"{one.copying:.3f}" for one in every)
    yield "steps on GPU or CPU, s", *(f"{one.stepping:.3f}" for one in every)
    yield "a step gets longer by, s", *(f"{planned.longer(one):.3f}" for one in every)


def notes(planned: OptimizerPlan) -> list[str]:
    """Return sentences that interpret the table."""
    whole, here = planned.matrices
    on_gpu, *others = planned.placements
    gains = (
        f"{LABELS[one.where]} frees {(on_gpu.device - one.device) / 1e9:.3g} GB of the GPU and makes a step "
        f"{planned.longer(one):.3g} s longer"
        for one in others
    )
    ranks = planned.neighbours
    threads = [
        f"torchrun gives a rank one CPU thread: pass quaver train --threads {max(1, planned.cores // ranks)} as well."
    ]
    return [
        f"{'; '.join(gains)}.",
        f"A parameter of the layers' matrices takes {whole:.2f} bytes, {here:.2f} of them on the GPU if states are in "
        "host memory. Activations are not included; buffers of copies are.",
        "Copies of one piece overlap the step of another, so the longer of both counts. With "
        "optimizer.step_in_backward() the CPU steps during backward, which hides up to the time of backward.",
        f"The time on the CPU is an estimate: each of {planned.cores} cores of a node"
        f"{f', which {ranks} ranks share,' if ranks > 1 else ''} is as fast as the measured one, up to "
        f"{HOST_MEMORY.value * 1e3:,.0f} GB/s of host memory ({HOST_MEMORY.source}).",
        f"Measured for a parameter: {CPU_STEPS[preset_of(planned)].source}.",
        *(threads if ranks > 1 else []),
    ]


def preset_of(planned: OptimizerPlan) -> str:
    """Return the name of the optimizer's preset."""
    preset = optimizer_name.find_optimizer(planned.optimizer).preset
    assert preset is not None
    return preset.name


def as_json(planned: OptimizerPlan) -> dict[str, Any]:
    """Return the plan as JSON data in seconds and bytes, with the rates and their sources."""
    rates = {
        "copy": (planned.gpu.copy, "TB/s"),
        "host": (planned.gpu.host, "TB/s"),
        "host_memory": (HOST_MEMORY, "TB/s"),
        **{f"cpu_{name}": (rate, "10^9 parameters a second of a core") for name, rate in CPU_STEPS.items()},
    }
    mesh = planned.mesh
    return {
        "model": planned.model,
        "recipe": str(planned.recipe),
        "optimizer": planned.optimizer,
        "gpu": planned.gpu.name,
        "mesh": {name: getattr(mesh, name) for name in ("tp", "cp", "fsdp", "replicas", "pp", "ep", "gpus")},
        "ranks_of_a_node": planned.neighbours,
        "host_cores": planned.cores,
        "placements": [
            {**one._asdict(), "longer": planned.longer(one), "node": planned.neighbours * one.host}
            for one in planned.placements
        ],
        "rates": {
            name: {"value": rate.value, "unit": unit, "how": rate.how, "source": rate.source}
            for name, (rate, unit) in rates.items()
        },
    }
