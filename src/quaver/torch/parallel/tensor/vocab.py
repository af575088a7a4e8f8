"""Vocabulary-parallel embedding, cross entropy, and language-model head fused with its loss.

In the embedding, a rank looks up the tokens in its vocabulary range and writes zeros for all others, and ranks merge
their results. No sum is rounded, so outputs and gradients have the bits of one process.
"""

import math
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quaver.recipes.text import check_name
from quaver.torch.linear.general import is_prequantized
from quaver.torch.nn.loss import REDUCTIONS, LossConfig, added, chunk_of, scaled, why_no_targets
from quaver.torch.operations import ops
from quaver.torch.parallel import comm
from quaver.torch.parallel.tensor.plan import accumulation_dtype, plain_product
from quaver.torch.parallel.tensor.sequence import SequenceLayout, gathered
from quaver.torch.parallel.tensor.sharded_module import ShardedModule
from quaver.torch.state.history.sync import check_agreement, describe_tensor

# ---- cross entropy ----
# Cross entropy of vocabulary-parallel logits; no rank ever has the logits of all tokens of the vocabulary.
#
# A rank computes three numbers per token: its largest logit, the sum of exponentials relative to it, and the target's
# logit if the target is in its range (a fourth under label smoothing: the sum of its logits). They are all-gathered and
# reduced in rank order on every rank. Source: Shoeybi et al. 2019, arXiv:1909.08053, §3.


class VocabRange(NamedTuple):
    """This rank's vocabulary range and the process group that shares the vocabulary."""

    group: Any
    #: First vocabulary index of this rank.
    first: int
    #: Size of the whole vocabulary.
    whole: int


class SharedLogitStats(NamedTuple):
    """Reduced statistics per token: largest logit [T], logarithm of the sum of exponentials relative to it [T], and
    loss [T].
    """

    top: Tensor
    log_total: Tensor
    losses: Tensor


def soft_capped(logits: Tensor, rule: LossConfig) -> tuple[Tensor, Tensor | None]:
    """Apply the soft cap. Returns logits in at least float32, and tanh(logits / cap) for the derivative, or None
    without a cap.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not rule.soft_cap:
        return z, None
    tangent = torch.tanh(z / rule.soft_cap)
    return rule.soft_cap * tangent, tangent


def local_stats(z: Tensor, targets: Tensor, rule: LossConfig, words: VocabRange) -> Tensor:
    """Compute one rank's statistics of its logits [T, V / ranks]: [T, 3], or [T, 4] under label smoothing."""
    # Clamp so that exponentials of a row of -inf are 0.
    top = z.amax(-1).clamp_min(torch.finfo(z.dtype).min)
    total = (z - top[:, None]).exp_().sum(-1)
    own, place = _places(targets, z.shape[1], words)
    target = torch.where(own, z.gather(1, place[:, None])[:, 0], 0.0)
    return torch.stack([top, total, target, *([z.sum(-1)] if rule.label_smoothing else [])], 1)


def reduce_stats(stats: Tensor, targets: Tensor, rule: LossConfig, words: VocabRange) -> SharedLogitStats:
    """Reduce the gathered statistics [ranks, T, 3 or 4] to `SharedLogitStats`."""
    top = stats[..., 0].amax(0)
    total = torch.zeros_like(top)
    target, sums = torch.zeros_like(top), torch.zeros_like(top)
    for each in stats:
        total += each[:, 1] * (each[:, 0] - top).exp()
        target += each[:, 2]
        if rule.label_smoothing:
            sums += each[:, 3]
    log_total = total.log()
    losses = (top - target) + log_total
    if rule.label_smoothing:
        mean = (top - sums / words.whole) + log_total
        losses = (1 - rule.label_smoothing) * losses + rule.label_smoothing * mean
    if rule.z_loss:
        losses = losses + rule.z_loss * (top + log_total).square()
    known = (targets >= 0) & (targets < words.whole)
    losses = torch.where(targets != rule.ignore_index, torch.where(known, losses, torch.nan), 0.0)
    return SharedLogitStats(top, log_total, losses)


