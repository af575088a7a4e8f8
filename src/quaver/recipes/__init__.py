"""Recipes: functions of their options that return a `Recipe`, and the table `RECIPES` of them by name.

Wherever a recipe is expected, its name is accepted as a string, with or without options: "mxfp8",
"delayed(history=16)". Nothing here depends on a framework.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from quaver.recipes.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format
from quaver.recipes.schedule import Schedule, read
from quaver.recipes.spec import (
    Delayed,
    GemmSpec,
    QuantSpec,
    Recipe,
    ScaleKind,
    attention_spec,
    check_flags,
    float32_scale,
    intern,
    recipe,
)
from quaver.recipes.text import parse, suggest

# ---- bf16: no quantization, the baseline of all comparisons ----


@recipe
def bf16() -> Recipe:
    """Run every GEMM in the precision of its operands."""
    high = GemmSpec(None, None)
    return Recipe("bf16", high, high, high)


def gradient_format(format: str) -> Format:
    """Return the format of gradients under a recipe's option `format`, where everything else is E4M3."""
    if format not in ("hybrid", "e4m3"):
        raise ValueError(f"format is {format!r}; give 'hybrid' (gradients in E5M2) or 'e4m3' (everything in E4M3)")
    return E5M2 if format == "hybrid" else E4M3


# ---- blockwise ----
# Source: DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.


@recipe
def blockwise(*, format: str = "e4m3", power_of_two: bool = True, attention: bool = False) -> Recipe:
    """E4M3; 1×128 blocks, 128×128 for weights, whose transpose is reused.

    Args:
        format: "e4m3", or "hybrid" for gradients in E5M2.
        power_of_two: True for power-of-two scales; False scales by 448 / amax.
        attention: True to quantize attention too: q, k, v and the gradients in 1×128 blocks along the contraction axis.
    """
    kind = float32_scale(power_of_two)
    line = QuantSpec(E4M3, (1, 128), kind)
    square = QuantSpec(E4M3, (128, 128), kind)
    gradient = replace(line, format=gradient_format(format))
    fprop, dgrad, wgrad = GemmSpec(line, square), GemmSpec(gradient, square), GemmSpec(gradient, line)
    return Recipe("blockwise", fprop, dgrad, wgrad, attention=attention_spec(attention, line, gradient))


# ---- tensorwise: one scale per tensor, from its own amax (current scaling) ----


def per_tensor_gemms(format: str, power_of_two: bool, fast_accum: bool) -> tuple[GemmSpec, GemmSpec, GemmSpec]:
    """Return the specs of fprop, dgrad and wgrad with one scale per tensor, gradients in E5M2 (hybrid) or E4M3."""
    scale = float32_scale(power_of_two)
    check_flags(fast_accum=fast_accum)
    value = QuantSpec(E4M3, scale=scale)
    gradient = QuantSpec(gradient_format(format), scale=scale)
    return GemmSpec(value, value, fast_accum), GemmSpec(gradient, value), GemmSpec(gradient, value)


@recipe
def tensorwise(
    *, format: str = "hybrid", power_of_two: bool = True, fast_accum: bool = True, attention: bool = False
) -> Recipe:
    """E4M3 with E5M2 gradients, one power-of-two scale per tensor.

    Args:
        format: "hybrid" (gradients in E5M2) or "e4m3" (gradients in E4M3 too).
        power_of_two: True for power-of-two scales; False scales by format.max / amax, as Transformer Engine and torchao
            do by default.
        fast_accum: True to let fprop accumulate faster where the hardware offers it.
        attention: True to quantize attention too, with one scale for each operand of each head.
    """
    fprop, dgrad, wgrad = per_tensor_gemms(format, power_of_two, fast_accum)
    return Recipe("tensorwise", fprop, dgrad, wgrad, attention=attention_spec(attention, fprop.a, dgrad.a))


# ---- delayed: one scale per tensor, from the amaxes of earlier steps (delayed scaling) ----
# Source: Micikevicius et al. 2022, arXiv:2209.05433; window and rules are those of Transformer Engine.


@recipe
def delayed(
    *,
    margin: int = 0,
    history: int = 1024,
    algorithm: Literal["max", "most_recent"] = "max",
    format: str = "hybrid",
    power_of_two: bool = True,
    fast_accum: bool = True,
    attention: bool = False,
) -> Recipe:
    """E4M3 with E5M2 gradients, scaled by the largest amax of the last `history` steps.

    Args:
        margin: number of times to halve the encode factor, as headroom for growing amaxes.
        history: number of steps in the scaling history.
        algorithm: "max" of the history or its "most_recent" value.
        format: "hybrid" (gradients in E5M2) or "e4m3" (gradients in E4M3 too).
        power_of_two: True for power-of-two scales; False scales by format.max / amax.
        fast_accum: True to let fprop accumulate faster where the hardware offers it.
        attention: True to quantize attention too; it has no history, and each operand of each head is scaled by its own
            amax.
    """
    state = Delayed(length=history, margin=margin, algorithm=algorithm)
    fprop, dgrad, wgrad = per_tensor_gemms(format, power_of_two, fast_accum)
    quantized_attention = attention_spec(attention, fprop.a, dgrad.a)
    return Recipe("delayed", fprop, dgrad, wgrad, delayed=state, attention=quantized_attention)


