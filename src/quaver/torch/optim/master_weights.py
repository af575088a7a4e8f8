"""How the weight itself is kept between steps: what a GEMM reads, and what it has more than that.

    plain       float32, float16 or bfloat16 itself; bfloat16 may be rounded at random
    remainder   bfloat16, and the 16 bits that float32 has more (int16): together float32, bit by bit
    residual    codes of a GEMM, or bfloat16, and the bits that a longer mantissa has more (int8 or int16)
    master      codes of a GEMM, or float16, and float32 beside them; codes, bfloat16 or float16, and float16 with one
                scale beside them

A weight is read as float32, and written from it. With a residual its magnitude is one whole number, the code's bits
with 8 or 16 more below them, as bfloat16's are float32's: the code is that number rounded, and the residual what
rounding it left. What int8 holds, int16 and float32 hold too. Sources: remainder, Transformer Engine's FusedAdam; a
residual of eight bits, FlashOptim, arXiv:2602.23349; float16 master with a scale, MS-AMP, arXiv:2310.18313.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec
from quaver.reference.optim import NOISE_BITS
from quaver.reference.optimizer_state import Preset, StateSpec
from quaver.torch.linear import store_weight
from quaver.torch.linear.stored_weight import lies_turned
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import decode_scales, spread
from quaver.torch.numerics.rounding import INFINITY_BITS, magnitude_bits
from quaver.torch.optim import codes

#: Bits of a residual.
BITS = {torch.int8: 8, torch.int16: 16}
NAN_BITS, _SIGN = 0x7FC00000, -0x80000000
_MASTER16 = StateSpec(code="float16", block=None, scale="power_of_two")


@dataclass(frozen=True)
class MasterFormat:
    """What is kept of a weight.

    Tensors go together, in this order: the weight, its scales (of codes), its state, the state's scale (of float16).
    """

    #: "plain", "remainder", "residual8", "residual16", "float32" or "float16", the masters.
    kind: str
    #: Of codes that a GEMM reads; None: the weight is a float.
    spec: QuantSpec | None = None
    #: Whether what is lost in rounding is so at random.
    stochastic: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        """Names of what is kept beside the weight."""
        kinds = {
            "plain": (),
            "remainder": ("remainder",),
            "float32": ("master",),
            "float16": ("master", "master_scale"),
        }
        return kinds.get(self.kind, ("residual",))

    @property
    def dtype(self) -> torch.dtype:
        """Of what is kept beside the weight element by element; not of "plain"."""
        return {
            **{"remainder": torch.int16, "residual16": torch.int16, "residual8": torch.int8},
            # Of earlier releases.
            **{"parts16": torch.int16, "parts8": torch.int8},
            **{"float32": torch.float32, "float16": torch.float16},
        }[self.kind]

    @property
    def master(self) -> bool:
        """Whether the weight has a float beside it that says it by itself."""
        return self.kind in ("float32", "float16")

    @property
    def whole(self) -> bool:
        """Whether a step needs the whole weight: a scale of all of it is measured."""
        return self.kind == "float16"

    @property
    def by_rows(self) -> "MasterFormat":
        """The same of rows that have their scales each: what is kept is read, and written around, alike."""
        return self if self.spec is None else replace(self, spec=replace(self.spec, block=(1, self.spec.block[1])))


def master_format_of(p: Tensor, preset: Preset) -> MasterFormat:
    """How a parameter's weight is kept."""
    if store_weight.holds_codes(p):
        owner = store_weight.owner(p)
        if owner is None:
            raise ValueError(
                f"a parameter of {p.dtype} belongs to no layer of quaver.torch: make it by quantized_init or "
                "quantize_weights, or keep it in high precision"
            )
        # As they lie: of a stack that is the transpose of what a GEMM reads, so is this.
        spec = owner.__dict__["weight_spec"]
        spec = replace(spec, block=spec.block[::-1]) if p.dim() == 3 and lies_turned(owner) else spec
        return MasterFormat(preset.codes, spec, preset.stochastic and preset.codes[:3] == "res")
    if preset.bfloat16 == "float16" and p.dtype in (torch.bfloat16, torch.float16):
        return MasterFormat("float16")
    if p.dtype is torch.bfloat16:
        if preset.bfloat16 == "none":
            return MasterFormat("plain", stochastic=True)
        return MasterFormat(preset.bfloat16, stochastic=preset.stochastic and preset.bfloat16[:3] == "res")
    # float16 has other exponents than float32, so that what float32 has more is not some bits.
    return MasterFormat("float32" if p.dtype is torch.float16 and preset.bfloat16 != "none" else "plain")


