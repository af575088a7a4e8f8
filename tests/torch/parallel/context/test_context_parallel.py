"""Test that a model with split sequences has the losses of one process with the same sum order, bit for bit."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import quaver.torch as qt
from quaver import recipes
from quaver.torch.parallel import (
    ColwiseParallel,
    ContextParallel,
    HeadParallel,
    RowwiseParallel,
    SequenceParallel,
    context_parallel,
)
from quaver.torch.parallel.context.comm import ChunkOrder
from tests import two_ranks
from tests.close import assert_bitwise
from tests.torch.parallel.context.split import SPLIT, Together
from tests.torch.parallel.tensor.split import SplitLinear
from tests.two_ranks import world

VOCABULARY, DIM, BATCH, TOKENS = 40, 64, 2, 64
LOSSES = 20
#: Recipes whose state belongs to named layers; in one process, `convert` gives the copies the same names.
NAMED = ("delayed", "nvfp4")
Steps = dict[str | None, int]
#: Steps by recipe on two ranks: recipes with state under every method, the others under one method each.
ALONE: dict[str, Steps] = {
    how: dict.fromkeys([None, *recipes.RECIPES][number :: len(SPLIT)], 2) | {"nvfp4": 2, "delayed": 3}
    for number, how in enumerate(SPLIT)
}
#: Steps on four ranks.
OF_FOUR: dict[str, Steps] = {how: {"rowwise": 2} for how in SPLIT}
#: Steps of the slow tests.
LONG: dict[str, Steps] = {how: dict.fromkeys((None, *recipes.RECIPES), LOSSES) for how in SPLIT}
#: Steps before histories of ranks are compared, by method.
HISTORIES = 3


class Net(nn.Module):
    def __init__(self, layers: int = 2, hidden: int = 96, dim: int = DIM, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        given = {"groups": 4, "mask_type": "causal", "normalization": "RMSNorm", "bias": False, **options}
        rope = qt.RotaryEmbedding(dim // 8)
        self.layers = nn.ModuleList(qt.TransformerLayer(dim, 8, hidden, rope=rope, **given) for _ in range(layers))
        self.head = qt.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, **options)
        y: Tensor = self.head(x)
        return y


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def batch(step: int, shape: tuple[int, ...] = (BATCH, TOKENS)) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (*shape[:-1], shape[-1] + 1), generator=torch.Generator().manual_seed(step))
    return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()


def prepared(model: nn.Module, recipe: str | None) -> str | None:
    """The context in which to call a model."""
    if recipe not in NAMED:
        return recipe
    qt.convert(model, recipe, head=True)
    return None


def loss_of(model: Callable[..., Tensor], recipe: str | None, tokens: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """This rank's contribution to the mean over all ranks' tokens."""
    with contextlib.nullcontext() if recipe is None else qt.autocast(recipe):
        logits = model(tokens, **options)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / (BATCH * TOKENS)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def in_parts(how: str, recipe: str | None, steps: int, quantized: str | None = None) -> list[Tensor]:
    """Losses of every rank at each step."""
    model = net()
    recipe = prepared(model, recipe)
    return trained(model, context_parallel(model, how=how, quantized=quantized), recipe, steps)


def trained(model: Net, cp: ContextParallel, recipe: str | None, steps: int) -> list[Tensor]:
    optimizer, losses = optimizer_of(model), []
    for step in range(steps):
        tokens, labels = (cp.cut(x) for x in batch(step))
        loss = loss_of(model, recipe, tokens, labels)
        loss.backward()
        cp.sum_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return two_ranks.gathered(torch.stack(losses))


def in_one_process(how: str, recipe: str | None, steps: int) -> list[Tensor]:
    """The same training in one process with the same order of sums."""
    models = [net() for _ in range(world())]
    if recipe in NAMED:
        for model in models:
            qt.convert(model, recipe, head=True)
            split(model, recipe, 1)
    return trained_in_one(models, how, None if recipe in NAMED else recipe, steps)


def split(model: nn.Module, recipe: str | None, ranks: int) -> None:
    """Replace linear layers by layers that compute as this many tensor-parallel ranks do."""
    for block in [*model.modules()]:
        for name, each in [*block._modules.items()]:
            if isinstance(each, nn.Linear) and (ranks == 1 or name in (*COLUMNS, *ROWS)):
                of_recipe = None if recipe is None else recipes.get(recipe)
                block._modules[name] = SplitLinear(each, of_recipe, ranks, name not in ROWS, False)


def roll(models: list[nn.Module]) -> None:
    """End a step of delayed scaling with the maxima over all ranks' tokens."""
    for layers in zip(*(model.modules() for model in models), strict=True):
        if not isinstance(layers[0], SplitLinear):
            continue
        windows: Any = [layer.windows for layer in layers]
        for name in windows[0]:
            newest = np.maximum.reduce([each[name][0] for each in windows])
            for each in windows:
                each[name][0] = newest
        for layer in layers:
            layer.roll()  # type: ignore[operator]