# ---- mxfp8: OCP microscaling, 32 elements along k share a power of two ----
# Source: OCP Microscaling Formats 1.0; scales are rounded up so that nothing saturates (NVIDIA, arXiv:2506.08027).

#: E4M3 with an exponent byte per 32 elements along k.
E4M3_1X32 = QuantSpec(E4M3, (1, 32), "e8m0")


@recipe
def mxfp8(*, format: str = "e4m3", weight_2d: bool = False, attention: bool = False) -> Recipe:
    """E4M3, E8M0 scales in 1×32 blocks.

    Args:
        format: "e4m3", or "hybrid" for gradients in E5M2, which is emulated on every GPU.
        weight_2d: True to scale weights in 32×32 blocks, so that one copy serves fprop and dgrad.
        attention: True to quantize attention too, in 1×32 blocks along the contraction axis.
    """
    check_flags(weight_2d=weight_2d)
    weight = QuantSpec(E4M3, (32, 32), "e8m0") if weight_2d else E4M3_1X32
    gradient = replace(E4M3_1X32, format=gradient_format(format))
    fprop, dgrad, wgrad = GemmSpec(E4M3_1X32, weight), GemmSpec(gradient, weight), GemmSpec(gradient, E4M3_1X32)
    return Recipe("mxfp8", fprop, dgrad, wgrad, attention=attention_spec(attention, E4M3_1X32, gradient))


# ---- mxfp4: OCP microscaling in four bits ----
# torch and XLA have native GEMMs for NVFP4 but not for MXFP4, so it is computed by emulation.
#
# Source: OCP Microscaling Formats 1.0; scales are rounded up so that nothing saturates, as in `mxfp8`. Stochastic
# rounding of gradients and rotation of backward operands: Tseng et al., "Training LLMs with MXFP4", arXiv:2502.20586.


@recipe
def mxfp4(*, stochastic_rounding: bool = False, hadamard: bool = False, attention: bool = False) -> Recipe:
    """E2M1 everywhere, E8M0 scales in 1×32 blocks.

    Args:
        stochastic_rounding: True to round grad_output stochastically, which keeps its mean.
        hadamard: True to rotate groups of 16 along k of all operands of dgrad and wgrad, which spreads outliers.
        attention: True to quantize attention too, in eight bits as in `mxfp8`.
    """
    check_flags(stochastic_rounding=stochastic_rounding, hadamard=hadamard)
    line = QuantSpec(E2M1, (1, 32), "e8m0")
    rotated = replace(line, hadamard=hadamard)
    gradient = replace(rotated, rounding="stochastic" if stochastic_rounding else "nearest")
    fprop, backward = GemmSpec(line, line), GemmSpec(gradient, rotated)
    return Recipe("mxfp4", fprop, backward, backward, attention=attention_spec(attention, E4M3_1X32, E4M3_1X32))


# ---- mxfp6: OCP microscaling in six bits ----
# torch and XLA have no six-bit GEMM, so it is computed by emulation, with a code per byte.
#
# Source: OCP Microscaling Formats 1.0; Rouhani et al., "Microscaling Data Formats for Deep Learning", arXiv:2310.10537,
# which trains in E3M2. Scales are rounded up so that nothing saturates, as in `mxfp8`.

#: By option: the format of input and weight, and that of gradients.
FORMATS = {"hybrid": (E2M3, E3M2), "e2m3": (E2M3, E2M3), "e3m2": (E3M2, E3M2)}


@recipe
def mxfp6(*, format: str = "hybrid", attention: bool = False) -> Recipe:
    """E2M3 with E3M2 gradients, E8M0 scales in 1×32 blocks.

    Args:
        format: "hybrid" (gradients in E3M2, the rest in E2M3), or "e2m3" or "e3m2" for all.
        attention: True to quantize attention too, in eight bits as in `mxfp8`.
    """
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f"format is {format!r}; give 'hybrid' (gradients in E3M2, the rest in E2M3), 'e2m3' or 'e3m2'")
    value, gradient = (QuantSpec(fmt, (1, 32), "e8m0") for fmt in FORMATS[format])
    fprop, backward = GemmSpec(value, value), GemmSpec(gradient, value)
    return Recipe("mxfp6", fprop, backward, backward, attention=attention_spec(attention, E4M3_1X32, E4M3_1X32))


