"""Cases for two processes: vocabulary-parallel embeddings, and column-parallel heads with their loss."""

import copy
import itertools
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import quaver.torch as qt
from quaver import recipes
from quaver.torch.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, VocabParallel, cross_entropy
from tests import two_ranks
from tests.close import assert_bitwise, assert_close
from tests.torch.nn.test_loss import OPTIONS
from tests.torch.parallel.tensor.split import SplitLinear, tokens
from tests.two_ranks import RANKS

VOCABULARY, DIM = 24, 16


def mesh() -> Any:
    return two_ranks.mesh(RANKS)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class SplitLoss(torch.autograd.Function):
    """Cross entropy in one process that sums over the vocabulary in as many shards as there are ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, options: dict[str, Any], reduction: str) -> Tensor:
        ignored, smooth = options.get("ignore_index", -100), options.get("label_smoothing", 0.0)
        z_loss, cap = options.get("z_loss", 0.0), options.get("soft_cap")
        wide = logits.float()
        z = cap * torch.tanh(wide / cap) if cap else wide
        parts = z.chunk(RANKS, 1)
        amax_values = [part.amax(1) for part in parts]
        amax, total = torch.stack(amax_values).amax(0), torch.zeros(len(z))
        for part, own in zip(parts, amax_values, strict=True):
            total += (part - own[:, None]).exp().sum(1) * (own - amax).exp()
        valid = targets != ignored
        safe = torch.where(valid, targets, 0)
        losses = (amax - z.gather(1, safe[:, None])[:, 0]) + total.log()
        if smooth:
            sums = torch.zeros(len(z))
            for part in parts:
                sums += part.sum(1)
            losses = (1 - smooth) * losses + smooth * ((amax - sums / z.shape[1]) + total.log())
        if z_loss:
            losses = losses + z_loss * (amax + total.log()).square()
        losses = torch.where(valid, losses, 0.0)
        grad_logits = (z - amax[:, None] - total.log()[:, None]).exp()
        if z_loss:
            grad_logits = grad_logits * (1 + 2 * z_loss * (amax + total.log()))[:, None]
        grad_logits[torch.arange(len(z)), safe] += smooth - 1
        if smooth:
            grad_logits = grad_logits - smooth / z.shape[1]
        if cap:
            grad_logits = grad_logits * (1 - torch.tanh(wide / cap).square())
        ctx.save_for_backward(grad_logits, valid)
        ctx.reduction, ctx.dtype = reduction, logits.dtype
        return losses if reduction == "none" else losses.sum() / (valid.sum() if reduction == "mean" else 1)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad_logits, valid = ctx.saved_tensors
        each = (grad_output / valid.sum() if ctx.reduction == "mean" else grad_output).expand(len(grad_logits))
        return (grad_logits * each[:, None]).masked_fill(~valid[:, None], 0).to(ctx.dtype), None, None, None


def a_vocabulary_parallel_embedding_matches_the_unsharded_one(rank: int) -> None:
    ids = torch.randint(VOCABULARY, (2, 8), generator=generator(1))
    for dtype in (torch.float32, torch.bfloat16):
        for sequence in (False, True):
            for padding in (None, 3, 20):
                torch.manual_seed(0)
                whole = nn.Embedding(VOCABULARY, 5, padding).to(dtype)
                with torch.no_grad():
                    whole.weight[2, :3] = torch.tensor([torch.nan, -0.0, torch.inf])
                    whole.weight[13, 1] = 1e-40
                ids[0, :4] = torch.tensor([2, 13, 3, 20])
                embedding = parallelize_module(copy.deepcopy(whole), mesh(), VocabParallel(sequence=sequence))
                label = f"{dtype}, sequence {sequence}, padding {padding}"
                y, z = embedding(ids), whole(ids)
                assert_bitwise(pickle.loads(pickle.dumps(embedding))(ids).detach(), y.detach(), f"{label}: a pickle")
                expected_local = tokens(z, rank, RANKS) if sequence else z
                assert_bitwise(y.detach(), expected_local.detach().contiguous(), label)
                if dtype is torch.float32:
                    assert bool(torch.signbit(y.detach()[0, 0, 1])) == bool(
                        torch.signbit(expected_local.detach()[0, 0, 1])
                    )
                g = torch.randn(z.shape, generator=generator(2)).to(dtype)
                y.backward(tokens(g, rank, RANKS) if sequence else g)
                z.backward(g)
                grad: Any = embedding.weight.grad  # type: ignore[union-attr]
                assert grad.placements == (Shard(0),)
                assert_bitwise(grad.to_local(), whole.weight.grad.chunk(RANKS)[rank], f"{label}: gradient")  # type: ignore[union-attr]


def head_and_batch(dtype: torch.dtype, biased: bool = True) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(DIM, VOCABULARY, biased).to(dtype)
    x = torch.randn(2, 6, DIM, generator=generator(1)).to(dtype) * 3
    return head, x, torch.randint(VOCABULARY, (2, 6), generator=generator(2))


def single_process_loss(
    head: nn.Linear, x: Tensor, targets: Tensor, options: dict[str, Any], chunk: int, sequence: bool
) -> list[Tensor]:
    """The loss and the gradients of x, weight and bias, in float32, with the chunks and shards of the ranks."""
    order = torch.arange(targets.numel()).view(targets.shape)
    own = [part.reshape(-1) for part in order.chunk(RANKS, 1)] if sequence else [order.reshape(-1)]
    step = max(1, chunk // len(own))
    weight, bias = head.weight.detach(), head.bias.detach()
    flat, labels = x.reshape(-1, DIM), targets.reshape(-1)
    losses, grad_x = torch.zeros(len(flat)), torch.zeros(flat.shape)
    grad_weight, grad_bias = torch.zeros(weight.shape), torch.zeros(bias.shape)
    for start in range(0, len(own[0]), step):
        positions = torch.cat([part[start : start + step] for part in own])
        logits = F.linear(flat[positions], weight, bias).requires_grad_()
        each = SplitLoss.apply(logits, labels[positions], options, "none")
        (g,) = torch.autograd.grad(each, logits, torch.ones_like(each))
        losses[positions] = each.detach()
        parts = [a.float() @ b.float() for a, b in zip(g.chunk(RANKS, 1), weight.chunk(RANKS), strict=True)]
        grad_x[positions] = sum(parts[1:], parts[0])
        grad_weight = torch.addmm(grad_weight, g.t(), flat[positions]) if start else g.t() @ flat[positions]
        grad_bias += g.sum(0)
    count = (labels != options.get("ignore_index", -100)).sum()
    scale = torch.ones(()) / count
    return [losses.sum() / count, *(g * scale for g in (grad_x.view(x.shape), grad_weight, grad_bias))]


def a_column_parallel_head_with_its_loss_matches_one_process(rank: int) -> None:
    """Equals one process with the same chunks and shards bit for bit, and the plain function within 1e-6."""
    for sequence in (False, True):
        for label, options in OPTIONS.items():
            for chunk in (None, 4):
                head, x, targets = head_and_batch(torch.float32)
                targets[1, 4] = options.get("ignore_index", -100)
                parallel = parallelize_module(copy.deepcopy(head), mesh(), ColwiseParallel(sequence=sequence))
                x_local = (tokens(x, rank, RANKS) if sequence else x).clone().requires_grad_()
                loss = qt.linear_cross_entropy(x_local, parallel, targets, chunk=chunk, **options)
                loss.backward()
                wanted = single_process_loss(head, x, targets, options, chunk or 1000, sequence)
                where = f"{label}, sequence {sequence}, chunk {chunk}"
                assert_bitwise(loss.detach(), wanted[0], where)
                count = (targets != options.get("ignore_index", -100)).sum()
                assert_close(
                    f"{where}: x", x_local.grad, tokens(wanted[1], rank, RANKS) if sequence else wanted[1], 1e-6
                )
                for what, p, g in zip(("weight", "bias"), parallel.parameters(), wanted[2:], strict=True):
                    assert_bitwise(p.grad.to_local(), g.chunk(RANKS)[rank].contiguous(), f"{where}: {what}")  # type: ignore[union-attr]
                plain, whole = copy.deepcopy(head), x.clone().requires_grad_()
                expected = qt.linear_cross_entropy(whole, plain, targets, **options)
                expected.backward()
                assert count and abs(loss.detach() - expected.detach()) <= 1e-6 * expected.detach(), where
                assert whole.grad is not None and plain.weight.grad is not None
                expected_local = tokens(whole.grad, rank, RANKS) if sequence else whole.grad
                assert_close(f"{where}: x of the plain", x_local.grad, expected_local, 1e-5)
                grad: Any = parallel.weight.grad
                assert_close(f"{where}: weight of the plain", grad.full_tensor(), plain.weight.grad, 1e-5)


def each_reduction_and_dtype(rank: int) -> None:
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float64, 1e-12)):
        for reduction in ("mean", "sum", "none"):
            for sequence in (False, True):
                head, x, targets = head_and_batch(dtype, False)
                parallel = parallelize_module(copy.deepcopy(head), mesh(), ColwiseParallel(sequence=sequence))
                x_local = (tokens(x, rank, RANKS) if sequence else x).clone().requires_grad_()
                whole = x.clone().requires_grad_()
                options = {"reduction": reduction, "chunk": 4, "ignore_index": int(targets[0, 0])}
                loss = qt.linear_cross_entropy(x_local, parallel, targets, **options)
                expected = qt.linear_cross_entropy(whole, head, targets, **options)
                assert loss.dtype is expected.dtype and loss.shape == expected.shape
                scale = torch.linspace(1, 2, loss.numel()).view(loss.shape).to(loss.dtype)
                (loss * scale).sum().backward()
                (expected * scale).sum().backward()
                label = f"{dtype}, {reduction}, sequence {sequence}"
                assert_close(label, loss.detach(), expected.detach(), bound)
                assert whole.grad is not None and head.weight.grad is not None
                expected_local = tokens(whole.grad, rank, RANKS) if sequence else whole.grad
                assert_close(
                    f"{label}: x", x_local.grad, expected_local, max(bound, 1e-5 if dtype is torch.float32 else 0)
                )
                grad: Any = parallel.weight.grad
                assert_close(f"{label}: weight", grad.full_tensor(), head.weight.grad, max(bound, 1e-11))


class _Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor computed inside the context."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, Tensor):
                self.most = max(self.most, t.numel())
        return result


def no_rank_has_all_logits(rank: int) -> None:
    torch.manual_seed(0)
    head, chunk = nn.Linear(8, 512), 16
    parallel = parallelize_module(copy.deepcopy(head), mesh(), ColwiseParallel(sequence=True))
    x, targets = torch.randn(1, 256, 8), torch.randint(512, (1, 256))
    with _Largest() as largest:
        qt.linear_cross_entropy(tokens(x, rank, RANKS).requires_grad_(), parallel, targets, chunk=chunk).backward()
    # The logits of a chunk for this rank's vocabulary shard; its shard of the weight has half as many elements.
    assert largest.most == chunk * 512 // RANKS, largest.most
    counted = []
    for gradients in (torch.enable_grad, torch.no_grad):
        with gradients(), FlopCounterMode(display=False) as counter:
            qt.linear_cross_entropy(tokens(x, rank, RANKS).requires_grad_(), parallel, targets, chunk=chunk)
        counted.append(counter.get_total_flops())
    assert counted[0] == 3 * counted[1] > 0, "gradients are computed only where autograd records"


#: Steps of a head under each recipe, in the quick and in the slow tests.
HEADS, LONG = dict.fromkeys(recipes.RECIPES, 2), dict.fromkeys(recipes.RECIPES, 20)


def quantized_heads(rank: int) -> None:
    heads_under(rank, HEADS)


def quantized_heads_for_long(rank: int) -> None:
    heads_under(rank, LONG)


def heads_under(rank: int, steps_of: Mapping[str, int]) -> None:
    """A column-parallel head and the cross entropy of its logits equal one process that splits the same sums."""
    for name, steps in steps_of.items():
        recipe = recipes.get(name)
        block = max([32, *(side for s in recipe.operands().values() if s for side in s.block if side is not None)])
        for sequence in (False, True):
            torch.manual_seed(0)
            head = nn.Sequential(nn.Linear(block, RANKS * block))
            qt.convert(head, recipe)
            plain, alone = copy.deepcopy(head), copy.deepcopy(head)
            split = SplitLinear(alone[0], recipe, RANKS, True, sequence)  # type: ignore[arg-type]
            parallel = parallelize_module(copy.deepcopy(head), mesh(), {"0": ColwiseParallel(sequence=sequence)})
            optimizers = [torch.optim.SGD(each.parameters(), 1.0) for each in (parallel, split)]
            for step in range(steps):
                x = torch.randn(2, 2 * block, block, generator=generator(step)) * 2
                targets = torch.randint(RANKS * block, (2, 2 * block), generator=generator(step))
                x_local = (tokens(x, rank, RANKS) if sequence else x).clone().requires_grad_()
                whole = x.clone().requires_grad_()
                loss = cross_entropy(parallel(x_local), targets, mesh(), label_smoothing=0.1)
                options = {"label_smoothing": 0.1}
                logits = split(whole)
                expected = SplitLoss.apply(logits.flatten(0, -2), targets.flatten(), options, "mean")
                label = f"{name}, sequence {sequence}, step {step}"
                if not step:
                    y = F.cross_entropy(plain(x).flatten(0, -2).float(), targets.flatten(), label_smoothing=0.1)
                    assert abs(loss.detach() - y.detach()) <= 1e-6 * y.detach(), label
                assert_bitwise(loss.detach(), expected.detach(), label)
                loss.backward()
                expected.backward()
                assert whole.grad is not None
                expected_local = tokens(whole.grad, rank, RANKS) if sequence else whole.grad
                assert_bitwise(x_local.grad, expected_local, f"{label}: x")
                for (what, p), q in zip(parallel.named_parameters(), split.parameters(), strict=True):
                    assert_bitwise(p.grad.to_local(), q.grad.chunk(RANKS)[rank].contiguous(), f"{label}: {what}")  # type: ignore[union-attr]
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                split.roll()


def hard_logits(rank: int) -> None:
    """NaN and infinite logits on any rank give what F.cross_entropy gives for the unsharded logits."""
    logits = torch.randn(7, VOCABULARY, generator=generator(0))
    logits[1, 2], logits[2, 20], logits[3, 20] = torch.nan, torch.nan, torch.inf
    logits[4] = -torch.inf
    logits[5, :12] = -torch.inf
    logits[6] *= 1e4
    targets = torch.tensor([0, 1, 1, 2, 3, 20, 5])
    ours = logits.chunk(RANKS, 1)[rank].clone().requires_grad_()
    theirs = logits.clone().requires_grad_()
    loss = cross_entropy(ours, targets, mesh(), reduction="none")
    expected = F.cross_entropy(theirs, targets, reduction="none")
    assert_close("loss", loss.detach().nan_to_num(7.0), expected.detach().nan_to_num(7.0), 1e-6)
    loss.sum().backward()
    expected.sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    wanted = theirs.grad.chunk(RANKS, 1)[rank]
    assert torch.equal(ours.grad.isnan(), wanted.isnan())
    assert_close("gradient", ours.grad.nan_to_num(), wanted.nan_to_num(), 1e-6)
    for reduction in ("mean", "sum"):
        none = cross_entropy(torch.zeros(0, 12).requires_grad_(), targets[:0], mesh(), reduction=reduction)
        assert none.isnan() if reduction == "mean" else none == 0


def ignored_targets(rank: int) -> None:
    """Ignored targets count neither in the mean nor in the gradients of the logits' shards."""
    logits = torch.randn(6, VOCABULARY, generator=generator(0))
    targets = torch.tensor([0, -100, 20, 5, -100, 23])
    for reduction in ("mean", "sum", "none"):
        ours = logits.chunk(RANKS, 1)[rank].clone().requires_grad_()
        theirs = logits.clone().requires_grad_()
        loss = cross_entropy(ours, targets, mesh(), reduction=reduction)
        expected = F.cross_entropy(theirs, targets, reduction=reduction)
        assert_close("loss", loss.detach(), expected.detach(), 1e-6)
        loss.sum().backward()
        expected.sum().backward()
        assert ours.grad is not None and theirs.grad is not None
        assert_close("gradient", ours.grad, theirs.grad.chunk(RANKS, 1)[rank], 1e-6)


