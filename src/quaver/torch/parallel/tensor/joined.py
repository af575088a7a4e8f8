"""Linear layers that join several matrices in one weight: which ones look so, and how many rows each matrix has.

Blocks of this library say so themselves. Of another library's layer nothing does but its name: `qkv_proj` of Phi-3,
whose forward slices queries, keys and values from its output. A rank that has a run of its rows has other matrices'
features than that forward takes them for, and nothing fails.
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

# ---- packed ----------------------------------------------------------------------------------------------

#: Names of layers that join matrices in the models of transformers, timm, xformers and others.
NAMES = re.compile(r"\w*[qQ][kK][vV]\w*|query_key_value|c_attn|W_pack|\w*gate_up\w*|Wi|w12|in_proj")


def matrices_of(layer: nn.Module, parts: Sequence[int]) -> Mapping[str, int]:
    """The rows of each matrix by its name: as a block says, or as a style does, whose matrices have numbers."""
    own: Mapping[str, int] = state_of(layer).pieces if isinstance(layer, Quantizable) else {}
    return own or {str(number): rows for number, rows in enumerate(parts)}


def check(layer: Any, name: str, style: str, parts: Sequence[int]) -> None:
    """Refuse parts that the weight does not have, and a weight that looks as if it had some and of which none are said.

    Raises:
        ValueError: with what to do.
    """
    rows = layer.weight.shape[0]
    own = matrices_of(layer, ())
    if own and parts:
        raise ValueError(f"{name} says itself that it joins {', '.join(own)}: leave out the parts of {style}")
    if parts and (sum(parts) != rows or min(parts) < 1):
        raise ValueError(f"{style} has {sum(parts)} rows, and {name} {rows}: give the rows of each of its matrices")
    if own or parts:
        return
    known = joined_name(layer)
    if known is not None:
        raise ValueError(
            f"{name} is called {known!r}, as layers are that join several matrices in one weight, and each rank needs "
            f"rows of each: say how many rows each has, in their order, ColwiseParallel(parts=(q, k, v)) or "
            f"ColwiseParallel(parts=(gate, "
            f"up)), in all {rows}; or ColwiseParallel(parts=({rows},)) where a head's q, k and v lie together, as "
            f"GPT-NeoX's "
            "do, or where it is one matrix"
        )


def joined_name(layer: nn.Module) -> str | None:
    """The layer's name, where it is one of `NAMES`."""
    qualified = layer.__dict__.get("qualified_name")
    if qualified:
        names = {qualified.rpartition(".")[2]}
    else:
        # Its parent's dict of modules has it under its name, and nothing but the interpreter knows the parent.
        holders = (each for each in gc.get_referrers(layer) if type(each) is dict)
        names = {key for holder in holders for key, held in holder.items() if held is layer and isinstance(key, str)}
    return next((name for name in sorted(names) if NAMES.fullmatch(name)), None)


# ---- pieces ----------------------------------------------------------------------------------------------
# A weight of several matrices, q, k and v for instance, of each of which every rank has some rows.
#
# A rank's rows of q, k and v are no run of rows of the whole weight, so that no placement of torch's says where they
# lie
# (`_StridedShard` does for matrices of one size, which q and k of grouped queries are not, and is private). So each
# matrix is a parameter of its own, a DTensor of placement Shard(0): `qkv_proj.weight` becomes `qkv_proj.weight.q_proj`,
# `.k_proj` and `.v_proj`, in their own order, on any number of ranks. Checkpoints, clipping and optimizers know such
# parameters; a whole layer loads them as its one weight, and a layer in parts loads a whole one's weight. The layer
# stays one: its GEMMs, its scales and its history are of all its matrices.
#
# On a rank they lie one behind the other in memory, and are read as one matrix without a copy.


def of(layer: Any, name: str) -> list[Any]:
    """The parameters that a layer's weight or bias is made of; none where there is no bias."""
    parameter = layer._parameters.get(name)
    if parameter is not None:
        return [parameter]
    apart: Any = layer._modules.get(name)
    return [] if apart is None else list(apart._parameters.values())


