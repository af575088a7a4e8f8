"""Storage of a weight between steps: the tensor that a GEMM reads, and additional bits.

    plain       float32, float16 or bfloat16 only; bfloat16 may be rounded stochastically
    remainder   bfloat16, and the other 16 bits of float32 (int16): together exactly a float32
    residual    codes, or bfloat16, and further mantissa bits (int8 or int16)
    master      codes or float16, and a float32 master; or codes, bfloat16 or float16, and a float16 master with one
    scale

A weight is read as float32 and written from float32. With a residual, the magnitude is one integer: the code's bits
followed by 8 or 16 more, as bfloat16 is the upper half of float32. The code is that integer rounded, and the residual
is the rounding error. A residual8 converts to residual16 or float32 exactly. Sources: remainder, Transformer Engine's
FusedAdam; residual of eight bits, FlashOptim, arXiv:2602.23349; float16 master with a scale, MS-AMP, arXiv:2310.18313.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec
from quaver.reference.optim import NOISE_BITS
from quaver.reference.optimizer_state import Preset, StateSpec
from quaver.torch.linear import stored_weight
from quaver.torch.linear.stored_weight import is_stored_transposed
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import decode_scales, spread
from quaver.torch.numerics.rounding import INFINITY_BITS, magnitude_bits
from quaver.torch.optim import codes

#: Bits of a residual by its dtype.
BITS = {torch.int8: 8, torch.int16: 16}
NAN_BITS, _SIGN = 0x7FC00000, -0x80000000
_MASTER16 = StateSpec(code="float16", block=None, scale="power_of_two")


@dataclass(frozen=True)
class WeightFormat:
    """Format of a weight and its additional states: a master, residual or remainder.

    Tensors are passed in this order: the weight, its scales (of codes), its state, the state's scale (of a float16
    master).
    """

    #: "plain", "remainder", "residual8", "residual16", or the masters "float32" and "float16".
    kind: str
    #: Spec of the codes that a GEMM reads; None if the weight is a float.
    code_spec: QuantSpec | None = None
    #: True if rounding to this format is stochastic.
    stochastic: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the additional states."""
        kinds = {
            "plain": (),
            "remainder": ("remainder",),
            "float32": ("master",),
            "float16": ("master", "master_scale"),
        }
        return kinds.get(self.kind, ("residual",))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elementwise additional state; undefined for "plain"."""
        return {
            **{"remainder": torch.int16, "residual16": torch.int16, "residual8": torch.int8},
            **{"float32": torch.float32, "float16": torch.float16},
        }[self.kind]

    @property
    def master(self) -> bool:
        """True if a float master determines the weight alone."""
        return self.kind in ("float32", "float16")

    @property
    def needs_whole_weight(self) -> bool:
        """True if a step needs the whole weight, because it measures a single scale."""
        return self.kind == "float16"

    @property
    def by_rows(self) -> "WeightFormat":
        """The same format with separate scales for each row, for reading, and for writing states around a weight."""
        return (
            self
            if self.code_spec is None
            else replace(self, code_spec=replace(self.code_spec, block=(1, self.code_spec.block[1])))
        )


def weight_format_of(p: Tensor, preset: Preset) -> WeightFormat:
    """Return the format of a parameter's weight under a preset."""
    if stored_weight.holds_codes(p):
        owner = stored_weight.owner(p)
        if owner is None:
            raise ValueError(
                f"a parameter of {p.dtype} belongs to no layer of quaver.torch: make it by quantized_init or "
                "quantize_weights, or keep it in high precision"
            )
        # In the stored layout: a stack may be stored as the transpose of what a GEMM reads, and its blocks with it.
        spec = owner.__dict__["weight_spec"]
        spec = replace(spec, block=spec.block[::-1]) if p.dim() == 3 and is_stored_transposed(owner) else spec
        return WeightFormat(preset.codes, spec, preset.stochastic and preset.codes[:3] == "res")
    if preset.bfloat16 == "float16" and p.dtype in (torch.bfloat16, torch.float16):
        return WeightFormat("float16")
    if p.dtype is torch.bfloat16:
        if preset.bfloat16 == "none":
            return WeightFormat("plain", stochastic=True)
        return WeightFormat(preset.bfloat16, stochastic=preset.stochastic and preset.bfloat16[:3] == "res")
    # float16 has another exponent range than float32, so a remainder of bits cannot extend it.
    return WeightFormat("float32" if p.dtype is torch.float16 and preset.bfloat16 != "none" else "plain")


