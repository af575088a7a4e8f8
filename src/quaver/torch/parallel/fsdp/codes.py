"""Weights that exist only in few bits under fully_shard: a rank's rows are codes, and travel as they are.

torch would cast codes as if they were numbers where a `MixedPrecisionPolicy` has another dtype, and gloo carries no
float8. Scales stay the layer's buffers, whole on every rank. Such weights are frozen, since fully_shard takes gradients
of one dtype in a unit.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.torch.parallel.fsdp.shards import KEEPS, Shard
from quaver.torch.parallel.fsdp.units import local, set_local


class Stored(NamedTuple):
    """What is known of such a weight."""

    name: str
    #: Of the weight, as the codes lie.
    shape: torch.Size
    #: No model's amaxes follow from it.
    model: None = None


class CodeShard(Shard):
    """Codes of a weight, or of one rank's rows of it."""

    # Moves take them as integers.
    keeps = frozenset({*KEEPS, torch.ops.aten.view.dtype})

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:  # type: ignore[override]
        stored: Any = self.weight
        own = self.plain.view(torch.uint8)
        part = torch.zeros((-(-stored.shape[0] // mesh.size()), *own.shape[1:]), dtype=torch.uint8, device=own.device)
        part[: own.shape[0]] = own
        return (part,), None

    def fsdp_post_all_gather(  # type: ignore[override]
        self, outputs: Sequence[Tensor], sent: None, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is not None:
            # The same memory, filled again.
            return None
        stored: Any = self.weight
        return outputs[0][: stored.shape[0]].view(self.plain.dtype), ()


def shard_codes(layer: nn.Module, name: str) -> None:
    """Put codes that fully_shard gathers as bytes in the place of a layer's weight."""
    parameter = layer._parameters["weight"]
    assert parameter is not None
    stored: Any = Stored(name, parameter.shape)
    layer._parameters["weight"] = nn.Parameter(CodeShard(parameter.detach(), stored), requires_grad=False)
    layer.register_load_state_dict_post_hook(partial(_shard_again, stored))


def _shard_again(stored: Any, layer: nn.Module, _: object) -> None:
    """What is loaded may be another parameter."""
    parameter: Any = layer._parameters["weight"]
    part = local(parameter)
    if part is None and not isinstance(parameter, CodeShard):
        layer._parameters["weight"] = nn.Parameter(CodeShard(parameter.detach(), stored), requires_grad=False)
    elif part is not None and not isinstance(part, CodeShard):
        set_local(parameter, CodeShard(part, stored))
