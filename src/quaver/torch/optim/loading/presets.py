"""Convert presets to and from plain data, which `torch.load` reads with `weights_only=True`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quaver.core.states.codes import StateSpec
from quaver.core.states.presets import PRESETS, Preset
from quaver.core.text.spelling import suggest

#: The mark of states in the second form, see `loading.earlier`: the suffix of a preset's name, or a key beside fields.
SECOND_FORM, FORM_KEY = "/2", "form"


def preset_of(preset: Any) -> Preset:
    """The preset of a name, or of the fields that `packed` returns without the mark; a `Preset` as it is.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(preset, Preset):
        return preset
    if isinstance(preset, Mapping):
        options: dict[str, Any] = dict(preset)
        options |= {name: StateSpec.parse(options[name]) for name in ("first", "second")}
        if "/" in options["gradient"]:
            options["gradient"] = StateSpec.parse(options["gradient"])
        return Preset(**options)
    if preset not in PRESETS:
        raise ValueError(f"preset {preset!r} is not known; {suggest(str(preset), list(PRESETS))}")
    return PRESETS[preset]


def packed(preset: Any) -> str | dict[str, Any]:
    """A preset as plain data: its name if it is one of `PRESETS`, else its fields; with the mark of the second form."""
    preset = preset_of(preset)
    marked = has_residuals(preset)
    if PRESETS.get(preset.name) == preset:
        return preset.name + (SECOND_FORM if marked else "")
    values = {field.name: getattr(preset, field.name) for field in fields(preset)}
    plain = {name: value.text if isinstance(value, StateSpec) else value for name, value in values.items()}
    return plain | ({FORM_KEY: 2} if marked else {})


def has_residuals(preset: Preset) -> bool:
    """Whether a preset may store residuals, which two forms store differently."""
    return "residual" in preset.codes + preset.bfloat16