def trained_in_one(models: Any, how: str, recipe: str | None, steps: int) -> list[Tensor]:
    order = ChunkOrder(len(models))
    together = Together(models, order, SPLIT[how])
    optimizers, losses = [optimizer_of(model) for model in models], []
    for step in range(steps):
        tokens, labels = batch(step)

        def call(model: nn.Module, rank: int, tokens: Tensor = tokens, labels: Tensor = labels) -> Tensor:
            places = order.places(TOKENS, rank)
            parts = order.cut(tokens, 1, rank), order.cut(labels, 1, rank)
            # Do not call `model(...)`: a forward of a converted root would reduce histories over all ranks.
            return loss_of(model.forward, recipe, *parts, positions=places)

        each = together.run(call)
        torch.autograd.backward(each)
        for same in zip(*(model.parameters() for model in models), strict=True):
            total = same[0].grad
            for p in same[1:]:
                total = total + p.grad
            for p in same:
                p.grad = total.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        roll(models)
        losses.append(torch.stack([x.detach() for x in each]))
    return list(torch.stack(losses, 1))


def the_same_losses(of_steps: dict[str, Steps]) -> two_ranks.Case:
    def case(rank: int) -> None:
        for how, recipe, steps in [(how, *each) for how, of_how in of_steps.items() for each in of_how.items()]:
            got = in_parts(how, recipe, steps)
            wanted = in_one_process(how, recipe, steps) if rank == 0 else got
            for other, (a, b) in enumerate(zip(got, wanted, strict=True)):
                assert_bitwise(a, b, f"{how}, {recipe}, rank {other}")

    case.__name__ = "the same losses"
    return case


def the_first_step(rank: int) -> None:
    """The loss, and each gradient relative to its maximum, are within 1e-6 of one process without splits."""
    plain = net()
    tokens, labels = batch(0)
    wanted = loss_of(plain, None, tokens, labels)
    wanted.backward()
    for how in SPLIT:
        model = net()
        cp = context_parallel(model, how=how)
        loss = loss_of(model, None, cp.cut(tokens), cp.cut(labels))
        loss.backward()
        cp.sum_gradients(model)
        total = sum(two_ranks.gathered(loss.detach()))
        assert abs(total - wanted.detach()) <= 1e-6 * wanted.detach(), how
        for (name, p), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and other.grad is not None
            away = (p.grad - other.grad).abs().max() / other.grad.abs().max()
            assert away <= 1e-6, f"{how}: {name} {away:.2g}"


def eight_bits_learn(rank: int) -> None:
    """With keys and values in eight bits, losses differ from high precision, but not much."""
    plain = sum(in_parts("gather", None, 3))
    for how in SPLIT:
        codes = sum(in_parts(how, "mxfp8", 3, "mxfp8"))
        assert not torch.equal(codes, plain) and ((codes - plain).abs() < 0.05).all(), how


