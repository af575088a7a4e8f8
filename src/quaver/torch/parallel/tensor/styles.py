"""The styles of a plan for torch's `parallelize_module`: which part of a layer's weight and tokens each rank has."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from quaver.torch.linear.layer import Quantizable
from quaver.torch.linear.stored import stored
from quaver.torch.parallel.tensor.layers import in_parts, layout_of
from quaver.torch.parallel.tensor.layout import Layout
from quaver.torch.state import kept_weights


class _InParts(ParallelStyle):
    """A linear layer in parts."""

    layout: Layout

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        _check(module, self.layout, device_mesh)
        of_weight = Shard(self.layout.weight_axis)
        of_bias = Shard(0) if self.layout.column else Replicate()
        for name, placement in (("weight", of_weight), ("bias", of_bias)):
            parameter = module._parameters[name]
            if parameter is not None:
                parts = distribute_tensor(
                    parameter.detach(), device_mesh, [placement], src_data_rank=self.src_data_rank
                )
                module.register_parameter(name, nn.Parameter(parts, requires_grad=parameter.requires_grad))
        if isinstance(module, Quantizable):
            kept_weights.drop(module)
        module.__class__ = in_parts(type(module), self.layout)  # type: ignore[arg-type]
        return module

    def __repr__(self) -> str:
        return self.layout.name


class Column(_InParts):
    """A linear layer of which each rank computes some output features: q, k and v, gate and up.

    The weight becomes a DTensor of placement Shard(0), and so does the bias. The layer takes and gives local tensors:
    an input that every rank has whole, and of the output this rank's features, those of a whole number of heads where
    heads follow. Where the input needs a gradient, the ranks sum theirs in float32.

    Args:
        sequence: True where each rank has some tokens of the input, its part of the last axis but one: they are
            gathered as codes, by recipes that quantize them, and each rank gets the gradient of its tokens.
    Exact: codes and scales are those of one process. Bounded: the order of the sums that several ranks share.
    """

    def __init__(self, *, sequence: bool = False) -> None:
        self.layout = Layout(column=True, sequence=sequence)


class Row(_InParts):
    """A linear layer of which each rank sums over some input features: o after attention, down after gate and up.

    The weight becomes a DTensor of placement Shard(1), the bias one of Replicate(). The layer takes and gives local
    tensors: of the input this rank's features, as a `Column` gives them; the ranks' sums are added in float32, and
    every rank has the whole output.

    Args:
        sequence: True leaves each rank some tokens of the output, its part of the last axis but one; their gradients
            are gathered as codes.
    Exact: codes and scales are those of one process. Bounded: the order of the sums that several ranks share.
    """

    def __init__(self, *, sequence: bool = False) -> None:
        self.layout = Layout(column=False, sequence=sequence)


def _check(module: nn.Module, layout: Layout, mesh: Any) -> None:
    """Refuse what cannot be in parts.

    Raises:
        ValueError: with what to do.
    """
    name = module.__dict__.get("qualified_name") or type(module).__name__
    if not isinstance(module, nn.Linear) or "weight" not in module._parameters:
        raise ValueError(
            f"{layout.name} is a style of linear layers, and {name} is none, or its weight is parametrized: name the "
            "linear layers in the plan, such as {'mlp.up_proj': Column(), 'mlp.down_proj': Row()}"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"{name} would be in parts over a mesh of {mesh.ndim} dimensions, {mesh.mesh_dim_names}: give one of "
            "them, such as mesh['tp']"
        )
    before = layout_of(module)
    weight: Any = module._parameters["weight"]
    if before is not None or getattr(weight, "device_mesh", None) is not None:
        of = (
            f"is in parts by {before.name}" if before is not None else f"has a weight that lies on {weight.device_mesh}"
        )
        raise ValueError(
            f"{name} {of} already, and {layout.name} is for a whole layer: name it in one style of the plan, and call "
            "parallelize_module before fully_shard"
        )
    if weight.dtype in stored.CODES:
        raise ValueError(
            f"{name} has a weight that exists only in few bits, and {layout.name} is for one in high precision: call "
            "quaver.torch.dequantize_weights(model) first"
        )
    number, features = mesh.size(), weight.shape[layout.weight_axis]
    if features % number:
        of = "output" if layout.column else "input"
        raise ValueError(
            f"{name} has {features} {of} features, which {number} ranks cannot share by {layout.name}: leave it out of "
            f"the plan, or give it a multiple of {number}"
        )
    if not torch.distributed.is_initialized():
        raise ValueError(f"{layout.name} needs a process group: call torch.distributed.init_process_group first")
