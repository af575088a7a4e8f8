"""What fully_shard does with a weight now, by its own names, which torch does not publish: all of them are read here.

Without them nothing is known of a weight's unit: both of its operands travel in every gather, and a
`MixedPrecisionPolicy` with another dtype than the parameters' is refused.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class FsdpParameter:
    """One weight as fully_shard holds it: its parameter, and the group that is gathered with it."""

    def __init__(self, group: Any, parameter: Any) -> None:
        self._group, self._parameter = group, parameter

    @property
    def in_backward(self) -> bool:
        """Whether the present gather is for a backward."""
        return bool(self._group._training_state.name == "PRE_BACKWARD")

    @property
    def for_one_pass(self) -> bool:
        """Whether what the present gather brings goes before another pass reads it."""
        if self._group._training_state.name == "FORWARD":
            return self._group.post_forward_mesh_info is not None
        return self.in_backward and bool(self._group.reshard_after_backward)

    @property
    def offloads(self) -> bool:
        """Whether the part on this rank lies on the CPU, by CPUOffloadPolicy."""
        return bool(getattr(self._parameter, "offload_to_cpu", False))

    def check(self, name: str) -> None:
        """Refuse what no gather of codes does. Raises: ValueError, which names the layer."""
        if self._group._use_post_forward_mesh:
            raise ValueError(
                f"{name} is gathered as codes, which no smaller number of ranks keeps after a forward; give "
                "fully_shard reshard_after_forward=True or False, not a number"
            )
        if getattr(getattr(self._parameter, "fsdp_placement", None), "dim", 0):
            raise ValueError(
                f"{name} is gathered as codes, of rows: ranks cannot divide its columns; have fully_shard's "
                "shard_placement_fn give Shard(0) or None for this weight, or leave the layer out with "
                "gather_quantized(model, skip=[...])"
            )

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that the weight is computed with, where it is not the parameter's."""
        if hasattr(self._parameter, "param_dtype"):
            dtype: torch.dtype | None = self._parameter.param_dtype
            return dtype
        # Another root has it, which has not run: fully_shard sets this in the first forward.
        asked: torch.dtype | None = self._group.mp_policy.param_dtype
        return None if asked is self.sharded.dtype else asked

    @property
    def sharded(self) -> Any:
        """The parameter as the optimizer has it."""
        return self._parameter.sharded_param

    @property
    def mesh(self) -> Any:
        """The ranks that hold parts of it."""
        return self._parameter.shard_mesh

    @property
    def shape(self) -> torch.Size:
        """Of what fully_shard divides: the weight, or the part of it that tensor parallelism leaves this rank."""
        shape: torch.Size = self._parameter._orig_size
        return shape

    def renew(self) -> None:
        """Have the next gather begin as the first one did: another tensor is the part on this rank."""
        if hasattr(self._parameter, "_unsharded_param"):
            del self._parameter._unsharded_param
        self.forget_outputs()
        part: Any = local(self.sharded)
        if hasattr(part, "fsdp_pre_all_gather"):
            # fully_shard would compare its address, which such a part has not, with that of a plain one.
            self._parameter._sharded_param_data = part.view(-1)
        self._parameter.reset_sharded_param()
        self._parameter._init_extensions()

    def forget_outputs(self) -> None:
        """Have the next gather take room for as many bytes as it is given: fully_shard keeps that of the first."""
        self._parameter.all_gather_outputs = []


class Collectives:
    """What one group of a fully_shard's weights is gathered by, and what its gradients are reduced by."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def all_gather(self) -> Any:
        """A custom one, or torch's own."""
        return self._group._all_gather_comm

    @all_gather.setter
    def all_gather(self, comm: Any) -> None:
        self._group._all_gather_comm = comm

    @property
    def reduce_scatter(self) -> Any:
        """Likewise."""
        return self._group._reduce_scatter_comm

    @reduce_scatter.setter
    def reduce_scatter(self, comm: Any) -> None:
        self._group._reduce_scatter_comm = comm

    @property
    def replicas(self) -> Any:
        """The ranks that hold the same part, whose gradients are summed after the reduce-scatter; None without any."""
        summed = self._group.all_reduce_grads
        return getattr(self._group.mesh_info, "replicate_process_group", None) if summed else None


#: What `Collectives` reads.
_OF_COLLECTIVES = ("_all_gather_comm", "_reduce_scatter_comm", "all_reduce_grads", "mesh_info")
#: What `Unit` reads.
_OF_GROUP = (
    "_training_state",
    "post_forward_mesh_info",
    "reshard_after_backward",
    "_use_post_forward_mesh",
    "mp_policy",
)
_OF_PARAMETER = (
    *("sharded_param", "shard_mesh", "all_gather_outputs", "_module_info"),
    *("_orig_size", "_sharded_param_data", "reset_sharded_param", "_init_extensions"),
)


def held_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, FsdpParameter]]:
    """Every parameter in a model that a fully_shard holds: its module, its name in it, and its unit."""
    for group in _groups(model):
        for parameter in getattr(group, "fsdp_params", ()):
            if all(hasattr(group, name) for name in _OF_GROUP) and all(
                hasattr(parameter, name) for name in _OF_PARAMETER
            ):
                info = parameter._module_info
                yield info.module, info.param_name, FsdpParameter(group, parameter)


def collectives(model: nn.Module) -> Iterator[Collectives]:
    """Of every group of weights that a fully_shard in a model holds; none where torch names them otherwise."""
    for group in _groups(model):
        if all(hasattr(group, name) for name in _OF_COLLECTIVES):
            yield Collectives(group)


def _groups(model: nn.Module) -> Iterator[Any]:
    for part in model.modules():
        if isinstance(part, FSDPModule) and hasattr(part, "_get_fsdp_state"):
            state = part._get_fsdp_state()
            # torch 2.12 has several groups of parameters in a module, and torch 2.11 at most one.
            groups = getattr(state, "_fsdp_param_groups", None)
            yield from [getattr(state, "_fsdp_param_group", None)] if groups is None else groups


def local(parameter: Any) -> Tensor | None:
    """A sharded parameter's part on this rank, or None where it is not sharded."""
    part: Tensor | None = getattr(parameter, "_local_tensor", None)
    return part


def set_local(parameter: Any, part: Tensor) -> None:
    """Put another tensor in the place of a sharded parameter's part on this rank."""
    parameter._local_tensor = part
