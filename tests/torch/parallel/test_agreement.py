"""Test that differing ranks get the same error at the same call, also after earlier agreement, without a hang."""

import gc
import re
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import quaver
import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import QuantSpec
from quaver.torch.parallel import (
    AllToAllSplits,
    ColwiseParallel,
    ExpertParallel,
    RowwiseParallel,
    SequenceParallel,
    VocabParallel,
    all_to_all,
    check_consistency,
    context_parallel,
    cross_entropy,
    gather_quantized,
    quantize_gradients,
    refresh_gather,
    sync_amax_histories,
)
from quaver.torch.parallel.context.attention import context_parallel_attention
from tests import two_ranks
from tests.close import assert_bitwise

#: Seconds that a rank waits for another one; a hang fails the test by this timeout.
SECONDS = 30.0


def raises_on_all_ranks(message: str, do: Callable[[], object]) -> None:
    """Check that all ranks raise the same ValueError."""
    with pytest.raises(ValueError, match=message) as error:
        do()
    two = two_ranks.gathered(torch.tensor(list(str(error.value).encode().ljust(4000)[:4000]), dtype=torch.uint8))
    assert torch.equal(two[0], two[1]), str(error.value)


def mlp(recipe: Any = "mxfp8", sequence: bool = False) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    qt.convert(net, recipe)
    plan = {"0": ColwiseParallel(sequence=sequence), "2": RowwiseParallel(sequence=sequence)}
    return parallelize_module(net, two_ranks.mesh(2), plan)


def tensor_parallel_layers(rank: int) -> None:
    """At the second step, one rank changes a shape, dtype, recipe, option, grad mode or requires_grad."""

    def second_step(message: str, change: Callable[[Any, Any], Any], sequence: bool = False) -> None:
        net, x = mlp(sequence=sequence), torch.ones(32, 64, requires_grad=True)
        net(x).sum().backward()
        changed = change(net, x) if rank else x
        raises_on_all_ranks(message, lambda: net(changed))
        # After the difference is undone, training continues.
        net.requires_grad_(True)
        qt.convert(net, "mxfp8")
        torch.set_grad_enabled(True)
        net(x).sum().backward()

    def without(name: str) -> Callable[[Any, Any], Any]:
        def change(net: Any, x: Any) -> Any:
            net.get_parameter(name).requires_grad_(False)
            return x

        return change

    def converted(net: Any, x: Any) -> Any:
        qt.convert(net, {"2": recipes.mxfp8(weight_2d=True)})
        return x

    def no_grad(net: Any, x: Any) -> Any:
        torch.set_grad_enabled(False)
        return x

    for sequence in (False, True):
        second_step(
            r"rank 0: input \(32, 64\) float32.*; rank 1: input \(64, 64\)", lambda net, x: x.repeat(2, 1), sequence
        )
        for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
            layer = "weights" if name.endswith("weight") else "biases"
            second_step(rf"differ at {name[0]}: rank 0: {layer} .*requires_grad.*; rank 1: ", without(name), sequence)
    second_step("rank 0: input .* requires_grad; rank 1: input", lambda net, x: x.detach())
    second_step("rank 0: recipe 'mxfp8'.*; rank 1: recipe 'mxfp8'", converted)
    second_step("rank 0: .*gradients True.*; rank 1: .*gradients False", no_grad)
    second_step("rank 0: no error; rank 1: .*its last axis must be 64", lambda net, x: torch.ones(32, 32))
    second_step("rank 0: no error; rank 1: .*bfloat16", lambda net, x: x.detach().bfloat16())
    # The error on the failing rank need not be a ValueError.
    net, x = mlp(), torch.ones(32, 64)
    raises_on_all_ranks(
        "rank 0: no error; rank 1: .*torch.func", lambda: torch.func.vmap(net)(x[None]) if rank else net(x)
    )


