"""fully_shard that all-gathers weights as codes: torchrun --nproc-per-node 2 examples/fsdp_gather_quantized.py

On a CPU the ranks use gloo; on GPUs they use NCCL, which has not been tested.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quaver.torch as qt
from quaver.torch.parallel import gather_quantized

if "RANK" not in os.environ:
    raise SystemExit("start it by: torchrun --nproc-per-node 2 examples/fsdp_gather_quantized.py")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
kind = "cuda" if torch.cuda.is_available() else "cpu"
device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
if kind == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if kind == "cuda" else "gloo")

# 1. The model, converted as on one GPU. All ranks begin with the same weights.
torch.manual_seed(0)
model = nn.Sequential(*(qt.TransformerLayer(64, 4, 128) for _ in range(2)), nn.Linear(64, 16)).to(device)
qt.convert(model, "mxfp8", skip=["2"])

# 2. The report lists the weights that are gathered as codes, and why others are not.
report = gather_quantized(model)
if rank == 0:
    print(report)

# 3. torch's own fully_shard: a unit for each layer, and the root.
mesh = init_device_mesh(kind, (world,))
for part in model:
    fully_shard(part, mesh=mesh)
fully_shard(model, mesh=mesh)

# 4. The usual loop. Each rank has its own data.
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
torch.manual_seed(1 + rank)
for step in range(20):
    x = torch.randn(4, 32, 64, device=device)
    wanted = x[..., :16].argmax(-1)
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), wanted.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 19 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

# 5. The state dict has only torch's classes, so torch.distributed.checkpoint can save it too.
weight = model.state_dict()["0.mlp.down_proj.weight"]
if rank == 0:
    print(f"{type(weight).__name__} of {weight.dtype}, {tuple(weight.to_local().shape)} of {tuple(weight.shape)} here")
dist.barrier()  # without it, gloo's threads may still have tensors when Python exits, and the process may abort
dist.destroy_process_group()
