"""Experts on several ranks: losses, gradients and weights are those of one process that computes the same sums."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import quaver
import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import QuantSpec
from quaver.torch.nn.moe.permutation import moves
from quaver.torch.parallel import CommCounter, ExpertParallel, HeadParallel
from tests import two_ranks
from tests.close import assert_bitwise, assert_close

DIM, EXPERTS = 32, 8
#: Number of compared losses, in the quick and in the slow tests.
FEW, MANY = 2, 20
STEPS = {name: MANY for name, build in recipes.RECIPES.items() if build().delayed is None}
MIXTURE = qt.MixtureConfig(experts=EXPERTS, k=2, scores="sigmoid", balance_bias=True, shared=32, shared_gate=True)
WIRE = QuantSpec(quaver.E4M3, (1, 32), "e8m0")


def steps() -> int:
    return MANY if (two_ranks.folder() / "many").exists() else FEW


class Net(nn.Module):
    """Two residual mixtures of experts."""

    def __init__(self, codes_alone: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        mixture = replace(MIXTURE, codes_alone=codes_alone)
        self.blocks = nn.ModuleList(qt.MoE(DIM, 32, mixture, normalization="RMSNorm") for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def chunks(ranks: int, step: int) -> list[Tensor]:
    """Numbers of tokens of each rank; in the third step the first rank has none."""
    generator = torch.Generator().manual_seed(step)
    sizes = [0 if step == 2 and rank == 0 else 20 + 7 * rank for rank in range(ranks)]
    return [torch.randn(size, DIM, generator=generator) for size in sizes]


def through(x: Tensor, way: Any) -> Tensor:
    """Apply the rounding of dispatch to rows, and to their gradients."""

    class Wire(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return rounded(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return rounded(g)

    def rounded(x: Tensor) -> Tensor:
        if isinstance(way, QuantSpec):
            return qt.quantize(x.detach(), way).dequantize().to(x.dtype) if len(x) else x.clone()
        return x.to(way).to(x.dtype)

    y: Tensor = Wire.apply(x)
    return y


class Together:
    """One process with the tokens of all ranks: dense layers rank by rank, experts with all tokens at once."""

    def __init__(self, net: Net, ranks: int, combine: Any = None) -> None:
        self.nets = [net, *(copy.deepcopy(net) for _ in range(ranks - 1))]
        for other in self.nets[1:]:
            for block, first in zip(other.blocks, net.blocks, strict=True):
                block.experts = first.experts
        self.combine = combine

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        for number in range(2):
            blocks: list[Any] = [net.blocks[number] for net in self.nets]
            hs = [block.norm(x) for block, x in zip(blocks, xs, strict=True)]
            routings = [block.router(h) for block, h in zip(blocks, hs, strict=True)]
            y = self.experts(blocks[0].experts, torch.cat(hs), routings)
            shared = [block._shared(h) for block, h in zip(blocks, hs, strict=True)]
            parts = y.split([len(x) for x in xs])
            xs = [x + (part + z) for x, part, z in zip(xs, parts, shared, strict=True)]
        return xs

    def experts(self, experts: Any, h: Tensor, routings: list[qt.Routing]) -> Tensor:
        indices, weights = (torch.cat([r[i] for r in routings]) for i in (0, 1))
        if self.combine is None:
            y: Tensor = experts(h, indices, weights)
            return y
        # Rows that combine rounds when it sends them back.
        rows, offsets, places = qt.permute(h, indices, EXPERTS)
        first = experts.gate_up_proj(rows, offsets)
        second = experts.down_proj(qt.activate("swiglu", first), offsets)
        return qt.unpermute(through(second, self.combine), places, 2, weights)

    def step(self, xs: list[Tensor], lr: float) -> Tensor:
        total = sum(len(x) for x in xs)
        ys = self.forward(xs)
        losses = [(y - 1).square().sum() / total for y in ys]
        torch.stack(losses).sum().backward()
        dense = [dict(net.named_parameters()) for net in self.nets]
        with torch.no_grad():
            for name, p in dense[0].items():
                grads = [each[name].grad for each in (dense[:1] if ".experts." in name else dense)]
                move(p, grads, lr)
                for each in dense[1:]:
                    each[name].copy_(p)
            for each in dense:
                for p in each.values():
                    p.grad = None
        return summed([loss.detach() for loss in losses])


def summed(parts: list[Any]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def move(p: Tensor, grads: list[Any], lr: float) -> None:
    if all(g is not None for g in grads):
        p -= lr * summed(grads)


def divided(net: Net | None = None, **ways: Any) -> Net:
    """A net whose experts are sharded over the ranks."""
    net = net or Net()
    return parallelize_module(net, two_ranks.mesh(two_ranks.world()), {"blocks.*": ExpertParallel(**ways)})  # type: ignore[return-value]


def step_on_ranks(net: nn.Module, x: Tensor, total: int, lr: float) -> Tensor:
    loss = (net(x) - 1).square().sum() / total
    loss.backward()
    with torch.no_grad():
        for p in net.parameters():
            assert p.grad is not None
            if isinstance(p, DTensor):
                move(p.to_local(), [p.grad.to_local()], lr)
            else:
                move(p, two_ranks.gathered(p.grad), lr)
            p.grad = None
    return summed(two_ranks.gathered(loss.detach()))


def compared(recipe: str, lr: float = 0.5, **ways: Any) -> None:
    rank, ranks = dist.get_rank(), two_ranks.world()
    spec = recipes.get(recipe).fprop.a
    by_codes = ways.get("dispatch", "recipe") == "recipe" and moves(spec)
    net = Net(by_codes)
    # A copy draws the same noise as its original once layers are numbered.
    with torch.no_grad(), qt.autocast(recipe):
        net(chunks(ranks, 0)[0])
    one, many = Together(net, ranks, ways.get("combine")), divided(copy.deepcopy(net), **ways)
    for step in range(steps()):
        xs = chunks(ranks, step)
        with qt.autocast(recipe):
            expected = one.step(xs, lr)
        with qt.autocast(recipe):
            loss = step_on_ranks(many, xs[rank], sum(map(len, xs)), lr)
        assert_bitwise(loss, expected, f"{recipe}, {ways}, step {step}")
    whole, own = dict(one.nets[0].named_parameters()), EXPERTS // ranks
    for name, p in many.named_parameters():
        part = p.to_local() if isinstance(p, DTensor) else p
        expected = whole[name][own * rank : own * (rank + 1)] if ".experts." in name else whole[name]
        assert_bitwise(part, expected, f"{recipe}, {ways}, {name}")


def losses_and_weights_are_those_of_one_process(rank: int) -> None:
    quick = ["nvfp4"] if two_ranks.world() == 4 else ["bf16", "tensorwise", "mxfp8", "nvfp4"]
    for recipe in STEPS if steps() == MANY else quick:
        compared(recipe)


def dispatch_and_combine_formats(rank: int) -> None:
    compared("rowwise", dispatch=None)
    many = divided(combine=WIRE)
    x = chunks(two_ranks.world(), 0)[rank]
    one = Together(Net(), two_ranks.world(), WIRE)
    with torch.no_grad():
        assert_bitwise(many(x), one.forward(chunks(two_ranks.world(), 0))[rank], "combined by codes")
    for ways in ({"gradients": WIRE}, {"combine": torch.bfloat16, "gradients": torch.bfloat16}, {"dispatch": WIRE}):
        net = divided(**ways)
        with qt.autocast("tensorwise"):
            loss = step_on_ranks(net, x, 100, 0.1)
        assert loss.isfinite(), ways


def bytes_of_dispatch_and_combine(rank: int) -> None:
    ranks, tokens, dim = two_ranks.world(), 64, 1024
    sent = {}
    torch.manual_seed(rank)
    x = torch.randn(tokens, dim).bfloat16()
    for name, ways in {"bf16": {}, "codes": {"combine": WIRE}}.items():
        torch.manual_seed(0)
        moe = qt.MoE(dim, 16, qt.MixtureConfig(experts=EXPERTS, k=2), dtype=torch.bfloat16)
        parallelize_module(moe, two_ranks.mesh(ranks), ExpertParallel(**ways))
        with CommCounter() as traffic, torch.no_grad(), qt.autocast("mxfp8" if name == "codes" else "bf16"):
            moe(x)
        sent[name] = traffic.bytes["activations"]
    share = sent["codes"] / sent["bf16"]
    assert 0.5 < share <= 0.52, (share, sent)
    # Rows for local experts are not sent; all others are sent there and back.
    assert sent["bf16"] <= 2 * 2 * tokens * 2 * dim


def disagreeing_ranks_all_raise(rank: int) -> None:
    moe: Any = parallelize_module(Net().blocks[0], two_ranks.mesh(two_ranks.world()), ExpertParallel())
    x = torch.randn(6, DIM)
    for of in range(two_ranks.world()):
        other = rank == of
        with pytest.raises(ValueError, match=rf"rank {of}: [^;]*torch\.float16 tokens"):
            moe.experts(x.half() if other else x, torch.zeros(6, 2).long(), torch.ones(6, 2))
        with pytest.raises(ValueError, match=rf"rank {of}: [^;]*indices are integers"):
            moe.experts(x, torch.zeros(6, 2) if other else torch.zeros(6, 2).long(), torch.ones(6, 2))
        with pytest.raises(ValueError, match=rf"rank {of}: [^;]*mxfp8"), qt.autocast("mxfp8" if other else "bf16"):
            moe(x)
        with pytest.raises(ValueError, match="rank 0"), torch.set_grad_enabled(other):
            moe(x)
    with pytest.raises(ValueError, match="uses scaling histories"), qt.autocast("delayed"):
        moe(x)
    assert moe(x).isfinite().all()


def indivisible_experts_raise(rank: int) -> None:
    mesh, ranks = two_ranks.mesh(two_ranks.world()), two_ranks.world()
    for module, message in (
        (qt.MoE(DIM, 8, qt.MixtureConfig(experts=ranks + 1, k=1)), f"{ranks} ranks cannot share {ranks + 1} experts"),
        (nn.Linear(4, 4), "is a style for quaver.torch.MoE and Experts"),
        (parallelize_module(Net().blocks[0], mesh, ExpertParallel()), "already sharded"),
    ):
        with pytest.raises(ValueError, match=message):
            parallelize_module(module, mesh, ExpertParallel())
    for options, message in (
        ({"dispatch": QuantSpec(quaver.E4M3, (128, 128))}, "dispatch of ExpertParallel"),
        ({"combine": torch.int8}, "combine of ExpertParallel"),
        ({"gradients": "recipe"}, "gradients of ExpertParallel"),
    ):
        with pytest.raises(ValueError, match=message):
            ExpertParallel(**options)  # type: ignore[arg-type]


def weights_are_saved_and_loaded_unsharded(rank: int) -> None:
    net = divided()
    with qt.autocast("nvfp4"):
        step_on_ranks(net, chunks(two_ranks.world(), 0)[rank], 100, 0.1)
    saved = net.state_dict()
    whole = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in saved.items()}
    # One process loads the checkpoint of ranks, and ranks that of one process.
    one = Net()
    with qt.autocast("nvfp4"):
        one(torch.randn(4, DIM)).sum().backward()
    one.load_state_dict(whole)
    other = divided()
    with qt.autocast("nvfp4"):
        step_on_ranks(other, chunks(two_ranks.world(), 1)[rank], 100, 0.1)
    for state in (one.state_dict(), saved):
        with torch.no_grad():
            for p in other.parameters():
                (p.to_local() if isinstance(p, DTensor) else p).zero_()
        other.load_state_dict(state)
        for (name, a), b in zip(other.state_dict().items(), saved.values(), strict=True):
            assert_bitwise(*(v.to_local() if isinstance(v, DTensor) else v for v in (a, b)), name)
    moved = copy.deepcopy(other.blocks[0].experts)
    x = chunks(two_ranks.world(), 0)[rank]
    arguments = x, torch.zeros(len(x), 2).long(), torch.ones(len(x), 2)
    assert_bitwise(moved(*arguments), other.blocks[0].experts(*arguments))


def assert_same_training(one: nn.Module, many: nn.Module, batches: Sequence[Any], own: int) -> None:
    """Check that one process with the full batches and many ranks with their shards train the same."""
    steppers = [torch.optim.SGD(each.parameters(), 0.5) for each in (one, many)]
    for step, xs in enumerate(batches):
        losses = []
        for each, parts in ((one, xs), (many, [xs[own]])):
            with qt.autocast("bf16"):
                loss = torch.stack([(each(x) - 1).square().mean() for x in parts]).mean()
            loss.backward()
            losses.append(loss.detach())
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        dist.all_reduce(losses[1])
        assert_close(f"loss {step}", losses[1] / two_ranks.world(), losses[0], 1e-5)
    whole = dict(one.named_parameters())
    for name, p in many.named_parameters():
        assert isinstance(p, DTensor)
        assert_close(name, p.full_tensor(), whole[name].detach(), 1e-5)


def under_fully_shard(rank: int) -> None:
    """Shard experts over one mesh dimension, each expert's weights over the other, and all else over both."""
    mesh = two_ranks.mesh(2, 2, names=("dp", "ep"))
    net = Net()
    one, many = copy.deepcopy(net), parallelize_module(net, mesh["ep"], {"blocks.*": ExpertParallel()})
    for block in many.blocks:  # type: ignore[union-attr]
        experts: Any = fully_shard(block.experts, mesh=mesh["dp"])  # type: ignore[union-attr]
        # Losses are means over all ranks; an expert's gradient sums tokens of the ranks of one expert group.
        experts.set_gradient_divide_factor(4)
        # gloo does not support scaling in a reduction.
        experts.set_force_sum_reduction_for_comms(True)
        fully_shard(block, mesh=mesh)
    fully_shard(many, mesh=mesh)
    assert_same_training(one, many, [chunks(4, step + 3) for step in range(steps())], rank)
    with qt.autocast("nvfp4"):
        loss = many(chunks(4, 9)[rank]).square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.to_local().isfinite().all() for p in many.parameters())  # type: ignore[attr-defined]


