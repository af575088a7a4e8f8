"""Gradient communication in 8 bits for DistributedDataParallel and fully_shard, through torch's own hooks.

Each rank quantizes its gradient once; the shards are sent as bytes and summed in float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from quaver.recipes.formats import E4M3
from quaver.recipes.spec import QuantSpec
from quaver.torch.operations.ops import DTYPES
from quaver.torch.parallel import comm
from quaver.torch.state.history.sync import check_agreement

#: Default spec: 1.03 bytes per element, 51.6 % of bfloat16.
BLOCKS = QuantSpec(E4M3, (1, 128), "fp32")


def quantize_gradients(model: nn.Module, spec: QuantSpec = BLOCKS) -> nn.Module:
    """Quantize a model's gradients before they are sent to other ranks.

    The model is wrapped by DistributedDataParallel or sharded by `fully_shard`. Under fully_shard only the
    reduce-scatter is replaced. DistributedDataParallel needs the mean on all ranks, so the rank that has summed a shard
    quantizes it a second time and every rank uses those bits.

    Args:
        model: the wrapped or sharded model.
        spec: blocks of one row, rounded to nearest.
    Returns:
        The model.
    Raises:
        ValueError: the model is neither wrapped nor sharded, the spec or a parameter's dtype is not supported, or this
            torch's fully_shard does not accept a custom reduce-scatter.
    Exact: the float32 sum of the quantized shards; a NaN or an infinity on any rank makes its block NaN on all.
    """
    comm.check_gradient_spec(spec)
    wide = next((name for name, p in model.named_parameters() if p.requires_grad and p.dtype not in DTYPES), None)
    if wide is not None:
        raise ValueError(
            f"{wide} is {model.get_parameter(wide).dtype}, and only gradients of float32, bfloat16 and "
            "float16 can be quantized: convert it, or do not quantize gradients"
        )
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(model.process_group, lambda group, bucket: _mean(bucket, spec, group))
        return model
    units = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if not units:
        raise ValueError(
            f"{type(model).__name__} is neither wrapped by DistributedDataParallel nor sharded by fully_shard: do that "
            "first, then call quantize_gradients"
        )
    for name, unit in units:
        if not hasattr(unit, "set_custom_reduce_scatter"):
            raise ValueError(
                f"fully_shard of torch {torch.__version__} does not accept a custom reduce-scatter: use a later torch"
            )
        unit.set_custom_reduce_scatter(QuantizedReduceScatter(spec, name))
    return model


class QuantizedReduceScatter:
    """Reduce-scatter for fully_shard that quantizes gradients before it sends them."""

    #: `comm` already counts the bytes of this collective.
    counts_itself = True

    def __init__(self, spec: QuantSpec = BLOCKS, name: str = "") -> None:
        #: `name` is the module that owns the gradients, for error messages.
        self.spec, self.name = spec, name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's shard of the sum, mean or scaled sum of all inputs [ranks × n] into the output [n]."""
        scale = _scale_of_sum(op)
        _check(input_tensor, self.name or "the root", self.spec, group)
        total = comm.scatter_quantized_sums(input_tensor, self.spec, group)
        if op == dist.ReduceOp.AVG:
            total /= dist.get_world_size(group)
        output_tensor.copy_(total if scale is None else total * scale)


def _check(x: Tensor, of: str, spec: QuantSpec, group: Any) -> None:
    """Raise on all ranks if they sum gradients of different modules, sizes, dtypes or specs."""
    what = {"gradients of": of, "gradients": (x.numel(), x.dtype), "spec": spec}
    check_agreement("a sum of quantized gradients", what, group)


def _scale_of_sum(op: Any) -> Any:
    """Return the factor of a PREMUL_SUM, or None for a sum or mean.

    fully_shard uses PREMUL_SUM after `set_gradient_divide_factor`.

    Raises:
        ValueError: any other reduction.
    """
    if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        return None
    # torch 2.11 and later expose the factor only through the pickle state.
    state: Any = op.__getstate__() if isinstance(op, dist.ReduceOp) else (op, None)
    kind, scale = state
    if kind != dist.ReduceOp.PREMUL_SUM or scale is None:
        raise ValueError(f"quantized gradients can be summed, averaged or scaled, and fully_shard requests {op}")
    return scale


def _mean(bucket: Any, spec: QuantSpec, group: Any) -> torch.futures.Future[Tensor]:
    """Average a gradient bucket over the ranks in quantized form."""
    own, ranks = bucket.buffer(), dist.get_world_size(group)
    _check(own, f"bucket {bucket.index()}", spec, group)
    part = -(-own.numel() // ranks)
    whole = torch.nn.functional.pad(own, (0, part * ranks - own.numel()))
    mean = comm.scatter_quantized_sums(whole, spec, group) / ranks
    own.copy_(comm.all_gather_quantized(mean, spec, group)[: own.numel()])
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(own)
    return done
