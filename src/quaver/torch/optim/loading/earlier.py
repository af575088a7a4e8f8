"""States as `lean` and `balanced` wrote them first: moments by softsign and roots, residuals in parts of half a step.

State dicts say of these presets, and of others with residuals, that states are in the second form; where nothing is
said they are in the first, and are converted as another preset's are. Source: FlashOptim, arXiv:2602.23349.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quaver.core.states.codes import StateSpec
from quaver.core.states.presets import PRESETS, Preset
from quaver.torch.optim import weights
from quaver.torch.optim.loading.presets import FORM, SECOND, has_residuals, preset_of
from quaver.torch.optim.weights import Keeping

#: What was kept beside weights, by what it is called now.
PARTS = {"residual8": "parts8", "residual16": "parts16"}
_FIRST = StateSpec(code="int8_softsign")
_SECOND = StateSpec(code="uint8_root", stochastic=True, floor=True)


def in_first_form(preset: Preset) -> Preset:
    """A preset whose residuals are parts of half a step."""
    return replace(
        preset,
        name=f"{preset.name}, in its first form,",
        codes=PARTS.get(preset.codes, preset.codes),
        bfloat16=PARTS.get(preset.bfloat16, preset.bfloat16),
    )


EARLIER = {
    preset.name: in_first_form(replace(preset, first=_FIRST, second=_SECOND))
    for preset in PRESETS.values()
    if has_residuals(preset)
}


def written_by(saved: Any) -> Preset:
    """The preset whose states a state dict has, by what it says of it. Raises: ValueError."""
    if isinstance(saved, str) and saved in EARLIER:
        return EARLIER[saved]
    preset = preset_of(without_form(saved))
    first = isinstance(saved, Mapping) and FORM not in saved and has_residuals(preset)
    return in_first_form(preset) if first else preset


def without_form(saved: Any) -> Any:
    """What a state dict says of a preset, as if its states were in the first form."""
    if isinstance(saved, str):
        return saved.removesuffix(SECOND)
    return {name: value for name, value in saved.items() if name != FORM} if isinstance(saved, Mapping) else saved


def read(keeping: Keeping, tensors: tuple[Tensor, ...]) -> Tensor:
    """The weight, float32, of residuals of the first form too. Exact."""
    if keeping.kind not in PARTS.values():
        return weights.read(keeping, tensors)
    held, rest = tensors[0], tensors[-1]
    if keeping.spec is None:
        # Half a step is 2**-8 of the number's power of two; kept a normal number, of infinity too.
        power = ((held.view(torch.int16).int() & 0x7F80) << 16).view(torch.float32)
        half = power.clamp(min=2.0**-117, max=2.0**127) * 2.0**-8
        return held.float() + rest.float() * (half / 2.0 ** (weights.BITS[rest.dtype] - 1))
    fmt = keeping.spec.format
    field = ((held.view(torch.uint8).int() & 0x7F) >> fmt.mantissa_bits).clamp(min=1)
    half = (field - (fmt.bias + fmt.mantissa_bits + 1) + 127 << 23).view(torch.float32)
    value = held.float() + rest.float() * (half / 2.0 ** (weights.BITS[rest.dtype] - 1))
    return weights.scaled(keeping.spec, tensors[1], value)
