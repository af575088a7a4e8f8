"""Which parameters a kernel steps, many in one launch, and what it is told of them; the others step piece by piece.

The kernel takes Adam, AdamW and Lion, weights that are floats or E4M3 codes with one scale, and moments that are floats
or codes in blocks of 64: the presets `float32`, `exact`, `balanced` and `lean`; and SGD of weights that are floats. Its
bits are those of `pieces`.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quaver.core.numbers.formats import E4M3
from quaver.core.states.codes import StateSpec
from quaver.torch.operations.operation import Impl, Operation
from quaver.torch.operations.ops import no_kernels
from quaver.torch.optim.rules.adam import Adam
from quaver.torch.optim.rules.lion import Lion
from quaver.torch.optim.rules.rule import Rule
from quaver.torch.optim.rules.sgd import SGD
from quaver.torch.optim.stepping.noise import Place
from quaver.torch.optim.stepping.pieces import Parts, Way

if TYPE_CHECKING:
    from quaver.torch.backends.gpu import stepping

#: Codes of moments that have scales of blocks, and can be rounded at random.
CODES = {"int8_softsign": False, "int8_root": False, "uint8_root": True, "root_e4m4": True, "e4m3": False}
#: Gradients: floats, and codes.
FLOATS, HELD = (torch.float32, torch.bfloat16, torch.float16), "e4m3/128"
#: Blocks of a parameter are counted in 32 bits.
MOST = 2**36


def _no_kernels(weight: Tensor, *_: object) -> str:
    return no_kernels(weight)


def reason(weight: Tensor, way: Way, parts: Parts, place: Place, step: Tensor) -> str:
    """Why no kernel steps a parameter, or "".

    Args:
        weight: as it lies.
        parts: all of it as matrices; place: where that lies in the whole parameter.
        step: the count of its steps.
    """
    if isinstance(way.rule, SGD) and way.predicts:
        return "the next scale of codes that SGD steps follows from the largest gradient, which is looked for first"
    if not isinstance(way.rule, (Adam, Lion, SGD)):
        return f"the kernel has no {type(way.rule).__name__}"
    for spec, signed in zip(way.moments, way.rule.signed, strict=True):
        if not _writes(spec, signed):
            return f"the kernel writes no moments in {spec.text}"
    if weight.data_ptr() != parts.weight[0].data_ptr():
        return "it does not lie row by row"
    return _of_weight(way, weight) or _of_gradient(way, parts) or _of_place(parts, place, step)


#: Whether a kernel steps a parameter, or its pieces do.
TAKES: Operation[bool] = Operation(
    "optimizer_step",
    [Impl("triton", lambda *_: True, reason, _no_kernels), Impl("reference", lambda *_: False)],
)


def _writes(spec: StateSpec, signed: bool) -> bool:
    if not spec.of.scaled:
        return True
    noise = not spec.stochastic or (CODES.get(spec.code, False) and not signed)
    floor = not spec.floor or (CODES.get(spec.code, False) and not signed)
    fits = spec.code in CODES and (signed <= spec.of.signed) and spec.block == 64 and spec.scale == "bfloat16"
    return fits and noise and floor


def _of_weight(way: Way, weight: Tensor) -> str:
    keeping = way.keeping
    if keeping.kind not in ("plain", "remainder", "residual8", "residual16"):
        return f"the scale of codes with masters in {keeping.kind} follows from the weight after the step"
    if keeping.spec is None:
        return "" if weight.dtype in FLOATS else f"the kernel writes no {weight.dtype}"
    if weight.dim() == 3:
        return "each matrix of its stack has a scale of its own"
    if keeping.spec.format != E4M3 or not keeping.spec.per_tensor or keeping.spec.scale not in ("fp32", "power_of_two"):
        return f"the kernel writes codes with one scale for all of a weight, and these are {keeping.spec}"
    return "" if way.predicts else "the scale of its codes follows from the weight after the step"


def _of_gradient(way: Way, parts: Parts) -> str:
    if way.gradient is not None:
        return "" if way.gradient.text == HELD else f"the kernel reads no gradients in {way.gradient.text}"
    dtype = parts.gradient[0].dtype
    return "" if dtype in FLOATS else f"the kernel reads no gradients in {dtype}"


def _of_place(parts: Parts, place: Place, step: Tensor) -> str:
    weight = parts.weight[0]
    tensors = (*parts.weight, *(t for held in parts.moments for t in held), *parts.gradient)
    if not weight.numel():
        return "it has no elements"
    if not place.joined or weight.numel() > MOST:
        return "its rows are in parts on ranks" if not place.joined else "it has more elements than the kernel counts"
    if not all(t.is_contiguous() for t in tensors):
        return "its tensors do not lie row by row"
    return "" if all(t.device == weight.device for t in (*tensors, step)) else "its states are on other devices"


def row(
    way: Way, parts: Parts, place: Place, seed: int, number: int, state: dict[str, Tensor], factor: Tensor | None
) -> "stepping.Row":
    """A parameter as the kernel is told of it.

    Args:
        number: of the parameter in its optimizer.
        factor: what gradients are multiplied by, float32 of one element on its device.
    """
    # Triton is imported when a tensor on a GPU comes.
    from quaver.torch.backends.gpu import stepping

    keeping, rule = way.keeping, way.rule
    weight, *rest = parts.weight
    tensors: dict[str, Tensor | None] = {"weight": weight, "factor": factor, "step": state["step"]}
    if keeping.spec is not None:
        tensors |= {"weight_scale": rest.pop(0), "amax": state["amax"]}
    tensors["beside"] = rest[0] if rest else None
    for name, held in zip(("first", "second"), parts.moments, strict=False):
        tensors |= {name: held[0], f"{name}_scale": held[1] if len(held) > 1 else None}
    tensors |= {"gradient": parts.gradient[0], "gradient_scale": parts.gradient[1] if way.gradient else None}
    rows, columns = weight.shape
    wide = [t for name in ("weight", "beside", "first", "second", "gradient") if (t := tensors.get(name)) is not None]
    form = stepping.Form(
        rule=_named(rule),
        clamp=isinstance(rule, Adam) and rule.clamp,
        maximize=rule.maximize,  # type: ignore[attr-defined]
        keeping=keeping.kind,
        weight=weight.dtype,
        beside=None if tensors["beside"] is None else tensors["beside"].dtype,
        gradient=parts.gradient[0].dtype,
        moments=tuple(stepping.Moment(spec.code, spec.stochastic, spec.floor) for spec in way.moments),
        spec=keeping.spec,
        stochastic=keeping.stochastic and (keeping.kind != "plain" or weight.dtype is torch.bfloat16),
        factored=factor is not None,
        even=stepping.even(wide, columns, rows * -(-columns // stepping.BLOCK), way.gradient is not None),
    )
    return stepping.Row(form, tensors, (rows, columns), place.first, number, seed)


def _named(rule: Rule) -> str:
    """In the kernel's words."""
    if isinstance(rule, Lion):
        return "lion"
    if isinstance(rule, SGD):
        return "nesterov" if rule.nesterov else "sgd"
    assert isinstance(rule, Adam)
    return "adamw" if rule.decoupled else "adam"