def norms_embeddings_and_losses(rank: int) -> None:
    mesh = two_ranks.mesh(2)
    norm: Any = parallelize_module(nn.LayerNorm(64), mesh, SequenceParallel())
    embedding: Any = parallelize_module(nn.Embedding(32, 64), mesh, VocabParallel())
    x, tokens = torch.ones(8, 64), torch.arange(8)
    norm(x), embedding(tokens)
    raises_on_all_ranks("differ at LayerNorm: rank 0: input", lambda: norm(x if rank else x.bfloat16()))
    if rank:
        embedding.weight.requires_grad_(False)
    raises_on_all_ranks(
        "differ at Embedding: rank 0: weight .* requires_grad; rank 1: weight", lambda: embedding(tokens)
    )
    raises_on_all_ranks("rank 0: no error; rank 1: .* 32 rows", lambda: embedding(tokens + 30 * rank))
    targets = tokens + 30 * rank if rank else tokens
    raises_on_all_ranks("rank 1: .*label_smoothing", lambda: cross_entropy(x, tokens, mesh, label_smoothing=2.0 * rank))
    raises_on_all_ranks(
        "rank 0: options .*; rank 1: options", lambda: cross_entropy(x, tokens, mesh, z_loss=1e-3 * rank)
    )
    unknown = "unknown" if rank else "mean"
    raises_on_all_ranks("rank 1: no reduction 'unknown'", lambda: cross_entropy(x, tokens, mesh, reduction=unknown))
    assert targets.numel() and cross_entropy(x, tokens, mesh).isfinite()
    late: Any = parallelize_module(nn.Sequential(nn.Linear(64, 64)), mesh, {"0": ColwiseParallel()})
    with pytest.warns(UserWarning, match="0 .its weight is already sharded: call convert before parallelize_module"):
        qt.convert(late, "mxfp8")


def expert_parallelism(rank: int) -> None:
    torch.manual_seed(0)
    moe = qt.MoE(64, 32, qt.MixtureConfig(experts=4, k=2), recipe="mxfp8")
    parallelize_module(moe, two_ranks.mesh(2), ExpertParallel())
    x = torch.randn(8 + rank, 64, requires_grad=True)
    moe(x).sum().backward()
    raises_on_all_ranks(
        "rank 0: no error; rank 1: .*its last axis must be 64", lambda: moe(torch.ones(4, 32 if rank else 64))
    )
    raises_on_all_ranks("rank 0: gradient of the input True; rank 1: ", lambda: moe(x.detach() if rank else x))
    if rank:
        moe.experts.requires_grad_(False)
    raises_on_all_ranks("gradients of parameters", lambda: moe(x))
    moe.requires_grad_(True)
    moe(x).sum().backward()
    rows, splits = torch.ones(4, 64), AllToAllSplits.even(2)
    raises_on_all_ranks(
        "differ at all_to_all: rank 0: width 64; rank 1: width 32", lambda: all_to_all(rows[:, : 64 >> rank], splits)
    )


def weights_gathered_as_codes(rank: int) -> None:
    """One rank uses another autocast, dtype or grad mode, or omits the autocast of delayed scaling."""

    def model(recipe: str) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(*(qt.Linear(64, 64) for _ in range(2)))
        gather_quantized(net, recipe=recipe)
        for layer in net:
            fully_shard(layer)
        return fully_shard(net)

    x = torch.ones(8, 64)
    for recipe in ("mxfp8", "delayed"):
        net = model(recipe)

        def under(chosen: str | None, net: Any = net) -> None:
            with nullcontext() if chosen is None else qt.autocast(chosen):
                net(x).sum().backward()

        for _ in range(2):
            under(recipe)
        for other in ("rowwise", None):
            raises_on_all_ranks("recipe of autocast|different calls", partial(under, other if rank else recipe))
        under(recipe)
    net = model("mxfp8")
    with qt.autocast("mxfp8"):
        net(x).sum().backward()
        torch.set_grad_enabled(not rank)
        raises_on_all_ranks("rank 0: gradients True; rank 1: gradients False", lambda: net(x))
        torch.set_grad_enabled(True)
    # A parameter is frozen on one rank, from the beginning or later.
    for first in (True, False):
        net = model("mxfp8")
        with qt.autocast("mxfp8"):
            if not first:
                net(x).sum().backward()
            net[0].bias.requires_grad_(not rank)
            raises_on_all_ranks(r"rank 0: frozen \[\]; rank 1: frozen \['0.bias'\]", lambda net=net: net(x))


def other_calls(rank: int) -> None:
    """Only one rank prepares a model, synchronizes histories, or runs its first forward without delayed scaling."""

    def model(recipe: str) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        qt.convert(net, recipe)
        gather_quantized(net)
        for layer in net:
            fully_shard(layer)
        return fully_shard(net)

    x = torch.ones(8, 64)
    net = model("mxfp8")
    net(x).sum().backward()
    qt.convert(net, "rowwise")
    message = "different calls: rank 0: a forward after gather_quantized; rank 1: the comparison of models by"
    raises_on_all_ranks(message, lambda: refresh_gather(net) if rank else net(x))
    net = model("delayed")
    torch.set_grad_enabled(not rank)
    raises_on_all_ranks(
        "different calls: rank 0: the end of a step .*; rank 1: gather_quantized's first gather", lambda: net(x)
    )
    torch.set_grad_enabled(True)
    net = nn.Linear(64, 64)
    qt.convert(net, "delayed")
    net = DistributedDataParallel(net)

    def step() -> None:
        with qt.autocast("delayed"):
            net(x).sum().backward()

    step()
    message = "different calls: rank 0: the end of a step of delayed scaling; rank 1: sync_amax_histories"
    raises_on_all_ranks(message, lambda: sync_amax_histories(net) if rank else step())
    # The reduction of two layers' amaxes has as many bytes as the header of a comparison.
    net = mlp("delayed")
    net(x).sum().backward()
    message = "different calls: rank 0: .* outside of qt.autocast; rank 1: the end of a step of delayed scaling;"

    def within() -> None:
        with qt.autocast("delayed") if rank else nullcontext():
            net(x)

    raises_on_all_ranks(message, within)


