"""Linear layers that join several matrices in one weight, such as q, k and v: detection and row sharding.

Quaver's own blocks declare their matrices. For layers of other libraries only the name tells, such as `qkv_proj` of
Phi-3, whose forward slices queries, keys and values from its output. If ranks got consecutive rows of such a weight,
the forward would take features of the wrong matrix without any error.
"""

import gc
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from quaver.torch.linear.linear import Quantizable
from quaver.torch.state import weight_cache
from quaver.torch.state.layer_state import state_of

# ---- detection ----

#: Names of layers that join matrices in models of transformers, timm, xformers and others.
NAMES = re.compile(r"\w*[qQ][kK][vV]\w*|query_key_value|c_attn|W_pack|\w*gate_up\w*|Wi|w12|in_proj")


def matrices_of(layer: nn.Module, parts: Sequence[int]) -> Mapping[str, int]:
    """Return the rows of each joined matrix by name, as the block declares them or as the style's `parts`, numbered."""
    own: Mapping[str, int] = state_of(layer).pieces if isinstance(layer, Quantizable) else {}
    return own or {str(number): rows for number, rows in enumerate(parts)}


def check(layer: Any, name: str, style: str, parts: Sequence[int]) -> None:
    """Validate a style's `parts` against the weight, and require them if the layer's name suggests joined matrices.

    Raises:
        ValueError: `parts` are wrong, superfluous or missing.
    """
    rows = layer.weight.shape[0]
    own = matrices_of(layer, ())
    if own and parts:
        raise ValueError(f"{name} already declares that it joins {', '.join(own)}: leave out the parts of {style}")
    if parts and (sum(parts) != rows or min(parts) < 1):
        raise ValueError(f"{style} has {sum(parts)} rows, and {name} has {rows}: give the rows of each of its matrices")
    if own or parts:
        return
    known = joined_name(layer)
    if known is not None:
        raise ValueError(
            f"{name} is called {known!r}, a name that suggests several matrices joined in one weight, and "
            "each rank needs rows of each. Give the rows of each in order, ColwiseParallel(parts=(q, k, v)) "
            f"or ColwiseParallel(parts=(gate, up)), {rows} in total; or ColwiseParallel(parts=({rows},)) if "
            "it is one matrix, or if q, k and v of each head are adjacent, as in GPT-NeoX"
        )


def joined_name(layer: nn.Module) -> str | None:
    """Return the layer's own name if it matches `NAMES`, else None."""
    qualified = layer.__dict__.get("qualified_name")
    if qualified:
        names = {qualified.rpartition(".")[2]}
    else:
        # The layer's name is its key in the parent's dict of modules, and only the garbage collector can find the
        # parent.
        holders = (each for each in gc.get_referrers(layer) if type(each) is dict)
        names = {key for holder in holders for key, each in holder.items() if each is layer and isinstance(key, str)}
    return next((name for name in sorted(names) if NAMES.fullmatch(name)), None)


# ---- separate matrices ----
# Shard a weight that joins several matrices, for instance q, k and v, so that every rank has rows of each.
#
# A rank's rows of q, k and v are not consecutive in the whole weight, so no placement of torch describes them
# (`_StridedShard` requires matrices of equal size, which q and k of grouped queries are not, and is private). So each
# matrix becomes a parameter of its own, a DTensor with placement Shard(0): `qkv_proj.weight` becomes
# `qkv_proj.weight.q_proj`, `.k_proj` and `.v_proj`. Each has its natural row order on any number of ranks, which
# checkpoints, clipping and optimizers support. An unsharded layer can load them as its one weight, and a sharded layer
# can load an unsharded weight. It remains one layer: its GEMMs, scales and history cover all its matrices.
#
# On a rank the matrices are adjacent in memory and are read as one matrix without a copy.


def of(layer: Any, name: str) -> list[Any]:
    """Return the parameters that make up a layer's weight or bias; empty if there is no bias."""
    parameter = layer._parameters.get(name)
    if parameter is not None:
        return [parameter]
    matrices: Any = layer._modules.get(name)
    return [] if matrices is None else list(matrices._parameters.values())