def gradient(
    z: Tensor,
    tangent: Tensor | None,
    shared: SharedLogitStats,
    targets: Tensor,
    scales: Tensor | None,
    rule: LossConfig,
    words: VocabRange,
) -> Tensor:
    """Return the gradient of this rank's logits, computed in place of z.

    Args:
        z, tangent: results of `soft_capped`.
        scales: gradient of each token's loss; None means 1.
    """
    d = z.sub_(shared.top[:, None]).sub_(shared.log_total[:, None]).exp_()
    if rule.z_loss:
        d *= (1 + 2 * rule.z_loss * (shared.top + shared.log_total))[:, None]
    own, place = _places(targets, z.shape[1], words)
    d.scatter_add_(1, place[:, None], torch.where(own, rule.label_smoothing - 1, 0.0).to(d.dtype)[:, None])
    if rule.label_smoothing:
        d -= rule.label_smoothing / words.whole
    if tangent is not None:
        d *= 1 - tangent.square()
    known = (targets >= 0) & (targets < words.whole)
    d *= torch.where(known, 1.0 if scales is None else scales, torch.nan).to(d.dtype)[:, None]
    return d.masked_fill_((targets == rule.ignore_index)[:, None], 0.0)


def _places(targets: Tensor, number: int, words: VocabRange) -> tuple[Tensor, Tensor]:
    """Return True for targets in this rank's range, and their local index, 0 for the others."""
    place = targets - words.first
    own = (place >= 0) & (place < number)
    return own, torch.where(own, place, 0)


def _reduced_stats(z: Tensor, targets: Tensor, rule: LossConfig, words: VocabRange) -> SharedLogitStats:
    """Compute statistics and losses of all tokens, reduced over ranks in rank order."""
    own = local_stats(z, targets, rule, words)
    stats = own[None] if z.shape[1] == words.whole else comm.gather(own[None], 0, words.group)()
    return reduce_stats(stats, targets, rule, words)


@torch.compiler.disable
def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    mesh: Any = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: str = "mean",
    overwrite: bool = False,
) -> Tensor:
    """Cross entropy of a `ColwiseParallel` head's logits, which are sharded over the vocabulary.

    Use it for quantized heads. For a head in high precision, `quaver.torch.linear_cross_entropy(x, head, targets)`
    computes head and loss chunk by chunk, without the logits of all tokens.

    Args:
        logits: [..., V / ranks], as the head returns them.
        targets: integer [...] in the whole vocabulary, the same on every rank.
        mesh: the head's one-dimensional mesh, or its process group; None means all ranks.
        ignore_index, label_smoothing, z_loss, soft_cap, reduction: as in `quaver.torch.linear_cross_entropy`.
        overwrite: write the gradient into the memory of the logits. Nothing may read them after backward, and there can
            be only one backward.
    Returns:
        float32 scalar, or [...] for "none"; the same on every rank. Its gradient is that of this rank's logits. Saved
        for backward are the logits and three numbers per token.
    Raises:
        ValueError: shapes or options do not fit; on a CPU also a target outside the vocabulary.
    Exact: the bits of one process that splits the logits the same way. Bounded: within 1e-6 of F.cross_entropy.
    """
    group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
    rule = LossConfig(ignore_index, label_smoothing, z_loss, 0.0 if soft_cap is None else soft_cap)
    number = logits.shape[-1]
    words = VocabRange(group, number * dist.get_rank(group), number * dist.get_world_size(group))
    why = _why_not(targets, [*logits.shape[:-1]], f"logits {tuple(logits.shape)} need", words, ignore_index)
    what = {
        "logits": describe_tensor(logits),
        "targets": describe_tensor(targets),
        "gradients": torch.is_grad_enabled(),
    }
    what |= {"options": (*rule, reduction, overwrite)}
    error: str | Exception = why or _why_no_rule(rule, soft_cap) or _why_no_memory(logits, overwrite)
    try:
        check_name("reduction", reduction, REDUCTIONS)
    except ValueError as raised:
        error = raised
    check_agreement("cross_entropy", what, group, error=error)
    return _logits_loss(logits, targets, rule, words, reduction, overwrite)