# ---- nvfp4: E2M1 with an E4M3 scale per 16 elements and one factor per tensor ----
# Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149.


@recipe
def nvfp4(
    *,
    stochastic_rounding: bool = True,
    hadamard: bool = True,
    weight_2d: bool = True,
    power_of_two: bool = True,
    attention: bool = False,
) -> Recipe:
    """E2M1 everywhere; 1×16 blocks, 16×16 for weights; stochastic gradients; both wgrad operands rotated.

    Args:
        stochastic_rounding: True to round grad_output stochastically, which keeps its mean.
        hadamard: True to rotate groups of 16 tokens of both wgrad operands, which spreads outliers.
        weight_2d: True to scale weights in 16×16 blocks, so that forward and backward use the same weight.
        power_of_two: True for a power-of-two tensor factor; False uses 2688 / amax, as Transformer Engine does.
        attention: True to quantize attention too, in eight bits as in `mxfp8`: E4M3 in 1×32 blocks, rounded to nearest.
            Four bits, stochastic rounding and rotation apply to linear layers only.
    """
    check_flags(
        stochastic_rounding=stochastic_rounding, hadamard=hadamard, weight_2d=weight_2d, power_of_two=power_of_two
    )
    kind: ScaleKind = "two_level" if power_of_two else "two_level_fp32"
    line = QuantSpec(E2M1, (1, 16), kind)
    weight = QuantSpec(E2M1, (16, 16), kind) if weight_2d else line
    gradient = QuantSpec(E2M1, (1, 16), kind, "stochastic" if stochastic_rounding else "nearest")
    rotated = QuantSpec(E2M1, (1, 16), kind, "nearest", hadamard)
    rotated_gradient = QuantSpec(E2M1, (1, 16), kind, gradient.rounding, hadamard)
    fprop, dgrad, wgrad = GemmSpec(line, weight), GemmSpec(gradient, weight), GemmSpec(rotated_gradient, rotated)
    quantized_attention = attention_spec(attention, E4M3_1X32, E4M3_1X32)
    return Recipe("nvfp4", fprop, dgrad, wgrad, attention=quantized_attention)


# ---- rowwise: one scale per row of each operand, so that an outlier affects only its own row ----
# Source: torchao.float8's recipes "rowwise" and "rowwise_with_gw_hp" (github.com/pytorch/ao).


@recipe
def rowwise(
    *, format: str = "e4m3", power_of_two: bool = True, fast_accum: bool = True, attention: bool = False
) -> Recipe:
    """E4M3, one scale per row along the contraction axis.

    Args:
        format: "e4m3", or "hybrid" for gradients in E5M2.
        power_of_two: True for power-of-two scales; False scales by 448 / amax.
        fast_accum: True to let fprop accumulate faster where the hardware offers it.
        attention: True to quantize attention too, with one scale per row of each operand.
    """
    row = QuantSpec(E4M3, (1, None), float32_scale(power_of_two))
    check_flags(fast_accum=fast_accum)
    gradient = replace(row, format=gradient_format(format))
    fprop, backward = GemmSpec(row, row, fast_accum), GemmSpec(gradient, row)
    return Recipe("rowwise", fprop, backward, backward, attention=attention_spec(attention, row, gradient))


@recipe
def rowwise_bf16_wgrad(*, power_of_two: bool = True, fast_accum: bool = True, attention: bool = False) -> Recipe:
    """`rowwise`, but with the weight scaled per tensor in dgrad, and wgrad in high precision.

    Args:
        power_of_two: True for power-of-two scales; False scales by 448 / amax.
        fast_accum: True to let fprop accumulate faster where the hardware offers it.
        attention: True to quantize attention too, with one scale per row of each operand.
    """
    whole = rowwise(power_of_two=power_of_two, fast_accum=fast_accum, attention=attention)
    dgrad = GemmSpec(whole.dgrad.a, QuantSpec(E4M3, scale=float32_scale(power_of_two)))
    return replace(whole, name="rowwise_bf16_wgrad", dgrad=dgrad, wgrad=GemmSpec(None, None))


# ---- table ----

RECIPES: dict[str, Callable[..., Recipe]] = {
    "bf16": bf16,
    "delayed": delayed,
    "tensorwise": tensorwise,
    "rowwise": rowwise,
    "rowwise_bf16_wgrad": rowwise_bf16_wgrad,
    "blockwise": blockwise,
    "mxfp8": mxfp8,
    "mxfp6": mxfp6,
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
}