def sequences_end_to_end(rank: int) -> None:
    """The model gets cu_seqlens of the full batch as usual; positions count within each sequence."""
    ends = torch.tensor([0, 7, 7, 50, 64], dtype=torch.int32)
    tokens, labels = batch(3, (TOKENS,))
    options = {"layout": "thd", "window": (9, 0), "sinks": "learnable", "qk_norm": "RMSNorm", "recompute": "full"}
    plain = net(**options)
    wanted = loss_of(plain, None, tokens, labels, cu_seqlens=ends)
    wanted.backward()
    for how in SPLIT:
        model = net(**options)
        cp = context_parallel(model, how=how)
        assert_bitwise(cp.join(cp.cut(tokens, 0), 0), tokens)
        assert_bitwise(cp.join(cp.cut(tokens > 3, 0), 0), tokens > 3)
        loss = loss_of(model, None, cp.cut(tokens, 0), cp.cut(labels, 0), cu_seqlens=ends)
        loss.backward()
        cp.sum_gradients(model)
        total = sum(two_ranks.gathered(loss.detach()))
        assert abs(total - wanted.detach()) <= 1e-6 * wanted.detach(), how
        for (name, p), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and other.grad is not None, name
            away = (p.grad - other.grad).abs().max() / other.grad.abs().max()
            assert away <= 2e-6, f"{how}: {name} {away:.2g}"
        with torch.inference_mode():
            others = ends.clone()
            for middle in (9, 30):
                # Writes to inference-mode tensors cannot be detected.
                others[2] = middle
                loss = loss_of(model, None, cp.cut(tokens, 0), cp.cut(labels, 0), cu_seqlens=others)
                of_plain = loss_of(plain, None, tokens, labels, cu_seqlens=others)
                assert abs(sum(two_ranks.gathered(loss)) - of_plain) <= 1e-6 * of_plain, how


def delayed_scaling(rank: int) -> None:
    """Amaxes are reduced when histories roll, as in data parallelism, since each rank has other tokens."""
    for how in SPLIT:
        model = net(layers=1)
        qt.convert(model, recipes.delayed(history=4))
        cp = context_parallel(model, how=how)
        for step in range(HISTORIES):
            tokens, labels = (cp.cut(x) for x in batch(step))
            loss_of(model, None, tokens, labels).backward()
            cp.sum_gradients(model)
        # The first row is what this rank measured since the last roll.
        histories = [layer.history for layer in model.modules() if isinstance(getattr(layer, "history", None), Tensor)]
        assert histories
        for history in histories:
            first, *others = two_ranks.gathered(history)
            assert first[1:].any(), how
            for other in others:
                assert_bitwise(other[1:], first[1:], how)


def some_ranks(rank: int) -> None:
    """A two-dimensional mesh: one axis for sequences, the other for batches."""
    mesh = two_ranks.mesh(2, 2, names=("dp", "cp"))
    plain = net(layers=1)
    for how in SPLIT:
        model = net(layers=1)
        cp = context_parallel(model, mesh["cp"], how)
        tokens, _ = batch(mesh["dp"].get_local_rank())
        with torch.no_grad():
            got, wanted = cp.join(model(cp.cut(tokens))), plain(tokens)
        assert (got - wanted).abs().max() <= 1e-6 * wanted.abs().max(), how


#: The model on 2 x 2 ranks, and steps by method and recipe.
OF_BOTH: dict[str, Any] = {"fused": False, "activation": "swiglu", "groups": 8, "hidden": 128}
WITH_HEADS: dict[str, Steps] = {
    "gather": {"tensorwise": 2, "mxfp8": 2},
    "ring": {"mxfp8": 2},
    "all_to_all": {None: 2, "delayed": 3},
}
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def of_both(recipe: str | None) -> dict[str, Any]:
    """Feature counts with whole blocks on each of two ranks."""
    return OF_BOTH | ({"dim": 256, "hidden": 256} if recipe == "blockwise" else {})


