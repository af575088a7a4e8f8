"""`QuantizedGradient`: a tensor subclass that stores `p.grad` as codes and scales, or as bfloat16.

Its dtype is that of the gradient, so `torch.nn.utils.clip_grad_norm_`, GradScaler, DDP and trainers work on it:

    operation                                   what happens
    read                                        decode into a temporary tensor; norms decode a chunk of rows at a time
    multiply or divide in place by one number   store the number; the optimizer step multiplies by it (exact)
    add in place, stored as bfloat16            add in bfloat16
    any other write, or a view                  dequantize in place: the values are a plain tensor from then on

Gradients that accumulate over several backwards are such a write.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from quaver.reference.optimizer_state import StateSpec
from quaver.torch.numerics.quantized import make_wrapper_subclass, no_torch_function
from quaver.torch.optim import codes

#: Elements a chunk, for encoding and for norms. Chunks are larger on GPUs, where each one costs launches.
CPU_CHUNK, GPU_CHUNK = 1 << 16, 1 << 22


@dataclass
class Contents:
    """The storage of a gradient; aliases of the gradient share it."""

    #: The format of the codes; None for bfloat16.
    spec: StateSpec | None
    #: (codes, scale), or (bfloat16 tensor,); None once dequantized in place.
    codes: tuple[Tensor, ...] | None
    #: A pending multiplier of the decoded values, float32 []; None for 1.
    factor: Tensor | None = None
    #: The plain tensor once dequantized in place, else None.
    value: Tensor | None = None
    #: True after zeroing in place; the optimizer then quantizes the next backward's gradient again.
    zeroed: bool = False


class QuantizedGradient(Tensor):
    """A gradient stored in fewer bits, with the dtype and shape of the gradient."""

    contents: Contents

    @staticmethod
    def __new__(cls, contents: Contents, like: Tensor) -> "QuantizedGradient":
        self: QuantizedGradient = make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        self.contents = contents
        return self

    @classmethod
    def from_tensor(
        cls, gradient: Tensor, spec: StateSpec | None, shape: tuple[int, ...] | None = None
    ) -> "QuantizedGradient":
        """Quantize a gradient.

        Args:
            gradient: in high precision.
            spec: the format of the codes; None stores bfloat16.
            shape: the shape of the codes, whose last dimension the blocks run along; None for the gradient's shape.
        """
        if spec is None:
            return cls(Contents(None, (gradient.to(torch.bfloat16),)), gradient)
        matrix = gradient if shape is None else gradient.reshape(shape)
        return cls(Contents(spec, encode_in_chunks(matrix, spec)), gradient)

    @property
    def codes(self) -> Tensor:
        """The codes, or the bfloat16 tensor; available until the gradient is dequantized in place."""
        assert self.contents.codes is not None
        return self.contents.codes[0]

    @property
    def scale(self) -> Tensor:
        """The scales of the codes; available until the gradient is dequantized in place, and not for bfloat16."""
        assert self.contents.codes is not None
        return self.contents.codes[1]

    @property
    def value(self) -> Tensor | None:
        """The plain tensor, if the gradient was dequantized in place; else None."""
        return self.contents.value

    def tensors(self) -> list[Tensor]:
        """Return all tensors that store the gradient: codes, scale, factor, plain tensor."""
        own = self.contents
        return [t for t in (*(own.codes or ()), own.factor, own.value) if t is not None]

    def dequantize(self) -> Tensor:
        """Return the gradient as a plain tensor: a new one, or `value` if it was dequantized in place."""
        own = self.contents
        if own.value is not None:
            return own.value
        values = self.codes.float() if own.spec is None else codes.decode(self.codes, self.scale, own.spec)
        values = values if own.factor is None else values * own.factor
        return values.to(self.dtype).reshape(self.shape).contiguous()

    def dequantize_(self) -> Tensor:
        """Dequantize in place, and return the plain tensor, which shares its memory with the gradient from now on."""
        own = self.contents
        own.value, own.codes, own.factor = self.dequantize(), None, None
        return own.value

    def multiply_by(self, number: Tensor | float) -> None:
        """Multiply in place by one number. Exact: decoded values are multiplied in float32."""
        own = self.contents
        if own.value is not None:
            own.value.mul_(number)
            return
        # Compiled steps read the factor as float32 [], whatever the dtype and shape of the number.
        factor = torch.as_tensor(number, dtype=torch.float32, device=self.device).detach().reshape(())
        own.factor = factor.clone() if own.factor is None else own.factor * factor

    def all_finite(self) -> Tensor:
        """Return True if all elements are finite, bool []."""
        own = self.contents
        if own.factor is not None:
            return self.norm_of(float("inf")).isfinite()
        # Encoding gives a block with a NaN or an infinity the scale NaN, so scales are enough.
        checked = own.value if own.value is not None else self.codes if own.spec is None else self.scale
        return checked.isfinite().all()

    def zero(self) -> None:
        """Set all elements to zero in place."""
        own = self.contents
        for tensor in self.tensors():
            tensor.zero_()
        own.factor, own.zeroed = None, True

    def norm_of(self, order: float) -> Tensor:
        """Return the vector norm, float32 []; decodes a chunk of rows at a time."""
        own = self.contents
        if own.value is not None:
            return norm_of(own.value, order)
        norms = [norm_of(chunk, order) for chunk in self._decode_in_chunks()]
        norms = norms or [torch.zeros((), dtype=torch.float32, device=self.device)]
        norm = torch.linalg.vector_norm(torch.stack(norms), order)
        return norm if own.factor is None else norm * own.factor.abs()

    def _decode_in_chunks(self) -> Iterator[Tensor]:
        """Yield values without the factor, a chunk of rows at a time, or all at once if rows share a scale."""
        data, spec = self.codes, self.contents.spec
        if spec is None:
            yield data
            return
        scale = self.scale
        if data.dim() < 2 or spec.block is None:
            yield codes.decode(data, scale, spec)
            return
        rows = max((CPU_CHUNK if data.is_cpu else GPU_CHUNK) // max(prod(data.shape[1:]), 1), 1)
        for at in range(0, data.shape[0], rows):
            yield codes.decode(data[at : at + rows], scale[at : at + rows], spec)

    @property
    def data(self) -> Tensor:
        """Like `Tensor.data`; `nn.Module.to` assigns to it."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, values: Tensor) -> None:
        own = self.contents
        plain = values.dequantize() if isinstance(values, QuantizedGradient) else values.detach()
        own.value, own.codes, own.factor = plain, None, None
        Tensor.data.__set__(self, QuantizedGradient(own, plain))  # type: ignore[attr-defined]

    def numpy(self, *, force: bool = False) -> Any:
        """Like `Tensor.numpy`: the array shares memory with the gradient, so this dequantizes in place."""
        return self.dequantize_().numpy(force=force)

    def tolist(self) -> Any:
        return self.dequantize().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec = self.contents.spec
        return f"QuantizedGradient({self.dequantize()!r}, {'bfloat16' if spec is None else spec.text})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor, which torch.load reads with weights_only=True."""
        return self.dequantize().__reduce_ex__(protocol)

    #: Results of operations are plain tensors, not instances of this class.
    __torch_function__: Any = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        handler, kwargs = HANDLERS.get(func.name().partition(".")[0]), kwargs or {}
        result = NotImplemented if handler is None else handler(*args, **kwargs)
        return _run_on_plain_tensors(func, args, kwargs) if result is NotImplemented else result


