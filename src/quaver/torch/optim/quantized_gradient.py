"""A gradient stored in fewer bits that stays in `p.grad`: a tensor of the gradient's dtype to all who read it.

`torch.nn.utils.clip_grad_norm_`, GradScaler, DDP and trainers work on `p.grad`, so codes and scales, or bfloat16
numbers, must stay there:

    read                          decodes, into a temporary; norms decode some rows at a time
    multiplied by one number      the number is stored, and the step multiplies by it: exact
    added to, if bfloat16         the sum is bfloat16
    changed otherwise, or viewed  stored in high precision from then on, such as the sum with a second backward's
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quaver.core.states.codes import StateSpec
from quaver.torch.numerics.quantized import make_wrapper_subclass
from quaver.torch.optim import codes

#: Elements that are encoded at once, and decoded where a norm is taken: on a CPU, and where launches cost more.
PIECE, LAUNCHED = 1 << 16, 1 << 22


@dataclass
class Contents:
    """What a gradient is stored as; shared by all tensors that alias it."""

    #: Of codes; None: the numbers are bfloat16.
    spec: StateSpec | None
    #: Codes and scales, or bfloat16 numbers; None where it is stored in high precision.
    codes: tuple[Tensor, ...] | None
    #: What decoded values are multiplied by, float32 []; None: 1.
    factor: Tensor | None = None
    #: The gradient in high precision, in place of codes.
    value: Tensor | None = None
    #: Whether it was set to zero in place, so that the next backward's gradient is encoded again.
    zeroed: bool = False


class QuantizedGradient(Tensor):
    """A gradient stored in fewer bits. Its dtype and shape are those of the values it stands for."""

    contents: Contents

    @staticmethod
    def __new__(cls, contents: Contents, like: Tensor) -> "QuantizedGradient":
        self: QuantizedGradient = make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        self.contents = contents
        return self

    @classmethod
    def of(cls, gradient: Tensor, spec: StateSpec | None, shape: tuple[int, ...] | None = None) -> "QuantizedGradient":
        """Store a gradient in high precision as codes of a shape (None: its own), or as bfloat16."""
        if spec is None:
            return cls(Contents(None, (gradient.to(torch.bfloat16),)), gradient)
        return cls(Contents(spec, encoded(gradient if shape is None else gradient.reshape(shape), spec)), gradient)

    @property
    def codes(self) -> Tensor:
        assert self.contents.codes is not None
        return self.contents.codes[0]

    @property
    def scale(self) -> Tensor:
        assert self.contents.codes is not None
        return self.contents.codes[1]

    @property
    def value(self) -> Tensor | None:
        """The gradient in high precision, where it is stored so; else None."""
        return self.contents.value

    def tensors(self) -> list[Tensor]:
        """All that it is stored in."""
        own = self.contents
        return [t for t in (*(own.codes or ()), own.factor, own.value) if t is not None]

    def decoded(self) -> Tensor:
        """Its values, of its dtype: a new tensor, or what stores them in high precision."""
        own = self.contents
        if own.value is not None:
            return own.value
        values = self.codes.float() if own.spec is None else codes.decode(self.codes, self.scale, own.spec)
        values = values if own.factor is None else values * own.factor
        return values.to(self.dtype).reshape(self.shape).contiguous()

    def in_high_precision(self) -> Tensor:
        """Its values, as which it is stored from now on: what is written to them is written to it."""
        own = self.contents
        own.value, own.codes, own.factor = self.decoded(), None, None
        return own.value

    def multiply_by(self, number: Tensor | float) -> None:
        """Multiply by one number; exact, as decoded values are multiplied in float32."""
        own = self.contents
        if own.value is not None:
            own.value.mul_(number)
            return
        # Compiled steps read the bits of float32 [].
        factor = torch.as_tensor(number, dtype=torch.float32, device=self.device).detach().reshape(())
        own.factor = factor.clone() if own.factor is None else own.factor * factor

    def finite(self) -> Tensor:
        """Whether it is: bool []. Codes of a block that is not have the scale NaN."""
        own = self.contents
        if own.factor is not None:
            return self.norm_of(float("inf")).isfinite()
        seen = own.value if own.value is not None else self.codes if own.spec is None else self.scale
        return seen.isfinite().all()

    def zero(self) -> None:
        """Set it to zero in place."""
        own = self.contents
        for tensor in self.tensors():
            tensor.zero_()
        own.factor, own.zeroed = None, True

    def norm_of(self, order: float) -> Tensor:
        """Its norm, float32 [], decoded some rows at a time."""
        own = self.contents
        if own.value is not None:
            return norm_of(own.value, order)
        norms = [norm_of(piece, order) for piece in self._pieces()]
        norms = norms or [torch.zeros((), dtype=torch.float32, device=self.device)]
        whole = torch.linalg.vector_norm(torch.stack(norms), order)
        return whole if own.factor is None else whole * own.factor.abs()

    def _pieces(self) -> Iterator[Tensor]:
        data, spec = self.codes, self.contents.spec
        if spec is None:
            yield data
            return
        scale = self.scale
        if data.dim() < 2 or spec.block is None:
            yield codes.decode(data, scale, spec)
            return
        rows = max((PIECE if data.is_cpu else LAUNCHED) // max(prod(data.shape[1:]), 1), 1)
        for at in range(0, data.shape[0], rows):
            yield codes.decode(data[at : at + rows], scale[at : at + rows], spec)

    @property
    def data(self) -> Tensor:
        """As torch's: modules set it where they change dtype or device."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, values: Tensor) -> None:
        own = self.contents
        plain = values.decoded() if isinstance(values, QuantizedGradient) else values.detach()
        own.value, own.codes, own.factor = plain, None, None
        Tensor.data.__set__(self, QuantizedGradient(own, plain))  # type: ignore[attr-defined]

    def numpy(self, *, force: bool = False) -> Any:
        """As torch's: what is written to the array is written to the gradient."""
        return self.in_high_precision().numpy(force=force)

    def tolist(self) -> Any:
        return self.decoded().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec = self.contents.spec
        return f"QuantizedGradient({self.decoded()!r}, {'bfloat16' if spec is None else spec.text})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor, which torch.load reads with weights_only=True."""
        return self.decoded().__reduce_ex__(protocol)

    #: Results are plain tensors.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        handler, kwargs = HANDLERS.get(func.name().partition(".")[0]), kwargs or {}
        result = NotImplemented if handler is None else handler(*args, **kwargs)
        return _by_values(func, args, kwargs) if result is NotImplemented else result