def rows(layer: Any, ranks: int) -> list[int]:
    """Return a rank's rows of each joined matrix; empty for a single matrix."""
    matrices = layer._modules.get("weight")
    return [p.shape[0] // ranks for p in matrices.values()] if isinstance(matrices, _SeparateMatrices) else []


class _SeparateMatrices(nn.ParameterDict):
    """The separate matrices of one joined weight, or their biases."""

    #: All matrices of this rank as one tensor, or None once they are no longer adjacent in memory.
    memory: Tensor | None = None

    def put(self, parts: dict[str, Any], gradients: bool) -> None:
        """Store copies of sharded matrices, adjacent in this rank's memory.

        Each gets its own storage, a slice of that memory: torch neither copies nor saves a DTensor whose local tensor
            starts inside a storage.
        """
        with torch.no_grad():
            local = [part.to_local() for part in parts.values()]
            memory = None if local[0].is_meta else torch.cat(local)
            begin = 0
            for (name, part), own in zip(parts.items(), local, strict=True):
                if memory is not None:
                    end = begin + own.numel() * own.element_size()
                    run, begin = memory.untyped_storage()[begin:end], end
                    own = memory.new_empty(0).set_(run, 0, own.shape, own.stride())
                fresh = DTensor.from_local(
                    own, part.device_mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride()
                )
                self[name] = nn.Parameter(fresh, requires_grad=gradients)
            self.memory = memory

    def joined(self) -> Tensor:
        """Return the matrices as one tensor: their common memory, or a copy if they are no longer adjacent."""
        with torch.no_grad():
            parts = [part.to_local() for part in self._parameters.values()]  # type: ignore[union-attr]
        at = None if self.memory is None else self.memory.data_ptr()
        for part in parts:
            if part.data_ptr() != at or not part.is_contiguous():
                self.memory = None
                return torch.cat(parts)
            at += part.numel() * part.element_size()
        assert self.memory is not None
        return self.memory

    def __deepcopy__(self, memo: dict[int, Any]) -> "_SeparateMatrices":
        copied = memo[id(self)] = _SeparateMatrices()
        copied.put(dict(self.items()), True)
        for key, value in self.items():
            memo[id(value)] = copied[key].requires_grad_(value.requires_grad)
            if value.grad is not None:
                copied[key].grad = value.grad.detach().clone()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "memory": None}


def divide(layer: Any, named: Mapping[str, int], mesh: Any, source: int | None) -> None:
    """Replace a layer's weight and bias by one sharded parameter per matrix.

    Args:
        named: rows of each matrix by name, in order.
        mesh: one-dimensional device mesh.
        source: `src_data_rank` of torch's `distribute_tensor`.
    """
    for name in ("weight", "bias"):
        whole = layer._parameters[name]
        if whole is None:
            continue
        each = whole.detach().split(list(named.values()))
        parts = [distribute_tensor(piece, mesh, [Shard(0)], src_data_rank=source) for piece in each]
        del layer._parameters[name]
        layer._modules[name] = matrices = _SeparateMatrices()
        matrices.put(dict(zip(named, parts, strict=True)), whole.requires_grad)


def local_weight(layer: Any) -> Tensor:
    """Return this rank's rows of the weight, without a copy if its matrices are adjacent in memory."""
    matrices: Any = layer._modules.get("weight")
    if matrices is not None:
        whole: Tensor = matrices.joined()
        return whole
    with torch.no_grad():
        local: Tensor = layer._parameters["weight"].to_local()
    return local


def routed(parts: Sequence[Tensor]) -> Tensor:
    """Return a tensor that receives the gradient of the joined weight and splits it to the separate matrices."""
    if len(parts) == 1:
        return parts[0]
    whole: Tensor = _Routed.apply(*parts)
    return whole


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.rows = [part.shape[0] for part in parts]
        # A placeholder without memory, used only to receive the gradient.
        return parts[0].new_empty(()).expand(sum(ctx.rows), *parts[0].shape[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return tuple(part.clone() for part in g.split(ctx.rows))


def watch(layer: Any, weights: Sequence[Any]) -> None:
    """Drop the layer's weight cache if a matrix other than the first was written to; the first is already tracked."""
    if len(weights) == 1:
        return
    with torch.no_grad():
        seen = tuple((id(each), each._version, each.to_local().data_ptr()) for each in weights[1:])
    state = state_of(layer)
    if state.seen != seen:
        weight_cache.drop(layer)
        state.seen = seen


def share(layer: Any, state_dict: Any, prefix: str) -> None:
    """Convert an unsharded weight in a state dict to this rank's shards, so that a sharded layer can load it."""
    for name in ("weight", "bias"):
        key, matrices = prefix + name, layer._modules.get(name)
        value = state_dict.get(key)
        parameters = of(layer, name)
        if value is None or not parameters or hasattr(value, "device_mesh"):
            continue
        if matrices is None:
            if value.shape == parameters[0].shape:
                state_dict[key] = distribute_tensor(
                    value.to(parameters[0].device),
                    parameters[0].device_mesh,
                    parameters[0].placements,
                    src_data_rank=None,
                )
            continue
        del state_dict[key]
        for (piece, parameter), part in zip(
            matrices._parameters.items(), value.split([p.shape[0] for p in parameters]), strict=True
        ):
            state_dict[f"{key}.{piece}"] = distribute_tensor(
                part.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
            )