def rows(layer: Any, ranks: int) -> list[int]:
    """A rank's rows of each matrix; of one matrix nothing."""
    apart = layer._modules.get("weight")
    return [p.shape[0] // ranks for p in apart.values()] if isinstance(apart, _SeparateMatrices) else []


class _SeparateMatrices(nn.ParameterDict):
    """The matrices of one weight, or their biases."""

    #: All of them on this rank, as one matrix, while they lie in its memory.
    memory: Tensor | None = None

    def put(self, parts: dict[str, Any], gradients: bool) -> None:
        """Take copies of matrices in parts, which lie one behind the other in this rank's memory.

        Each has a storage of its own, a run of that memory: torch neither copies nor saves a DTensor whose part begins
        within a storage.
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
        """The matrices one below the other: the memory that they lie in, or a copy where they lie elsewhere by now."""
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
        for key, held in self.items():
            memo[id(held)] = copied[key].requires_grad_(held.requires_grad)
            if held.grad is not None:
                copied[key].grad = held.grad.detach().clone()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "memory": None}


def divide(layer: Any, named: Mapping[str, int], mesh: Any, source: int | None) -> None:
    """Make a parameter in parts of each matrix of a layer, and of its bias.

    Args:
        named: the rows of each matrix by its name, in their order.
    """
    for name in ("weight", "bias"):
        whole = layer._parameters[name]
        if whole is None:
            continue
        each = whole.detach().split(list(named.values()))
        parts = [distribute_tensor(piece, mesh, [Shard(0)], src_data_rank=source) for piece in each]
        del layer._parameters[name]
        layer._modules[name] = apart = _SeparateMatrices()
        apart.put(dict(zip(named, parts, strict=True)), whole.requires_grad)


def held(layer: Any) -> Tensor:
    """This rank's rows of the weight: the very memory that the parameters have, where they lie in one."""
    apart: Any = layer._modules.get("weight")
    if apart is not None:
        whole: Tensor = apart.joined()
        return whole
    with torch.no_grad():
        local: Tensor = layer._parameters["weight"].to_local()
    return local


def routed(parts: Sequence[Tensor]) -> Tensor:
    """What a gradient of all matrices is given to, which goes to each of them."""
    if len(parts) == 1:
        return parts[0]
    whole: Tensor = _Routed.apply(*parts)
    return whole


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.rows = [part.shape[0] for part in parts]
        # Of no values: gradients alone go by it.
        return parts[0].new_empty(()).expand(sum(ctx.rows), *parts[0].shape[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return tuple(part.clone() for part in g.split(ctx.rows))


def watch(layer: Any, weights: Sequence[Any]) -> None:
    """Drop what the layer keeps of its weight where another matrix than the first, which is watched, was written to."""
    if len(weights) == 1:
        return
    with torch.no_grad():
        seen = tuple((id(each), each._version, each.to_local().data_ptr()) for each in weights[1:])
    state = state_of(layer)
    if state.seen != seen:
        weight_cache.drop(layer)
        state.seen = seen


def share(layer: Any, state_dict: Any, prefix: str) -> None:
    """Let a layer in parts load a whole layer's weight: each rank takes its part of what all are given."""
    for name in ("weight", "bias"):
        key, apart = prefix + name, layer._modules.get(name)
        given = state_dict.get(key)
        held = of(layer, name)
        if given is None or not held or hasattr(given, "device_mesh"):
            continue
        if apart is None:
            if given.shape == held[0].shape:
                state_dict[key] = distribute_tensor(
                    given.to(held[0].device), held[0].device_mesh, held[0].placements, src_data_rank=None
                )
            continue
        del state_dict[key]
        for (piece, parameter), part in zip(
            apart._parameters.items(), given.split([p.shape[0] for p in held]), strict=True
        ):
            state_dict[f"{key}.{piece}"] = distribute_tensor(
                part.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
            )
