"""Transformer Engine's `MeshResource`: names of mesh axes, which Quaver's layers do not use."""

from dataclasses import dataclass, fields

from quaver.options import suggests


@suggests
@dataclass
class MeshResource:
    """Names of mesh axes by the kind of parallelism."""

    dp_resource: str | None = None
    tp_resource: str | None = None
    tpsp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None
    ep_resource: str | None = None


def check_unsharded(resource: MeshResource | None) -> None:
    """Raise a ValueError if any mesh axis is named."""
    named = [f.name for f in fields(MeshResource) if resource is not None and getattr(resource, f.name) is not None]
    if named:
        raise ValueError(
            f"mesh_resource names axes ({', '.join(named)}), which Quaver's layers do not use: shard "
            "parameters and inputs by jax.jit's in_shardings, or set kernel_axes and use Flax's logical "
            "rules, and leave it out"
        )
