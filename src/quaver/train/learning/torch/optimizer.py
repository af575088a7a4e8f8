"""A run's optimizer, weight decay on matrices only, and its state under the parameters' names."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quaver.torch import optim
from quaver.torch.optim.loading.earlier import without_form
from quaver.torch.optim.loading.rules import CODES
from quaver.train.configuration import optimizer_name
from quaver.train.configuration.config import TrainConfig


def optimizer_of(model: nn.Module, config: TrainConfig, stage: int = 0) -> torch.optim.Optimizer:
    """The optimizer that a run names; see `quaver.train.configuration.optimizer_name`.

    Args:
        stage: of a pipeline, whose noise is its own.
    """
    chosen = optimizer_name.find(config.optimizer)
    if chosen.preset is None:
        return adamw(model, config)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = getattr(model, "head", None)
    heads = {id(head.weight)} if head is not None and chosen.rule == "muon" else set()
    kinds: dict[str, list[Tensor]] = {"matrices": [], "head": [], "embedding": [], "vectors": []}
    for p in model.parameters():
        kind = "embedding" if id(p) in tables else "head" if id(p) in heads else "matrices"
        kinds[kind if p.ndim >= 2 else "vectors"].append(p)
    of_kind: dict[str, dict[str, Any]] = {"embedding": {"preset": "float32"}, "vectors": {"weight_decay": 0.0}}
    if chosen.rule == "muon":
        of_kind = {kind: of_kind.get(kind, {}) | {"rule": "adamw"} for kind in ("head", "embedding", "vectors")}
    groups = [{"params": own, **of_kind.get(kind, {})} for kind, own in kinds.items() if own]
    options: dict[str, Any] = {"weight_decay": config.weight_decay, "preset": chosen.preset}
    options["seed"] = config.seed + (stage << 32)
    betas = (config.beta1, config.beta2)
    if chosen.rule == "muon":
        # Updates of AdamW's size: one learning rate serves both.
        return optim.Muon(groups, 0.0, adjust_lr_fn="match_rms_adamw", betas=betas, **options)
    if chosen.rule == "sgd":
        return optim.SGD(groups, 0.0, config.beta1, **options)
    rules = {"adamw": optim.AdamW, "adam": optim.Adam, "lion": optim.Lion}
    return rules[chosen.rule](groups, 0.0, betas, **options)


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
    """Take up what `state_of` gave.

    Raises: ValueError for a parameter that the model does not have, and for what another optimizer keeps.
    """
    if isinstance(optimizer, optim.Optimizer):
        load_kept(model, optimizer, tensors)
        return
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


def load_kept(model: nn.Module, optimizer: optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """`load_state` of an optimizer of `quaver.torch.optim`: each state as it was, none cast."""
    parameters, given = dict(model.named_parameters()), dict(tensors)
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = next(name for name, own in parameters.items() if own is p)
            first = optimizer.first_state(p, group)
            for key, held in first.items():
                # Codes of moments had the moments' names once.
                value = given.pop(f"{name}/{key}", given.pop(f"{name}/{key.removesuffix(CODES)}", None))
                if value is None:
                    raise ValueError(f"{name}/{key} is missing in the optimizer")
                if value.shape != held.shape or value.dtype is not held.dtype:
                    raise ValueError(
                        f"{name}/{key} is {value.dtype} {tuple(value.shape)}, where the optimizer has {held.dtype} "
                        f"{tuple(held.shape)}"
                    )
                first[key] = value.to(held.device)
            optimizer.state[p] = first
    if given:
        raise ValueError(f"{next(iter(given))} is not part of the optimizer")


def renew(optimizer: torch.optim.Optimizer) -> None:
    """Convert states of `quaver.torch.optim` from the first form, see `loading.earlier` there; others stay."""
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["preset"] = without_form(group["preset"])
    optimizer.load_state_dict(state)


def mesh_of(parameter: Tensor) -> object:
    """The ranks that have parts of a parameter; None where it is whole."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None