class Launches:
    """The parameters of one step that kernels take, by device."""

    def __init__(self, kept: "dict[torch.device, stepping.Stepping]") -> None:
        self.kept = kept
        self.rows: dict[torch.device, list[stepping.Row]] = {}
        self.scalars: dict[torch.device, list[Tensor]] = {}

    def add(self, rows: "Sequence[stepping.Row]", scalars: Tensor) -> None:
        """Take parameters along whose counts of steps lie on one device.

        Args:
            scalars: of their rule, float32 [scalars, rows].
        """
        self.rows.setdefault(scalars.device, []).extend(rows)
        self.scalars.setdefault(scalars.device, []).append(scalars)

    def run(self, keep: Tensor | None, statistics: bool) -> Mapping[torch.device, Tensor | None]:
        """Step them.

        Args:
            keep: bool [], False leaves everything as it is.
        Returns:
            By device how many updates were held to their bound, int64 [rows], if statistics are asked for.
        """
        if not self.rows:
            return {}
        from quaver.torch.backends.gpu import stepping

        counts: dict[torch.device, Tensor | None] = {}
        for where, rows in self.rows.items():
            stepper = self.kept.setdefault(where, stepping.Stepping())
            counts[where] = torch.zeros(len(rows), dtype=torch.int64, device=where) if statistics else None
            stepper(rows, torch.cat(self.scalars[where], 1), None if keep is None else keep.to(where), counts[where])
        return counts


def announce(said: set[str], weight: Tensor, *given: object) -> None:
    """Warn once of each reason for which no kernel steps a parameter on a GPU."""
    if not weight.is_cuda:
        return
    why = dict(TAKES.explain(weight, *given)).get("triton", "")
    if why and why not in said:
        said.add(why)
        warnings.warn(
            f"parameters such as one of shape {tuple(weight.shape)} step in plain torch operations, the same numbers "
            f"and slower, because {why}",
            stacklevel=2,
        )