def cross_entropy_of_all(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, reduction: str, overwrite: bool = False
) -> Tensor:
    """`cross_entropy` in one process, from the logits [..., V] of the whole vocabulary.

    Raises:
        ValueError: shapes or options do not fit; on a CPU also a target outside the vocabulary.
    """
    rule, words = LossConfig(ignore_index, label_smoothing, 0.0, 0.0), VocabRange(None, 0, logits.shape[-1])
    why = _why_not(targets, [*logits.shape[:-1]], f"logits {tuple(logits.shape)} need", words, ignore_index)
    why = why or _why_no_rule(rule, None) or _why_no_memory(logits, overwrite)
    if why:
        raise ValueError(why)
    return _logits_loss(logits, targets, rule, words, reduction, overwrite)


def _logits_loss(
    logits: Tensor, targets: Tensor, rule: LossConfig, words: VocabRange, reduction: str, overwrite: bool
) -> Tensor:
    """Compute the loss of validated arguments."""
    labels = targets.reshape(-1).to(torch.int64)
    y: Tensor = _CrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), labels, rule, words, reduction, overwrite)
    return y.view(targets.shape) if reduction == "none" else y


def _why_not(targets: Tensor, shape: list[int], needs: str, words: VocabRange, ignored: int, more: str = "") -> str:
    """Return an error message if the targets do not have the given shape or an integer dtype, or ""."""
    if [*targets.shape] != shape or targets.is_floating_point() or targets.dtype is torch.bool:
        return f"targets are {targets.dtype} {tuple(targets.shape)}; {needs} integers of shape {tuple(shape)}{more}"
    return why_no_targets(targets, words.whole, ignored)


def _why_no_rule(rule: LossConfig, soft_cap: float | None) -> str:
    """Return an error message for invalid loss options, or ""."""
    capped = soft_cap is None or 0 < soft_cap < math.inf
    if 0 <= rule.label_smoothing <= 1 and 0 <= rule.z_loss < math.inf and capped:
        return ""
    return (
        f"label_smoothing is {rule.label_smoothing}, z_loss {rule.z_loss}, soft_cap {soft_cap}; "
        "label_smoothing must be in 0 … 1, z_loss finite and not negative, soft_cap finite and positive, or "
        "None"
    )


def _why_no_memory(logits: Tensor, overwrite: bool) -> str:
    """Return an error message if the logits cannot be overwritten by their gradient, or ""."""
    if not overwrite or logits.is_contiguous():
        return ""
    return f"logits {tuple(logits.shape)} with strides {logits.stride()} cannot be overwritten: give contiguous ones"


