"""torch's AdamW, weight decay on matrices only, and its state under the parameters' names."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quaver.train.configuration.config import TrainConfig


def adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """torch's fused AdamW, norms without decay; the schedule sets its learning rate."""
    parameters = list(model.parameters())
    # The fused optimizer takes those of one group together, and wants them on the same ranks.
    groups = [
        {"params": of_kind, "weight_decay": config.weight_decay if matrices else 0.0}
        for mesh in dict.fromkeys(map(mesh_of, parameters))
        for matrices in (True, False)
        if (of_kind := [p for p in parameters if (p.ndim >= 2) is matrices and mesh_of(p) == mesh])
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(config.beta1, config.beta2), fused=True)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state under the parameters' names: `head.weight/exp_avg`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Take up what `state_of` gave. Raises: ValueError for a parameter that the model does not have."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    index = {name: number for number, name in enumerate(order)}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition("/")
        if name not in index:
            raise ValueError(f"{full_name!r} belongs to none of the model's parameters")
        state.setdefault(index[name], {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def mesh_of(parameter: Tensor) -> object:
    """The ranks that have parts of a parameter; None where it is whole."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None
