"""FSDP2 for weights stored only as codes: a rank's rows are codes and are gathered unchanged.

Codes are viewed as bytes for the all-gather. torch would otherwise cast codes as numbers if a `MixedPrecisionPolicy`
has another dtype, and gloo does not support float8. Scales move to buffers of the layer, complete on every rank. An
optimizer of `quaver.torch.optim` writes the scales of a rank's own rows and exchanges them at the end of a step.

The gathered weight is a `QuantizedTensor`. fully_shard requires the gradients of a unit to have one dtype, that of the
parameter. So a shard reports the high-precision dtype that its codes represent, and the gathered weight reports the
dtype of its gradient.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quaver.torch.linear.stored_weight import CODE_DTYPES, CODES, of_codes, scales_of
from quaver.torch.parallel.fsdp.shards import SHARD_OPS, Shard, wrap
from quaver.torch.parallel.fsdp.torch_internals import FsdpParameter, managed_parameters, set_local

aten = torch.ops.aten


class StoredShardInfo:
    """State of one stored weight under fully_shard."""

    #: Ranks agree on no amaxes of this weight.
    model = None

    def __init__(self, layer: nn.Module, name: str, root: nn.Module) -> None:
        weight: Any = layer._parameters["weight"]
        self.layer, self.root, self.name = weakref.ref(layer), weakref.ref(root), name
        #: Number of rows of the whole weight.
        self.rows: int = weight.shape[0]
        self.codes: torch.dtype = CODE_DTYPES[weight.spec.format.name]
        #: fully_shard's object for the weight; None before the first gather or if this torch has other internals.
        self.fsdp_parameter: FsdpParameter | None = None
        self.gathered_once = False

    @property
    def dtype(self) -> torch.dtype:
        """The high-precision dtype that the codes represent."""
        layer = self.layer()
        dtype: torch.dtype = torch.float32 if layer is None else layer.__dict__["weight_dtype"]
        return dtype

    def invalidate(self) -> None:
        """Do nothing, because codes are gathered unchanged."""

    def check(self) -> None:
        """Raise a ValueError before a gather if fully_shard would silently corrupt the weight."""
        layer, root = self.layer(), self.root()
        if layer is None:
            return
        if not self.gathered_once and root is not None:
            self.gathered_once = True
            for module, name, fsdp_parameter in managed_parameters(root):
                if module is layer and name == "weight":
                    self.fsdp_parameter = fsdp_parameter
        if self.fsdp_parameter is not None:
            self.fsdp_parameter.check(self.name)


class CodeShard(Shard):
    """Codes of a stored weight, or of one rank's rows of it; implements
    `quaver.torch.linear.stored_weight.ShardedStoredWeight`.
    """

    @classmethod
    def reported_dtype(cls, plain: Tensor, weight_state: Any) -> torch.dtype:
        dtype: torch.dtype = weight_state.dtype if plain.dtype in CODES else plain.dtype
        return dtype

    @property
    def why_high_precision(self) -> str:
        return ""

    @property
    def layer_of_codes(self) -> nn.Module | None:
        layer: nn.Module | None = self.weight_state.layer()
        return layer

    @property
    def name_of_codes(self) -> str:
        name: str = self.weight_state.name
        return name

    def as_bytes(self, parameter: Tensor) -> Tensor:
        data = self.plain.detach().view(torch.uint8)
        return _as_dtensor(parameter, data) if isinstance(parameter, DTensor) else data

    def with_bytes(self, parameter: Tensor, data: Tensor) -> nn.Parameter:
        info = self.weight_state
        own = data.to_local() if isinstance(data, DTensor) else data
        shard = CodeShard(own.view(info.codes), info)
        if not isinstance(parameter, DTensor):
            return nn.Parameter(shard, requires_grad=parameter.requires_grad)
        if parameter.device == own.device and parameter.dtype is shard.dtype:
            set_local(parameter, shard)
            return parameter
        return nn.Parameter(_as_dtensor(parameter, shard), requires_grad=parameter.requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shard = next((x for x in args if isinstance(x, CodeShard) and x.plain.dtype in CODES), None)
        options = dict(kwargs or {})
        if shard is None:
            return super().__torch_dispatch__(function, types, args, options)
        info = shard.weight_state
        source = getattr(args[1], "plain", args[1]) if function is aten.copy_.default else shard.plain
        if function is aten.copy_.default and getattr(args[1], "weight_state", info) is not info:
            raise ValueError(
                f"{info.name} was copied from the codes of {args[1].weight_state.name} without their scales: load a "
                "state dict, or copy before gather_quantized"
            )
        dtype = options.get("dtype")
        if function not in SHARD_OPS or source.dtype is not shard.plain.dtype or dtype not in (None, shard.dtype):
            raise ValueError(
                f"{function} reads the weight of {shard.weight_state.name} as numbers, and it is stored only as "
                "codes: step it by an optimizer of quaver.torch.optim, load it from a checkpoint of codes, "
                "or convert it to high precision (dequantize_weights(model) before gather_quantized)"
            )
        if dtype is not None:
            # The caller passes the reported dtype, as torch does when it pads a shard; the codes have their own.
            options["dtype"] = shard.plain.dtype
        return super().__torch_dispatch__(function, types, args, options)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        info = self.weight_state
        info.check()
        own = self.plain.view(torch.uint8)
        rows = -(-info.rows // mesh.size())
        if own.shape[0] == rows:
            return (own,), None
        part = torch.zeros((rows, *own.shape[1:]), dtype=torch.uint8, device=own.device)
        part[: own.shape[0]] = own
        return (part,), None

    def fsdp_post_all_gather(  # type: ignore[override]
        self, outputs: Sequence[Tensor], sent: None, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        info = self.weight_state
        gathered = of_codes(info.layer(), outputs[0][: info.rows], dtype)
        if out is None:
            return gathered, ()
        # Backward has saved this weight; its codes may be stored elsewhere now.
        getattr(out, "_local_tensor", out).set_tensors(gathered)
        return None


def _as_dtensor(parameter: DTensor, part: Tensor) -> Tensor:
    """Wrap a rank's shard as a DTensor with the mesh, placements and shape of a parameter."""
    mesh, placements = parameter.device_mesh, parameter.placements
    with torch.no_grad():
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )


def shard_codes(layer: nn.Module, name: str, root: nn.Module) -> None:
    """Replace the weight of a layer by a tensor that fully_shard gathers as bytes, and its scales by buffers."""
    weight: Any = layer._parameters["weight"]
    info: Any = StoredShardInfo(layer, name, root)
    scales, codes = scales_of(layer), weight.codes.detach().view(info.codes)
    layer._parameters["weight"] = nn.Parameter(CodeShard(codes, info), requires_grad=weight.requires_grad)
    for scale_name, scale in scales.items():
        layer.register_buffer(scale_name, scale)
    wrap(layer, CodeShard, info)