class _CrossEntropy(torch.autograd.Function):
    """Autograd function of `cross_entropy`; saves the logits, the targets, and two numbers per token."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, rule: LossConfig, words: VocabRange, reduction: str, overwrite: bool
    ) -> Tensor:
        z, _ = soft_capped(logits, rule)
        shared = _reduced_stats(z, targets, rule, words)
        count = (targets != rule.ignore_index).sum() if reduction == "mean" else None
        ctx.save_for_backward(logits, targets, shared.top, shared.log_total, count)
        ctx.facts = rule, words, reduction, overwrite
        return _reduced(shared.losses, count, reduction)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        logits, targets, top, log_total, count = ctx.saved_tensors
        rule, words, reduction, overwrite = ctx.facts
        z, tangent = soft_capped(logits, rule)
        z = z.clone() if z is logits and not overwrite else z
        scales = g if reduction == "none" else (g if count is None else g / count.clamp(min=1)).expand(top.shape)
        d = gradient(z, tangent, SharedLogitStats(top, log_total, top), targets, scales, rule, words)
        if overwrite:
            # `copy_` bumps the version counter, so that autograd rejects a second backward.
            d = d if d is logits else logits.copy_(d)
        return d.to(logits.dtype), None, None, None, None, None


def _reduced(losses: Tensor, count: Tensor | None, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if count is None else losses.sum() / count


class _HeadLossCall(NamedTuple):
    """Options of one call of a head with its loss."""

    words: VocabRange
    #: Number of ranks over which the tokens of x are sharded; 1 if each has all.
    ranks: int
    dtype: torch.dtype
    rule: LossConfig
    reduction: str
    #: Tokens per chunk.
    chunk: int
    #: True if gradients are enabled; `ctx.needs_input_grad` in forward ignores no_grad.
    differentiated: bool


@torch.compiler.disable
def loss_over_ranks(
    head: nn.Linear | nn.Embedding,
    x: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    rule: LossConfig,
    reduction: str,
    chunk: int | None,
) -> Tensor:
    """`linear_cross_entropy` for a `ColwiseParallel` head, or a `VocabParallel` embedding used as the head.

    Args:
        head: layer whose weight is sharded over the vocabulary.
        x: [..., dim], all tokens on every rank; if the style has sequence=True, [..., tokens of this rank, dim].
        targets: targets of all tokens, the same on every rank.
        bias: must be None; a bias of the head is used.
        dtype: compute dtype of the GEMMs.
        rule, reduction: options of the loss.
        chunk: tokens per chunk; None chooses.
    Returns:
        The loss, the same on every rank. A chunk's logits are [chunk, V / ranks] on each rank. With sequence=True, x is
        gathered one chunk at a time, and its gradient is reduce-scattered in float32.
    """
    weight: Any = head._parameters["weight"]
    layout: Any = head.layout_on_ranks
    mesh = weight.device_mesh
    ranks, name = mesh.size(), head.__dict__.get("qualified_name") or type(head).__name__
    group = mesh.get_group()
    prefix = f"linear_cross_entropy of {name} under {layout.name}"
    with torch.no_grad():
        local_weight: Tensor = weight.to_local()
    words = VocabRange(group, local_weight.shape[0] * mesh.get_local_rank(), weight.shape[0])
    lead = [*x.shape[:-1]]
    if layout.sequence and lead:
        lead[-1] *= ranks
    why = ""
    if bias is not None:
        why = f"{prefix} uses the bias of the layer: pass none"
    elif not layout.column:
        why = f"{prefix}: each rank has a partial sum of every logit; use the style ColwiseParallel() for the head"
    elif x.dim() < (2 if layout.sequence else 1) or x.shape[-1] != weight.shape[1]:
        why = f"{prefix} got x of shape {tuple(x.shape)}; its last axis must be {weight.shape[1]}"
    elif is_prequantized(local_weight):
        why = (
            f"{prefix} multiplies in high precision, and its weight is gathered as codes: leave it out, "
            f"gather_quantized(model, skip=[{name!r}]), or call the head and "
            "quaver.torch.parallel.cross_entropy"
        )
    else:
        needs = f"{prefix}: x {tuple(x.shape)} on each of {ranks} ranks needs"
        why = _why_not(targets, lead, needs, words, rule.ignore_index, ", those of all tokens on every rank")
    what = {
        "x": describe_tensor(x),
        "targets": describe_tensor(targets),
        "weight": describe_tensor(weight),
        "gradients": torch.is_grad_enabled(),
        "options": (dtype, *rule, reduction, chunk),
    }
    check_agreement(f"{name} with its loss", what, group, error=why)
    labels = targets.to(torch.int64)
    parts = ranks if layout.sequence else 1
    chunk = chunk or chunk_of(labels.numel(), local_weight.shape[0], dtype)
    call = _HeadLossCall(words, parts, dtype, rule, reduction, chunk, torch.is_grad_enabled())
    sharded_bias: Any = head._parameters.get("bias")
    local = None if sharded_bias is None else sharded_bias.to_local()
    y: Tensor = _VocabParallelHeadLoss.apply(call, local_weight, x, weight.to_local(), local, labels)
    return y


class _VocabParallelHeadLoss(torch.autograd.Function):
    """Autograd function of `loss_over_ranks`. Gradients are computed in forward, except in backward for reduction
    "none".
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: _HeadLossCall,
        local_weight: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
    ) -> Tensor:
        needs = tuple(call.differentiated and need for need in ctx.needs_input_grad[2:5])
        now = (False,) * 3 if call.reduction == "none" else needs
        losses, *grads = _chunks(call, local_weight, x, bias, targets, None, now)
        count = (targets != call.rule.ignore_index).sum() if call.reduction == "mean" else None
        ctx.facts = call, needs, x.dtype, weight.dtype, None if bias is None else bias.dtype, x.shape
        if call.reduction == "none":
            ctx.save_for_backward(local_weight, x, bias, targets)
        else:
            ctx.save_for_backward(None if count is None else count.clamp(min=1), *grads)
        return _reduced(losses, count, call.reduction)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        call, needs, *dtypes, shape = ctx.facts
        if call.reduction == "none":
            local_weight, x, bias, targets = ctx.saved_tensors
            _, *grads = _chunks(call, local_weight, x, bias, targets, g, needs)
            scale = None
        else:
            count, *grads = ctx.saved_tensors
            scale = g if count is None else g / count
        grad_x, grad_weight, grad_bias = (
            None if grad is None else scaled(grad, scale, to) for grad, to in zip(grads, dtypes, strict=True)
        )
        return None, None, None if grad_x is None else grad_x.view(shape), grad_weight, grad_bias, None