def a_rank_waiting_in_vain_gets_an_error(rank: int) -> None:
    """The error names the call at which a rank waited. Runs last, since its process group has timed out."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    if rank == 0:
        message = "this rank waited at the comparison of models .* for the other ranks .*make the call on all ranks"
        with pytest.raises(RuntimeError, match=message):
            check_consistency(nn.Linear(4, 4), DeviceMesh.from_group(group, "cpu"))


def gradients_by_other_specs(rank: int) -> None:
    for wrap in (fully_shard, DistributedDataParallel):
        torch.manual_seed(0)
        model: Any = wrap(nn.Linear(64, 64))
        spec = QuantSpec(quaver.E5M2 if rank else quaver.E4M3, (1, 128))
        quantize_gradients(model, spec)
        with pytest.raises(
            (ValueError, RuntimeError), match="ranks differ at a sum of quantized gradients: rank 0: spec"
        ):
            model(torch.ones(8, 64)).sum().backward()


def recipes_that_change(rank: int) -> None:
    """Only one rank runs the garbage collector, which frees the modules prepared before."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    qt.convert(net, "mxfp8")
    gather_quantized(net)
    fully_shard(net)
    x = torch.ones(8, 64)
    gc.disable()
    for recipe in ("tensorwise", "rowwise"):
        net(x).sum().backward()
        qt.convert(net, recipe)
        refresh_gather(net)
        if rank:
            gc.collect()
        net(x).sum().backward()
    gc.enable()


