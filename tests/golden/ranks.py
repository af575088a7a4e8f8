"""What each of two ranks runs: `tests.golden.cases.ranks` starts this module, and reads the files that it writes."""

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor.parallel import parallelize_module

import quaver.torch as qt
from quaver import recipes
from quaver.torch import optim
from tests import two_ranks
from tests.golden.cases.linear import fill
from tests.golden.checkpoints.cases import DELAYED, FOLDER, net, unpack
from tests.golden.inputs import values
from tests.golden.names import find, parallel
from tests.golden.record import Record

Case = Callable[[Record, int], None]
RANKS = 2
STEPS = 2
CASES: dict[str, Case] = {}
#: A history of four steps where one is 1024 long by default.
RECIPES: dict[str, Any] = {name: DELAYED if name == "delayed" else recipes.get(name) for name in recipes.RECIPES}


def add(name: str, case: Callable[..., None], *arguments: Any) -> None:
    CASES[name] = partial(case, *arguments)


def mesh(name: str = "tp") -> DeviceMesh:
    return _meshes.setdefault(name, init_device_mesh("cpu", (RANKS,), mesh_dim_names=(name,)))


_meshes: dict[str, DeviceMesh] = {}


def steps(record: Record, model: nn.Module, recipe: str, x_of: Callable[[int], Tensor], optimizer: Any = None) -> None:
    """Two steps: outputs, gradients, and the state dict after them."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=2.0**-6)
    for step in range(STEPS):
        x = x_of(step)
        with qt.autocast(RECIPES[recipe]):
            y = model(x)
        y = y[0] if isinstance(y, tuple) else y
        (y.float() * torch.from_numpy(values(*y.shape, seed=60 + step))).sum().backward()
        record.sum(**{f"y{step}": y})
        if step == 0:
            record.sum(**{f"grad of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    record.keys(state)
    record.sum(**{f"after {name}": value for name, value in state.items() if isinstance(value, Tensor)})


def inputs(*shape: int, rank: int = 0) -> Callable[[int], Tensor]:
    return lambda step: torch.from_numpy(values(*shape, seed=10 * rank + step))


def mlp(width: int = 64, hidden: int = 256) -> nn.Module:
    model = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width), nn.LayerNorm(width))
    fill(model)
    return model


def fsdp(recipe: str, gather: bool, ours: bool, record: Record, rank: int) -> None:
    model = mlp()
    qt.convert(model, RECIPES[recipe])
    if gather:
        find("quaver.torch.parallel", "gather_quantized")(model)
    for part in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(part, mesh=mesh("dp"))
    optimizer = optim.AdamW(model.parameters(), lr=2.0**-8, preset="lean") if ours else None
    steps(record, model, recipe, inputs(16, 64, rank=rank), optimizer)
    if optimizer is not None:
        record.keys(optimizer.state_dict(), "keys of the optimizer")


for name in ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"):
    add(f"fully_shard, gather_quantized, {name}", fsdp, name, True, False)
for name in ("bf16", "delayed", "mxfp8"):
    add(f"fully_shard, {name}", fsdp, name, False, False)
for name in ("tensorwise", "mxfp8"):
    add(f"fully_shard, gather_quantized, lean, {name}", fsdp, name, True, True)


def sharded_codes(recipe: str, record: Record, rank: int) -> None:
    """Frozen weights that exist only as codes."""
    with qt.quantized_init(recipe):
        layer = qt.Linear(64, 128, bias=False, recipe=recipe)
    layer.set_weight(torch.from_numpy(values(128, 64, seed=3)))
    layer.weight.requires_grad_(False)
    model = nn.Sequential(nn.Linear(64, 64), layer)
    fill(model[0])
    find("quaver.torch.parallel", "gather_quantized")(model)
    fully_shard(model, mesh=mesh("dp"))
    y = model(torch.from_numpy(values(16, 64, seed=rank)))
    y.backward(torch.from_numpy(values(16, 128, seed=60)))
    record.sum(y=y, **{"grad": model[0].weight.grad})  # type: ignore[dict-item]
    record.keys(model.state_dict())


for name in ("tensorwise", "mxfp8", "nvfp4"):
    add(f"fully_shard, quantized_init, {name}", sharded_codes, name)


def tensor_parallel(recipe: str, sequence: bool, record: Record, rank: int) -> None:
    model = mlp(256, 256)
    qt.convert(model, RECIPES[recipe])
    plan = {
        "0": parallel("ColwiseParallel", sequence=sequence),
        "2": parallel("RowwiseParallel", sequence=sequence),
    }
    if sequence:
        plan["3"] = parallel("SequenceParallel")
    parallelize_module(model, mesh(), plan)
    steps(record, model, recipe, inputs(2, 128, 256, rank=rank if sequence else 0))


for number, name in enumerate(recipes.RECIPES):
    if name not in ("mxfp4", "mxfp6"):
        add(f"tensor parallel, {name}", tensor_parallel, name, False)
        if number % 2 or name in ("mxfp8", "delayed"):
            add(f"sequence parallel, {name}", tensor_parallel, name, True)


def layer_of_heads(recipe: str, sequence: bool, record: Record, rank: int) -> None:
    options: Any = {"normalization": "RMSNorm", "activation": "swiglu", "mask_type": "causal", "fused": False}
    model = nn.Sequential(qt.TransformerLayer(64, 4, 128, **options), nn.LayerNorm(64))
    fill(model)
    qt.convert(model, RECIPES[recipe])
    plan = {"0.attention": parallel("HeadParallel", sequence=sequence)}
    plan |= {f"0.mlp.{name}": parallel("ColwiseParallel", sequence=sequence) for name in ("gate_proj", "up_proj")}
    plan |= {"0.mlp.down_proj": parallel("RowwiseParallel", sequence=sequence)}
    if sequence:
        plan |= {f"0.{name}.norm": parallel("SequenceParallel") for name in ("attention", "mlp")}
        plan["1"] = parallel("SequenceParallel", gather_output=True)
    parallelize_module(model, mesh(), plan)
    steps(record, model, recipe, inputs(2, 64, 64, rank=rank if sequence else 0))


for name in ("tensorwise", "mxfp8"):
    add(f"heads, {name}", layer_of_heads, name, False)
    add(f"heads, sequence, {name}", layer_of_heads, name, True)


def vocabulary(recipe: str, sequence: bool, record: Record, rank: int) -> None:
    model: Any = nn.ModuleDict({"embed": nn.Embedding(64, 64), "head": nn.Linear(64, 64, bias=False)})
    fill(model)
    qt.convert(model, RECIPES[recipe], head=True)
    plan = {
        "embed": parallel("VocabParallel", sequence=sequence),
        "head": parallel("ColwiseParallel", sequence=sequence),
    }
    parallelize_module(model, mesh(), plan)
    ids = torch.from_numpy(abs(values(2, 64, seed=1)) * 2**9).long() % 64
    with qt.autocast(RECIPES[recipe]):
        logits = model["head"](model["embed"](ids))
    loss = find("quaver.torch.parallel", "cross_entropy")(logits, ids.roll(1), mesh())
    loss.backward()
    record.sum(loss=loss, logits=logits)
    record.sum(**{f"grad of {name}": p.grad for name, p in model.named_parameters()})
    record.keys(model.state_dict())


for name in ("bf16", "tensorwise", "mxfp8"):
    add(f"vocabulary, {name}", vocabulary, name, False)
add("vocabulary, sequence, mxfp8", vocabulary, "mxfp8", True)


def context(how: str, recipe: str, record: Record, rank: int) -> None:
    options: dict[str, Any] = {"normalization": "RMSNorm", "mask_type": "causal", "groups": 2, "bias": False}
    model = nn.Sequential(*[qt.TransformerLayer(64, 4, 96, rope=qt.RotaryEmbedding(16), **options) for _ in range(2)])
    fill(model)
    qt.convert(model, RECIPES[recipe])
    across = find("quaver.torch.parallel", "context_parallel")(model, mesh("cp"), how=how)
    x = across.cut(torch.from_numpy(values(2, 64, 64, seed=1)))
    with qt.autocast(RECIPES[recipe]):
        y = model(x)
    y.backward(across.cut(torch.from_numpy(values(2, 64, 64, seed=2))))
    across.sum_gradients(model)
    record.exact(part=x)
    record.sum(y=across.join(y.detach()), **{f"grad of {name}": p.grad for name, p in model.named_parameters()})  # type: ignore[arg-type]


for how, name in (("ring", "bf16"), ("ring", "mxfp8"), ("gather", "tensorwise"), ("all_to_all", "delayed")):
    add(f"context parallel {how}, {name}", context, how, name)


def experts(recipe: str, record: Record, rank: int) -> None:
    mixture = find("quaver.torch", "MixtureConfig")(experts=4, k=2, scores="sigmoid", balance_bias=True, shared=32)
    model = nn.Sequential(qt.MoE(64, 64, mixture, normalization="RMSNorm"))
    fill(model)
    qt.convert(model, RECIPES[recipe])
    parallelize_module(model, mesh("ep"), {"0": parallel("ExpertParallel")})
    steps(record, model, recipe, inputs(20 + 7 * rank, 64, rank=rank))


for name in ("bf16", "tensorwise", "mxfp8", "nvfp4"):
    add(f"expert parallel, {name}", experts, name)


def exchanged(recipe: str, record: Record, rank: int) -> None:
    """Rows that travel as codes: exact."""
    splits = find("quaver.torch.parallel", "AllToAllSplits").even(8)
    spec = recipes.get(recipe).fprop.a
    x = torch.from_numpy(values(16, 96, seed=rank)).requires_grad_()
    y = find("quaver.torch.parallel", "all_to_all")(x, splits, spec)
    y.backward(torch.from_numpy(values(*y.shape, seed=60 + rank)))
    record.exact(y=y, dx=x.grad)


for name in ("bf16", "tensorwise", "rowwise", "blockwise", "mxfp8", "mxfp4"):
    add(f"exchange, {name}", exchanged, name)


def pipeline(schedule: Any, recipe: str, record: Record, rank: int) -> None:
    per_rank = 1 if schedule is Schedule1F1B else 2
    whole = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(RANKS * per_rank)])
    fill(whole)
    qt.convert(whole, RECIPES[recipe])
    of_rank = [rank + RANKS * number for number in range(per_rank)]
    stage = find("quaver.torch.parallel", "pipeline_stage")
    stages = [stage(whole[i], i, len(whole), torch.empty(8, 64)) for i in of_rank]
    run = schedule(
        stages[0] if per_rank == 1 else stages, n_microbatches=4, loss_fn=lambda y, target: (y - target).square().mean()
    )
    for step in range(STEPS):
        x, target = (torch.from_numpy(values(32, 64, seed=seed + step)) for seed in (0, 50))
        losses: list[Tensor] = []
        with qt.autocast(RECIPES[recipe]):
            if rank == 0:
                run.step(x, **({"target": target} if rank == RANKS - 1 else {}))
            else:
                run.step(target=target, losses=losses)
        if losses:
            record.sum(**{f"losses {step}": torch.stack(losses)})
    for i in of_rank:
        record.sum(**{f"grad of {i} {name}": p.grad for name, p in whole[i].named_parameters()})
        record.keys(whole[i].state_dict(), f"keys of {i}")
        for name, buffer in whole[i].named_buffers():
            record.sum(**{f"buffer of {i} {name}": buffer})


for name in ("bf16", "delayed", "mxfp8", "nvfp4"):
    add(f"pipeline, 1F1B, {name}", pipeline, Schedule1F1B, name)
add("pipeline, zero bubble, mxfp8", pipeline, ScheduleInterleavedZeroBubble, "mxfp8")


def gradients(record: Record, rank: int) -> None:
    """Gradients that DistributedDataParallel averages as codes."""
    model = mlp()
    qt.convert(model, "mxfp8")
    across = nn.parallel.DistributedDataParallel(model)
    find("quaver.torch.parallel", "quantize_gradients")(across)
    steps(record, across, "mxfp8", inputs(16, 64, rank=rank))


add("quantize_gradients, mxfp8", gradients)


def sharded_net(rank: int) -> tuple[nn.Module, Any]:
    model = net()
    find("quaver.torch.parallel", "gather_quantized")(model)
    for part in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(part, mesh=mesh("dp"))
    return model, optim.AdamW(model.parameters(), lr=2.0**-8, preset="exact")


def saved_and_loaded(record: Record, rank: int) -> None:
    """A checkpoint that two ranks write and load, and the next step of both runs."""
    names = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(names)
    model, optimizer = sharded_net(rank)
    steps(record, model, "delayed", inputs(16, 32, rank=rank), optimizer)
    folder = Path(names[0]) / "saved"
    find("quaver.torch.parallel", "Checkpoint")(model, optimizer).save(folder)
    other, loaded = sharded_net(rank)
    find("quaver.torch.parallel", "Checkpoint")(other, loaded).load(folder)
    for name, value in other.state_dict().items():
        record.sum(**{f"loaded {name}": value})
    with qt.autocast(DELAYED):
        record.sum(**{"next y": other(torch.from_numpy(values(16, 32, seed=rank)))})


def loaded_fixture(name: str, record: Record, rank: int) -> None:
    """Two ranks load what one or two ranks of an earlier commit wrote."""
    model, optimizer = sharded_net(rank)
    checkpoint = find("quaver.torch.parallel", "Checkpoint")(model, optimizer)
    names = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(names)
    if rank == 0:
        unpack(FOLDER / name, names[0])
    dist.barrier()
    checkpoint.load(Path(names[0]) / "saved")
    record.exact(**{key: value for key, value in checkpoint.state_dict().items() if isinstance(value, Tensor)})


for name in ("dcp-one.tar.xz", "dcp-two.tar.xz"):
    add(f"checkpoint, {name}", loaded_fixture, name)
add("checkpoint, saved and loaded", saved_and_loaded)


def main(rank: int) -> None:
    folder = two_ranks.folder()
    for number, name in enumerate(json.loads((folder / "cases.json").read_text())):
        record = Record()
        torch.manual_seed(0)
        dist.barrier()
        CASES[name](record, rank)
        for kind, values_of in (("fixed", record.fixed), ("sums", record.sums)):
            plain = {key.removeprefix(": "): value for key, value in values_of.items()}
            np.savez(folder / f"{number}.{rank}.{kind}.npz", **plain)  # type: ignore[arg-type]
        (folder / f"{number}.{rank}.done").touch()


if __name__ == "__main__":
    two_ranks.main([main])
