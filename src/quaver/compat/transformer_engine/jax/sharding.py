"""Transformer Engine's `MeshResource`: names of a mesh's axes, which nothing here needs to be told."""

from dataclasses import dataclass, fields

from quaver.options import suggests


@suggests
@dataclass
class MeshResource:
    """Names of a mesh's axes by what they divide."""

    dp_resource: str | None = None
    tp_resource: str | None = None
    tpsp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None
    ep_resource: str | None = None


def check_unsharded(resource: MeshResource | None) -> None:
    """Refuse axes of a mesh.

    Raises:
        ValueError: with what to do.
    """
    named = [f.name for f in fields(MeshResource) if resource is not None and getattr(resource, f.name) is not None]
    if named:
        raise ValueError(
            f"mesh_resource names axes ({', '.join(named)}), and layers here know of no mesh: shard parameters and "
            "inputs by jax.jit's in_shardings, or name kernel_axes and use Flax's logical rules, and leave it out"
        )