def _dequantizing_method(name: str) -> Callable[..., Any]:
    """Return a Tensor method that dequantizes in place first, for methods that bypass `__torch_dispatch__`."""

    def method(self: QuantizedGradient, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.dequantize_(), name)(*args, **kwargs)
        return self if result is self.value else result

    return method


for _name in ("apply_", "map_", "share_memory_"):
    setattr(QuantizedGradient, _name, _dequantizing_method(_name))


def encode_in_chunks(gradient: Tensor, spec: StateSpec) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a gradient [..., K], with temporary memory for one chunk of rows.

    Exact: the same bits as `codes.encode` of the whole gradient.
    """
    size, count = CPU_CHUNK if gradient.is_cpu else GPU_CHUNK, gradient.numel()
    if gradient.dim() < 2 or count <= size:
        data, scale = codes.encode(gradient.float(), spec)
        assert scale is not None
        # Where K is no multiple of the block the codes are a view of a padded tensor; drop the padding.
        return data.contiguous(), scale
    chunks = gradient.flatten(0, -2).split(max(size // gradient.shape[-1], 1))
    amax = None
    if spec.block is None:
        # One scale for the whole tensor needs the amax of all chunks first.
        amax = torch.stack([codes.block_amax(chunk.float(), None) for chunk in chunks]).amax(0)
    data = torch.empty(gradient.shape, dtype=codes.code_dtype(spec.of), device=gradient.device)
    shape = codes.scale_shape(gradient.shape, spec.block, spec.of.numbers)
    scales = torch.empty(shape, dtype=codes.SCALE_DTYPES[spec.scale], device=gradient.device)
    at = 0
    for chunk in chunks:
        chunk_codes, scale = codes.encode(chunk.float(), spec, amax=amax)
        assert scale is not None
        rows = slice(at, at + chunk.shape[0])
        data.flatten(0, -2)[rows] = chunk_codes
        if spec.block is None:
            scales.copy_(scale)
        else:
            scales.flatten(0, -2)[rows] = scale
        at = rows.stop
    return data, scales


def norm_of(x: Tensor, order: float) -> Tensor:
    """Return the vector norm of a tensor, float32 []; 0 for an empty one, such as a shard without rows."""
    return torch.linalg.vector_norm(x if x.numel() else x.new_zeros(1), order, dtype=torch.float32)


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


def _foreach(name: str) -> Callable[..., None]:
    """Return a handler of `torch._foreach_<name>` that calls the Tensor method on each gradient.

    Further arguments are shared by all gradients, or lists with one entry for each.
    """

    def handler(gradients: Sequence[Tensor], *others: Any) -> None:
        listed = others and isinstance(others[0], (list, tuple))
        arguments = zip(*others, strict=False) if listed else [others] * len(gradients)
        for gradient, own in zip(gradients, arguments, strict=True):
            getattr(gradient, name)(*own)

    return handler


def _add(gradient: Any, other: Any, *, alpha: Any = 1) -> Any:
    own = getattr(gradient, "contents", None)
    if own is None or own.spec is not None or own.value is not None or isinstance(other, QuantizedGradient):
        return NotImplemented
    if own.factor is not None:
        own.codes, own.factor = ((own.codes[0] * own.factor).to(torch.bfloat16),), None
    # Round the other summand first, as where both gradients are bfloat16 tensors.
    other = other.to(torch.bfloat16) if isinstance(other, Tensor) else other
    own.codes[0].add_(other, alpha=alpha)
    return gradient


def _zero(gradient: QuantizedGradient) -> QuantizedGradient:
    gradient.zero()
    return gradient


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Unscale gradients for GradScaler: multiply them by `inverse`, and set `found_inf` to 1 if one is not finite."""
    for gradient in gradients:
        finite = gradient.all_finite() if isinstance(gradient, QuantizedGradient) else gradient.isfinite().all()
        found_inf.masked_fill_(~finite, 1.0)
        gradient.mul_(inverse)


