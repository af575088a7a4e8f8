"""How the weight itself is kept between steps: what a GEMM reads, and what it has more than that.

    plain       float32, float16 or bfloat16 itself; bfloat16 may be rounded at random
    remainder   bfloat16, and the 16 bits that float32 has more (int16): together float32, bit by bit
    residual    codes of a GEMM, or bfloat16, and what is missing in parts of half a step (int8 or int16)
    master      codes of a GEMM, and float32 or float16 beside them

A weight is read as float32, and written from it. The parts of a residual are powers of two, 1/128 and 1/32768 of half a
step: what int8 holds, int16 and float32 hold too. Sources: remainder, Transformer Engine's FusedAdam; residual of
bfloat16, FlashOptim, arXiv:2602.23349; float16 master with a scale, MS-AMP, arXiv:2310.18313.
"""

from dataclasses import dataclass, replace
from math import log2

import torch
from torch import Tensor

from quaver.core.numbers.formats import E4M3
from quaver.core.spec import QuantSpec
from quaver.core.states.codes import StateSpec
from quaver.core.states.presets import Preset
from quaver.torch.linear.stored import storing
from quaver.torch.linear.stored.stored import lies_turned
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import decode_scales, spread
from quaver.torch.numerics.rounding import INFINITY_BITS, magnitude_bits
from quaver.torch.optim import codes

#: Parts of half a step by the dtype of the residual.
PARTS = {torch.int8: 2.0**7, torch.int16: 2.0**15}
_NAN_BITS = 0x7FC00000
_MASTER16 = StateSpec(code="float16", block=None, scale="power_of_two")


@dataclass(frozen=True)
class Keeping:
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
    def whole(self) -> bool:
        """Whether a step needs the whole weight: a scale of all of it is measured."""
        return self.kind == "float16"

    @property
    def by_rows(self) -> "Keeping":
        """The same of rows that have their scales each: what is kept is read, and written around, alike."""
        return self if self.spec is None else replace(self, spec=replace(self.spec, block=(1, self.spec.block[1])))


def keeping_of(p: Tensor, preset: Preset) -> Keeping:
    """How a parameter's weight is kept."""
    if storing.holds_codes(p):
        owner = storing.owner(p)
        if owner is None:
            raise ValueError(
                f"a parameter of {p.dtype} belongs to no layer of quaver.torch: make it by quantized_init or "
                "quantize_weights, or keep it in high precision"
            )
        # As they lie: of a stack that is the transpose of what a GEMM reads, so is this.
        spec = owner.__dict__["weight_spec"]
        spec = replace(spec, block=spec.block[::-1]) if p.dim() == 3 and lies_turned(owner) else spec
        return Keeping(preset.codes, spec, preset.stochastic and preset.codes[:3] == "res")
    if p.dtype is torch.bfloat16:
        if preset.bfloat16 == "none":
            return Keeping("plain", stochastic=True)
        return Keeping(preset.bfloat16, stochastic=preset.stochastic and preset.bfloat16[:3] == "res")
    return Keeping("plain")


def first_states(keeping: Keeping, weight: Tensor, value: Tensor | None) -> tuple[Tensor, ...]:
    """What is kept beside a weight at the first step, of its shape.

    Args:
        weight: as it is.
        value: float32 in high precision, if it is known.
    """
    integers = {"remainder": torch.int16, "residual16": torch.int16, "residual8": torch.int8}
    if keeping.kind in integers:
        return (torch.zeros(weight.shape, dtype=integers[keeping.kind], device=weight.device),)
    if keeping.kind == "plain":
        return ()
    assert value is not None
    if keeping.kind == "float32":
        return (value.clone(),)
    master, scale = codes.encode(value, _MASTER16)
    assert scale is not None
    return master, scale