def as_torch_loss_parallel(rank: int) -> None:
    """torch's loss_parallel accepts the output of a column-parallel layer as a DTensor."""
    head, x, targets = head_and_batch(torch.float32)
    parallel = parallelize_module(copy.deepcopy(head), mesh(), ColwiseParallel())
    logits = DTensor.from_local(parallel(x.flatten(0, 1)), mesh(), [Shard(1)])
    with loss_parallel():
        loss: Any = F.cross_entropy(logits, targets.flatten())
        loss.backward()
    expected = F.cross_entropy(head(x.flatten(0, 1)), targets.flatten())
    expected.backward()
    assert_close("loss", loss.full_tensor().detach(), expected.detach(), 1e-6)
    grad: Any = parallel.weight.grad
    assert head.weight.grad is not None
    assert_close("weight", grad.full_tensor(), head.weight.grad, 1e-5)


class Tied(nn.Module):
    """A head that shares the embedding's weight: a layer of its own, or the embedding itself."""

    def __init__(self, layer: bool = True) -> None:
        super().__init__()
        self.embed, self.up, self.norm = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.head = None
        if layer:
            self.head = nn.Linear(DIM, VOCABULARY, False)
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        head = self.embed if self.head is None else self.head
        loss: Tensor = qt.linear_cross_entropy(self.norm(self.embed(ids)), head, targets, chunk=8)
        return loss


