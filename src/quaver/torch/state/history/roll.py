"""End of a step of delayed scaling: roll the recorded amaxes into each history and compute new factors.

Runs as Python floats on a CPU in eager mode, as one launch per model on a GPU (`roll_gpu`), and as tensor arithmetic
elsewhere. Each column equals `quaver.reference.operations.roll`.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.reference.numerics import FACTOR_EXPONENTS, FLT_MAX
from quaver.torch.backends.cpu.quantize import SMALLEST_NORMAL, host_factor
from quaver.torch.numerics.rounding import exponent, is_tracing, power_of_two
from quaver.torch.state.history import amax
from quaver.torch.state.history.sync import ALONE, AgreedLayers
from quaver.torch.state.layer_state import state_of


class _TrafficWatchers:
    """Hook that counts communication between ranks; set by `quaver.torch.parallel.comm`, which this module must not
    import.
    """

    def __init__(self) -> None:
        #: (maxima, group) -> context manager around their all-reduce.
        self.by: Callable[[Tensor, Any], AbstractContextManager[Any]] = lambda maxima, group: nullcontext()


watched = _TrafficWatchers()


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
    """All-reduce row 0 of each history by maximum over a process group (None: the default group)."""
    if has_ranks(group):
        # Layers on meta have no amaxes.
        _reduce([layer for layer in layers if not layer.history.is_meta], group)


def reduce_agreed(agreed: AgreedLayers, layers: Iterable[nn.Module]) -> None:
    """Run `reduce` for the layers that a group agreed on, with zeros for those that this rank has freed."""
    if agreed.device is None or agreed.group is ALONE:
        return
    rows: Any = {amax.number_of(layer): _newest(layer) for layer in layers}
    device = agreed.device
    nothing = [torch.zeros(shape, dtype=torch.float32, device=device) for shape in agreed.shapes.values()]
    _reduce_rows([rows.get(n, zeros) for n, zeros in zip(agreed.shapes, nothing, strict=True)], agreed.group)


def own(group: Any) -> Any:
    """Return a process group for comparison by identity: None for the default group."""
    return None if group is None or (dist.is_available() and group is dist.group.WORLD) else group


def roll(layers: Iterable[nn.Module], recipe: Recipe | None = None) -> None:
    """Roll the histories of layers and compute new factors; columns without a recorded amax are unchanged.

    Each column equals `quaver.reference.operations.roll`.

    Args:
        layers: layers with a history; call `reduce` first if there are several ranks.
        recipe: recipe for layers that got a history from a checkpoint and have not run yet.
    """
    together: dict[Any, list[nn.Module]] = {}
    for layer in layers:
        own = state_of(layer).delayed
        rule = recipe if own is None else own
        history = layer._buffers["history"]
        assert history is not None
        if rule is None or rule.delayed is None:
            continue
        if is_tracing():
            _roll_tensors(layer, rule)
        elif amax._launched(history):
            key = history.device, rule, history.shape[-2], history.stride()[-2:]
            together.setdefault(key, []).append(layer)
        elif not history.is_cpu:
            _roll_tensors(layer, rule)
        else:
            seen = amax.views(layer)
            if seen.recorded or seen.version != history._version:
                _roll_floats(seen, rule)
    for (_, rule, *_), equal_layers in together.items():
        _roll_together(equal_layers, rule)


def _roll_together(layers: list[nn.Module], rule: Recipe) -> None:
    from quaver.torch.state.history import roll_gpu as kernels

    assert rule.delayed is not None
    first: Any = layers[0]._buffers
    for layer in layers:
        # The cached numpy values of its buffers become invalid.
        state_of(layer).views = None
    if kernels.reason(first["history"], first["factor"]) or not kernels.roll(layers, rule.delayed, rule.history_specs):
        for layer in layers:
            _roll_tensors(layer, rule)


def _reduce(layers: list[nn.Module], group: Any) -> None:
    if not layers:
        return
    _reduce_rows([_newest(layer) for layer in layers], group)


def _newest(layer: nn.Module) -> Tensor:
    history = layer._buffers["history"]
    assert history is not None
    return amax.newest_row(history)


@torch.no_grad()
def _reduce_rows(rows: list[Tensor], group: Any) -> None:
    flat = torch.cat([row.reshape(-1) for row in rows])
    with watched.by(flat, group):
        dist.all_reduce(flat, dist.ReduceOp.MAX, group)
    parts = flat.split([row.numel() for row in rows])
    _copy(rows, [part.view(row.shape) for part, row in zip(parts, rows, strict=True)])


def _copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


#: Copies many small tensors in few launches.
_copy: Any = getattr(torch, "_foreach_copy_", _copy_each)


def _roll_floats(seen: amax._BufferViews, recipe: Recipe) -> None:
    if seen.version != seen.history._version:
        seen.version, seen.amax_values = seen.history._version, None
    seen.recorded = False
    newest = seen.newest.tolist()
    if not any(newest):
        return
    assert recipe.delayed is not None
    columns = seen.columns
    if seen.amax_values is None:
        seen.amax_values = columns[:, 1:].max(1, initial=0.0).tolist()
    oldest = columns[:, 1 % columns.shape[1]].tolist()
    if all(newest) and seen.flat is not None:
        # Move every value down by one. The front value of a column then lands at the end of the previous column, where
        # the newest value overwrites it.
        seen.flat[:-1] = seen.flat[1:]
        columns[:, -1] = newest
        seen.newest[:] = 0.0
    else:
        for i, value in enumerate(newest):
            if value > 0.0:
                columns[i, :-1] = columns[i, 1:].copy()
                columns[i, -1] = value
                columns[i, 0] = 0.0
    specs = recipe.history_specs
    for i in range(len(newest)):
        spec = specs[i % 3]
        if newest[i] > 0.0:
            largest = max(seen.amax_values[i], newest[i])
            top = largest if recipe.delayed.algorithm == "max" else newest[i]
            seen.factors[i] = _factor(top, spec, recipe.delayed.margin)
            gone = columns.shape[1] == 1 or oldest[i] == largest > newest[i]
            seen.amax_values[i] = float(columns[i].max()) if gone else largest


def _factor(amax: float, spec: QuantSpec, margin: int) -> float:
    e = host_factor(amax, spec.format, spec.power_of_two)
    if margin == 0:
        return e
    largest = 2.0 ** FACTOR_EXPONENTS[1] if spec.power_of_two else float(FLT_MAX)
    return min(max(math.ldexp(e, -margin), SMALLEST_NORMAL), largest)


@torch.no_grad()
def _roll_tensors(layer: nn.Module, recipe: Recipe) -> None:
    history, factor = layer._buffers["history"], layer._buffers["factor"]
    assert history is not None and factor is not None and recipe.delayed is not None
    newest = amax.newest_row(history).clone()
    top = history.amax(-2) if recipe.delayed.algorithm == "max" else newest
    rolled = history.roll(-1, -2)
    amax.newest_row(rolled).zero_()
    margin = recipe.delayed.margin
    e = torch.stack([_factor_tensor(top[..., i], s, margin) for i, s in enumerate(recipe.history_specs)], -1)
    history.copy_(torch.where(newest.unsqueeze(-2) > 0, rolled, history))
    factor.copy_(torch.where(newest > 0, e, factor))


def _factor_tensor(amax: Tensor, spec: QuantSpec, margin: int) -> Tensor:
    if spec.power_of_two:
        p = exponent(amax.view(torch.int32), spec.format) - margin
        return power_of_two(p.clamp(*FACTOR_EXPONENTS))
    e = torch.full_like(amax, spec.format.max) / amax.clamp(min=SMALLEST_NORMAL)
    e = e.clamp(SMALLEST_NORMAL, float(FLT_MAX)).double() * 2.0**-margin
    return e.clamp(SMALLEST_NORMAL, float(FLT_MAX)).float()
