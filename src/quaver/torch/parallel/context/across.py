"""Attention of a sequence that lies in parts on several ranks: one function, three ways."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quaver import recipes
from quaver.core.reference.masks import MASKS, check_window
from quaver.core.spec import Recipe
from quaver.core.text.spelling import check_name
from quaver.torch.blocks.attention.inputs.layout import CuSeqlens, all_heads_first, ragged_of
from quaver.torch.blocks.attention.inputs.masks import Mask, Window, bounds, check_chunk
from quaver.torch.blocks.attention.op import OFF_BY_ONE, check_numbers
from quaver.torch.operations import ops
from quaver.torch.parallel.context import gathering, heads, ring
from quaver.torch.parallel.context.exchange import Across, Group
from quaver.torch.parallel.context.parcels import spec_of
from quaver.torch.parallel.context.sequence import Order, Sight
from quaver.torch.state.history.agreement import check_agreement, facts_of
from quaver.torch.state.recomputation import graph_task_id

#: How ranks exchange keys and values, and what each rank computes.
WAYS: dict[str, Any] = {"gather": gathering.attend, "ring": ring.attend, "all_to_all": heads.attend}


@torch.compiler.disable
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | Group | None = None,
    how: str = "gather",
    balanced: bool = True,
    quantized: str | Recipe | None = None,
    mask_type: str = "none",
    mask: Mask | None = None,
    window: Window | None = None,
    chunk: int | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: str | Tensor | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    layout: str = "bshd",
    cu_seqlens: CuSeqlens | None = None,
    recipe: str | Recipe | None = None,
) -> Tensor:
    """This rank's part of attention of a whole sequence, of which q, k and v are this rank's part.

    Args:
        q, k, v: the chunks of this rank, as `Order.cut` cuts them; equally many tokens on each rank.
        mesh: a mesh of one dimension, or a group of processes; None for all.
        how: "gather": each rank gathers all keys and values. "ring": they go from rank to rank, and no rank holds all.
            "all_to_all": ranks trade heads for tokens, as many of k's as of ranks at least.
        balanced: the order of the chunks.
        quantized: a recipe, by whose spec of a layer's input keys and values are quantized, once by the rank that has
            them, and travel as codes and scales. Their gradients travel as they are.
        cu_seqlens: of the whole sequence, and the same for queries and keys.
        mask_type, window, chunk, alibi_slopes, sinks, scale, soft_cap, layout: as
            `quaver.torch.blocks.attention.attention`.
        recipe: as there; one that quantizes attention goes with "all_to_all" alone.
    Returns:
        As q, with v's features; differentiable once, in q, k, v and sinks, whose gradient is of this rank's queries.
    Raises:
        ValueError: what is not right yet is refused: masks as tensors, a bias, dropout, keys of another sequence; a
            mesh of several dimensions, heads that do not divide.
    Exact: without `quantized`, "all_to_all" has the bits of one process, and "gather" those of one that attends chunk
        by chunk and adds gradients rank by rank. Bounded: "ring", 1e-6 of the largest in float32. With `quantized`
        they are those of keys and values that were quantized and dequantized.
    """
    group = group_of(mesh)
    order = Order(dist.get_world_size(group), balanced)
    kind = ops.autocast_device(q)
    q, k, v = _as_autocast(kind, q, k, v)
    spec, ends = None, None
    error: str | Exception = ""
    try:
        recipe = None if recipe is None else recipes.get(recipe)
        _check_options(how, mask_type, window, chunk, soft_cap, dropout)
        spec = spec_of(quantized)
        wide, keys, _ = all_heads_first(layout, q, k, v)
        refuse(mask_type, mask is not None, bias is not None, dropout, how, recipe)
        _check_parts(wide.shape[2], keys.shape[2], order)
        _check_slopes(alibi_slopes)
        if how == "all_to_all":
            check_heads_divide(wide.shape[1], keys.shape[1], order.ranks)
        ends = _ends(layout, cu_seqlens, wide.shape[2] * order.ranks)
        sinks = _as_tensor(sinks, wide)
    except Exception as raised:  # of any kind: the other ranks wait
        error = raised
    compared: dict[str, Any] = {"q": facts_of(q), "k": facts_of(k), "v": facts_of(v), "recipe": recipe}
    compared |= {"how": how, "balanced": balanced, "quantized": spec, "scale": scale, "soft_cap": soft_cap}
    compared |= {"sinks": facts_of(sinks) if isinstance(sinks, Tensor) else sinks, "mask_type": mask_type}
    compared |= {"layout": layout, "window": window, "chunk": chunk, "alibi_slopes": facts_of(alibi_slopes)}
    _compare(compared | {"cu_seqlens": ends}, group, error)
    left, right = bounds(mask_type, window)
    across = Across(group, order, 1 if layout == "bshd" else 0, spec)
    sight = Sight(left, right, chunk, alibi_slopes, ends)
    scale = (1 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0) if scale is None else scale
    options: dict[str, Any] = {"layout": layout, "scale": scale, "soft_cap": soft_cap, "sinks": sinks}
    options |= {"recipe": recipe} if how == "all_to_all" else {}
    with torch.autocast(kind, enabled=False):
        out: Tensor = WAYS[how](q, k, v, across, sight, **options)
    return out


def _as_autocast(kind: str, *tensors: Tensor) -> Iterator[Tensor]:
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (x if dtype is None or x.dtype not in ops.DTYPES else x.to(dtype) for x in tensors)


def _check_options(
    how: str, mask_type: str, window: Window | None, chunk: int | None, soft_cap: float | None, dropout: float
) -> None:
    check_name("how", how, WAYS)
    check_name("mask type", mask_type, MASKS)
    check_window(mask_type, window)
    check_chunk(chunk)
    check_numbers(soft_cap, dropout)


def _check_slopes(alibi_slopes: Tensor | None) -> None:
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes want a gradient, which context parallelism does not give; detach them")


def _as_tensor(sinks: str | Tensor | None, wide: Tensor) -> Tensor | None:
    """Sinks given by a name as the tensor that they stand for; wide: queries, heads first."""
    if not isinstance(sinks, str):
        return sinks
    check_name("sinks", sinks, (OFF_BY_ONE,))
    return wide.new_zeros(wide.shape[1], dtype=torch.float32)


def _compare(facts: Mapping[str, Any], group: Group, error: str | Exception) -> None:
    """Raise the same ValueError on all ranks where they differ, or one has an error; once for a forward."""
    if graph_task_id() == -1:
        # A recipe's name does not tell its options.
        recipe = getattr(facts["recipe"], "text", facts["recipe"])
        what = {**facts, "recipe": recipe, "gradients": torch.is_grad_enabled()}
        check_agreement("attention across ranks", what, group, error=error)
    elif isinstance(error, Exception):  # a recomputation repeats what was compared
        raise error


def group_of(mesh: DeviceMesh | Group | None) -> Group:
    """The processes that hold a sequence.

    Raises:
        ValueError: a mesh of several dimensions.
    """
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names
            which = f"mesh[{names[-1]!r}]" if names else "one with names, and of it the one dimension, mesh['cp']"
            raise ValueError(
                f"a sequence lies on one dimension of a mesh, and this mesh has {mesh.ndim}, "
                f"{names or tuple(mesh.shape)}; give the one, such as {which}"
            )
        return mesh.get_group()
    group = dist.group.WORLD if mesh is None else mesh
    if group is None:
        raise ValueError("there is no process group; call torch.distributed.init_process_group first, or run torchrun")
    return group


def refuse(
    mask_type: str, mask: bool, bias: bool, dropout: float, how: str, recipe: Recipe | None, where: str = "attention"
) -> None:
    """Raise the ValueError for what a sequence in parts does not go with."""
    if mask or mask_type not in ("none", "causal", "causal_bottom_right"):
        raise ValueError(
            f"{where} with mask_type {mask_type!r} and a mask as a tensor does not go with a sequence in parts: lay "
            "sequences end to end instead of padding them, in layout 'thd' with cu_seqlens, and take 'causal' or 'none'"
        )
    if bias:
        raise ValueError(f"{where} has a bias of scores, which a sequence in parts has not yet; ALiBi it has")
    if dropout:
        raise ValueError(
            f"{where} has dropout {dropout} of probabilities, whose mask would be another on each number of ranks; "
            "take dropout 0, or drop the outputs of parts"
        )
    if recipe is not None and recipe.attention is not None and how != "all_to_all":
        raise ValueError(
            f"recipe {recipe} quantizes attention, by amaxes of whole sequences, and with how={how!r} no rank has the "
            "queries of a whole one; take how='all_to_all', or a recipe without attention=True"
        )


def check_heads_divide(queries: int, groups: int, ranks: int, where: str = "attention") -> None:
    """Raise the ValueError unless heads divide among ranks."""
    if queries % ranks or groups % ranks:
        raise ValueError(
            f"{where} has {queries} heads of queries and {groups} of keys and values, which {ranks} ranks cannot trade "
            "for tokens: both must be multiples of the ranks; take how='ring' or 'gather', or fewer ranks"
        )


def _check_parts(queries: int, keys: int, order: Order) -> None:
    held = len(order.of(0))
    if queries != keys or queries == 0 or queries % held:
        raise ValueError(
            f"this rank's part has {queries} queries and {keys} keys; each rank holds equally many of both, a multiple "
            f"of {held} and not 0, as `cut` of the whole sequence gives them"
        )


def _ends(layout: str, cu_seqlens: CuSeqlens | None, tokens: int) -> tuple[int, ...] | None:
    if isinstance(cu_seqlens, tuple) and len(cu_seqlens) == 2 and cu_seqlens[0] is not cu_seqlens[1]:
        raise ValueError("cu_seqlens differ for queries and keys; a sequence in parts attends to itself: give one")
    ragged = ragged_of(layout, cu_seqlens, tokens, tokens)
    return None if ragged is None else tuple(ragged.of_queries.tolist())
