"""Two processes on gloo: layers in parts give the losses of one process that splits the same sums, bit for bit."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import quaver.torch as qt
from quaver import recipes
from quaver.core.spec import Recipe
from quaver.torch.parallel import Column, Row
from tests import two_ranks
from tests.close import assert_bitwise
from tests.torch.parallel.tensor.split import SplitLinear, tokens
from tests.two_ranks import RANKS

LOSSES = 20


def mesh() -> Any:
    return init_device_mesh("cpu", (RANKS,))


def block_of(recipe: Recipe | None) -> int:
    """The largest block that has an end: each rank gets one at least."""
    specs = [] if recipe is None else [spec for spec in recipe.operands().values() if spec is not None]
    return max([32, *(side for spec in specs for side in spec.block if side is not None)])


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return y


def net(recipe: Recipe | None, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    model = Net(block_of(recipe)).to(dtype)
    qt.convert(model, "bf16" if recipe is None else recipe)
    return model


def batch(step: int, block: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Two sequences of two blocks, of another magnitude at each step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 2 * block, block, generator=generator).to(dtype) * (1 + step % 3)


def split(model: Net, recipe: Recipe | None, sequence: bool) -> Net:
    """The same model as one process computes it in the ranks' order."""
    model.up = SplitLinear(model.up, recipe, RANKS, True, sequence)  # type: ignore[assignment]
    model.down = SplitLinear(model.down, recipe, RANKS, False, sequence)  # type: ignore[assignment]
    return model


def part(p: Tensor, placement: Any, rank: int) -> Tensor:
    return p.chunk(RANKS, placement.dim)[rank] if placement.is_shard() else p


def run(name: str, sequence: bool, dtype: torch.dtype, steps: int, rank: int) -> None:
    recipe = None if name == "none" else recipes.get(name)
    says = f"{name} {'sequence' if sequence else 'replicated'} {dtype}"
    parallel, whole, plain = net(recipe, dtype), split(net(recipe, dtype), recipe, sequence), net(recipe, dtype)
    plan = {"up": Column(sequence=sequence), "down": Row(sequence=sequence)}
    parallelize_module(parallel, mesh(), plan)
    nets = parallel, whole, plain
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2, foreach=False) for each in nets[:2]]
    for step in range(steps):
        x = batch(step, block_of(recipe), dtype)
        inputs = [x.clone().requires_grad_() for _ in nets]
        losses = []
        for each, given in zip(nets[: 3 if step == 0 else 2], inputs, strict=False):
            y = each(tokens(given, rank, RANKS) if sequence and each is parallel else given)
            if sequence and each is parallel:
                loss = y.float().square().sum()
            elif sequence:
                loss = sum(tokens(y, i, RANKS).float().square().sum() for i in range(RANKS))
            else:
                loss = y.float().square().sum()
            (loss / x.numel()).backward()
            losses.append(loss.detach())
        if sequence:
            dist.all_reduce(losses[0])
        assert_bitwise(losses[0], losses[1], f"{says}: loss {step}")
        if step == 0:
            gap = (losses[0] - losses[2]).abs() / losses[2]
            assert gap <= (1e-6 if dtype is torch.float32 else 1e-3), f"{says}: {gap} of one process's loss"
        if step in (0, steps - 1):
            for (what, p), q in zip(parallel.named_parameters(), whole.parameters(), strict=True):
                assert p.grad is not None and q.grad is not None
                of_rank = part(q.grad, p.placements[0], rank)
                assert_bitwise(p.grad.to_local(), of_rank, f"{says}: gradient of {what} in step {step}")
            theirs = tokens(inputs[1].grad, rank, RANKS) if sequence else inputs[1].grad
            ours = tokens(inputs[0].grad, rank, RANKS) if sequence else inputs[0].grad
            assert_bitwise(ours, theirs, f"{says}: gradient of the input in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for layer in (whole.up, whole.down):
            layer.roll()


NAMES = ["none", *recipes.RECIPES]


def every_recipe_with_tokens_in_parts(rank: int) -> None:
    for name in NAMES:
        run(name, True, torch.float32, LOSSES, rank)


def every_recipe_with_all_tokens_on_each_rank(rank: int) -> None:
    for name in NAMES:
        run(name, False, torch.float32, 3, rank)


def every_recipe_in_bf16(rank: int) -> None:
    for name in NAMES:
        for sequence in (False, True):
            run(name, sequence, torch.bfloat16, 2, rank)


CASES = [
    every_recipe_with_tokens_in_parts,
    every_recipe_with_all_tokens_on_each_rank,
    every_recipe_in_bf16,
]


def test_two_ranks_are_one_process_that_splits_the_same_sums(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


if __name__ == "__main__":
    two_ranks.main(CASES)