def a_tied_head_stays_tied(rank: int) -> None:
    for sequence, layer in itertools.product((False, True), (False, True)):
        torch.manual_seed(0)
        whole = Tied(layer)
        model: Any = copy.deepcopy(whole)
        plan: Any = {"embed": VocabParallel(sequence=sequence), "up": ColwiseParallel()}
        if layer:
            plan["head"] = ColwiseParallel(sequence=sequence)
        if sequence:
            plan["norm"] = SequenceParallel()
        parallelize_module(model, mesh(), plan)
        assert not layer or model.head.weight is model.embed.weight
        assert len(list(model.parameters())) == 5
        optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (model, whole)]
        for step in range(3):
            ids, targets = (torch.randint(VOCABULARY, (2, 8), generator=generator(2 * step + i)) for i in range(2))
            losses = [each(ids, targets) for each in (model, whole)]
            assert_close(f"sequence {sequence}: loss {step}", losses[0].detach(), losses[1].detach(), 1e-5)
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert not layer or model.head.weight is model.embed.weight
        assert_close("weight", model.embed.weight.full_tensor().detach(), whole.embed.weight.detach(), 1e-5)


@contextmanager
def raises(message: str) -> Iterator[None]:
    with pytest.raises(ValueError, match=message):
        yield