def _of_memory(name: str) -> Callable[..., Any]:
    """A method that reads or writes memory and does not dispatch, on what stores the values in high precision."""

    def method(self: QuantizedGradient, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.in_high_precision(), name)(*args, **kwargs)
        return self if result is self.value else result

    return method


for _name in ("apply_", "map_", "share_memory_"):
    setattr(QuantizedGradient, _name, _of_memory(_name))


def encoded(gradient: Tensor, spec: StateSpec) -> tuple[Tensor, Tensor]:
    """Codes and scales of a gradient [..., K], some rows at a time: what that needs besides is as large as a piece.

    Exact: the bits of all rows at once.
    """
    size, count = PIECE if gradient.is_cpu else LAUNCHED, gradient.numel()
    if gradient.dim() < 2 or count <= size:
        data, scale = codes.encode(gradient.float(), spec)
        assert scale is not None
        # Of rows that are no whole blocks codes lie among what filled these.
        return data.contiguous(), scale
    pieces = gradient.flatten(0, -2).split(max(size // gradient.shape[-1], 1))
    top = None
    if spec.block is None:
        top = torch.stack([codes.block_amax(piece.float(), None) for piece in pieces]).amax(0)
    data = torch.empty(gradient.shape, dtype=codes.code_dtype(spec.of), device=gradient.device)
    shape = codes.scale_shape(gradient.shape, spec.block, spec.of.numbers)
    scales = torch.empty(shape, dtype=codes.SCALE_DTYPES[spec.scale], device=gradient.device)
    at = 0
    for piece in pieces:
        own, scale = codes.encode(piece.float(), spec, amax=top)
        assert scale is not None
        rows = slice(at, at + piece.shape[0])
        data.flatten(0, -2)[rows] = own
        if spec.block is None:
            scales.copy_(scale)
        else:
            scales.flatten(0, -2)[rows] = scale
        at = rows.stop
    return data, scales


def norm_of(x: Tensor, order: float) -> Tensor:
    """A norm, float32 []; of nothing, as a rank without rows has it, 0."""
    return torch.linalg.vector_norm(x if x.numel() else x.new_zeros(1), order, dtype=torch.float32)


def quantized(gradient: Tensor | None) -> QuantizedGradient | None:
    """A gradient that is stored as codes, this rank's part; None of any other."""
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return own if isinstance(own, QuantizedGradient) and own.value is None else None


def unwrapped(gradient: Tensor) -> Tensor:
    """A plain tensor for a gradient in high precision; one stored as codes is itself."""
    return gradient.value if isinstance(gradient, QuantizedGradient) and gradient.value is not None else gradient


def _alias(gradient: QuantizedGradient, *_: Any) -> QuantizedGradient:
    return QuantizedGradient(gradient.contents, gradient)


def _view(gradient: QuantizedGradient, shape: Any) -> Any:
    return _alias(gradient) if tuple(shape) == tuple(gradient.shape) else NotImplemented


def _clone(gradient: QuantizedGradient, **_: Any) -> QuantizedGradient:
    own = gradient.contents
    codes = None if own.codes is None else tuple(t.clone() for t in own.codes)
    factor, value = (None if t is None else t.clone() for t in (own.factor, own.value))
    return QuantizedGradient(Contents(own.spec, codes, factor, value, own.zeroed), gradient)


def _norm(gradient: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if not isinstance(gradient, QuantizedGradient) or dim is not None or keepdim or order == 0:
        return NotImplemented
    return gradient.norm_of(float(order)).to(dtype or gradient.dtype)


def _norms(gradients: Sequence[Tensor], order: Any = 2, dtype: Any = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(gradient, order, dtype=dtype) for gradient in gradients]


def _is_number(other: Any) -> bool:
    return not isinstance(other, Tensor) or (
        other.numel() == 1 and other.dim() < 2 and not isinstance(other, QuantizedGradient)
    )


def _multiply(gradient: Any, other: Any) -> Any:
    if not isinstance(gradient, QuantizedGradient) or not _is_number(other):
        return NotImplemented
    gradient.multiply_by(other)
    return gradient


def _divide(gradient: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    return _multiply(gradient, 1 / other) if rounding_mode is None and _is_number(other) else NotImplemented


def _of_each(name: str) -> Callable[..., None]:
    """An operation of `torch._foreach_...` as one on each gradient, with one argument for all, or one for each."""

    def every(gradients: Sequence[Tensor], *others: Any) -> None:
        each = (
            zip(*others, strict=False) if others and isinstance(others[0], (list, tuple)) else [others] * len(gradients)
        )
        for gradient, other in zip(gradients, each, strict=True):
            getattr(gradient, name)(*other)

    return every


def _add(gradient: Any, other: Any, *, alpha: Any = 1) -> Any:
    own = getattr(gradient, "contents", None)
    if own is None or own.spec is not None or own.value is not None or isinstance(other, QuantizedGradient):
        return NotImplemented
    if own.factor is not None:
        own.codes, own.factor = ((own.codes[0] * own.factor).to(torch.bfloat16),), None
    # What is added is rounded first, as where gradients are bfloat16 themselves.
    other = other.to(torch.bfloat16) if isinstance(other, Tensor) else other
    own.codes[0].add_(other, alpha=alpha)
    return gradient


def _zero(gradient: QuantizedGradient) -> QuantizedGradient:
    gradient.zero()
    return gradient


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """GradScaler's: multiply gradients, and say whether one is not finite."""
    for gradient in gradients:
        finite = gradient.finite() if isinstance(gradient, QuantizedGradient) else gradient.isfinite().all()
        found_inf.masked_fill_(~finite, 1.0)
        gradient.mul_(inverse)


def _by_values(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on the values of gradients; those that it writes to, or gives views of, are then stored as these."""
    schema = func._schema
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    # What other namespaces write to they do not always say, as collectives.
    shares = views or func.namespace != "aten"
    written: dict[int, QuantizedGradient] = {}

    def value_of(gradient: Any, writes: bool) -> Any:
        if not isinstance(gradient, QuantizedGradient):
            return gradient
        value = gradient.in_high_precision() if writes or shares else gradient.decoded()
        if writes:
            written[id(value)] = gradient
        return value

    def of_argument(argument: Any, value: Any) -> Any:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        return [value_of(t, writes) for t in value] if isinstance(value, (list, tuple)) else value_of(value, writes)

    named = {argument.name: argument for argument in schema.arguments}
    result = func(
        *(of_argument(argument, value) for argument, value in zip(schema.arguments, args, strict=False)),
        **{name: of_argument(named[name], value) for name, value in kwargs.items()},
    )
    return written.get(id(result), result)


#: Operations on gradients that are stored as codes; what they give NotImplemented for goes by values.
HANDLERS: dict[str, Callable[..., Any]] = {
    "aten::detach": _alias,
    "aten::alias": _alias,
    "aten::view": _view,
    "aten::clone": _clone,
    "aten::linalg_vector_norm": _norm,
    "aten::_foreach_norm": _norms,
    "aten::add_": _add,
    "aten::mul_": _multiply,
    "aten::div_": _divide,
    "aten::zero_": _zero,
    "aten::_amp_foreach_non_finite_check_and_unscale_": _unscale,
    **{f"aten::_foreach_{name}": _of_each(name) for name in ("mul_", "div_", "zero_")},
}