def first_states(
    weight_format: WeightFormat, weight: Tensor, value: Tensor | None, device: torch.device | None = None
) -> tuple[Tensor, ...]:
    """Create the additional states of a weight before the first step.

    Args:
        weight_format: format of the weight.
        weight: the weight as stored; states have its shape.
        value: the weight in float32, on the device of the states; required for masters.
        device: device of the states; None for the weight's.
    """
    if weight_format.kind == "plain":
        return ()
    if not weight_format.dtype.is_floating_point:
        return (torch.zeros(weight.shape, dtype=weight_format.dtype, device=device or weight.device),)
    assert value is not None
    if weight_format.kind == "float32":
        return (value.clone(),)
    master, scale = codes.encode(value, _MASTER16)
    assert scale is not None
    return master, scale


def read(weight_format: WeightFormat, tensors: tuple[Tensor, ...]) -> Tensor:
    """Return the weight in float32. Exact."""
    if weight_format.kind == "plain":
        return tensors[0].float()
    if weight_format.kind == "remainder":
        return from_code_and_residual(weight_format, _bits(weight_format, tensors[0]), tensors[1].int(), 16)
    if weight_format.master:
        halved = weight_format.kind == "float16"
        weight, master = tensors[0], codes.decode(tensors[-2], tensors[-1], _MASTER16) if halved else tensors[-1]
        # For codes, nothing shows whether they were changed after the master was written, so trust the master.
        if weight_format.code_spec is not None:
            return master
        # Compare bits: a compiler may drop a conversion that only a comparison of floats uses.
        same = master.to(weight.dtype).view(torch.int16) == weight.view(torch.int16)
        return torch.where(same, master, weight.float())
    value = from_code_and_residual(
        weight_format, _bits(weight_format, tensors[0]), tensors[-1].int(), BITS[tensors[-1].dtype]
    )
    return (
        value if weight_format.code_spec is None else value * _spread_scales(weight_format.code_spec, tensors[1], value)
    )