def read(keeping: Keeping, tensors: tuple[Tensor, ...]) -> Tensor:
    """The weight, float32. Exact."""
    if keeping.kind == "plain":
        return tensors[0].float()
    if keeping.kind == "remainder":
        weight, rest = tensors
        return ((weight.view(torch.int16).int() << 16) + rest.int()).view(torch.float32)
    if keeping.kind == "float32":
        return tensors[-1]
    if keeping.kind == "float16":
        return codes.decode(tensors[-2], tensors[-1], _MASTER16)
    value, half = _value_and_half(keeping, tensors[0])
    value = value + tensors[-1].float() * (half * (1 / PARTS[tensors[-1].dtype]))
    return value if keeping.spec is None else value * _spread_scales(keeping.spec, tensors[1], value)


def write(
    keeping: Keeping, weight: Tensor, tensors: tuple[Tensor, ...], noise: Tensor | None, amax: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The tensors that hold a new weight.

    Args:
        weight: float32.
        tensors: that held the last, for their dtypes.
        noise: int32 below 2**15, if the keeping is stochastic.
        amax: float32, of the weight's blocks, that none exceeds; None measures them.
    """
    if keeping.kind == "plain":
        if tensors[0].dtype is torch.bfloat16:
            return (codes.to_bfloat16(weight, noise),)
        return (weight.to(tensors[0].dtype),)
    if keeping.kind == "remainder":
        # Of NaN the sixteen bits of a bfloat16 alone may say a number, or carry into the sign.
        bits = torch.where(weight.isnan(), _NAN_BITS, weight.view(torch.int32))
        rest = bits.to(torch.int16)
        return ((bits - rest.int()) >> 16).to(torch.int16).view(torch.bfloat16), rest
    if keeping.spec is None:
        value = weight.to(torch.bfloat16)
        return value, _residual(keeping, weight, value, tensors[-1].dtype, noise)
    if tensors[0].dtype is torch.uint8 and keeping.spec.format == E4M3 and torch.compiler.is_compiling():
        return _write_in_vectors(keeping, weight, tensors, noise, amax)
    q = reference.quantize(weight, keeping.spec, amax)
    scale = q.scale
    assert isinstance(scale, Tensor)
    data = q.data.view(tensors[0].dtype)
    if keeping.kind == "float32":
        return data, scale, weight
    if keeping.kind == "float16":
        master, master_scale = codes.encode(weight, _MASTER16)
        assert master_scale is not None
        return data, scale, master, master_scale
    wide = _spread_scales(keeping.spec, scale, weight)
    # By a power of two, a product with the inverse.
    scaled = weight * codes.kept_apart(wide.reciprocal()) if keeping.spec.power_of_two else weight / wide
    return data, scale, _residual(keeping, scaled, data, tensors[-1].dtype, noise)


def _write_in_vectors(
    keeping: Keeping, weight: Tensor, tensors: tuple[Tensor, ...], noise: Tensor | None, amax: Tensor | None
) -> tuple[Tensor, ...]:
    """Codes of E4M3 and residuals for a compiler that makes vectors of them; of a weight that is not finite residuals
    say nothing."""
    spec = keeping.spec
    assert spec is not None
    measured = reference.block_bits(magnitude_bits(weight), spec)
    top = measured if amax is None else reference.given_bits(amax, measured)
    e = reference.factors(top, spec)
    scale = reference.stored_scale(top, (top < INFINITY_BITS) & (measured < INFINITY_BITS), e, spec)
    # Not what says whether all is finite, for which a compiler would go over the weight before.
    wide = decode_scales(reference.stored_scale(top, top < INFINITY_BITS, e, spec), spec, None)
    e = torch.where(top == 0, 0.0, e) if spec.scale == "e8m0" else e
    shape = (weight.shape[0], weight.shape[1])
    inverse = spread(codes.kept_apart(wide.reciprocal()), spec.block, shape)
    scaled = weight * inverse if spec.power_of_two else weight / spread(wide, spec.block, shape)
    written, near, exponent = codes.to_e4m3(weight * spread(codes.kept_apart(e), spec.block, shape))
    beside = _rounded(scaled - near, exponent, tensors[-1].dtype, noise)
    return written.to(torch.uint8), scale, beside


def values(spec: QuantSpec, codes: Tensor, scale: Tensor) -> Tensor:
    """What codes [rows, K] stand for, float32. Exact."""
    return codes.float() * _spread_scales(spec, scale, codes)


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


def _residual(keeping: Keeping, value: Tensor, held: Tensor, dtype: torch.dtype, noise: Tensor | None) -> Tensor:
    near, half = _value_and_half(keeping, held)
    if keeping.spec is not None:
        return _rounded(value - near, _exponent(keeping, held), dtype, noise)
    return _whole((value - near) / half * PARTS[dtype], dtype, noise)


def _rounded(rest: Tensor, exponent: Tensor, dtype: torch.dtype, noise: Tensor | None) -> Tensor:
    """A residual of what is missing, float32, beside codes half of whose step has this exponent."""
    return _whole(rest * (int(log2(PARTS[dtype])) + 127 - exponent << 23).view(torch.float32), dtype, noise)


def _whole(rest: Tensor, dtype: torch.dtype, noise: Tensor | None) -> Tensor:
    parts = PARTS[dtype]
    rest = rest.round() if noise is None else noise.float().mul_(2.0**-15).add_(rest).floor_()
    return torch.where(rest == rest, rest, 0.0).clamp_(-parts, parts - 1).to(dtype)


def _value_and_half(keeping: Keeping, held: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of codes, and half of the step between neighbours there: float32."""
    if keeping.spec is None:
        bits = held.view(torch.int16).int() & 0x7F80
        # Half a step is 2**-8 of the number's power of two; kept a normal number, of infinity too.
        half = (bits << 16).view(torch.float32).clamp(min=2.0**-117, max=2.0**127) * 2.0**-8
        return held.float(), half
    return _value(keeping, held), (_exponent(keeping, held) + 127 << 23).view(torch.float32)


def _value(keeping: Keeping, held: Tensor) -> Tensor:
    """The numbers of codes, float32; E4M3 in bytes is what a compiler makes vectors of."""
    assert keeping.spec is not None
    in_bytes = held.dtype is torch.uint8 and keeping.spec.format == E4M3
    return codes.e4m3_values(held) if in_bytes else held.float()


def _exponent(keeping: Keeping, held: Tensor) -> Tensor:
    """Of half a step around the numbers of codes: int32."""
    assert keeping.spec is not None
    fmt = keeping.spec.format
    field = (held.view(torch.uint8).int() & 0x7F) >> fmt.mantissa_bits
    return field.clamp(min=1) - (fmt.bias + fmt.mantissa_bits + 1)


def _spread_scales(spec: QuantSpec, scale: Tensor, weight: Tensor) -> Tensor:
    return spread(decode_scales(scale, spec, None), spec.block, (weight.shape[0], weight.shape[1]))


def around(keeping: Keeping, weight: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What is kept beside a weight that stays as a GEMM reads it, so that both say `weight` as nearly as they can.

    Args:
        weight: float32.
        tensors: as `read` takes them; what is kept beside the weight may hold anything.
    """
    if keeping.kind == "plain":
        return ()
    if keeping.kind == "remainder":
        # Exact where the bfloat16 is the weight rounded: it fits sixteen bits, but for a negative number just half a
        # step away, which comes an ulp nearer.
        rest = weight.view(torch.int32) - (tensors[0].view(torch.int16).int() << 16)
        return (rest.clamp(-(2**15), 2**15 - 1).to(torch.int16),)
    if keeping.kind == "float32":
        return (weight.clone(),)
    if keeping.kind == "float16":
        master, scale = codes.encode(weight, _MASTER16)
        assert scale is not None
        return master, scale
    scaled = weight if keeping.spec is None else weight / _spread_scales(keeping.spec, tensors[1], weight)
    return (_residual(keeping, scaled, tensors[0], tensors[-1].dtype, None),)
