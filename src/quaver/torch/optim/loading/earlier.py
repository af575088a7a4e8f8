"""Read the first form of states, which the presets `lean` and `balanced` wrote in earlier releases.

                first form                                          second form, since then
    moments     int8_softsign and uint8_root                        the codes of the preset
    residuals   multiples of 2**-7 (int8) or 2**-15 (int16)         the next 8 or 16 bits of the mantissa, see
                of half the distance to the next code               `quaver.torch.optim.weights`

State dicts of presets with residuals have a mark for the second form (`presets.packed`). States without the mark are
converted like those of another preset. Source: FlashOptim, arXiv:2602.23349.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quaver.core.states.codes import StateSpec
from quaver.core.states.presets import PRESETS, Preset
from quaver.torch.optim import weights
from quaver.torch.optim.loading.presets import FORM_KEY, SECOND_FORM, has_residuals, preset_of
from quaver.torch.optim.weights import Keeping

#: `Keeping.kind` of residuals in the first form, by the kind in the second.
FIRST_FORM_KINDS = {"residual8": "parts8", "residual16": "parts16"}
_FIRST = StateSpec(code="int8_softsign")
_SECOND = StateSpec(code="uint8_root", stochastic=True, floor=True)


def in_first_form(preset: Preset) -> Preset:
    """The same preset with residuals in the first form."""
    return replace(
        preset,
        name=f"{preset.name}, in its first form,",
        codes=FIRST_FORM_KINDS.get(preset.codes, preset.codes),
        bfloat16=FIRST_FORM_KINDS.get(preset.bfloat16, preset.bfloat16),
    )


#: The presets that wrote the first form, with the formats that they had.
FIRST_FORM_PRESETS = {
    preset.name: in_first_form(replace(preset, first=_FIRST, second=_SECOND))
    for preset in PRESETS.values()
    if has_residuals(preset)
}


def saved_preset(saved: Any) -> Preset:
    """The preset that wrote the states of a parameter group.

    Args:
        saved: the group's entry "preset" in the state dict, as `presets.packed` writes it; without the mark of the
            second form the result has the formats of the first.
    Raises:
        ValueError: an unknown preset.
    """
    if isinstance(saved, str) and saved in FIRST_FORM_PRESETS:
        return FIRST_FORM_PRESETS[saved]
    preset = preset_of(without_form(saved))
    first = isinstance(saved, Mapping) and FORM_KEY not in saved and has_residuals(preset)
    return in_first_form(preset) if first else preset


def without_form(saved: Any) -> Any:
    """The entry "preset" of a state dict without the mark of the second form."""
    if isinstance(saved, str):
        return saved.removesuffix(SECOND_FORM)
    return {name: value for name, value in saved.items() if name != FORM_KEY} if isinstance(saved, Mapping) else saved


def read(keeping: Keeping, tensors: tuple[Tensor, ...]) -> Tensor:
    """The weight, float32, with residuals in either form. Exact.

    Args:
        tensors: the weight, its scales if it is codes, and the tensors of its state, as `Keeping` orders them.
    """
    if keeping.kind not in FIRST_FORM_KINDS.values():
        return weights.read(keeping, tensors)
    weight, residual = tensors[0], tensors[-1]
    fraction = residual.float() / 2.0 ** (weights.BITS[residual.dtype] - 1)
    if keeping.spec is None:
        # Half an ULP of bfloat16 is 2**-8 of the power of two; clamp it to a normal number, for infinity as well.
        power = ((weight.view(torch.int16).int() & 0x7F80) << 16).view(torch.float32)
        half = power.clamp(min=2.0**-117, max=2.0**127) * 2.0**-8
        return weight.float() + fraction * half
    fmt = keeping.spec.format
    # A float32 with the exponent of half an ULP of the code; a subnormal has the exponent of the smallest normal.
    exponent = ((weight.view(torch.uint8).int() & 0x7F) >> fmt.mantissa_bits).clamp(min=1)
    half = (exponent - (fmt.bias + fmt.mantissa_bits + 1) + 127 << 23).view(torch.float32)
    return weights.scaled(keeping.spec, tensors[1], weight.float() + fraction * half)