def first_states(master_format: MasterFormat, weight: Tensor, value: Tensor | None) -> tuple[Tensor, ...]:
    """What is kept beside a weight at the first step, of its shape.

    Args:
        weight: as it is.
        value: float32 in high precision, if it is known.
    """
    if master_format.kind == "plain":
        return ()
    if not master_format.dtype.is_floating_point:
        return (torch.zeros(weight.shape, dtype=master_format.dtype, device=weight.device),)
    assert value is not None
    if master_format.kind == "float32":
        return (value.clone(),)
    master, scale = codes.encode(value, _MASTER16)
    assert scale is not None
    return master, scale


def read(master_format: MasterFormat, tensors: tuple[Tensor, ...]) -> Tensor:
    """The weight, float32. Exact."""
    if master_format.kind == "plain":
        return tensors[0].float()
    if master_format.kind == "remainder":
        return worth(master_format, _bits(master_format, tensors[0]), tensors[1].int(), 16)
    if master_format.master:
        halved = master_format.kind == "float16"
        weight, master = tensors[0], codes.decode(tensors[-2], tensors[-1], _MASTER16) if halved else tensors[-1]
        # Of codes nothing shows whether they were changed since the master was written.
        if master_format.spec is not None:
            return master
        # By bits: a compiler leaves a conversion out that only a comparison of numbers reads.
        same = master.to(weight.dtype).view(torch.int16) == weight.view(torch.int16)
        return torch.where(same, master, weight.float())
    value = worth(master_format, _bits(master_format, tensors[0]), tensors[-1].int(), BITS[tensors[-1].dtype])
    return value if master_format.spec is None else value * _spread_scales(master_format.spec, tensors[1], value)