def _run_on_plain_tensors(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on dequantized gradients; dequantize in place those that it writes to or returns views of."""
    schema = func._schema
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    # Schemas outside aten, such as those of collectives, do not always declare what they write to.
    may_write = views or func.namespace != "aten"
    written: dict[int, QuantizedGradient] = {}

    def plain(value: Any, writes: bool) -> Any:
        if not isinstance(value, QuantizedGradient):
            return value
        tensor = value.dequantize_() if writes or may_write else value.dequantize()
        if writes:
            written[id(tensor)] = value
        return tensor

    def plain_argument(argument: Any, value: Any) -> Any:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        return [plain(t, writes) for t in value] if isinstance(value, (list, tuple)) else plain(value, writes)

    named = {argument.name: argument for argument in schema.arguments}
    result = func(
        *(plain_argument(argument, value) for argument, value in zip(schema.arguments, args, strict=False)),
        **{name: plain_argument(named[name], value) for name, value in kwargs.items()},
    )
    # An in-place operation returns its gradient, not the tensor within.
    return written.get(id(result), result)


#: Operations that work on codes, by name. A handler that returns NotImplemented leaves it to `_run_on_plain_tensors`.
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
    **{f"aten::_foreach_{name}": _foreach(name) for name in ("mul_", "div_", "zero_")},
}