def bad_vocabularies(rank: int) -> None:
    with raises("25 rows, which 2 ranks cannot share.*pad the vocabulary by 1"):
        parallelize_module(nn.Embedding(25, 8), mesh(), VocabParallel())
    with raises("scale_grad_by_freq=True"):
        parallelize_module(nn.Embedding(24, 8, scale_grad_by_freq=True), mesh(), VocabParallel())
    with raises("a style for nn.Embedding"):
        parallelize_module(nn.Linear(24, 8), mesh(), VocabParallel())
    with raises("for a head pad the vocabulary"):
        parallelize_module(nn.Linear(8, 25), mesh(), ColwiseParallel())
    tied = Tied()
    with raises("is on .*already"):
        parallelize_module(tied, mesh(), {"embed": VocabParallel(), "head": RowwiseParallel()})
    embedding = parallelize_module(nn.Embedding(24, 8), mesh(), VocabParallel(sequence=True))
    with raises("already"):
        parallelize_module(embedding, mesh(), VocabParallel())
    with raises("24 rows, and token ids range from 0 to 24"):
        embedding(torch.tensor([[0, 24]]))
    with raises("2 ranks cannot share them"):
        embedding(torch.tensor([[0, 1, 2]]))
    head, x, targets = head_and_batch(torch.float32)
    column = parallelize_module(copy.deepcopy(head), mesh(), ColwiseParallel(sequence=True))
    with raises(r"needs integers of shape \(2, 12\), those of all tokens"):
        qt.linear_cross_entropy(x, column, targets)
    with raises("its last axis must be 16"):
        qt.linear_cross_entropy(x[..., :8], column, targets)
    with raises("uses the bias of the layer"):
        qt.linear_cross_entropy(x[:, :3], column, targets, torch.zeros(VOCABULARY))
    with raises("pass the layer instead"):
        qt.linear_cross_entropy(x[:, :3], column.weight, targets)
    with raises("target 24 is outside 0 … 23"):
        qt.linear_cross_entropy(x[:, :3], column, targets.clamp(min=24))
    with raises(r"of Embedding under VocabParallel\(sequence=True\): .* needs integers of shape \(2, 12\)"):
        qt.linear_cross_entropy(torch.zeros(2, 6, 8), embedding, targets)
    row = parallelize_module(copy.deepcopy(head), mesh(), RowwiseParallel())
    with raises(r"use the style ColwiseParallel"):
        qt.linear_cross_entropy(x[..., :8], row, targets)
    with raises("need integers of shape"):
        cross_entropy(torch.zeros(2, 12), targets, mesh())
    with raises("label_smoothing is 2"):
        cross_entropy(torch.zeros(2, 12), targets[0, :2], mesh(), label_smoothing=2.0)


