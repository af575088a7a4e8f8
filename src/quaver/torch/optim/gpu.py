"""Selection of parameters that a GPU kernel steps, many per launch, and its arguments; the others step chunk by chunk.

Kernels support Adam, AdamW and Lion with weights that are floats, or E4M3 codes with one scale or block scales, and
with moments that are floats or codes in blocks of 64. These are the presets `float32`, `exact`, `balanced` and `lean`.
They support SGD with weights that are floats or have block scales. The bits are those of
`quaver.torch.optim.step`.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from quaver.recipes.formats import E4M3
from quaver.recipes.spec import Block
from quaver.reference.optimizer_state import StateSpec
from quaver.torch.operations.operation import Implementation, Operation
from quaver.torch.operations.ops import no_kernels
from quaver.torch.optim.rules import AdamRule, LionRule, SGDRule, UpdateRule
from quaver.torch.optim.step import ParameterTensors, ShardPosition, StepConfig, stored

if TYPE_CHECKING:
    from quaver.torch.backends.gpu import optim

#: Moment formats with block scales, and True for those that may be negative.
CODES = {
    **{"int8_mitchell/64": True, "int8_mitchell/64 stochastic": True},
    **{"uint8_mitchell4/64 floor": False, "uint8_mitchell4/64 stochastic floor": False},
}
#: Supported gradients: float dtypes, and a format of codes.
FLOATS, GRADIENT_FORMAT = (torch.float32, torch.bfloat16, torch.float16), "e4m3/128"
#: Block shapes whose scales a kernel measures, and kinds of scale: those of `blockwise` and `mxfp8`.
MEASURED: dict[Block, tuple[str, ...]] = {(128, 128): ("fp32", "power_of_two"), (32, 32): ("e8m0",), (1, 32): ("e8m0",)}
#: Maximum number of elements, because blocks of a parameter are counted in 32 bits.
MAX_ELEMENTS = 2**36


def _no_kernels(weight: Tensor, *_: object) -> str:
    return no_kernels(weight)


def reason(weight: Tensor, config: StepConfig, parts: ParameterTensors, place: ShardPosition, step: Tensor) -> str:
    """Return why no kernel can step a parameter, or "".

    Args:
        weight: the parameter's local tensor.
        config: step configuration.
        parts: all its tensors, as matrices.
        place: position of these in the whole parameter.
        step: its step count.
    """
    if isinstance(config.rule, SGDRule) and config.predicts_scale:
        return "the next scale of codes that SGD steps depends on the largest gradient, which must be found first"
    if not isinstance(config.rule, (AdamRule, LionRule, SGDRule)):
        return f"the kernel does not support {config.rule.name}"
    for spec, signed in zip(config.moments, config.rule.signed, strict=True):
        if not _writes(spec, signed):
            return f"the kernel does not support moments in {spec.text}"
    if weight.data_ptr() != parts.weight[0].data_ptr():
        return "it is not row-major"
    return (
        _weight_reason(config, weight) or _gradient_reason(config, parts) or _shard_reason(config, parts, place, step)
    )


#: Operation that is True if a kernel steps a parameter, False if it steps chunk by chunk.
HAS_KERNEL: Operation[bool] = Operation(
    "optimizer_step",
    [Implementation("triton", lambda *_: True, reason, _no_kernels), Implementation("reference", lambda *_: False)],
)


def _writes(spec: StateSpec, signed: bool) -> bool:
    if not spec.of.scaled:
        return True
    return signed <= CODES.get(spec.text, -1)


def _weight_reason(config: StepConfig, weight: Tensor) -> str:
    weight_format, spec = config.weight_format, config.weight_format.code_spec
    if spec is None:
        supported = weight.dtype in FLOATS and not weight_format.master
        return "" if supported else f"the kernel does not support {weight.dtype}, or not with a master"
    if weight.dim() == 3 and (spec.block[0] is None or weight.shape[1] % spec.block[0]):
        return "a matrix of its stack ends within a block, or has a single scale"
    one_scale = spec.per_tensor and spec.scale in ("fp32", "power_of_two")
    if spec.format != E4M3 or spec.hadamard or not (one_scale or spec.scale in MEASURED.get(spec.block, ())):
        return f"the kernel supports E4M3 codes with one scale or those of blockwise and mxfp8, and these are {spec}"
    if weight_format.kind not in (("residual8", "residual16") if one_scale else ("residual8", "residual16", "float32")):
        return f"the kernel does not support masters in {weight_format.kind} beside codes of {spec}"
    return (
        "" if config.predicts_scale or not one_scale else "the scale of its codes depends on the weight after the step"
    )


def _gradient_reason(config: StepConfig, parts: ParameterTensors) -> str:
    if config.gradient is not None:
        return (
            ""
            if config.gradient.text == GRADIENT_FORMAT
            else f"the kernel does not support gradients in {config.gradient.text}"
        )
    dtype = parts.gradient[0].dtype
    return "" if dtype in FLOATS else f"the kernel does not support gradients in {dtype}"


def _shard_reason(config: StepConfig, parts: ParameterTensors, place: ShardPosition, step: Tensor) -> str:
    weight = parts.weight[0]
    tensors = (*stored(parts), *parts.gradient)
    if not weight.numel():
        return "it has no elements"
    if not place.contiguous or weight.numel() > MAX_ELEMENTS:
        return (
            "its rows are in parts on ranks" if not place.contiguous else "it has more elements than the kernel counts"
        )
    spec = config.weight_format.code_spec
    if spec is not None and _cut(place, spec.block[0] or 1):
        return "its blocks cross shards"
    if spec is not None and spec.block[0] == 1 and not _vectorizable(tensors):
        return "weights with row scales are stepped 32 rows at a time and in blocks of 128, which do not fit this shape"
    if not all(t.is_contiguous() for t in tensors):
        return "its tensors are not contiguous"
    return "" if all(t.device == weight.device for t in (*tensors, step)) else "its states are on other devices"


def _vectorizable(tensors: Sequence[Tensor]) -> bool:
    """True if a matrix, the first tensor, consists of whole blocks, and all tensors are aligned for vector loads."""
    rows, columns = tensors[0].shape
    return rows % 32 == 0 and columns % 128 == 0 and all(t.data_ptr() % 16 == 0 for t in tensors)


def _cut(place: ShardPosition, high: int) -> bool:
    """True if a shard begins or ends within a block of `high` rows."""
    start, stop = place.global_offset[0], place.global_offset[0] + place.local_shape[0]
    return bool(start % high) or (bool(stop % high) and stop != place.global_shape[0])


def kernel_parameter(
    config: StepConfig,
    parts: ParameterTensors,
    place: ShardPosition,
    seed: int,
    param_index: int,
    state: dict[str, Tensor],
    factor: Tensor | None,
) -> "optim.ParameterRow":
    """Describe a parameter for the kernel.

    Args:
        config, parts, place: as in `reason`.
        seed: seed of stochastic rounding.
        param_index: index of the parameter in its optimizer.
        state: its state, with "step", and "amax" if scales are predicted.
        factor: multiplier of the gradient, float32 of one element on its device, or None.
    """
    # Import Triton only when a tensor on a GPU appears.
    from quaver.torch.backends.gpu import optim

    weight_format, rule = config.weight_format, config.rule
    weight, *rest = parts.weight
    tensors: dict[str, Tensor | None] = {"weight": weight, "factor": factor, "step": state["step"]}
    if weight_format.code_spec is not None:
        tensors |= {"weight_scale": rest.pop(0), "amax": state["amax"] if config.predicts_scale else None}
    tensors["beside"] = rest[0] if rest else None
    for name, moment_tensors in zip(("first", "second"), parts.moments, strict=False):
        tensors |= {name: moment_tensors[0], f"{name}_scale": moment_tensors[1] if len(moment_tensors) > 1 else None}
    tensors |= {"gradient": parts.gradient[0], "gradient_scale": parts.gradient[1] if config.gradient else None}
    wide = [t for name in ("weight", "beside", "first", "second", "gradient") if (t := tensors.get(name)) is not None]
    form = optim.StepSpecialization(
        rule=_named(rule),
        clamp=isinstance(rule, AdamRule) and rule.clamp,
        maximize=rule.maximize,  # type: ignore[attr-defined]
        master_format=weight_format.kind,
        weight=weight.dtype,
        beside=None if tensors["beside"] is None else tensors["beside"].dtype,
        gradient=parts.gradient[0].dtype,
        moments=tuple(optim.MomentFormat(spec.code, spec.stochastic) for spec in config.moments),
        spec=weight_format.code_spec,
        stochastic=weight_format.stochastic and (weight_format.kind != "plain" or weight.dtype is torch.bfloat16),
        factored=factor is not None,
    )
    shape = weight.shape[0], weight.shape[1]
    form = replace(form, even=optim.even(form, wide, shape))
    return optim.ParameterRow(form, tensors, shape, place.flat_offset, param_index, seed)


def _named(rule: UpdateRule) -> str:
    """Return the kernel's name of a rule."""
    if isinstance(rule, LionRule):
        return "lion"
    if isinstance(rule, SGDRule):
        return "nesterov" if rule.nesterov else "sgd"
    assert isinstance(rule, AdamRule)
    return "adamw" if rule.decoupled else "adam"


