"""Transformer Engine's names of mesh axes: `MeshResource`, its logical axes, and the rules from one to the other."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import jax
from flax import linen as nn
from flax.core import meta
from flax.linen.spmd import with_logical_constraint
from jax import Array
from jax.sharding import PartitionSpec

from quaver.options import suggests

# ---- logical axes of activations (no prefix) and of weights ("w") ----

BATCH_AXES = "nvte_batch"
SEQLEN_AXES = "nvte_seqlen"
SEQLEN_TP_AXES = "nvte_seqlen_tp"
SEQLEN_CP_AXES = "nvte_seqlen_cp"
HEAD_AXES = "nvte_head"
HIDDEN_AXES = "nvte_hidden"
HIDDEN_TP_AXES = "nvte_hidden_tp"
JOINED_AXES = "nvte_joined"
W_NO_SHARD_AXES = "nvte_w_no_shard"
W_FSDP_AXES = "nvte_w_fsdp"
W_TP_AXES = "nvte_w_tp"
W_JOINED_AXES = "nvte_w_joined"

Axes = tuple[str | None, ...] | None

# ---- mesh resources ----


@suggests
@dataclass(frozen=True)
class MeshResource:
    """Names of mesh axes by the kind of parallelism.

    Layers are sharded by these axes inside `autocast(mesh_resource=...)` or `global_shard_guard`, in a mesh that
    `jax.set_mesh` sets. With `tpsp_resource`, activations between layers are sharded along the sequence.
    """

    dp_resource: str | None = None
    tp_resource: str | None = None
    tpsp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None
    ep_resource: str | None = None


# Part of jit's cache key, as the recipe.
_resource = jax.make_user_context(default_value=None)


@contextmanager
def global_shard_guard(resource: MeshResource | None) -> Iterator[None]:
    """Context in which layers are sharded by these mesh axes; None changes nothing."""
    if resource is None:
        yield
        return
    with _resource(resource):
        yield


def global_mesh_resource() -> MeshResource | None:
    """Return the innermost context's `MeshResource`, or None."""
    resource: MeshResource | None = _resource.value
    return resource


def get_sharding_map_logic_axis_to_mesh_axis() -> dict[str, str | None]:
    """Return the mesh axis of each logical axis; {} without a `MeshResource`, or in `jax.shard_map`.

    Raises:
        ValueError: the mesh has no such axis.
    """
    resource, mesh = global_mesh_resource(), jax.sharding.get_abstract_mesh()
    if resource is None or (not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names)):
        return {}
    named = {f.name: getattr(resource, f.name) for f in fields(resource)}
    missing = {name: axis for name, axis in named.items() if axis is not None and axis not in mesh.axis_names}
    if missing and not mesh.empty:
        raise ValueError(f"MeshResource names axes {missing}, and the mesh has {mesh.axis_names}")
    sizes = dict(mesh.shape)
    if sizes.get(resource.tp_resource, 1) > 1 and sizes.get(resource.tpsp_resource, 1) > 1:
        raise ValueError("MeshResource shards weights by tp_resource and by tpsp_resource; give one of them")
    tensor = resource.tp_resource if resource.tpsp_resource is None else resource.tpsp_resource
    return {
        BATCH_AXES: resource.dp_resource if resource.fsdp_resource is None else resource.fsdp_resource,
        SEQLEN_AXES: None,
        SEQLEN_TP_AXES: resource.tpsp_resource,
        SEQLEN_CP_AXES: resource.cp_resource,
        HEAD_AXES: tensor,
        HIDDEN_AXES: None,
        HIDDEN_TP_AXES: tensor,
        JOINED_AXES: None,
        W_NO_SHARD_AXES: None,
        W_FSDP_AXES: resource.fsdp_resource,
        W_TP_AXES: tensor,
        W_JOINED_AXES: None,
    }


def extend_logical_axis_rules(rules: Sequence[tuple[str, str | None]]) -> tuple[tuple[str, str | None], ...]:
    """Append the rules of this package's logical axes to Flax's logical axis rules.

    Args:
        rules: (logical axis, mesh axis) pairs; call it where the `MeshResource` is in force.
    Raises:
        ValueError: a rule for one of these axes names another mesh axis.
    """
    own, more = dict(rules), get_sharding_map_logic_axis_to_mesh_axis()
    differing = {name: (own[name], axis) for name, axis in more.items() if name in own and own[name] != axis}
    if differing:
        raise ValueError(f"rules and MeshResource differ, {{axis: (rule, MeshResource)}}: {differing}")
    return (*rules, *((name, axis) for name, axis in more.items() if name not in own))


def with_sharding_constraint_by_logical_axes(x: Array, logical_axis_names: Sequence[str | None] | None) -> Array:
    """Shard an array by Flax's logical axis rules if there are any, else by the `MeshResource`; None does nothing."""
    if not logical_axis_names:
        return x
    if nn.get_logical_axis_rules():
        constrained: Array = with_logical_constraint(x, tuple(logical_axis_names))
        return constrained
    rules, mesh = get_sharding_map_logic_axis_to_mesh_axis(), jax.sharding.get_abstract_mesh()
    axes = [rules.get(name) if name is not None else None for name in logical_axis_names]
    if not any(axes) or (mesh.empty and not meta.global_mesh_defined()):
        return x
    free: list[Any] = [None if axis in mesh.manual_axes else axis for axis in axes]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*free)) if any(free) else x