def an_invalid_input_on_one_rank_raises_on_all(rank: int) -> None:
    """Invalid targets or tokens on any single rank, at any point of a forward, raise everywhere; no rank hangs."""
    head, x, targets = head_and_batch(torch.float32)
    embedding = parallelize_module(nn.Embedding(VOCABULARY, DIM), mesh(), VocabParallel())
    wrong = {
        "targets": (targets.float(), targets > 3, targets[:1], targets.view(-1)),
        f"target {VOCABULARY} is outside": (torch.full_like(targets, VOCABULARY),),
    }
    for sequence in (False, True):
        column = parallelize_module(copy.deepcopy(head), mesh(), ColwiseParallel(sequence=sequence))
        x_local = tokens(x, rank, RANKS) if sequence else x
        losses = [lambda t, x_local=x_local, column=column: qt.linear_cross_entropy(x_local, column, t)]
        if not sequence:
            losses.append(lambda t, x_local=x_local, column=column: cross_entropy(column(x_local), t, mesh()))
        for loss in losses:
            for first_call in (True, False):
                for message, each in wrong.items():
                    for failing_rank in range(RANKS):
                        for bad in each:
                            if not first_call:
                                # Then the loss is not the first call of the forward.
                                embedding(targets)
                            with raises(f"rank {failing_rank}: [^;]*{message}"):
                                loss(bad if rank == failing_rank else targets)
                            loss(targets).backward()
    for failing_rank in range(RANKS):
        with raises(f"rank {failing_rank}: Embedding has 24 rows, and token ids range from -1"):
            embedding(targets - (int(targets.min()) + 1) if rank == failing_rank else targets)
        embedding(targets)


CASES = [
    a_vocabulary_parallel_embedding_matches_the_unsharded_one,
    a_column_parallel_head_with_its_loss_matches_one_process,
    each_reduction_and_dtype,
    no_rank_has_all_logits,
    quantized_heads,
    hard_logits,
    ignored_targets,
    as_torch_loss_parallel,
    a_tied_head_stays_tied,
    bad_vocabularies,
    an_invalid_input_on_one_rank_raises_on_all,
]


if __name__ == "__main__":
    two_ranks.main(CASES)
