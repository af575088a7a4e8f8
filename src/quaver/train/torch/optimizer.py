"""Optimizer of a run, its state by parameter name, and one training step."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quaver.torch import optim
from quaver.torch.optim import Optimizer
from quaver.train import config as optimizer_name
from quaver.train.config import TrainConfig
from quaver.train.torch.decoder import Balance, Decoder, Routings, loss_and_routings, loss_of
from quaver.train.torch.process_group import TorchProcessGroup

# ---- optimizer ----


def optimizer_of(model: nn.Module, config: TrainConfig, stage: int = 0) -> torch.optim.Optimizer:
    """Create the optimizer that the options name; see `quaver.train.config`.

    Args:
        model: the converted model.
        config: options of the run.
        stage: pipeline rank, which gets its own noise.
    """
    chosen = optimizer_name.find_optimizer(config.optimizer)
    if chosen.preset is None:
        return adamw(model, config)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = getattr(model, "head", None)
    heads = {id(head.weight)} if head is not None and chosen.rule == "muon" else set()
    kinds: dict[str, list[Tensor]] = {"matrices": [], "head": [], "embedding": [], "vectors": []}
    for p in model.parameters():
        kind = "embedding" if id(p) in tables else "head" if id(p) in heads else "matrices"
        kinds[kind if p.ndim >= 2 else "vectors"].append(p)
    options_of_kind: dict[str, dict[str, Any]] = {"embedding": {"preset": "float32"}, "vectors": {"weight_decay": 0.0}}
    if chosen.rule == "muon":
        options_of_kind = {
            kind: options_of_kind.get(kind, {}) | {"rule": "adamw"} for kind in ("head", "embedding", "vectors")
        }
    groups = [{"params": own, **options_of_kind.get(kind, {})} for kind, own in kinds.items() if own]
    options: dict[str, Any] = {"weight_decay": config.weight_decay, "preset": chosen.preset}
    options["seed"] = config.seed + (stage << 32)
    if config.optimizer_offload != "none":
        options["offload"] = config.optimizer_offload
        # Eager steps on the CPU take many times as long; compiled ones have the same bits.
        options["compile"] = config.optimizer_offload == "cpu" and any(p.is_cuda for p in model.parameters())
    betas = (config.beta1, config.beta2)
    if chosen.rule == "muon":
        # Scale Muon's updates like AdamW's, so that one learning rate serves both.
        return optim.Muon(groups, 0.0, adjust_lr_fn="match_rms_adamw", betas=betas, **options)
    if chosen.rule == "sgd":
        return optim.SGD(groups, 0.0, config.beta1, **options)
    if chosen.rule == "schedulefree":
        return optim.ScheduleFreeAdamW(groups, 0.0, betas, **options)
    rules = {"adamw": optim.AdamW, "adam": optim.Adam, "lion": optim.Lion}
    return rules[chosen.rule](groups, 0.0, betas, **options)


def set_averaged(optimizer: torch.optim.Optimizer, averaged: bool) -> None:
    """Switch a model between the weights that are trained and their average; no effect with most optimizers."""
    if isinstance(optimizer, optim.ScheduleFreeAdamW):
        (optimizer.eval if averaged else optimizer.train)()


def adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Create torch's fused AdamW without weight decay for norms; the schedule sets its learning rate."""
    parameters = list(model.parameters())
    # The fused optimizer steps a group at once and requires the same device mesh within a group.
    groups = [
        {"params": group, "weight_decay": config.weight_decay if matrices else 0.0}
        for mesh in dict.fromkeys(map(mesh_of, parameters))
        for matrices in (True, False)
        if (group := [p for p in parameters if (p.ndim >= 2) is matrices and mesh_of(p) == mesh])
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(config.beta1, config.beta2), fused=True)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the optimizer's state by parameter name and entry: `head.weight/exp_avg`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load a state that `state_of` returned.

    Raises: ValueError for unknown parameters, and for states of another kind of optimizer.
    """
    if isinstance(optimizer, optim.Optimizer):
        load_low_bit_state(model, optimizer, tensors)
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


def load_low_bit_state(model: nn.Module, optimizer: optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """`load_state` for an optimizer of `quaver.torch.optim`: each state unchanged, without casts."""
    parameters, remaining = dict(model.named_parameters()), dict(tensors)
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = next(name for name, own in parameters.items() if own is p)
            first = optimizer.first_state(p, group)
            for key, present in first.items():
                value = remaining.pop(f"{name}/{key}", None)
                if value is None:
                    raise ValueError(f"{name}/{key} is missing in the optimizer")
                if value.shape != present.shape or value.dtype is not present.dtype:
                    raise ValueError(
                        f"{name}/{key} is {value.dtype} {tuple(value.shape)}, where the optimizer has {present.dtype} "
                        f"{tuple(present.shape)}"
                    )
                # In place, because states that are streamed to a device need pinned memory.
                present.copy_(value)
            optimizer.state[p] = first
    if remaining:
        raise ValueError(f"{next(iter(remaining))} is not part of the optimizer")


def mesh_of(parameter: Tensor) -> object:
    """Return the device mesh of a sharded parameter, or None."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


# ---- step ----