def get(recipe: str | Recipe, **options: Any) -> Recipe:
    """Return the recipe with this name and these options; a Recipe is returned unchanged.

    Args:
        recipe: a name from `RECIPES`, a name with options as text, such as "delayed(history=16)", or a Recipe.
        options: options of the recipe function; only with a name.

    Raises:
        ValueError: unknown name or option (the message suggests the nearest), or text of another form.
    """
    if isinstance(recipe, Recipe):
        if options:
            raise ValueError(
                f"recipe {recipe.name!r} is already built; pass its options {sorted(options)} to its function"
            )
        return intern(recipe)
    if not isinstance(recipe, str):
        raise ValueError(f"a recipe is a name or a quaver.Recipe, not {recipe!r}; try quaver.recipes.get('mxfp8')")
    name, in_text = (recipe, {}) if recipe in RECIPES else parse(recipe)
    if name not in RECIPES:
        raise ValueError(f"no recipe {name!r}; {suggest(name, RECIPES)}")
    twice = sorted(set(in_text) & set(options))
    if twice:
        raise ValueError(f"recipe {recipe!r} gives {', '.join(twice)} in its text and as an argument; give it once")
    return RECIPES[name](**in_text, **options)


def override(
    recipe: str | Recipe,
    *,
    fprop: GemmSpec | Literal["same"] | None = "same",
    dgrad: GemmSpec | Literal["same"] | None = "same",
    wgrad: GemmSpec | Literal["same"] | None = "same",
) -> Recipe:
    """Return a recipe with some of its three GEMMs replaced.

        rules = {"*.o_proj": quaver.recipes.override("mxfp8", wgrad=None), "*": "mxfp8"}

    Args:
        recipe: a recipe, or its name with or without options.
        fprop, dgrad, wgrad: a GemmSpec, such as another recipe's; None for high precision; "same" to leave it.

    Raises:
        ValueError: an argument is something else, or the result is impossible, such as delayed scaling of an
            unquantized dgrad.
    """
    base = get(recipe)
    changed: dict[str, GemmSpec] = {}
    for gemm, spec in {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}.items():
        if isinstance(spec, GemmSpec) or spec is None:
            changed[gemm] = spec or GemmSpec(None, None)
        elif spec != "same":
            raise ValueError(
                f"override: {gemm} is {spec!r}; give a GemmSpec, such as quaver.recipes.get('mxfp8').{gemm}, None for "
                'high precision, or "same"'
            )
    changed = {gemm: spec for gemm, spec in changed.items() if spec != base.gemms[gemm]}
    if not changed:
        return base
    # GEMMs that an earlier override has replaced stay in the name.
    root, _, before = base.name.partition(" with ")
    was_high, _, was_other = before.partition("another ")
    high = [gemm for gemm in base.gemms if (changed[gemm].a is None if gemm in changed else gemm in was_high)]
    other = [gemm for gemm in base.gemms if gemm not in high and (gemm in changed or gemm in was_other)]
    parts = []
    if high:
        parts.append(f"high-precision {' and '.join(high)}")
    if other:
        parts.append(f"another {' and '.join(other)}")
    gemms = base.gemms | changed
    name = f"{root} with {', '.join(parts)}"
    return intern(replace(base, name=name, fprop=gemms["fprop"], dgrad=gemms["dgrad"], wgrad=gemms["wgrad"]))


def schedule(text: str, *, steps: int | None = None, peak: float | None = None) -> Schedule:
    """Return a schedule of recipes over a run, such as `nvfp4 until 85%, bf16`; the grammar is in
    `quaver.recipes.schedule`.

        schedule = quaver.recipes.schedule("nvfp4 until 85%, bf16", steps=1000)
        recipe = schedule.at(step)  # before each step, with lr= if a phase ends by learning rate
        schedule.record_loss(loss)  # after each step, if a phase ends by loss

    Args:
        text: phases separated by commas, each but the last with its end: `until STEP`, `until SHARE%` (of the steps),
            `until loss<NATS` (mean of the last 20 steps) or `until lr<SHARE%` (of the peak, after the warm-up). A
            single recipe applies all the time.
        steps: total number of steps; needed for shares of it.
        peak: highest learning rate; needed for ends by learning rate.

    Raises:
        ValueError: the text cannot be read, needs a missing argument, or has a phase without a step.
    """
    return Schedule(read(text, get), steps=steps, peak=peak)


# Written out for type checkers, which do not run code: a missing recipe is an error under mypy --strict.
__all__ = [
    "RECIPES",
    "bf16",
    "blockwise",
    "delayed",
    "get",
    "mxfp4",
    "mxfp6",
    "mxfp8",
    "nvfp4",
    "override",
    "rowwise",
    "rowwise_bf16_wgrad",
    "schedule",
    "tensorwise",
]


def __dir__() -> list[str]:
    """Return only the public names."""
    return sorted(__all__)
