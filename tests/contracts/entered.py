"""Which files of the library a call enters: `python -m tests.contracts.entered` prints them.

What a reader of a warm forward, of a conversion, of an optimizer's first step or of FSDP has to open. Threads of
autograd's are not followed.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import quaver.torch as qt
from quaver.torch import optim
from quaver.torch.parallel import gather_quantized

ROOT = Path(qt.__file__).parents[1]


def entered(call: Callable[[], Any]) -> list[str]:
    """The files of src/quaver in which a function ran during a call, by their paths there."""
    names = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            names.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return sorted(str(Path(name).relative_to(ROOT)) for name in names if name.startswith(str(ROOT)))


def linear(recipe: str) -> list[str]:
    """The files of a warm forward of a Linear."""
    layer, x = qt.Linear(64, 64, recipe=recipe), torch.randn(64, 64, requires_grad=True)
    for _ in range(2):
        layer(x).sum().backward()
    return entered(lambda: layer(x))


def transformer(recipe: str) -> list[str]:
    """The files of a warm forward of a Transformer layer with Llama's options."""
    layer = qt.TransformerLayer(
        64, 4, 128, normalization="RMSNorm", activation="swiglu", bias=False, mask_type="causal", recipe=recipe
    )
    x = torch.randn(2, 32, 64, requires_grad=True)
    for _ in range(2):
        layer(x).sum().backward()
    return entered(lambda: layer(x))


def blocks(recipe: str) -> list[str]:
    """The files of `convert(blocks=True)` on a Llama of transformers, the first call."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=96))
    return entered(lambda: qt.convert(model, recipe, blocks=True))


def optimizer_step(preset: str) -> list[str]:
    """The files of the first step of AdamW for one matrix, without compilation."""
    layer = torch.nn.Linear(1024, 1024, bias=False)
    optimizer = optim.AdamW(layer.parameters(), lr=1e-3, preset=preset)
    layer(torch.randn(4, 1024)).square().mean().backward()
    return entered(optimizer.step)


def gathered(recipe: str) -> list[str]:
    """The files of `gather_quantized`, `fully_shard` and the first forward and backward of two layers, on one rank."""
    first = not dist.is_initialized()
    if first:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    qt.convert(layers, recipe)
    x = torch.randn(64, 64)

    def step() -> None:
        gather_quantized(layers)
        for part in (*layers, layers):
            fully_shard(part)
        layers(x).sum().backward()

    try:
        return entered(step)
    finally:
        if first:
            dist.destroy_process_group()


if __name__ == "__main__":
    for name, files in (
        ("Linear, rowwise", linear("rowwise")),
        ("TransformerLayer, mxfp8", transformer("mxfp8")),
        ("convert(blocks=True), tensorwise", blocks("tensorwise")),
        ("AdamW step, lean", optimizer_step("lean")),
        ("gather_quantized, fully_shard, a step, mxfp8", gathered("mxfp8")),
    ):
        print(f"{name}: {len(files)}", *files, sep="\n  ")
