"""One process that splits the sums of attention as the ranks of a sequence do, and adds them in their order."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.nn.attention import DotProductAttention, attention
from quaver.torch.parallel.context import comm
from quaver.torch.parallel.context.comm import CausalWindow, ChunkOrder

#: Of all ranks' q, k and v [B, S, H, D], the outputs.
Attend = Callable[[ChunkOrder, list[Tensor], list[Tensor], list[Tensor]], list[Tensor]]


class Gathered(torch.autograd.Function):
    """Causal, chunk by chunk; gradients of keys and values are added chunk by chunk, then rank by rank."""

    @staticmethod
    def forward(ctx: Any, order: ChunkOrder, *qkv: Tensor) -> tuple[Tensor, ...]:
        ranks = order.ranks
        keys, values = (order.join(qkv[i * ranks : (i + 1) * ranks], 1) for i in (1, 2))
        ctx.order, ctx.shape, ctx.runs = order, keys.shape, []
        outs = []
        for rank, q in enumerate(qkv[:ranks]):
            spans = order.spans(rank, keys.shape[1])
            with torch.enable_grad():
                for part, (_, end) in zip(q.chunk(len(spans), 1), spans, strict=True):
                    leaves = [x.detach().clone().requires_grad_() for x in (part, keys[:, :end], values[:, :end])]
                    ctx.runs.append((rank, end, leaves, attention(*leaves, mask_type="causal_bottom_right")))
            outs.append(torch.cat([run[3].detach() for run in ctx.runs if run[0] == rank], 1))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        order, ranks = ctx.order, ctx.order.ranks
        dqs, totals = [], None
        for rank, grad in enumerate(grads):
            runs = [run for run in ctx.runs if run[0] == rank]
            own = [torch.zeros(ctx.shape) for _ in range(2)]
            dq = []
            for (_, end, leaves, y), g in zip(runs, grad.chunk(len(runs), 1), strict=True):
                of_q, *of_rest = torch.autograd.grad(y, leaves, g)
                dq.append(of_q)
                for total, part in zip(own, of_rest, strict=True):
                    total[:, :end] += part
            dqs.append(torch.cat(dq, 1))
            totals = own if totals is None else [a + b for a, b in zip(totals, own, strict=True)]
        assert totals is not None
        return None, *dqs, *(order.cut(x, 1, rank) for x in totals for rank in range(ranks))


class Ring(torch.autograd.Function):
    """Causal, each rank's queries against one rank's keys after the other; their gradients are added in that order."""

    @staticmethod
    def forward(ctx: Any, order: ChunkOrder, *qkv: Tensor) -> tuple[Tensor, ...]:
        ranks = order.ranks
        q, k, v = ([x.transpose(1, 2) for x in qkv[i * ranks : (i + 1) * ranks]] for i in range(3))
        ctx.order, ctx.qkv, ctx.merged = order, (q, k, v), []
        for rank in range(ranks):
            merged = comm.MergedSoftmax(
                torch.zeros_like(q[rank]), torch.full(q[rank].shape[:3], -torch.inf), torch.zeros(())
            )
            merged = merged._replace(total=torch.zeros_like(merged.top))
            for step in range(ranks):
                source = (rank - step) % ranks
                for rows, columns, block in _pairs(order, rank, source, q[rank]):
                    operands = q[rank][:, :, rows], k[source][:, :, columns], v[source][:, :, columns]
                    merged.rows(rows).add(comm.forward(*operands, block))
            ctx.merged.append(merged)
        ctx.outs = [merged.normalized() for merged in ctx.merged]
        return tuple(out.transpose(1, 2) for out in ctx.outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        order, ranks, (q, k, v) = ctx.order, ctx.order.ranks, ctx.qkv
        dq = [torch.zeros_like(x) for x in q]
        sums: list[Any] = [None] * ranks
        for step in range(ranks):
            for rank in range(ranks):
                source, grad = (rank - step) % ranks, grads[rank].transpose(1, 2)
                delta = (grad * ctx.outs[rank]).sum(-1, keepdim=True)
                merged = ctx.merged[rank]._replace(out=delta)
                own = torch.zeros_like(k[source]), torch.zeros_like(v[source])
                for rows, columns, block in _pairs(order, rank, source, q[rank]):
                    keys, values = k[source][:, :, columns], v[source][:, :, columns]
                    given = grad[:, :, rows], q[rank][:, :, rows], keys, values, merged.rows(rows), block
                    gradients = comm.backward(*given)
                    for x, part, g in zip((dq[rank], *own), (rows, columns, columns), gradients, strict=True):
                        x[:, :, part] += g
                before = sums[source]
                sums[source] = own if before is None else tuple(a + b for a, b in zip(own, before, strict=True))
        every = (*dq, *(x[0] for x in sums), *(x[1] for x in sums))
        return None, *(x.transpose(1, 2) for x in every)


def _pairs(order: ChunkOrder, rank: int, source: int, q: Tensor) -> list[tuple[slice, slice, comm.ScoreBlock]]:
    tokens = q.shape[2] * order.ranks
    length = tokens // order.chunks
    pairs = []
    for i, queries in enumerate(order.spans(rank, tokens)):
        for j, keys in enumerate(order.spans(source, tokens)):
            if keys[0] < queries[1]:
                block = comm.ScoreBlock(
                    q.shape[3] ** -0.5, None, CausalWindow(-1, 0).hidden(queries, keys, q.device), None
                )
                pairs.append((slice(i * length, (i + 1) * length), slice(j * length, (j + 1) * length), block))
    return pairs


def by_heads(order: ChunkOrder, *qkv: list[Tensor]) -> list[Tensor]:
    """Plain attention: nothing is split."""
    out = attention(*(order.join(parts, 1) for parts in qkv), mask_type="causal")
    return [order.cut(out, 1, rank) for rank in range(order.ranks)]


#: By the way it is the reference of.
SPLIT: dict[str, Attend] = {
    "gather": lambda order, q, k, v: list(Gathered.apply(order, *q, *k, *v)),
    "ring": lambda order, q, k, v: list(Ring.apply(order, *q, *k, *v)),
    "all_to_all": by_heads,
}


class Together:
    """Runs a model of each rank in this process, a thread each, which meet where they attend."""

    def __init__(self, models: list[nn.Module], order: ChunkOrder, attend: Attend) -> None:
        self.models, self.order, self.attend = models, order, attend
        self.meeting = threading.Barrier(order.ranks, timeout=60)
        self.given: list[Any] = [None] * order.ranks
        self.outs: list[Tensor] = []
        for rank, model in enumerate(models):
            for core in model.modules():
                if isinstance(core, DotProductAttention):
                    core.attend = self._attend_of(rank)

    def _attend_of(self, rank: int) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            self.given[rank] = q, k, v
            if self.meeting.wait() == 0:
                self.outs = self.attend(self.order, *([x[i] for x in self.given] for i in range(3)))
            self.meeting.wait()
            return self.outs[rank]

        return attend

    def run(self, call: Callable[[nn.Module, int], Tensor]) -> list[Tensor]:
        """What each rank's call returns."""
        results: list[Any] = [None] * self.order.ranks

        def run_rank(rank: int) -> None:
            try:
                results[rank] = call(self.models[rank], rank)
            except Exception as error:
                results[rank] = error
                self.meeting.abort()

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(self.order.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, threading.BrokenBarrierError):
                raise result
        return results