def gradients_of_other_modules(rank: int) -> None:
    """Gradients of equal size from different modules would be summed without an error."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    for layer in net:
        fully_shard(layer)
    quantize_gradients(fully_shard(net))
    x = torch.ones(8, 64)
    net(x).sum().backward()
    outputs = [layer(x).sum() for layer in net]
    with pytest.raises((ValueError, RuntimeError), match="rank 0: gradients of 1; rank 1: gradients of 2"):
        outputs[1 + rank].backward()


def sharded_optimizers(rank: int) -> None:
    """Options differ, or a parameter has no gradient on one rank, in a step that communicates."""

    def step(lr: float | Tensor = 1e-3, nonfinite: str = "keep", lacks: bool = False) -> None:
        net: Any = fully_shard(nn.Linear(64, 64))
        optimizer = qt.optim.AdamW(net.parameters(), lr, nonfinite=nonfinite)
        for _ in range(2):
            net(torch.ones(8, 64)).sum().backward()
            optimizer.step()
        net.bias.grad = None if lacks else net.bias.grad
        optimizer.step()

    raises_on_all_ranks(
        "an optimizer's step: rank 0: nonfinite keep.*rank 1: nonfinite skip",
        lambda: step(nonfinite=("keep", "skip")[rank]),
    )
    raises_on_all_ranks("rank 0: options .*0.001.*rank 1: options .*0.002", lambda: step(1e-3 + 1e-3 * rank))
    raises_on_all_ranks(
        "rank 0: options .*0.001.*rank 1: options .*0.002", lambda: step(torch.tensor(1e-3 + 1e-3 * rank))
    )
    message = r"rank 0: parameters with gradients \[0, 1\]; rank 1: parameters with gradients \[0\]"
    raises_on_all_ranks(message, lambda: step(nonfinite="skip", lacks=rank == 1))
    # Without communication the difference is allowed.
    step(lacks=rank == 1)


def context_parallel_attention_calls(rank: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, 4, 16, requires_grad=True) for _ in range(3))

    def attend(q: Any = q, k: Any = k, v: Any = v, **options: Any) -> None:
        context_parallel_attention(q, k, v, **{"mask_type": "causal", "how": "gather", **options}).sum().backward()

    for how in ("gather", "ring", "all_to_all"):
        attend(how=how)
        short = [x[:, :4] for x in (q, k, v)]
        half = [x.bfloat16() for x in (q, k, v)]
        for other in (short, half):
            raises_on_all_ranks("rank 0: q .*; rank 1: q", partial(attend, *(other if rank else (q, k, v)), how=how))
        raises_on_all_ranks("balanced True; rank 1: balanced False", lambda how=how: attend(how=how, balanced=not rank))
        raises_on_all_ranks("quantized", lambda how=how: attend(how=how, quantized="mxfp8" if rank else None))
        raises_on_all_ranks(
            "how ", lambda how=how: attend(how=how if rank else "gather" if how != "gather" else "ring")
        )
        frozen = k.detach() if rank else k
        raises_on_all_ranks(
            "rank 0: k .* requires_grad; rank 1: k", lambda how=how, frozen=frozen: attend(k=frozen, how=how)
        )
        raises_on_all_ranks("rank 0: no error; rank 1: .*dropout", lambda how=how: attend(how=how, dropout=0.5 * rank))
        unknown = "unknown" if rank else None
        raises_on_all_ranks(
            "rank 0: no error; rank 1: no recipe 'unknown'", lambda how=how, to=unknown: attend(how=how, recipe=to)
        )
        attend(how=how)


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Dropout(dropout)
        self.layer = qt.TransformerLayer(32, 4, 64, mask_type="causal", dropout=dropout)
        self.unused, self.sometimes = nn.Linear(4, 4), nn.Linear(32, 32)

    def forward(self, x: Any, more: bool = False) -> Any:
        y = self.layer(self.first(x))
        return self.sometimes(y) if more else y


def context_parallel_dropout(rank: int) -> None:
    """With one seed, ranks drop the same elements as one process, and each rank other ones."""
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    whole = Net(0.4)
    torch.manual_seed(7)
    expected = whole(x)
    net = Net(0.4)
    cp = context_parallel(net, how="all_to_all")
    torch.manual_seed(7)
    y = net(cp.cut(x))
    assert_bitwise((cp.join(y) == 0), (expected == 0))
    torch.testing.assert_close(cp.join(y), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(net.eval().first(x), x)
    raises_on_all_ranks("rank 0: training True; rank 1: training False", lambda: net.train(rank == 0)(cp.cut(x)))
    cu_seqlens = [0, 16] if rank else None
    part = y[:, : 4 * (1 + rank)]
    raises_on_all_ranks(
        r"differ at ContextParallel.join: rank 0: x \(2, 4, 32\).*; rank 1: x \(2, 8, 32\)", lambda: cp.join(part)
    )
    raises_on_all_ranks("7 tokens .* 2 chunks", lambda: cp.join(y[:, :7]))
    raises_on_all_ranks(
        "rank 0: no error; rank 1: .*'tolist'", lambda: net.train().layer(cp.cut(x), cu_seqlens=cu_seqlens)
    )


def missing_gradients_count_as_zeros(rank: int) -> None:
    """A gradient missing on one rank counts as zeros; a parameter unused by all ranks has none."""
    net = Net(0.0)
    cp = context_parallel(net)
    x = cp.cut(torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1)))
    net(x, more=rank == 1).square().sum().backward()
    assert (net.sometimes.weight.grad is None) == (rank == 0)
    own = net.layer.mlp.down_proj.weight.grad.clone()
    cp.sum_gradients(net)
    assert net.unused.weight.grad is None
    assert_bitwise(*two_ranks.gathered(net.sometimes.weight.grad))
    owns = two_ranks.gathered(own)
    assert_bitwise(net.layer.mlp.down_proj.weight.grad, owns[0] + owns[1])
    if rank:
        net.unused.requires_grad_(False)
    raises_on_all_ranks("differ at sum_gradients", lambda: cp.sum_gradients(net))


CASES = [
    *(tensor_parallel_layers, norms_embeddings_and_losses, expert_parallelism, weights_gathered_as_codes),
    *(
        gradients_by_other_specs,
        recipes_that_change,
        gradients_of_other_modules,
        sharded_optimizers,
        context_parallel_attention_calls,
    ),
    *(other_calls, context_parallel_dropout, missing_gradients_count_as_zeros, a_rank_waiting_in_vain_gets_an_error),
]


@pytest.mark.ranks
def test_ranks_that_differ_get_one_error(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


def test_the_page_lists_the_compared_facts() -> None:
    page = (Path(__file__).parents[3] / "docs" / "parallel.md").read_text(encoding="utf-8")
    assert re.search(r"^## What ranks compare$", page, re.MULTILINE)


if __name__ == "__main__":
    two_ranks.main(CASES, SECONDS)
