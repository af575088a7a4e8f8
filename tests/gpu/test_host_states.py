"""On a card: optimizer states in host memory step to the same bits, with real streams and pinned memory."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver.torch import optim
from quaver.torch.optim import host, layout
from tests.close import assert_bitwise

pytestmark = pytest.mark.gpu
LAYERS, WIDTH = 12, 1024


def trained(offload: str | None, preset: str, in_backward: bool) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(LAYERS)]
    model = nn.Sequential(*layers, nn.LayerNorm(WIDTH, device="cuda"))
    qt.convert(model, "tensorwise")
    if preset == "lean":
        qt.quantize_weights(model, "tensorwise")
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, preset=preset, offload=offload)
    if in_backward:
        optimizer.step_in_backward(outstanding_bytes=1 << 21, max_norm=1.0)
    for step in range(4):
        x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
        model(x).square().mean().backward()
        if not in_backward:
            optimizer.clip_grad_norm_(1e-3)
        optimizer.step()
        optimizer.zero_grad()
        # What a checkpoint saves right after the step.
        states = copy.deepcopy(optimizer.state_dict()["state"])
    tensors = {f"{key} {name}": value.cpu() for key, state in states.items() for name, value in state.items()}
    return tensors | {name: layout.local(p).detach().cpu() for name, p in model.named_parameters()}, optimizer


@pytest.mark.parametrize("offload", ["cpu", "stream"])
@pytest.mark.parametrize(("preset", "in_backward"), [("lean", False), ("lean", True), ("float32", False)])
def test_bits_equal_those_of_states_on_the_device(
    offload: str, preset: str, in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "PIECE_BYTES", {"cpu": 1 << 22, "stream": 1 << 22})
    ours, optimizer = trained(offload, preset, in_backward)
    theirs, _ = trained(None, preset, in_backward)
    for name, value in theirs.items():
        assert_bitwise(ours[name], value, name)
    placed = [t for p, state in optimizer.state.items() if p.numel() >= WIDTH**2 for t in state.values() if t.dim()]
    assert placed and all(t.is_cpu and (offload == "cpu" or t.is_pinned()) for t in placed)


def test_a_step_in_a_cuda_graph_raises() -> None:
    model = nn.Linear(WIDTH, WIDTH, device="cuda")
    optimizer = optim.AdamW(model.parameters(), offload="stream")
    model(torch.randn(8, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="steps inside a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