def with_heads_in_parts(of_steps: dict[str, Steps]) -> two_ranks.Case:
    """With 2-way tensor and context parallelism, results equal one process that splits the same sums, bit for bit."""

    def case(rank: int) -> None:
        mesh = two_ranks.mesh(2, 2, names=("cp", "tp"))
        runs = [(how, recipe, steps) for how, each in of_steps.items() for recipe, steps in each.items()]
        got = []
        for how, recipe, steps in runs:
            model = net(**of_both(recipe))
            active_context = prepared(model, recipe)
            plan = {f"layers.*.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
            plan |= {"layers.*.attention": HeadParallel(), "layers.*.mlp.down_proj": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            got.append(trained(model, context_parallel(model, mesh["cp"], how), active_context, steps))
        # The single-process references are distributed over the ranks.
        for i, (how, recipe, steps) in enumerate(runs):
            if i % world() != rank:
                continue
            models = [net(**of_both(recipe)) for _ in range(2)]
            for model in models:
                active_context = prepared(model, recipe)
                split(model, recipe, 2)
                if recipe in NAMED:
                    model.head = SplitLinear(model.head, recipes.get(recipe), 1, True, False)  # type: ignore[assignment]
            wanted = trained_in_one(models, how, active_context, steps)
            for other, losses in enumerate(got[i]):
                assert_bitwise(losses, wanted[other // 2], f"{how}, {recipe}, rank {other}")

    case.__name__ = "the same losses with heads in parts"
    return case


def tokens_in_parts_twice(rank: int) -> None:
    """Sequence parallelism inside context parallelism: positions are those of the gathered tokens."""
    mesh = two_ranks.mesh(2, 2, names=("cp", "tp"))
    x = torch.randn(BATCH, TOKENS, DIM, generator=torch.Generator().manual_seed(1))
    options = {"layers": 1, "fused": False, "activation": "swiglu"}
    plain = net(**options).layers[0]
    wanted = plain(x)
    wanted.square().mean().backward()
    columns = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel(sequence=True))
    norms = dict.fromkeys(("attention.norm", "mlp.norm"), SequenceParallel())
    for how in SPLIT:
        layer = net(**options).layers[0]
        plan = {
            "attention": HeadParallel(sequence=True),
            "mlp.down_proj": RowwiseParallel(sequence=True),
            **columns,
            **norms,
        }
        parallelize_module(layer, mesh["tp"], plan)
        cp = context_parallel(layer, mesh["cp"], how)
        part, tp_rank = cp.cut(x), mesh["tp"].get_local_rank()
        out = layer(part.chunk(2, 1)[tp_rank])
        expected = cp.cut(wanted.detach()).chunk(2, 1)[tp_rank]
        assert (out - expected).abs().max() <= 1e-6 * wanted.abs().max(), how
        (out.square().sum() / x.numel()).backward()
        cp.sum_gradients(layer)
        for (name, p), other in zip(layer.named_parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and other.grad is not None
            g = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            away = (g - other.grad).abs().max() / other.grad.abs().max()
            assert away <= 2e-6, f"{how}: {name} {away:.2g}"


def beside_data_parallelism(rank: int) -> None:
    """DistributedDataParallel and fully_shard over the same ranks give `sum_gradients` divided by the world size."""
    tokens, labels = batch(0)
    summed = net(layers=1)
    cp = context_parallel(summed)
    loss_of(summed, None, cp.cut(tokens), cp.cut(labels)).backward()
    cp.sum_gradients(summed)
    for wrap in (DistributedDataParallel, fully_shard):
        model = net(layers=1)
        cp = context_parallel(model)
        wrapped = wrap(model)
        (loss_of(wrapped, None, cp.cut(tokens), cp.cut(labels)) * world()).backward()
        for (name, p), other in zip(model.named_parameters(), summed.parameters(), strict=True):
            assert p.grad is not None and other.grad is not None
            g = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            assert_bitwise(g, other.grad, f"{wrap.__name__}: {name}")


def bad_models(rank: int) -> None:
    def refused(words: str, model: nn.Module, **options: Any) -> None:
        with pytest.raises(ValueError, match=words):
            context_parallel(model, **options)

    attention = nn.TransformerEncoderLayer(8, 2, 8)
    refused("has 1 MultiheadAttention: context parallelism only converts", attention)
    refused("has no DotProductAttention", nn.Linear(2, 2))
    refused(r"attention.core has dropout 0.1", qt.TransformerLayer(16, 2, 16, attention_dropout=0.1))
    refused("attention.core with mask_type 'padding'", qt.TransformerLayer(16, 2, 16, mask_type="padding"))
    refused("has drop_path", qt.TransformerLayer(16, 2, 16, drop_path=0.1))
    refused("has cross attention", qt.TransformerLayer(16, 2, 16, cross_attention=True))
    refused("has 1 query heads and 1", qt.TransformerLayer(16, 1, 16), how="all_to_all")
    relative = qt.RelativePositionBias(2)
    refused("has a position_bias", qt.TransformerLayer(16, 2, 16, position_bias=relative))
    grows = qt.RotaryEmbedding(8, scaling={"rope_type": "dynamic", "factor": 2.0}, max_positions=8)
    refused("rope of type 'dynamic'", qt.TransformerLayer(16, 2, 16, rope=grows))
    refused("cannot be sent in recipe nvfp4", qt.TransformerLayer(16, 2, 16), quantized="nvfp4")
    for mixer in (qt.Mamba2(16, head_dim=8, state=8), nn.GRU(16, 16), nn.Conv1d(16, 16, 3)):
        hybrid = nn.Sequential(qt.TransformerLayer(16, 2, 16), mixer)
        refused("1 mixes each token with earlier ones, and a rank", hybrid)
    eight = qt.MultiheadAttention(64, 2, recipe=recipes.mxfp8(attention=True))
    refused("quantizes attention, by amaxes of whole sequences", eight, how="ring")
    layer = qt.TransformerLayer(16, 4, 16)
    cp = context_parallel(layer)
    refused("is already context-parallel", layer)
    x = torch.randn(1, 4, 16)
    with pytest.raises(ValueError, match="MultiheadAttention has a sharded sequence, which does not support a cache"):
        layer(x, cache=qt.KVCache(1, 8))
    with pytest.raises(ValueError, match="pack sequences"):
        layer(x, mask=torch.zeros(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="has a bias"):
        layer(x, bias=torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"5 tokens .* does not divide"):
        cp.cut(torch.zeros(1, 5))
    assert isinstance(cp, ContextParallel) and "'gather'" in repr(cp)
    dist.barrier()


COMMON: list[two_ranks.Case] = [the_first_step, sequences_end_to_end, delayed_scaling, bad_models]
CASES: dict[int, list[two_ranks.Case]] = {
    2: [the_same_losses(ALONE), eight_bits_learn, beside_data_parallelism, *COMMON],
    4: [
        *(the_same_losses(OF_FOUR), some_ranks, with_heads_in_parts(WITH_HEADS)),
        *(tokens_in_parts_twice, *COMMON),
    ],
}
SLOW: dict[int, list[two_ranks.Case]] = {
    2: [the_same_losses(LONG)],
    4: [the_same_losses(LONG), with_heads_in_parts(LONG)],
}


@pytest.mark.parametrize("ranks", CASES)
@pytest.mark.ranks
def test_models_train_with_sequences_in_parts(tmp_path: Path, ranks: int) -> None:
    two_ranks.run(__name__, tmp_path, ranks)


@pytest.mark.parametrize("ranks", SLOW)
@pytest.mark.ranks
@pytest.mark.slow
def test_twenty_losses(tmp_path: Path, ranks: int) -> None:
    two_ranks.run(__name__, tmp_path, ranks, slow=True)


if __name__ == "__main__":
    two_ranks.main(CASES[world()], slow=SLOW[world()])
