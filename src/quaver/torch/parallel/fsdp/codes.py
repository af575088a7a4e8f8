"""Weights that exist only in few bits under fully_shard: a rank's rows are codes, and travel as they are.

torch would cast codes as if they were numbers where a `MixedPrecisionPolicy` has another dtype, and gloo carries no
float8. Scales stay the layer's buffers, whole on every rank: an optimizer of `quaver.torch.optim`, which writes those
of a rank's own rows, has all ranks tell each other theirs at the end of a step.

fully_shard takes gradients of one dtype in a unit, that of the parameter. So the shard of a weight that learns says the
dtype that its codes stand for, and what is gathered of it says the dtype that its gradient shall have.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quaver.recipes.spec import Recipe
from quaver.torch.linear import stored_weight
from quaver.torch.linear.stored_weight import CODES
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.parallel.fsdp.shard_tensors import KEEPS, Gathered, Shard
from quaver.torch.parallel.fsdp.torch_internals import FsdpParameter, held_parameters, local, set_local

aten = torch.ops.aten


class StoredShardInfo:
    """What is known of such a weight."""

    #: No model's amaxes follow from it.
    model = None

    def __init__(self, layer: nn.Module, name: str, root: nn.Module) -> None:
        weight: Any = layer._parameters["weight"]
        self.layer, self.root, self.name = weakref.ref(layer), weakref.ref(root), name
        #: Of the weight, as the codes lie.
        self.shape: torch.Size = weight.shape
        self.codes: torch.dtype = weight.dtype
        #: Whether it learns, or did when it was prepared.
        self.learns: bool = weight.requires_grad
        #: As fully_shard holds it; None before the first gather, or where its names are unknown.
        self.unit: FsdpParameter | None = None
        self.gathered_once = False

    @property
    def dtype(self) -> torch.dtype:
        """What the codes stand for."""
        layer = self.layer()
        dtype: torch.dtype = torch.float32 if layer is None else layer.__dict__["weight_dtype"]
        return dtype

    def check(self) -> None:
        """Refuse what fully_shard would do without a word, before a gather. Raises: ValueError."""
        layer, root = self.layer(), self.root()
        if layer is None:
            return
        if not self.gathered_once and root is not None:
            self.gathered_once = True
            for module, name, unit in held_parameters(root):
                if module is layer and name == "weight":
                    self.unit = unit
        if self.unit is not None:
            self.unit.check(self.name)
        weight = layer._parameters["weight"]
        if not self.learns and weight is not None and weight.requires_grad:
            raise ValueError(
                f"{self.name} exists only in codes, and was frozen when gather_quantized prepared it: fully_shard "
                "would round its gradient to their dtype. Let it require a gradient before gather_quantized, and "
                "freeze it afterwards if it shall learn later"
            )


class CodeShard(Shard):
    """Codes of a frozen weight, or of one rank's rows of it."""

    # Moves take them as integers.
    keeps = frozenset({*KEEPS, aten.view.dtype})

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:  # type: ignore[override]
        of: Any = self.weight
        of.check()
        own = self.plain.view(torch.uint8)
        rows = -(-of.shape[0] // mesh.size())
        if own.shape[0] == rows:
            return (own,), None
        part = torch.zeros((rows, *own.shape[1:]), dtype=torch.uint8, device=own.device)
        part[: own.shape[0]] = own
        return (part,), None

    def fsdp_post_all_gather(  # type: ignore[override]
        self, outputs: Sequence[Tensor], sent: None, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is not None:
            # The same memory, filled again.
            return None
        of: Any = self.weight
        return outputs[0][: of.shape[0]].view(self.plain.dtype), ()


class LearningCodes(CodeShard):
    """Codes of a weight that learns, or of one rank's rows of it: a
    `quaver.torch.linear.store_weight.ShardedStoredWeight`.
    """

    @classmethod
    def shown(cls, plain: Tensor, weight: Any) -> torch.dtype:
        dtype: torch.dtype = weight.dtype if plain.dtype in CODES else plain.dtype
        return dtype

    @property
    def layer_of_codes(self) -> nn.Module | None:
        of: Any = self.weight
        layer: nn.Module | None = of.layer()
        return layer

    @property
    def name_of_codes(self) -> str:
        of: Any = self.weight
        name: str = of.name
        return name

    def as_bytes(self, parameter: Tensor) -> Tensor:
        data = self.plain.detach().view(torch.uint8)
        return _lying_as(parameter, data) if isinstance(parameter, DTensor) else data

    def with_bytes(self, parameter: Tensor, data: Tensor) -> nn.Parameter:
        of: Any = self.weight
        own = data.to_local() if isinstance(data, DTensor) else data
        shard = LearningCodes(own.view(of.codes), of)
        if not isinstance(parameter, DTensor):
            return nn.Parameter(shard, requires_grad=parameter.requires_grad)
        if parameter.device == own.device and parameter.dtype is shard.dtype:
            set_local(parameter, shard)
            return parameter
        return nn.Parameter(_lying_as(parameter, shard), requires_grad=parameter.requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shard = next((x for x in args if isinstance(x, LearningCodes) and x.plain.dtype in CODES), None)
        options = dict(kwargs or {})
        if shard is None:
            return super().__torch_dispatch__(function, types, args, options)
        source = getattr(args[1], "plain", args[1]) if function is aten.copy_.default else shard.plain
        dtype = options.get("dtype")
        if function not in cls.keeps or source.dtype is not shard.plain.dtype or dtype not in (None, shard.dtype):
            raise ValueError(
                f"{function} takes the weight of {shard.weight.name} for numbers, and it exists only in codes: step it "
                "by an optimizer of quaver.torch.optim, load it from a checkpoint of codes, or keep it in high "
                "precision (dequantize_weights(model) before gather_quantized)"
            )
        if dtype is not None:
            # Of what it says to be: as torch fills a part up.
            options["dtype"] = shard.plain.dtype
        return super().__torch_dispatch__(function, types, args, options)

    def fsdp_post_all_gather(  # type: ignore[override]
        self, outputs: Sequence[Tensor], sent: None, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        of: Any = self.weight
        codes = outputs[0][: of.shape[0]].view(self.plain.dtype)
        if out is not None:
            given: Any = getattr(out, "_local_tensor", out)
            given.held[:] = [codes]
            return None
        return GatheredCodes(of, dtype, codes.device, [codes]), ()


class GatheredCodes(Gathered):
    """A weight [N, K] whose codes fully_shard has gathered: a `quaver.torch.linear.gemms.PrequantizedWeight`."""

    held: list[Tensor]

    @property
    def gathered_codes(self) -> Tensor:
        """In their own dtype."""
        return self.held[0]

    def check_recipe(self, layer: nn.Module, recipe: Recipe | None) -> None:
        """Codes serve every recipe: one whose operands they are not is given what they stand for, quantized."""

    def quantized_operand(self, call: Any, side: str) -> Quantized:
        transposed = side == "dgrad"
        spec = (call.recipe.dgrad if transposed else call.recipe.fprop).b
        return stored_weight.operand(call.layer, self, transposed, call.plan.weight, spec, call)


def _lying_as(parameter: DTensor, part: Tensor) -> Tensor:
    """A rank's part of what lies as a parameter does."""
    mesh, placements = parameter.device_mesh, parameter.placements
    with torch.no_grad():
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )


def shard_codes(layer: nn.Module, name: str, root: nn.Module) -> None:
    """Put codes that fully_shard gathers as bytes in the place of a layer's weight."""
    parameter = layer._parameters["weight"]
    assert parameter is not None
    of = _stored[layer] = StoredShardInfo(layer, name, root)
    layer._parameters["weight"] = nn.Parameter(_shard(parameter.detach(), of), requires_grad=of.learns)
    layer.register_load_state_dict_post_hook(_shard_again)


def _shard(codes: Tensor, of: StoredShardInfo) -> CodeShard:
    weight: Any = of
    return (LearningCodes if of.learns else CodeShard)(codes, weight)


#: What is known of the weight of each layer that is prepared; a copy of one is not.
_stored: "weakref.WeakKeyDictionary[nn.Module, StoredShardInfo]" = weakref.WeakKeyDictionary()


def _shard_again(layer: nn.Module, _: object) -> None:
    """What is loaded may be another parameter."""
    of = _stored.get(layer)
    if of is None:
        return
    parameter: Any = layer._parameters["weight"]
    part = local(parameter)
    if part is None and not isinstance(parameter, CodeShard):
        shard = _shard(parameter.detach(), of)
        layer._parameters["weight"] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
    elif part is not None and not isinstance(part, CodeShard):
        set_local(parameter, _shard(part, of))