def _group_by_rank(values: Tensor, ranks: int) -> Tensor:
    """Reorder values of all tokens [..., S] to [ranks, tokens of a rank]."""
    if ranks == 1:
        return values.reshape(1, -1)
    return values.unflatten(-1, (ranks, values.shape[-1] // ranks)).movedim(-2, 0).reshape(ranks, -1)


def _ungroup_by_rank(by_rank: Tensor, like: Tensor) -> Tensor:
    """Undo `_group_by_rank`: reorder [ranks, tokens of a rank] to the shape of `like`."""
    ranks = by_rank.shape[0]
    if ranks == 1:
        return by_rank.view(like.shape)
    shape = (ranks, *like.shape[:-1], like.shape[-1] // ranks)
    return by_rank.view(shape).movedim(0, -2).reshape(like.shape)


def _chunks(
    call: _HeadLossCall,
    local_weight: Tensor,
    x: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scales: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the losses of all tokens, and the gradients of x, weight and bias selected by `needs`, or None."""
    dtype, rule, words = call.dtype, call.rule, call.words
    wide, (need_x, need_weight, need_bias) = accumulation_dtype(dtype), needs
    labels = _group_by_rank(targets, call.ranks)
    factors = None if scales is None else _group_by_rank(scales, call.ranks)
    with torch.no_grad(), ops.without_autocast(ops.autocast_device(x)):
        w, b = local_weight.to(dtype), None if bias is None else bias.detach().to(dtype)
        flat = x.detach().reshape(-1, x.shape[-1]).to(dtype)
        losses = x.new_empty(labels.shape, dtype=wide)
        grad_x = flat.new_empty(flat.shape) if need_x else None
        grad_weight = w.new_zeros(w.shape, dtype=wide) if need_weight and not flat.shape[0] else None
        grad_bias = w.new_zeros(w.shape[0], dtype=wide) if need_bias else None
        step = max(1, call.chunk // call.ranks)
        spans = [(at, min(at + step, flat.shape[0])) for at in range(0, flat.shape[0], step)]
        coming = _tokens(call, flat, spans, 0)
        summed: tuple[int, int, Any] | None = None
        for i, (start, end) in enumerate(spans):
            tokens = coming()
            coming = _tokens(call, flat, spans, i + 1)
            label_ids = labels[:, start:end].reshape(-1)
            logits = F.linear(tokens, w, b)
            z, tangent = soft_capped(logits, rule)
            shared = _reduced_stats(z, label_ids, rule, words)
            losses[:, start:end] = shared.losses.view(call.ranks, -1)
            if not any(needs):
                continue
            token_factors = None if factors is None else factors[:, start:end].reshape(-1)
            grad = gradient(z.clone() if z is logits else z, tangent, shared, label_ids, token_factors, rule, words).to(
                dtype
            )
            if need_x:
                partial = plain_product(grad, w.t(), wide)
                if summed is not None:
                    grad_x[summed[0] : summed[1]] = summed[2]()  # type: ignore[index]
                sums = comm.scatter_sums if call.ranks > 1 else comm.sum_parts
                summed = start, end, sums(partial, words.group)
            if need_weight:
                grad_weight = added(grad_weight, grad, tokens)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=wide)
        if summed is not None:
            grad_x[summed[0] : summed[1]] = summed[2]()  # type: ignore[index]
    return _ungroup_by_rank(losses, targets), grad_x, grad_weight, grad_bias


def _tokens(call: _HeadLossCall, flat: Tensor, spans: list[tuple[int, int]], i: int) -> Any:
    """Start an all-gather of the tokens of chunk i from all ranks, in rank order."""
    if i >= len(spans):
        return None
    part = flat[slice(*spans[i])]
    return comm.gather(part, 0, call.words.group) if call.ranks > 1 else lambda: part


# ---- embedding ----


class VocabShard(NamedTuple):
    """Mesh over which an embedding's vocabulary is sharded, and True if its output tokens are sharded too."""

    mesh: Any
    sequence: bool

    @property
    def name(self) -> str:
        """The style as the user writes it, for error messages."""
        return f"VocabParallel({'sequence=True' if self.sequence else ''})"

    @property
    def column(self) -> bool:
        """True: used as a head, it is column-parallel."""
        return True


class VocabShardedEmbedding(ShardedModule):
    """An embedding of this rank's vocabulary range."""

    layout_on_ranks: VocabShard

    @torch.compiler.disable
    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        words, weight = self.layout_on_ranks, cast(DTensor, self._parameters["weight"])
        number, group = words.mesh.size(), words.mesh.get_group()
        name, rows = type(self).__name__, weight.shape[0]
        each = rows // number
        why = ""
        if words.sequence and (not input.dim() or input.shape[-1] % number):
            why = (
                f"{name} under {words.name} got tokens of shape {tuple(input.shape)}: {number} ranks cannot share them;"
                " pad the last axis"
            )
        elif input.is_cpu and input.numel() and not 0 <= int(input.min()) <= int(input.max()) < weight.shape[0]:
            why = (
                f"{name} has {weight.shape[0]} rows, and token ids range from {int(input.min())} to {int(input.max())}"
            )
        what = {"tokens": describe_tensor(input), "weight": describe_tensor(weight)}
        check_agreement(name, what | {"gradients": torch.is_grad_enabled()}, group, error=why, forward=True)
        first = each * words.mesh.get_local_rank()
        place = input - first
        own = (place >= 0) & (place < each)
        before: Any = self._parameters, self.padding_idx
        self.__dict__["_parameters"] = {**self._parameters, "weight": weight.to_local()}
        if self.padding_idx is not None:
            # The padding row gets no gradient on the rank that has it.
            padding = self.padding_idx - first
            self.__dict__["padding_idx"] = padding if 0 <= padding < each else None
        try:
            y = super().forward(torch.where(own, place, 0), *args, **kwargs)
        finally:
            self.__dict__["_parameters"], self.__dict__["padding_idx"] = before
        return _VocabEmbeddingFunction.apply(y.masked_fill(~own[..., None], 0), words)

    def loss_over_ranks(self, *args: Any) -> Tensor:
        """Compute `linear_cross_entropy` with the embedding as the head."""
        return loss_over_ranks(self, *args)


class _VocabEmbeddingFunction(torch.autograd.Function):
    """Merge the embeddings of all ranks, on every rank for all tokens or for its own tokens."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, words: VocabShard) -> Tensor:
        ctx.words, dim = words, y.dim() - 2
        united: Tensor = comm.merge_disjoint(y, words.mesh.get_group(), dim if words.sequence else None)()
        return united

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        words: VocabShard = ctx.words
        return gathered(g, g.dim() - 2, SequenceLayout(words.mesh, False, False)) if words.sequence else g, None
