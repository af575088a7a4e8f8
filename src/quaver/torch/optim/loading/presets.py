"""Presets as state dicts hold them: plain data, which torch.load reads with weights_only=True."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quaver.core.states.codes import StateSpec
from quaver.core.states.presets import PRESETS, Preset
from quaver.core.text.spelling import suggest


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
    """The name of a preset of `PRESETS`; of another one its fields as plain data."""
    preset = preset_of(preset)
    if PRESETS.get(preset.name) == preset:
        return preset.name
    values = {field.name: getattr(preset, field.name) for field in fields(preset)}
    return {name: value.text if isinstance(value, StateSpec) else value for name, value in values.items()}
