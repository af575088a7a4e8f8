"""End of a step of delayed scaling: roll the recorded amaxes into each history and compute new factors.

Layers with the same recipe, device and length roll together: in one launch on a GPU (`roll_gpu`), as tensor arithmetic
elsewhere. Each column equals `quaver.reference.operations.roll`.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.reference.numerics import FACTOR_EXPONENTS, FLT_MAX
from quaver.torch.backends.cpu.quantize import SMALLEST_NORMAL
from quaver.torch.numerics.rounding import exponent, is_tracing, power_of_two
from quaver.torch.state.history import amax, sync
from quaver.torch.state.layer_state import state_of
from quaver.torch.state.selective_checkpoint import hide_from_policies


def roll_all(group: Any = None, recipe: Recipe | None = None) -> None:
    """End a step for every layer with a history, in any model and thread."""
    everything = amax.layers()
    if has_ranks(group):
        # A copy that exists on one rank only, such as a weight average, must not wait for the others.
        reduce([layer for layer in everything if not state_of(layer).copied], group)
    roll(everything, recipe)


def has_ranks(group: Any) -> bool:
    """Return True if a process group (None: the default group) has several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def active_wrapper() -> Any:
    """Return the DistributedDataParallel whose forward runs, or None; private to torch."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def refuse_join() -> None:
    """Raise inside DistributedDataParallel's `join()`.

    Raises:
        ValueError: a rank that has run out of data contributes gradients, but reduces no amaxes.
    """
    # Otherwise such a rank and the others would call collectives of different sizes.
    wrapper = active_wrapper()
    config = getattr(wrapper, "_join_config", None)
    if config is not None and config.enable:
        raise ValueError(
            "delayed scaling reduces amaxes over all ranks in each step, but within DistributedDataParallel.join() a "
            "rank without data does not take part: give all ranks the same number of batches, or use a recipe without "
            "histories, such as 'tensorwise'"
        )


def reduce(layers: Iterable[nn.Module], group: Any = None) -> None:
    """All-reduce row 0 of each history by maximum, over a group whose ranks have the same layers (compiled code)."""
    # Layers on meta have no amaxes.
    histories: list[Any] = [layer.history for layer in layers if not layer.history.is_meta]
    if histories and has_ranks(group):
        sync.reduce_rows([amax.newest_row(history) for history in histories], group)


def own(group: Any) -> Any:
    """Return a process group for comparison by identity: None for the default group."""
    return None if group is None or (dist.is_available() and group is dist.group.WORLD) else group


# A recomputed forward does not roll.
@hide_from_policies
def roll(layers: Iterable[nn.Module], recipe: Recipe | None = None) -> None:
    """Roll the histories of layers and compute new factors; columns without a recorded amax are unchanged.

    Each column equals `quaver.reference.operations.roll`.

    Args:
        layers: layers with a history; call `reduce` first if there are several ranks.
        recipe: recipe for layers that got a history from a checkpoint and have not run yet.
    """
    stacks: dict[Any, list[nn.Module]] = {}
    for layer in layers:
        own = state_of(layer).delayed
        rule = recipe if own is None else own
        if rule is not None and rule.delayed is not None:
            history: Any = layer._buffers["history"]
            key = history.device, rule, history.shape[-2], history.stride()[-2:]
            stacks.setdefault(key, []).append(layer)
    for (_, rule, *_), stack in stacks.items():
        if not _roll_by_kernel(stack, rule):
            _roll_tensors(stack, rule)


def _roll_by_kernel(layers: list[nn.Module], rule: Recipe) -> bool:
    """Roll in one launch, or return False where no kernel does that."""
    history, factor = layers[0]._buffers["history"], layers[0]._buffers["factor"]
    assert rule.delayed is not None and history is not None and factor is not None
    if is_tracing() or not amax.has_kernels(history):
        return False
    from quaver.torch.state.history import roll_gpu as kernels

    return not kernels.reason(history, factor) and kernels.roll(layers, rule.delayed, rule.history_specs)


@torch.no_grad()
def _roll_tensors(layers: list[nn.Module], rule: Recipe) -> None:
    histories: Any = [layer._buffers["history"] for layer in layers]
    factors: Any = [layer._buffers["factor"] for layer in layers]
    assert rule.delayed is not None
    length, margin = histories[0].shape[-2], rule.delayed.margin
    window = torch.cat([h.mT.reshape(-1, 3, length) for h in histories])  # [layers and members, 3, length]
    factor = torch.cat([f.reshape(-1, 3) for f in factors])  # [layers and members, 3]
    newest = window[..., 0].clone()
    top = window.amax(-1) if rule.delayed.algorithm == "max" else newest
    rolled = window.roll(-1, -1)
    rolled[..., 0] = 0.0
    e = torch.stack([_factor(top[:, i], spec, margin) for i, spec in enumerate(rule.history_specs)], -1)
    window = torch.where(newest.unsqueeze(-1) > 0, rolled, window)
    factor = torch.where(newest > 0, e, factor)
    members = [h.shape[0] if h.dim() > 2 else 1 for h in histories]
    windows = [w.view(h.mT.shape).mT for w, h in zip(window.split(members), histories, strict=True)]
    if not is_tracing():
        # A compiled forward may have saved the factors for a pending backward, which checks their version.
        histories, factors = ([buffer.data for buffer in buffers] for buffers in (histories, factors))
    sync.copy_each(histories, windows)
    sync.copy_each(factors, [e.view(f.shape) for e, f in zip(factor.split(members), factors, strict=True)])


def _factor(amax: Tensor, spec: QuantSpec, margin: int) -> Tensor:
    if spec.power_of_two:
        p = exponent(amax.view(torch.int32), spec.format) - margin
        return power_of_two(p.clamp(*FACTOR_EXPONENTS))
    e = torch.full_like(amax, spec.format.max) / amax.clamp(min=SMALLEST_NORMAL)
    e = e.clamp(SMALLEST_NORMAL, float(FLT_MAX)).double() * 2.0**-margin
    return e.clamp(SMALLEST_NORMAL, float(FLT_MAX)).float()