#: Parameters whose step counts are on one device, and the scalars of their rule: float32 [scalars, parameters].
Launch: TypeAlias = "tuple[Sequence[optim.ParameterRow], Tensor]"


def launch(
    launches: Sequence[Launch],
    steppers: "dict[tuple[torch.device, Tensor | None], optim.OptimizerLaunches]",
    piece: Tensor | None,
    apply_step: Tensor | None,
    statistics: bool,
) -> "list[tuple[list[optim.ParameterRow], Tensor | None]]":
    """Step parameters by kernels, those of one device together.

    Args:
        launches: the parameters.
        steppers: prepared kernel arguments by device and piece, which the optimizer stores between steps.
        piece: first parameter of a piece of parameters that are stepped at a time; None if all are.
        apply_step: bool []; False leaves everything unchanged; None always steps.
        statistics: count clamped updates.
    Returns:
        For each device, its parameters and the number of clamped updates, int64 [parameters], or None without
        statistics.
    """
    from quaver.torch.backends.gpu import optim

    done: list[tuple[list[optim.ParameterRow], Tensor | None]] = []
    for device in dict.fromkeys(scalars.device for _, scalars in launches):
        own = [(rows, scalars) for rows, scalars in launches if scalars.device == device]
        every = [row for rows, _ in own for row in rows]
        counts = torch.zeros(len(every), dtype=torch.int64, device=device) if statistics else None
        stepper = steppers.setdefault((device, piece), optim.OptimizerLaunches())
        stepper(
            every,
            torch.cat([scalars for _, scalars in own], 1),
            None if apply_step is None else apply_step.to(device),
            counts,
        )
        done.append((every, counts))
    return done


def warn_once(warned: set[str], weight: Tensor, *operands: object) -> None:
    """Warn once for each reason why kernels cannot step a parameter on a GPU."""
    if not weight.is_cuda:
        return
    why = dict(HAS_KERNEL.explain(weight, *operands)).get("triton", "")
    if why and why not in warned:
        warned.add(why)
        warnings.warn(
            f"parameters such as one of shape {tuple(weight.shape)} are stepped by plain torch operations, "
            f"with the same numbers but slower, because {why}",
            stacklevel=2,
        )
