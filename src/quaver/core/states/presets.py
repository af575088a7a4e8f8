"""Presets: what an optimizer keeps for a parameter, in how many bits; the libraries' own for comparison.

Sources: MS-AMP, arXiv:2310.18313; Transformer Engine's FusedAdam; COAT, arXiv:2410.19313; bitsandbytes,
arXiv:2110.02861; torchao.optim; FlashOptim, arXiv:2602.23349.
"""

from dataclasses import dataclass

from quaver.core.states.codes import FLOAT32, StateSpec

#: What a weight that a GEMM reads in few bits keeps besides, so that small steps add up.
MASTERS = ("none", "residual8", "residual16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What is kept for a matrix. Norms, biases, embeddings and small tensors are kept as `float32` keeps them."""

    name: str
    #: What quaver's trainer keeps matrices as: "codes" of the recipe, where it has any, "bfloat16" or "float32".
    weights: str = "float32"
    #: The first moment of Adam, and the momentum of other rules.
    first: StateSpec = FLOAT32
    #: The second moment of Adam.
    second: StateSpec = FLOAT32
    #: Of weights that exist only in eight bits, one of `MASTERS`: what the step adds up in.
    codes: str = "float32"
    #: Of bfloat16 weights: "remainder", the 16 bits that float32 has more; "residual8", eight of them; "none";
    #: "float16", a master with one scale, of float16 weights too, which have a float32 one unless this is "none".
    bfloat16: str = "remainder"
    #: Whether `codes` and float16 masters are rounded at random.
    stochastic: bool = False
    #: How gradients are kept between backward and step: a dtype's name, or a spec.
    gradient: str | StateSpec = "float32"
    #: Whether updates of Adam are held to their bound.
    clamp: bool = True


_BFLOAT16 = StateSpec(code="bfloat16", stochastic=True)
#: At random: to nearest 0.9 of a small code is that code again, so a moment whose gradient stops would never decay.
_FIRST = StateSpec(code="int8_mitchell", stochastic=True)
_SECOND = StateSpec(code="uint8_mitchell4", stochastic=True, floor=True)
_MSAMP = StateSpec(code="e4m3", block=None, scale="power_of_two")
_COAT = StateSpec(code="e4m3_expanded", block=128, scale="float32")
_DYNAMIC_FIRST = StateSpec(code="int8_dynamic", block=256, scale="float32")
_DYNAMIC_SECOND = StateSpec(code="uint8_dynamic", block=256, scale="float32")

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(name="float32"),
        Preset(name="exact", weights="bfloat16", first=_BFLOAT16, second=_BFLOAT16, gradient="bfloat16"),
        Preset(name="balanced", weights="codes", first=_FIRST, second=_SECOND, codes="residual16", gradient="bfloat16"),
        Preset(
            name="lean",
            weights="codes",
            first=_FIRST,
            second=_SECOND,
            codes="residual8",
            bfloat16="residual8",
            stochastic=True,
            gradient=StateSpec(code="e4m3", block=128),
        ),
        Preset(
            name="msamp",
            weights="codes",
            first=_MSAMP,
            second=StateSpec(code="float16", block=None, scale="power_of_two"),
            codes="float16",
            gradient=_MSAMP,
            clamp=False,
        ),
        Preset(
            name="te",
            weights="bfloat16",
            first=StateSpec(code="e4m3", block=None, scale="float32"),
            second=StateSpec(code="float16", block=None, scale="float32"),
            gradient="bfloat16",
            clamp=False,
        ),
        Preset(name="coat", first=_COAT, second=_COAT, clamp=False),
        # Its scales are float16, which a block of √v below 6e-8 has none of; its masters have 24 bits, these 32.
        Preset(
            name="flashoptim",
            weights="bfloat16",
            first=StateSpec(code="int8_softsign", block=32),
            second=StateSpec(code="uint8_root", block=32),
            gradient="bfloat16",
            clamp=False,
        ),
        Preset(
            name="bnb8",
            first=_DYNAMIC_FIRST,
            second=_DYNAMIC_SECOND,
            clamp=False,
        ),
        Preset(
            name="torchao8",
            weights="bfloat16",
            first=_DYNAMIC_FIRST,
            second=_DYNAMIC_SECOND,
            gradient="bfloat16",
            clamp=False,
        ),
    )
}
