"""Tensor and sequence parallelism in MXFP8 on two ranks, which send tokens as codes.

torchrun --nproc-per-node 2 examples/tensor_parallel.py

It runs on CPUs. Started without torchrun, it calls torchrun itself.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import quaver.torch as qt
from quaver.torch.parallel import ColwiseParallel, HeadParallel, RowwiseParallel, SequenceParallel

TOKENS, WIDTH = 128, 128


def train() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    rank, ranks = mesh.get_local_rank(), mesh.size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, WIDTH),
        qt.TransformerLayer(
            WIDTH,
            4,
            hidden=256,
            activation="swiglu",
            normalization="RMSNorm",
            mask_type="causal",
            fused=False,
            recipe="mxfp8",
        ),
        nn.Linear(WIDTH, 256),
    )
    parallelize_module(
        model,
        mesh,
        {
            # Every rank gets all token ids, and returns the embeddings of its own tokens.
            "0": SequenceParallel(replicated_input=True),
            "1.attention.norm": SequenceParallel(),
            "1.attention": HeadParallel(sequence=True),
            "1.mlp.norm": SequenceParallel(),
            "1.mlp.gate_proj": ColwiseParallel(sequence=True),
            "1.mlp.up_proj": ColwiseParallel(sequence=True),
            "1.mlp.down_proj": RowwiseParallel(sequence=True),
            "2": SequenceParallel(),
        },
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    # The target is the next byte of a repeating text.
    text = torch.arange(2 * TOKENS + 1).mul(7).remainder(50)
    inputs, labels = text[:-1].view(2, TOKENS), text[1:].view(2, TOKENS)
    for step in range(20):
        logits = model(inputs)
        # The model returns this rank's tokens of every sequence. Losses and gradients are summed over the ranks.
        own = labels.chunk(ranks, 1)[rank]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum") / labels.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {total:.3f}", flush=True)
    if rank == 0:
        weight = model[1].mlp.up_proj.weight
        print(f"up_proj: {tuple(weight.to_local().shape)} of {tuple(weight.shape)} on this rank, {weight.placements}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train()
        # Without it, gloo's threads may still have tensors when Python exits, and the process may abort.
        dist.barrier()
        dist.destroy_process_group()
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