def with_tensor_parallelism(rank: int) -> None:
    """Shard heads over one mesh dimension and experts over the other; tensor-parallel ranks have all tokens."""
    mesh = two_ranks.mesh(2, 2, names=("ep", "tp"))
    torch.manual_seed(0)
    layer = qt.TransformerLayer(
        DIM, 4, 32, mixture=MIXTURE, activation="swiglu", normalization="RMSNorm", bias=False, fused=False
    )
    one = copy.deepcopy(layer)
    parallelize_module(layer, mesh["tp"], {"attention": HeadParallel()})
    parallelize_module(layer, mesh["ep"], {"mlp": ExpertParallel()})
    x = torch.randn(2, 16, DIM, generator=torch.Generator().manual_seed(1))
    own = x[mesh["ep"].get_local_rank()][None]
    with qt.autocast("bf16"):
        loss = layer(own).square().sum()
        # Each sequence separately, as on the ranks.
        expected = torch.stack([one(each[None]).square().sum() for each in x])
    loss.backward()
    expected.sum().backward()
    assert_close("loss", loss, expected[mesh["ep"].get_local_rank()], 1e-6)
    whole = dict(one.named_parameters())
    for name, p in layer.named_parameters():
        g, full = p.grad, whole[name].grad
        assert full is not None
        if ".experts." in name:
            assert isinstance(g, DTensor)
            assert_close(name, g.full_tensor(), full, 1e-5)
        else:
            g = g.full_tensor() if isinstance(g, DTensor) else g
            assert g is not None
            dist.all_reduce(g, group=mesh["ep"].get_group())
            assert_close(name, g, full, 1e-5)


CASES = [
    losses_and_weights_are_those_of_one_process,
    dispatch_and_combine_formats,
    bytes_of_dispatch_and_combine,
    disagreeing_ranks_all_raise,
    indivisible_experts_raise,
    weights_are_saved_and_loaded_unsharded,
]


#: Cases for four ranks.
CROSSED = [losses_and_weights_are_those_of_one_process, under_fully_shard, with_tensor_parallelism]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.ranks
def test_experts_on_ranks_match_one_process(ranks: int, tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, ranks)


@pytest.mark.slow  # A minute each.
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.ranks
def test_twenty_losses_under_every_recipe_match_one_process(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "many").touch()
    two_ranks.run(__name__, tmp_path, ranks)


if __name__ == "__main__":
    two_ranks.main(CASES if two_ranks.world() == 2 else CROSSED)
