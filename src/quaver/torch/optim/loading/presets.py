"""Presets as state dicts hold them: plain data, which torch.load reads with weights_only=True."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quaver.core.states.codes import StateSpec
from quaver.core.states.presets import PRESETS, Preset
from quaver.core.text.spelling import suggest

#: Behind a name, and the entry of other presets' fields: states are written in the second form, see `loading.earlier`.
SECOND, FORM = "/2", "form"


def preset_of(preset: Any) -> Preset:
    """A preset by its name, by what `packed` made of it, or itself. Raises: ValueError."""
    if isinstance(preset, Preset):
        return preset
    if isinstance(preset, Mapping):
        specs = ("first", "second")
        options: dict[str, Any] = dict(preset)
        options |= {name: StateSpec.parse(options[name]) for name in specs}
        if "/" in options["gradient"]:
            options["gradient"] = StateSpec.parse(options["gradient"])
        return Preset(**options)
    if preset not in PRESETS:
        raise ValueError(f"preset {preset!r} is not known; {suggest(str(preset), list(PRESETS))}")
    return PRESETS[preset]


def packed(preset: Any) -> str | dict[str, Any]:
    """The name of a preset of `PRESETS`; of another one its fields as plain data; and in which form states are."""
    preset = preset_of(preset)
    second = has_residuals(preset)
    if PRESETS.get(preset.name) == preset:
        return preset.name + (SECOND if second else "")
    values = {field.name: getattr(preset, field.name) for field in fields(preset)}
    plain = {name: value.text if isinstance(value, StateSpec) else value for name, value in values.items()}
    return plain | ({FORM: 2} if second else {})


def has_residuals(preset: Preset) -> bool:
    """Whether a preset may keep some, whose meaning the form says."""
    return "residual" in preset.codes + preset.bfloat16