class TrainStep:
    """One training step on device tensors only, so that it can be captured in a CUDA graph.

    Called with batches int64 [accumulate, B, S + 1], it returns float32 [2 or more]: loss, gradient norm, and the
    numbers of `Balance`. The loss is the cross-entropy; the gradient includes the balance losses of experts. With a
    group, the batches are this rank's, and the numbers cover all ranks. If loss or norm is not finite, nothing is
    updated; the gradients remain, so that `first_gradient` can find the cause.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        group: TorchProcessGroup | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.group = group
        #: Loss of a batch int64 [B, S + 1] of this rank; without gradients in a pipeline.
        self.loss: Callable[[Tensor], Tensor] = partial(
            loss_of,
            model,
            dtype=config.dtype,
            chunk=config.loss_chunk if group is None else group.loss_chunk(config),
            cut=Tensor.contiguous if group is None else group.cut,
        )
        if group is not None and group.pipeline is not None:
            self.loss = group.pipeline.loss
        #: Balancing of experts, or None.
        self.balance: Balance | None = None
        if isinstance(model, Decoder) and model.config.experts is not None:
            ranks = (None, 1) if group is None else (group.mean, group.sizes.fsdp)
            self.balance = Balance(model, model.config.experts, *ranks)
        #: This rank's own loss in the last step.
        self.own: Tensor | None = None
        #: Learning rate as a GPU tensor that a captured step reads, or None.
        self.lr: Tensor | None = None

    def set_lr(self, lr: float, device: torch.device) -> None:
        """Set the learning rate of the next update."""
        if device.type == "cuda":
            self.lr = torch.zeros((), dtype=torch.float32, device=device) if self.lr is None else self.lr
            self.lr.fill_(lr)
        for group in self.optimizer.param_groups:
            group["lr"] = lr if self.lr is None else self.lr

    def __call__(self, ids: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        if self.balance is not None:
            self.balance.begin()
        total = torch.zeros((), dtype=torch.float32, device=ids.device)
        if self.group is not None and self.group.pipeline is not None:
            total = self.group.pipeline.step(ids)
        else:
            for left, micro_batch in zip(range(len(ids))[::-1], ids, strict=True):
                with self.accumulating() if left else nullcontext():
                    loss, minimized = self.losses(micro_batch)
                    (minimized / len(ids)).backward()
                total += loss.detach() / len(ids)
        if self.group is not None:
            self.own = total.clone()
            total = self.group.agree_if_finite(self.group.mean(total))
        norm = self.clip(self.config.clip or float("inf"))
        norms = torch.stack([total, norm])
        # The optimizer skips the update if this is nonzero, as with torch.amp.GradScaler.
        self.optimizer.found_inf = (~norms.isfinite().all()).float()  # type: ignore[attr-defined]
        capturing = ids.is_cuda and torch.cuda.is_current_stream_capturing()
        if not isinstance(self.optimizer, Optimizer):
            for group in self.optimizer.param_groups:
                group["capturable"] = capturing
        self.optimizer.step()
        if self.balance is None:
            return norms
        return torch.cat([norms, self.balance.end(1 - self.optimizer.found_inf)])  # type: ignore[attr-defined]

    def losses(self, micro_batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of a micro-batch, and the same with balance losses added."""
        if self.balance is None:
            loss = self.loss(micro_batch)
            return loss, loss
        loss, routings = self.routed(micro_batch)
        return loss, loss + self.balance.loss(routings, len(micro_batch))

    def routed(self, batch: Tensor) -> tuple[Tensor, Routings]:
        """Return the loss of a batch and the routing of its tokens."""
        group, config = self.group, self.config
        chunk = config.loss_chunk if group is None else group.loss_chunk(config)
        return loss_and_routings(self.model, batch, config.dtype, chunk)

    def accumulating(self) -> AbstractContextManager[None]:
        """Return the context for all micro-batches except the last of a step."""
        return self.optimizer.accumulating() if isinstance(self.optimizer, Optimizer) else nullcontext()

    def clip(self, largest: float) -> Tensor:
        """Scale gradients so that their norm is at most `largest`; returns the norm before."""
        if not isinstance(self.optimizer, Optimizer):
            return clip_gradients(self.model, largest, self.group)
        if self.group is None or self.group.sizes.pp == 1:
            return self.optimizer.clip_grad_norm_(largest)
        return clip_stages(self.model, self.optimizer, largest, self.group)


def clip_stages(model: nn.Module, optimizer: Optimizer, largest: float, group: TorchProcessGroup) -> Tensor:
    """`clip_gradients` for pipeline stages whose gradients may be quantized."""
    parameters = [*model.parameters()]
    every = group.gather_number(optimizer.gradients.norm(parameters).to(group.device))
    # All ranks of a stage have the same norm; the pipeline dimension is the outermost.
    norm = torch.linalg.vector_norm(every.view(group.sizes.pp, -1)[:, 0])
    optimizer.gradients.hold_to(parameters, largest, norm)
    return norm


def clip_gradients(model: nn.Module, largest: float, group: TorchProcessGroup | None) -> Tensor:
    """Scale a model's gradients so that their norm over all ranks is at most `largest`; returns the norm.

    Each parameter counts once. All ranks get the same bits of the norm; otherwise replicated weights would drift apart.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if group is None:
        return torch.nn.utils.clip_grad_norm_(parameters, largest)
    own = [local_shard(parameter.grad) for parameter in parameters if group.counts_parameter(parameter)]
    norm = torch.linalg.vector_norm(group.gather_number(torch.nn.utils.get_total_norm(own).to(group.device)))
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(mesh_of(parameter), []).append(parameter)
    for mesh_parameters in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(mesh_parameters, largest, norm)
    return norm


def local_shard(gradient: Tensor | None) -> Tensor:
    """Return this rank's shard of a gradient."""
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