def followed(master_format: MasterFormat, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The master beside codes after a write to these: itself within half a step of its code, else the code's value."""
    spec, master = master_format.spec, read(master_format, tensors)
    assert spec is not None
    field = ((_bits(master_format, tensors[0]) & 0x7F) >> spec.format.mantissa_bits).clamp_(min=1)
    half = (field - (spec.format.bias + spec.format.mantissa_bits + 1) + 127 << 23).view(torch.float32)
    value = values(spec, tensors[0], tensors[1])
    # A scale that is no power of two rounds, and a float16 master has eleven bits.
    near = (master - value).abs() <= scaled(spec, tensors[1], half) * (1 + 2.0**-6)
    return first_states(master_format, tensors[0], torch.where(near, master, value))


def worth(master_format: MasterFormat, code: Tensor, rest: Tensor, more: int) -> Tensor:
    """What a code and its residual of so many bits are, int32 each: float32, a multiple of the code's scale. Exact;
    below a code of 0, which a pruning mask writes over a residual, there is nothing."""
    below, lower, sign, most = _places(master_format, more)
    bits = (((code & most) << more) + rest).clamp_(min=0) << below
    value = (bits | (code << (31 - sign)) & _SIGN).view(torch.float32)
    return value if lower == 1.0 else value * (1.0 / lower)


def numbers(master_format: MasterFormat, x: Tensor, more: int, noise: Tensor | None) -> Tensor:
    """The whole numbers that magnitudes are with so many bits below a code's: int32.

    Args:
        x: float32, multiples of the scale.
        noise: int32 below 2**15; None rounds to nearest.
    """
    below, lower, _, _ = _places(master_format, more)
    lost = 1 << below >> 1 if noise is None else noise >> (NOISE_BITS - below)
    if master_format.spec is None:
        return (torch.where(x != x, NAN_BITS, x.view(torch.int32)) & ~_SIGN) + lost >> below
    # As far as the largest code reaches, of NaN too.
    most = (master_format.spec.format.max_code << more) + (1 << more - 1) - 1
    return (x.abs() * lower).view(torch.int32).clamp(max=most << below) + lost >> below


def halves(master_format: MasterFormat, number: Tensor, x: Tensor, more: int) -> tuple[Tensor, Tensor]:
    """The code, with the sign of x, and the residual of such numbers: int32."""
    _, _, sign, most = _places(master_format, more)
    code = number + (1 << more - 1) >> more
    return code | x.view(torch.int32) >> (31 - sign) & (most + 1), number - (code << more)


def write(
    master_format: MasterFormat,
    weight: Tensor,
    tensors: tuple[Tensor, ...],
    noise: Tensor | None,
    amax: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The tensors that hold a new weight.

    Args:
        weight: float32.
        tensors: that held the last, for their dtypes.
        noise: int32 below 2**15, if the keeping is stochastic.
        amax: float32, of the weight's blocks, that none exceeds; None measures them.
    """
    if master_format.kind == "plain":
        if tensors[0].dtype is torch.bfloat16:
            return (codes.to_bfloat16(weight, noise),)
        return (weight.to(tensors[0].dtype),)
    if master_format.kind == "remainder":
        # Of NaN the sixteen bits of a bfloat16 alone may say a number, or carry into the sign.
        bits = torch.where(weight != weight, NAN_BITS, weight.view(torch.int32))
        rest = bits.to(torch.int16)
        return ((bits - rest.int()) >> 16).to(torch.int16).view(torch.bfloat16), rest
    if master_format.kind[:8] == "residual":
        return _write_longer(master_format, weight, tensors, noise, amax)
    if master_format.spec is None and master_format.kind == "float32":
        return weight.to(tensors[0].dtype), weight
    if master_format.spec is None:
        master, master_scale = codes.encode(weight, _MASTER16)
        # The weight follows from its master: rounded by itself it would differ at ties, as if it was written since.
        value = codes.decode(master, master_scale, _MASTER16)
        assert master_scale is not None
        return value.to(tensors[0].dtype), master, master_scale
    q = reference.quantize(weight, master_format.spec, amax)
    scale = q.scale
    assert isinstance(scale, Tensor)
    data = q.data.view(tensors[0].dtype)
    if master_format.kind == "float32":
        return data, scale, weight
    master, master_scale = codes.encode(weight, _MASTER16)
    assert master_scale is not None
    return data, scale, master, master_scale


def _write_longer(
    master_format: MasterFormat, weight: Tensor, tensors: tuple[Tensor, ...], noise: Tensor | None, amax: Tensor | None
) -> tuple[Tensor, ...]:
    """Codes, or bfloat16, and residuals; of codes that are not finite residuals say nothing."""
    more, spec = BITS[tensors[-1].dtype], master_format.spec
    if spec is None:
        code, rest = halves(master_format, numbers(master_format, weight, more, noise), weight, more)
        return code.to(torch.int16).view(torch.bfloat16), rest.to(tensors[-1].dtype)
    measured = reference.block_bits(magnitude_bits(weight), spec)
    top = measured if amax is None else reference.given_bits(amax, measured)
    e = reference.factors(top, spec)
    scale = reference.stored_scale(top, (top < INFINITY_BITS) & (measured < INFINITY_BITS), e, spec)
    y = weight * spread(codes.kept_apart(e), spec.block, (weight.shape[0], weight.shape[1]))
    code, rest = halves(master_format, numbers(master_format, y, more, noise), y, more)
    return code.to(torch.uint8).view(tensors[0].dtype), scale, rest.to(tensors[-1].dtype)


def values(spec: QuantSpec, codes: Tensor, scale: Tensor) -> Tensor:
    """What codes [rows, K] stand for, float32. Exact."""
    return scaled(spec, scale, codes.float())


def scaled(spec: QuantSpec, scale: Tensor, multiples: Tensor) -> Tensor:
    """Multiples of the scales, float32 [rows, K], times these. Exact."""
    return multiples * _spread_scales(spec, scale, multiples)


def resolution(weight: Tensor) -> float:
    """The mean distance between numbers that E4M3 codes and eight bits of residual tell apart."""
    # A code's half step is at most 2**-4 of its number, a part of it 2**-7.
    return float(weight.abs().mean()) * 2.0**-11


def block_amax(spec: QuantSpec, weight: Tensor) -> Tensor:
    """The largest magnitude of each block, float32: subnormal ones are 0."""
    if spec.block == (None, None) and weight.numel():
        top = weight.abs().amax().view(1, 1)
        return torch.where(top < codes.SMALLEST_NORMAL, 0.0, top)
    return reference.block_bits(magnitude_bits(weight), spec).view(torch.float32)


def _places(master_format: MasterFormat, more: int) -> tuple[int, float, int, int]:
    """Of a residual with so many bits: how many of float32's lie below it; what brings a number's exponent to where
    float32's bits are a code's, so that subnormals of the format are float32's; the place of a code's sign, and the
    largest magnitude of its bits."""
    if master_format.spec is None:
        return 16 - more, 1.0, 15, 0x7FFF
    fmt = master_format.spec.format
    return 23 - fmt.mantissa_bits - more, 2.0 ** (fmt.bias - 127), 7, 0x7F


def _bits(master_format: MasterFormat, held: Tensor) -> Tensor:
    """Codes as int32."""
    return held.view(torch.int16 if master_format.spec is None else torch.uint8).int()


def _spread_scales(spec: QuantSpec, scale: Tensor, weight: Tensor) -> Tensor:
    return spread(decode_scales(scale, spec, None), spec.block, (weight.shape[0], weight.shape[1]))


def around(master_format: MasterFormat, weight: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What is kept beside a weight that stays as a GEMM reads it, so that both say `weight` as nearly as they can.

    Args:
        weight: float32.
        tensors: as `read` takes them; what is kept beside the weight may hold anything.
    """
    if master_format.kind == "plain":
        return ()
    if master_format.kind == "remainder":
        # Exact where the bfloat16 is the weight rounded: it fits sixteen bits, but for a negative number just half a
        # step away, which comes an ulp nearer.
        rest = weight.view(torch.int32) - (tensors[0].view(torch.int16).int() << 16)
        return (rest.clamp(-(2**15), 2**15 - 1).to(torch.int16),)
    if master_format.kind == "float32":
        return (weight.clone(),)
    if master_format.kind == "float16":
        master, scale = codes.encode(weight, _MASTER16)
        assert scale is not None
        return master, scale
    scaled = weight if master_format.spec is None else weight / _spread_scales(master_format.spec, tensors[1], weight)
    more, code = BITS[tensors[-1].dtype], _bits(master_format, tensors[0])
    _, _, sign, most = _places(master_format, more)
    number, nearest = numbers(master_format, scaled, more, None), (code & most) << more
    # A number of the other sign comes nearest where there is nothing; below nothing there is none.
    rest = torch.where((code << (31 - sign) ^ scaled.view(torch.int32)) < 0, -number, number) - nearest
    rest = torch.maximum(rest, -nearest).clamp_(-(1 << more - 1), (1 << more - 1) - 1)
    return (torch.where(weight.isnan(), 0, rest).to(tensors[-1].dtype),)
