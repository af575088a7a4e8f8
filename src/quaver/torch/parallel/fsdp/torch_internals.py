"""Accessors for private attributes of torch's fully_shard, all in this file.

If this torch lacks the attributes, the FSDP unit of a weight is unknown. Both operands then travel in every gather, and
a `MixedPrecisionPolicy` with another dtype than the parameters' raises an error.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class FsdpParameter:
    """One weight managed by fully_shard: its FSDP parameter and the parameter group that is gathered with it."""

    def __init__(self, group: Any, parameter: Any) -> None:
        self._group, self._parameter = group, parameter

    @property
    def in_backward(self) -> bool:
        """True if the current gather is for backward."""
        return bool(self._group._training_state.name == "PRE_BACKWARD")

    @property
    def for_one_pass(self) -> bool:
        """True if the gathered weight is freed before another pass reads it."""
        if self._group._training_state.name == "FORWARD":
            return self._group.post_forward_mesh_info is not None
        return self.in_backward and bool(self._group.reshard_after_backward)

    @property
    def offloads(self) -> bool:
        """True if CPUOffloadPolicy keeps this rank's shard on the CPU."""
        return bool(getattr(self._parameter, "offload_to_cpu", False))

    def check(self, name: str) -> None:
        """Raise a ValueError with the layer's name if the sharding does not support gathers of codes."""
        if self._group._use_post_forward_mesh:
            raise ValueError(
                f"{name} is gathered as codes, which cannot be resharded to a smaller number of ranks after a "
                "forward; give fully_shard reshard_after_forward=True or False, not a number"
            )
        if getattr(getattr(self._parameter, "fsdp_placement", None), "dim", 0):
            raise ValueError(
                f"{name} is gathered as codes by rows, so its columns cannot be sharded; let fully_shard's "
                "shard_placement_fn return Shard(0) or None for this weight, or leave the layer out with "
                "gather_quantized(model, skip=[...])"
            )

    @property
    def dtype(self) -> torch.dtype | None:
        """The compute dtype of the weight if it differs from the parameter's dtype, else None."""
        if hasattr(self._parameter, "param_dtype"):
            dtype: torch.dtype | None = self._parameter.param_dtype
            return dtype
        # fully_shard sets `param_dtype` in the first forward of the root, which has not run yet.
        policy_dtype: torch.dtype | None = self._group.mp_policy.param_dtype
        return None if policy_dtype is self.sharded.dtype else policy_dtype

    @property
    def sharded(self) -> Any:
        """The sharded parameter, as the optimizer sees it."""
        return self._parameter.sharded_param

    @property
    def mesh(self) -> Any:
        """The device mesh over which the weight is sharded."""
        return self._parameter.shard_mesh

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that fully_shard shards: the weight, or this rank's tensor-parallel shard of it."""
        shape: torch.Size = self._parameter._orig_size
        return shape

    def initialize(self) -> None:
        """Have fully_shard pad this rank's rows now, as it does before the first gather of the weight's root.

        Padding writes the rows to other memory, and only on ranks that have fewer rows.
        """
        if not any(p.sharded_param.is_meta for p in self._group.fsdp_params):
            self._group.lazy_init()

    def reinitialize(self) -> None:
        """Reinitialize fully_shard's state for this parameter after its local tensor was replaced."""
        if hasattr(self._parameter, "_unsharded_param"):
            del self._parameter._unsharded_param
        self.forget_outputs()
        part: Any = local(self.sharded)
        if hasattr(part, "fsdp_pre_all_gather"):
            # fully_shard would compare the data pointer of the wrapper, which has none, with that of a plain tensor.
            self._parameter._sharded_param_data = part.view(-1)
        self._parameter.reset_sharded_param()
        self._parameter._init_extensions()

    def forget_outputs(self) -> None:
        """Make the next gather allocate new output buffers; fully_shard otherwise reuses those of the first size."""
        self._parameter.all_gather_outputs = []


#: Attributes of a parameter group that the functions for its collectives use.
_OF_COLLECTIVES = ("_all_gather_comm", "_reduce_scatter_comm", "all_reduce_grads", "mesh_info")
#: Attributes that `FsdpParameter` reads.
_OF_GROUP = (
    "_training_state",
    "post_forward_mesh_info",
    "reshard_after_backward",
    "_use_post_forward_mesh",
    "mp_policy",
    "lazy_init",
)
_OF_PARAMETER = (
    *("sharded_param", "shard_mesh", "all_gather_outputs", "_module_info"),
    *("_orig_size", "_sharded_param_data", "reset_sharded_param", "_init_extensions"),
)


def managed_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, FsdpParameter]]:
    """Yield every parameter that fully_shard manages in a model: module, name in it, and `FsdpParameter`."""
    for group in _groups(model):
        for parameter in getattr(group, "fsdp_params", ()):
            if all(hasattr(group, name) for name in _OF_GROUP) and all(
                hasattr(parameter, name) for name in _OF_PARAMETER
            ):
                info = parameter._module_info
                yield info.module, info.param_name, FsdpParameter(group, parameter)


def groups_with_collectives(model: nn.Module) -> Iterator[Any]:
    """Yield every fully_shard parameter group in a model; nothing if this torch lacks the attributes."""
    for group in _groups(model):
        if all(hasattr(group, name) for name in _OF_COLLECTIVES):
            yield group


def get_collectives(group: Any) -> tuple[Any, Any]:
    """Return the all-gather and the reduce-scatter of a parameter group: custom ones or torch's own."""
    return group._all_gather_comm, group._reduce_scatter_comm


def set_collectives(group: Any, all_gather: Any, reduce_scatter: Any) -> None:
    """Replace the collectives of a parameter group."""
    group._all_gather_comm, group._reduce_scatter_comm = all_gather, reduce_scatter


def replicas(group: Any) -> Any:
    """Return the process group that all-reduces gradients after the reduce-scatter (hybrid sharding), or None."""
    return getattr(group.mesh_info, "replicate_process_group", None) if group.all_reduce_grads else None


def _groups(model: nn.Module) -> Iterator[Any]:
    for part in model.modules():
        if isinstance(part, FSDPModule) and hasattr(part, "_get_fsdp_state"):
            state = part._get_fsdp_state()
            # torch 2.12 has several parameter groups per module, torch 2.11 at most one.
            groups = getattr(state, "_fsdp_param_groups", None)
            yield from [getattr(state, "_fsdp_param_group", None)] if groups is None else groups


def local(parameter: Any) -> Tensor | None:
    """Return the local tensor of a sharded parameter, or None if it is not sharded."""
    shard: Tensor | None = getattr(parameter, "_local_tensor", None)
    return shard


def set_local(parameter: Any, shard: Tensor) -> None:
    """Replace the local tensor of a sharded parameter."""
    parameter._local_tensor = shard
