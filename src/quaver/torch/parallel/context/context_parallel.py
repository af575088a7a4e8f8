"""Context parallelism for a whole model: attention across ranks, and positions of each rank's tokens.

All other layers of a Transformer process tokens independently and are left unchanged.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.recipes.text import check_name
from quaver.torch.conversion import convert
from quaver.torch.conversion.matchers.swap_class import PUT_ABOVE
from quaver.torch.nn.attention.dot_product import DotProductAttention
from quaver.torch.nn.attention.latent import LatentAttention
from quaver.torch.nn.attention.multihead import MultiheadAttention
from quaver.torch.nn.attention.rope import positions_of
from quaver.torch.nn.ssm.mamba2 import Mamba2
from quaver.torch.nn.transformer import TransformerLayer
from quaver.torch.numerics.versions import has_reliable_version
from quaver.torch.parallel.comm import gather, sum_for_ranks
from quaver.torch.parallel.context.attention import (
    WAYS,
    check_heads_divide,
    context_parallel_attention,
    group_of,
    refuse,
)
from quaver.torch.parallel.context.comm import ChunkOrder, Group, spec_of
from quaver.torch.parallel.tensor import joined
from quaver.torch.parallel.tensor.layers import layout_of
from quaver.torch.state.history.sync import check_agreement, describe_tensor

Layer = MultiheadAttention | LatentAttention


class ContextParallel:
    """Context-parallel setup of a model, returned by `context_parallel`; cuts batches into each rank's chunks."""

    def __init__(self, group: Group, how: str, balanced: bool, quantized: str | Recipe | None) -> None:
        self.group, self.how, self.quantized = group, how, quantized
        self.rank, self.order = dist.get_rank(group), ChunkOrder(dist.get_world_size(group), balanced)
        #: Cached positions of the last batch: the arguments and the result.
        self._placed: tuple[Any, Tensor] | None = None

    def cut(self, x: Tensor, dim: int = 1) -> Tensor:
        """Select this rank's chunks of tokens, labels or other per-token data from a whole sequence.

        Shift next-token labels before cutting them. `cu_seqlens` refers to the whole batch and is not cut.

        Args:
            x: the same whole tensor on every rank.
            dim: axis of tokens: 1 in layout "bshd", 0 in "sbhd" and "thd".
        Raises:
            ValueError: the number of tokens is no multiple of the number of chunks.
        """
        return self.order.cut(x, dim, self.rank)

    def join(self, x: Tensor, dim: int = 1) -> Tensor:
        """All-gather the chunks of all ranks to the whole sequence, on every rank and without gradients. Exact.

        Raises:
            ValueError: on all ranks, if shapes or dtypes differ or a shard does not consist of whole chunks.
        """
        tokens, chunks = x.shape[dim], len(self.order.of(self.rank))
        error = (
            f"x has {tokens} tokens (dimension {dim} of {list(x.shape)}), which is no multiple of {chunks} "
            "chunks: pass a rank's whole shard to join, as cut returns it, and remove tokens from the result"
        )
        what = {"x": describe_tensor(x.detach()), "dim": dim}
        check_agreement("ContextParallel.join", what, self.group, error=error if tokens % chunks else "")
        value = x.detach().unsqueeze(0)
        whole = gather(value.view(torch.uint8) if x.dtype is torch.bool else value, 0, self.group)()
        return self.order.join(whole.view(x.dtype).unbind(0), dim)

    def positions(self, tokens: int, device: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return the positions of this rank's tokens in their sequences, int64 [tokens].

        A model converted by `context_parallel` computes them itself.

        Args:
            tokens: number of tokens of this rank.
            device: device of the result.
            cu_seqlens: cumulative lengths of the whole batch, if sequences are packed.
        """
        tells = cu_seqlens is None or has_reliable_version(cu_seqlens)
        placement_key = (
            tokens,
            device,
            None if cu_seqlens is None or not tells else (id(cu_seqlens), cu_seqlens._version),
        )
        cached = self._placed if tells else None
        if cached is not None and cached[0][:3] == placement_key:
            # Return the same tensor for all layers, because rotary tables are cached by it.
            return cached[1]
        whole = tokens * self.order.ranks
        placed = self.order.places(whole, self.rank, device)
        if cu_seqlens is not None:
            every = torch.empty(whole, 0, 0, dtype=torch.float32, device=device)
            placed = positions_of(every, "thd", None, 0, cu_seqlens.to(every.device))[placed]
        if tells:
            # Store the tensor in the cache entry, so that its id is not reused.
            self._placed = (*placement_key, cu_seqlens), placed
        return placed

    def sum_gradients(self, parameters: nn.Module | Iterable[Tensor]) -> None:
        """Sum the gradients of replicated parameters over ranks, in place, in float32 and rank order.

        A parameter without a gradient on some ranks counts as zeros there; without one on any rank it gets none. Each
        rank's loss must be the sum over its own tokens, divided by the number of tokens of all ranks. FSDP or
        DistributedDataParallel over these ranks replaces this call but divides by their number, so multiply the loss by
        it.
        """
        every = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
        every = [p for p in every if p.requires_grad or p.grad is not None]
        check_agreement("sum_gradients", {str(i): describe_tensor(p) for i, p in enumerate(every)}, self.group)
        if not every:
            return
        ranks = self.order.ranks
        # One flag per parameter, sent with the gradients: 1 if it has a gradient on this rank.
        there = torch.tensor([p.grad is not None for p in every], dtype=torch.float32, device=_local(every[0]).device)
        own = [_local(p if p.grad is None else p.grad).detach() for p in every]
        values = [(torch.zeros_like(x) if p.grad is None else x) for p, x in zip(every, own, strict=True)]
        flat = torch.cat([*(x.flatten().float() for x in values), there])
        padded = nn.functional.pad(flat, (0, -flat.numel() % ranks)).view(ranks, -1)
        part = sum_for_ranks(padded, self.group, "gradients")()
        total = gather(part, 0, self.group, kind="gradients")()[: flat.numel()]
        *sums, anywhere = total.split([*(x.numel() for x in values), len(every)])
        lacking = [i for i, p in enumerate(every) if p.grad is None]
        # Read back only if a parameter has no gradient here.
        missed = set(lacking) & set(anywhere.nonzero().flatten().tolist()) if lacking else set()
        for i, (p, sum_) in enumerate(zip(every, sums, strict=True)):
            if i in missed:
                p.grad = torch.zeros_like(p)
            if p.grad is not None:
                _local(p.grad).copy_(sum_.view_as(_local(p.grad)))

    def __deepcopy__(self, memo: Any) -> "ContextParallel":
        return self

    def __repr__(self) -> str:
        text = "" if self.quantized is None else f", quantized={self.quantized!r}"
        return f"ContextParallel({self.order.ranks} ranks, {self.how!r}, balanced={self.order.balanced}{text})"


def context_parallel(
    model: nn.Module,
    mesh: DeviceMesh | Group | None = None,
    how: str = "gather",
    *,
    balanced: bool = True,
    quantized: str | Recipe | None = None,
) -> ContextParallel:
    """Convert a model in place so that its attention works on sequences sharded across ranks.

    Afterwards cut batches, `tokens, labels = cp.cut(tokens), cp.cut(labels)`, and call the model as before, with the
    cu_seqlens of the whole batch. Rotary embeddings and attention temperatures use positions in the whole sequence. A
    model that adds positional embeddings itself needs `cp.positions`.

    Args:
        model: built of Quaver's blocks, or a single `DotProductAttention`.
        mesh: one-dimensional mesh or process group; None means all ranks.
        how: "gather", "ring" or "all_to_all": see `quaver.torch.parallel.context.attention.context_parallel_attention`.
        balanced: give each rank the same amount of causal work; False keeps the sequence in order.
        quantized: recipe by which keys and values are sent in 8 bits: "mxfp8", "rowwise", "blockwise" or "tensorwise".
    Returns:
        The object that cuts and joins batches.
    Raises:
        ValueError: the model has attention that is not Quaver's, or a module, named in the message, that does not
            support sharded sequences.
    """
    check_name("how", how, WAYS)
    spec_of(quantized)
    quantized = None if quantized is None else recipes.get(quantized)
    across = ContextParallel(group_of(mesh), how, balanced, quantized)
    cores = convert.instances(model, DotProductAttention)
    _check_model(model, cores, across)
    for core, _ in cores:
        core.attend = ContextParallelAttention(across)
    layouts = [layer.layout for layer in model.modules() if isinstance(layer, TransformerLayer | Layer)]
    dropping = Dropping(across, 1 if "bshd" in layouts or not layouts else 0)
    for layer in list(model.modules()):
        if isinstance(layer, Layer):
            layer.register_forward_pre_hook(partial(_set_positions, across), with_kwargs=True)
        if isinstance(layer, TransformerLayer):
            layer.drop = dropping
        if isinstance(layer, nn.Dropout):
            kind: Any = type(layer)
            layer.__class__ = _by_parts(kind, dropping)
    return across


class Dropping:
    """Dropout that applies this rank's part of the mask for the whole sequence.

    Each rank draws the mask of all tokens. With the same seed, ranks together drop what one process would.
    """

    def __init__(self, across: ContextParallel, dim: int) -> None:
        self.across, self.dim = across, dim

    @torch.compiler.disable
    def __call__(self, x: Tensor, p: float) -> Tensor:
        shape = [*x.shape]
        shape[self.dim] *= self.across.order.ranks
        whole = nn.functional.dropout(torch.ones(shape, dtype=torch.float32, device=x.device), p)
        mask = self.across.cut(whole, self.dim) != 0
        return x * mask * (1 / (1 - p) if p < 1 else 0.0)


def _by_parts(kind: Any, dropping: Dropping) -> Any:
    """Return the subclass of a dropout class that uses the mask of the whole sequence."""

    def forward(module: nn.Dropout, x: Tensor) -> Tensor:
        return dropping(x, module.p) if module.training and module.p else x

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, PUT_ABOVE: True})


class ContextParallelAttention:
    """Replacement for `attention` in a `DotProductAttention`."""

    def __init__(self, across: ContextParallel) -> None:
        self.across = across
        #: Cumulative lengths of the whole batch, set by the hook and hidden from the surrounding layer.
        self.ends: Any = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Any = None, **options: Any) -> Tensor:
        how = self.across
        return context_parallel_attention(
            *(q, k, v),
            mesh=how.group,
            how=how.how,
            balanced=how.order.balanced,
            quantized=how.quantized,
            cu_seqlens=self.ends if cu_seqlens is None else cu_seqlens,
            **options,
        )


def _set_positions(
    across: ContextParallel, layer: Layer, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, Any]:
    """Forward pre-hook that sets the positions of this rank's tokens and passes cu_seqlens directly to the core
    attention.
    """
    x = args[0] if args else options["x"]
    ends = options.get("cu_seqlens")
    where = type(layer).__name__
    what: dict[str, Any] = {}
    error: str | Exception = ""
    masked, bent = (options.get(name) is not None for name in ("mask", "bias"))
    try:
        refuse(layer.core.mask_type, masked, bent, 0.0, across.how, None, where)
        if options.get("cache") is not None:
            raise ValueError(
                f"{where} has a sharded sequence, which does not support a cache of keys and values; pass no cache"
            )
        if isinstance(ends, tuple):
            raise ValueError(
                f"{where} runs self attention on a sharded sequence; pass one cu_seqlens, that of the whole batch"
            )
        what = {"x": describe_tensor(x), "training": layer.training}
        what["cu_seqlens"] = None if ends is None else ends.tolist()
    except Exception as raised:
        # Catch any exception: the other ranks wait.
        error = raised
    check_agreement(f"{where} across ranks", what, across.group, error=error, forward=True)
    attend: Any = layer.core.attend
    attend.ends = ends
    placed = options.get("positions")
    if placed is None:
        tokens = x.shape[1 if layer.layout == "bshd" else 0] * _ranks_of_tokens(layer)
        placed = across.positions(tokens, x.device, ends)
    return args, {**options, "cu_seqlens": None, "positions": placed}


def _check_model(model: nn.Module, cores: list[tuple[DotProductAttention, list[str]]], across: ContextParallel) -> None:
    others = convert.others(model)
    if others or not cores:
        text = ", ".join(f"{count} {name}" for name, count in sorted(others.items())) or "no DotProductAttention"
        raise ValueError(
            f"{type(model).__name__} has {text}: context parallelism only converts the attention of quaver's "
            "blocks. Any other attention would see only a rank's own tokens. Build the model of quaver's "
            "blocks, for instance as quaver train does or by quaver.torch.from_huggingface(layer)"
        )
    for core, (name, *_) in cores:
        where = name or type(core).__name__
        if isinstance(core.attend, ContextParallelAttention):
            raise ValueError(f"{where} is already context-parallel; call context_parallel once per model")
        refuse(core.mask_type, False, False, core.dropout, across.how, core.recipe, where)
        if across.how == "all_to_all":
            check_heads_divide(core.heads, core.groups, across.order.ranks, where)
    for name, module in model.named_modules():
        reason = _reason(module)
        if reason:
            raise ValueError(f"{name or type(module).__name__} {reason}")


def _reason(module: nn.Module) -> str:
    """Return why a module does not support sharded sequences, or ""."""
    if isinstance(module, TransformerLayer) and module.drop_path:
        return "has drop_path, which drops whole samples: each rank would draw its own; use drop_path=0"
    if isinstance(module, MultiheadAttention) and module.cross:
        return "has cross attention, and only self attention supports a sharded sequence"
    if isinstance(module, MultiheadAttention) and module._modules["position_bias"] is not None:
        return "has a position_bias, which would count from a rank's first token; use rope or ALiBi"
    if isinstance(module, Mamba2 | nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size != (1,)):
        return (
            "mixes each token with earlier ones, and a rank would start at its own first token: only "
            "attention works across ranks"
        )
    rope: Any = module._modules.get("rope") if isinstance(module, Layer) else None
    if rope is not None and rope.frequencies.by_length:
        kind = rope.frequencies.rope_type
        return f"has rope of type {kind!r}, whose frequencies depend on the length of a rank's shard; use another type"
    return ""


def _ranks_of_tokens(layer: nn.Module) -> int:
    """Return the number of tensor-parallel ranks over which a layer's input tokens are sharded; its projections gather
    them.
    """
    first = layer._modules.get("q_proj", layer._modules.get("qkv_proj"))
    layout = None if first is None else layout_of(first)
    if first is None or layout is None or not layout.sequence:
        return 1
    ranks: int = joined.of(first, "weight")[0].device_mesh.size()
    return ranks


def _local(grad: Any) -> Tensor:
    local: Tensor = grad.to_local() if isinstance(grad, DTensor) else grad
    return local