def master_after_write(weight_format: WeightFormat, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the master after a write to its codes: unchanged where it is within half a step of its code, else the
    code's value.
    """
    spec, master = weight_format.code_spec, read(weight_format, tensors)
    assert spec is not None
    field = ((_bits(weight_format, tensors[0]) & 0x7F) >> spec.format.mantissa_bits).clamp_(min=1)
    half = (field - (spec.format.bias + spec.format.mantissa_bits + 1) + 127 << 23).view(torch.float32)
    value = values(spec, tensors[0], tensors[1])
    # A scale that is no power of two rounds, and a float16 master has 11 bits, so allow a tolerance.
    near = (master - value).abs() <= scaled(spec, tensors[1], half) * (1 + 2.0**-6)
    return first_states(weight_format, tensors[0], torch.where(near, master, value))


def from_code_and_residual(weight_format: WeightFormat, code: Tensor, rest: Tensor, residual_bits: int) -> Tensor:
    """Combine int32 codes and residuals of `residual_bits` bits to float32 multiples of the code's scale. Exact.

    A negative residual below a code of 0, as a pruning mask may leave, counts as 0.
    """
    dropped_bits, rebase, sign_bit, max_magnitude = _bit_layout(weight_format, residual_bits)
    bits = (((code & max_magnitude) << residual_bits) + rest).clamp_(min=0) << dropped_bits
    value = (bits | (code << (31 - sign_bit)) & _SIGN).view(torch.float32)
    return value if rebase == 1.0 else value * (1.0 / rebase)


def to_integers(weight_format: WeightFormat, x: Tensor, residual_bits: int, noise: Tensor | None) -> Tensor:
    """Convert magnitudes to integers with `residual_bits` bits below those of a code: int32.

    Args:
        weight_format: format of the weight.
        x: float32, multiples of the scale.
        residual_bits: bits of a residual.
        noise: int32 below 2**15; None rounds to nearest.
    """
    dropped_bits, rebase, _, _ = _bit_layout(weight_format, residual_bits)
    rounding_addend = 1 << dropped_bits >> 1 if noise is None else noise >> (NOISE_BITS - dropped_bits)
    if weight_format.code_spec is None:
        return (torch.where(x != x, NAN_BITS, x.view(torch.int32)) & ~_SIGN) + rounding_addend >> dropped_bits
    # Clamp to the range of the largest code, NaN included.
    max_integer = (weight_format.code_spec.format.max_code << residual_bits) + (1 << residual_bits - 1) - 1
    return (x.abs() * rebase).view(torch.int32).clamp(max=max_integer << dropped_bits) + rounding_addend >> dropped_bits


def split_integers(weight_format: WeightFormat, number: Tensor, x: Tensor, residual_bits: int) -> tuple[Tensor, Tensor]:
    """Split such integers into int32 codes, with the sign of x, and int32 residuals."""
    _, _, sign_bit, max_magnitude = _bit_layout(weight_format, residual_bits)
    code = number + (1 << residual_bits - 1) >> residual_bits
    return code | x.view(torch.int32) >> (31 - sign_bit) & (max_magnitude + 1), number - (code << residual_bits)


def write(
    weight_format: WeightFormat,
    weight: Tensor,
    tensors: tuple[Tensor, ...],
    noise: Tensor | None,
    amax: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the tensors that represent a new weight.

    Args:
        weight_format: format of the weight.
        weight: float32.
        tensors: the previous tensors, for their dtypes.
        noise: int32 below 2**15, if the format is stochastic.
        amax: float32 upper bounds of the blocks' magnitudes; None measures them.
    """
    if weight_format.kind == "plain":
        if tensors[0].dtype is torch.bfloat16:
            return (codes.to_bfloat16(weight, noise),)
        return (weight.to(tensors[0].dtype),)
    if weight_format.kind == "remainder":
        # Canonical NaN: the upper 16 bits of another NaN may encode a number or carry into the sign.
        bits = torch.where(weight != weight, NAN_BITS, weight.view(torch.int32))
        rest = bits.to(torch.int16)
        return ((bits - rest.int()) >> 16).to(torch.int16).view(torch.bfloat16), rest
    if weight_format.kind[:8] == "residual":
        return _write_longer(weight_format, weight, tensors, noise, amax)
    if weight_format.code_spec is None and weight_format.kind == "float32":
        return weight.to(tensors[0].dtype), weight
    if weight_format.code_spec is None:
        master, master_scale = codes.encode(weight, _MASTER16)
        # Derive the weight from the rounded master; rounded from the original it would differ at ties, as if it was
        # written since.
        value = codes.decode(master, master_scale, _MASTER16)
        assert master_scale is not None
        return value.to(tensors[0].dtype), master, master_scale
    q = reference.quantize(weight, weight_format.code_spec, amax)
    scale = q.scale
    assert isinstance(scale, Tensor)
    data = q.data.view(tensors[0].dtype)
    if weight_format.kind == "float32":
        return data, scale, weight
    master, master_scale = codes.encode(weight, _MASTER16)
    assert master_scale is not None
    return data, scale, master, master_scale


def _write_longer(
    weight_format: WeightFormat, weight: Tensor, tensors: tuple[Tensor, ...], noise: Tensor | None, amax: Tensor | None
) -> tuple[Tensor, ...]:
    """Return codes or bfloat16, and residuals. Where codes are not finite, residuals are meaningless."""
    residual_bits, spec = BITS[tensors[-1].dtype], weight_format.code_spec
    if spec is None:
        code, rest = split_integers(
            weight_format, to_integers(weight_format, weight, residual_bits, noise), weight, residual_bits
        )
        return code.to(torch.int16).view(torch.bfloat16), rest.to(tensors[-1].dtype)
    measured = reference.block_bits(magnitude_bits(weight), spec)
    amax_bits = measured if amax is None else reference.override_bits(amax, measured)
    e = reference.factors(amax_bits, spec)
    scale = reference.stored_scale(amax_bits, (amax_bits < INFINITY_BITS) & (measured < INFINITY_BITS), e, spec)
    y = weight * spread(codes.materialized(e), spec.block, (weight.shape[0], weight.shape[1]))
    code, rest = split_integers(weight_format, to_integers(weight_format, y, residual_bits, noise), y, residual_bits)
    return code.to(torch.uint8).view(tensors[0].dtype), scale, rest.to(tensors[-1].dtype)


def values(spec: QuantSpec, codes: Tensor, scale: Tensor) -> Tensor:
    """Dequantize codes [rows, K] to float32. Exact."""
    return scaled(spec, scale, codes.float())


def scaled(spec: QuantSpec, scale: Tensor, multiples: Tensor) -> Tensor:
    """Multiply float32 [rows, K] by the scales of their blocks. Exact."""
    return multiples * _spread_scales(spec, scale, multiples)


def resolution(weight: Tensor) -> float:
    """Return the mean distance between values that E4M3 codes with 8-bit residuals can represent."""
    # Half a step of a code is at most 2**-4 of its value, and a residual divides it by 2**7.
    return float(weight.abs().mean()) * 2.0**-11


def block_amax(spec: QuantSpec, weight: Tensor) -> Tensor:
    """Return the largest magnitude of each block, float32; subnormal ones count as 0."""
    if spec.block == (None, None) and weight.numel():
        amax = weight.abs().amax().view(1, 1)
        return torch.where(amax < codes.SMALLEST_NORMAL, 0.0, amax)
    return reference.block_bits(magnitude_bits(weight), spec).view(torch.float32)


def _bit_layout(weight_format: WeightFormat, residual_bits: int) -> tuple[int, float, int, int]:
    """Return bit positions for a residual of `residual_bits` bits.

    Returns:
        The number of float32 mantissa bits below the residual; the factor that rebases a value's exponent so that
        float32 bits are the code's bits, subnormals included; the bit position of a code's sign; the largest magnitude
        of a code's bits.
    """
    if weight_format.code_spec is None:
        return 16 - residual_bits, 1.0, 15, 0x7FFF
    fmt = weight_format.code_spec.format
    return 23 - fmt.mantissa_bits - residual_bits, 2.0 ** (fmt.bias - 127), 7, 0x7F


def _bits(weight_format: WeightFormat, stored: Tensor) -> Tensor:
    """View codes as int32."""
    return stored.view(torch.int16 if weight_format.code_spec is None else torch.uint8).int()


def _spread_scales(spec: QuantSpec, scale: Tensor, weight: Tensor) -> Tensor:
    return spread(decode_scales(scale, spec, None), spec.block, (weight.shape[0], weight.shape[1]))


def around(weight_format: WeightFormat, weight: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute the additional states of a given weight so that both together come closest to a float32 value.

    Args:
        weight_format: format of the weight.
        weight: the float32 value.
        tensors: as in `read`; contents of the states are ignored.
    """
    if weight_format.kind == "plain":
        return ()
    if weight_format.kind == "remainder":
        # Exact if the bfloat16 is the value rounded: the difference fits 16 bits, except for a negative value just half
        # a step away, which ends up one ulp nearer.
        rest = weight.view(torch.int32) - (tensors[0].view(torch.int16).int() << 16)
        return (rest.clamp(-(2**15), 2**15 - 1).to(torch.int16),)
    if weight_format.kind == "float32":
        return (weight.clone(),)
    if weight_format.kind == "float16":
        master, scale = codes.encode(weight, _MASTER16)
        assert scale is not None
        return master, scale
    scaled = (
        weight
        if weight_format.code_spec is None
        else weight / _spread_scales(weight_format.code_spec, tensors[1], weight)
    )
    residual_bits, code = BITS[tensors[-1].dtype], _bits(weight_format, tensors[0])
    _, _, sign_bit, max_magnitude = _bit_layout(weight_format, residual_bits)
    number, nearest = to_integers(weight_format, scaled, residual_bits, None), (code & max_magnitude) << residual_bits
    # For a value of the opposite sign, residual 0 would be nearest; magnitudes below 0 do not exist.
    rest = torch.where((code << (31 - sign_bit) ^ scaled.view(torch.int32)) < 0, -number, number) - nearest
    rest = torch.maximum(rest, -nearest).clamp_(-(1 << residual_bits - 1), (1 << residual_bits - 1) - 1)
    return (torch.where(weight.isnan(), 0, rest).to(tensors[-1].dtype),)
