"""Parameters that are no matrices: stacks under Muon, weights of convolutions, columns."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver.torch import optim
from quaver.torch.optim import codes
from tests.pairs import case_name, pairs


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained(optimizer: optim.Optimizer, parameters: list[nn.Parameter], gradients: list[list[Tensor]]) -> None:
    for of_step in gradients:
        for p, gradient in zip(parameters, of_step, strict=True):
            if p.grad_dtype is None or p.grad_dtype == gradient.dtype:
                p.grad = gradient.clone()
            else:
                p.grad = gradient.to(p.grad_dtype)
            for hook in (p._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
                hook(p)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("preset", ["float32", "lean"])
def test_muon_steps_each_matrix_of_a_stack_separately(preset: str, nesterov: bool) -> None:
    start = drawn((3, 70, 96), 0)
    stack, alone = nn.Parameter(start.clone()), [nn.Parameter(one.clone()) for one in start]
    gradients = [drawn((3, 70, 96), 1 + i) for i in range(4)]
    options = {"lr": 1e-2, "nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw"}
    trained(optim.Muon([stack], preset=preset, **options), [stack], [[g] for g in gradients])
    trained(optim.Muon(alone, preset="float32", **options), alone, [[*g.unbind()] for g in gradients])
    want = torch.stack([*alone]) - start
    if preset == "float32":
        assert torch.equal(stack, torch.stack([*alone]))
    else:
        assert float((stack - start - want).detach().norm() / want.detach().norm()) < 0.1


def test_muon_steps_stacks_of_codes() -> None:
    torch.manual_seed(0)
    layer = qt.GroupedLinear(3, 128, 64, bias=False)
    qt.quantize_weights(nn.Sequential(layer), "tensorwise")
    p: nn.Parameter = layer.weight
    optimizer = optim.Muon([p], lr=1.0, weight_decay=0.0, preset="balanced")
    before = qt.plain_state_dict(layer)["weight"].float().view(-1, 128)
    reference = [nn.Parameter(one.clone()) for one in before.view(3, 64, 128)]
    theirs = optim.Muon(reference, lr=1.0, weight_decay=0.0, preset="float32")
    for step in range(3):
        gradient = drawn((3, 64, 128), step)
        p.grad = gradient.to(p.grad_dtype or p.dtype)
        optimizer.step()
        trained(theirs, reference, [[*gradient.unbind()]])
    moved = qt.plain_state_dict(layer)["weight"].float().view(-1, 128) - before
    want = torch.cat([*reference]).detach() - before
    assert float((moved - want).norm() / want.norm()) < 0.1


SHAPES = {(64, 64, 3, 3): (64, 576), (8192, 1): (1, 8192), (128, 96, 3): (128, 288), (96, 8, 5, 5, 5): (768, 125)}


@pytest.mark.parametrize(
    ("dtype", "shape", "preset"),
    pairs((torch.float32, torch.bfloat16), SHAPES, ("exact", "lean", "te")),
    ids=case_name,
)
def test_a_weight_of_short_rows_steps_as_the_matrix_that_it_is_flattened_to(
    dtype: torch.dtype, shape: tuple[int, ...], preset: str
) -> None:
    start = drawn(shape, 0).to(dtype)
    p, r = nn.Parameter(start.clone()), nn.Parameter(start.view(SHAPES[shape]).clone())
    made = [optim.AdamW([each], lr=1e-2, preset=preset) for each in (p, r)]
    for step in range(3):
        gradient = drawn(shape, 1 + step).to(dtype)
        for each, optimizer in zip((p, r), made, strict=True):
            trained(optimizer, [each], [[gradient.view(each.shape)]])
    assert torch.equal(p.view(r.shape), r)
    for name, value in made[1].state[r].items():
        assert torch.equal(made[0].state[p][name].flatten(), value.flatten()), name
    moment_bytes = sum(t.nbytes for name, t in made[0].state[p].items() if name.startswith("exp_avg")) / p.numel()
    assert moment_bytes <= {"exact": 4.0, "coat": 2.26, "msamp": 3.01, "te": 3.01}.get(preset, 2.07)


@pytest.mark.parametrize("shape", [(64, 64, 3, 3), (8192, 1)])
def test_states_with_blocks_of_short_rows_are_converted(shape: tuple[int, ...]) -> None:
    p = nn.Parameter(drawn(shape, 0))
    optimizer = optim.AdamW([p], preset="balanced")
    trained(optimizer, [p], [[drawn(shape, 1)]])
    saved = copy.deepcopy(optimizer.state_dict())
    state, values = saved["state"][0], {}
    for name, spec in (("exp_avg", optim.PRESETS["balanced"].first), ("exp_avg_sq", optim.PRESETS["balanced"].second)):
        # As written by an earlier release, with separate scales for each row along the last dimension.
        values[name] = drawn(shape, 2).abs()
        nearest = replace(spec, stochastic=False)
        del state[f"{name}_codes"]
        state[name], state[f"{name}_scale"] = codes.encode(values[name], nearest)
    again = optim.AdamW([p], preset="balanced")
    again.load_state_dict(saved)
    own = again.state[p]
    for name, spec in (("exp_avg", optim.PRESETS["balanced"].first), ("exp_avg_sq", optim.PRESETS["balanced"].second)):
        scale = own[f"{name}_scale"]
        assert scale.shape == optimizer.state[p][f"{name}_scale"].shape != state[f"{name}_scale"].shape
        value = codes.decode(own[f"{name}_codes"].flatten(scale.dim() - 1), scale, spec).view(shape)
        assert float((value - values[name]).norm() / values[name].norm()) < 0.03
    trained(again, [p], [[drawn(shape, 3)]])
