"""`QuantizedTensor`: a weight at rest in eight or four bits, whose codes and scales are one tensor.

It reports the shape [N, K] and the dtype that it dequantizes to, and holds

    codes    a float8 dtype [N, K]; uint8 [N, K] of other formats, [N, ceil(K / 2)] of packed four-bit codes
    scale    decode scales of the blocks, as `Quantized.scale`: [ceil(N / rows of a block), ceil(K / columns)]
    factor   factor [1, 1] of two-level scales, as `Quantized.tensor_factor`, or None
    spec     the `QuantSpec` of the operand [N, K]

A stack of G matrices [G, N, K], such as the weights of experts, has a leading axis G in each of them. If its matrices
are `transposed`, it reports [G, K, N], and codes and scales are transposed too, except for packed codes, which always
run along K.

    operation                                     result
    detach, clone, to(device), deepcopy, pickle   the same codes and scales
    to(dtype)                                     the same codes and scales; reports another dtype
    w.copy_(other) of one spec, w.data = other    the codes and scales of the other
    w.copy_(x), zero_, fill_, uniform_, normal_   quantizes the values
    x.copy_(w), torch.equal, torch.dequantize     reads the values
    split, chunk, narrow, w[a:b] of whole blocks  views of the rows, or of the matrices of a stack
    torch.cat of rows or of stacks                codes and scales one after the other
    empty_like                                    codes and scales without values; plain in a dtype that holds no values
    as_strided to its own shape                   the same tensor
    view(-1)                                      a copy of the values that cannot be written, for DDP's broadcasts
    zeros_like, full_like, new_zeros, new_empty   plain tensors, for gradients and optimizer states; also ones
    pin_memory, record_stream                     of codes and scales
    any other                                     NotImplementedError

There is no fallback that dequantizes: an operation that this table lacks, such as an optimizer's in-place arithmetic or
a collective, would otherwise read or write values without their codes. A layer calls `unwrap` for each GEMM, and its
kernels see plain tensors.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from quaver.recipes.spec import QuantSpec
from quaver.torch.numerics.quantized import Quantized, make_wrapper_subclass, no_torch_function, storage
from quaver.torch.numerics.rounding import NO_NOISE, is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import empty_parts, parts

aten = torch.ops.aten
#: Copies between dtypes and devices, and into pinned memory.
TO_COPY, PIN_MEMORY = aten._to_copy.default, aten._pin_memory.default
#: dtypes that a QuantizedTensor can report.
REPORTED = (*ops.DTYPES, torch.float64)


class QuantizedTensor(Tensor):
    """A matrix [N, K], or a stack of them, stored as codes and scales; it reports the dtype that it dequantizes to.

    Args:
        codes: float8 [N, K]; uint8 [N, K] of other formats, [N, ceil(K / 2)] of packed ones; of a stack [G, ...].
        scale: decode scales of the blocks, never a float on the host.
        spec: spec of the operand [N, K]; rounds to nearest and does not rotate.
        factor: float32 [1, 1] for two-level scales, else None.
        dtype: high-precision dtype that the tensor reports.
        columns: K of packed codes; None for an even K.
        transposed: True if the tensor reports [G, K, N], and codes that are not packed have that shape.

    Nothing is checked here, because every operation makes one: use `from_tensor` and `from_quantized`.
    """

    codes: Tensor
    scale: Tensor
    factor: Tensor | None
    spec: QuantSpec
    transposed: bool
    #: True for a view of rows whose scale also serves rows outside of the view.
    shares_scale: bool

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        scale: Tensor,
        spec: QuantSpec,
        *,
        factor: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        columns: int | None = None,
        transposed: bool = False,
        shares_scale: bool = False,
    ) -> "QuantizedTensor":
        shape = codes.shape
        if spec.format.packed:
            rows, k = shape[-2], 2 * shape[-1] if columns is None else columns
            shape = torch.Size((*shape[:-2], *((k, rows) if transposed else (rows, k))))
        self: QuantizedTensor = make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)
        self.codes, self.scale, self.factor, self.spec = codes, scale, factor, spec
        self.transposed, self.shares_scale = transposed, shares_scale
        return self

    def __init__(self, *_: object, **__: object) -> None:
        pass

    @staticmethod
    def from_tensor(value: Tensor, spec: QuantSpec, transposed: bool = False) -> "QuantizedTensor":
        """Quantize a matrix [N, K], or a stack of them; the result reports the dtype of the value.

        Args:
            transposed: True for a stack [G, K, N], which is quantized as matrices [N, K].

        Raises:
            ValueError: the value is no matrix or stack in high precision, or the spec rotates or rounds stochastically.
        """
        if value.dim() not in (2, 3) or value.dtype not in REPORTED or (transposed and value.dim() == 2):
            raise ValueError(
                "a QuantizedTensor is made of a matrix or a stack of matrices in high precision; this value is "
                f"{value.dtype} of shape {tuple(value.shape)}: convert or reshape it"
            )
        codes, scale, factor = _encode(value, spec, transposed)
        columns, dtype = value.shape[-2 if transposed else -1], value.dtype
        return QuantizedTensor(codes, scale, spec, factor=factor, dtype=dtype, columns=columns, transposed=transposed)

    @staticmethod
    def from_quantized(q: Quantized, dtype: torch.dtype = torch.float32) -> "QuantizedTensor":
        """Wrap the codes and scales of an operand [N, K]; they are copied only if their layout differs."""
        _check_spec(q.spec)
        if q.amax is not None or q.swizzled or q.transposed or not isinstance(q.scale, Tensor):
            q = q.upright()
        scale = q.scale if isinstance(q.scale, Tensor) else q.data.new_full((1, 1), q.scale, dtype=torch.float32)
        return QuantizedTensor(q.data, scale, q.spec, factor=q.tensor_factor, dtype=dtype, columns=q.shape[1])

    @property
    def columns(self) -> int:
        """K, the number of columns of a matrix [N, K]."""
        return self.shape[-2 if self.transposed else -1]

    def unwrap(self, index: int | None = None) -> Quantized:
        """Return codes and scales as the operand [N, K] that GEMMs read; it shares their memory.

        Args:
            index: of a matrix in a stack; None for a tensor that is one matrix.

        Raises:
            ValueError: a stack without an index, or one matrix with an index.
        """
        if (index is None) != (self.dim() == 2):
            raise ValueError(
                f"unwrap got index {index} of a QuantizedTensor {tuple(self.shape)}: a stack takes the index of a "
                "matrix, and one matrix takes None"
            )
        return unwrap(self, index)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values as a plain tensor, in the dtype that this tensor reports or in another one."""
        return dequantized(self, dtype)

    @property
    def data(self) -> Tensor:
        """The tensor detached from autograd."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.move(value)
        # A backward would read the new values.
        if not self.is_inference():
            increment_version(self)

    def move(self, value: Tensor) -> None:
        """Become another tensor of the same values, as on another device or of another dtype."""
        # Without `set_tensors` only the wrapper would change.
        if not isinstance(value, QuantizedTensor) or value.shape != self.shape:
            raise TypeError(
                f"a QuantizedTensor {tuple(self.shape)} got .data of class {type(value).__name__} and shape "
                f"{tuple(value.shape)}: assign a QuantizedTensor of its shape, or quantize by copy_(value)"
            )
        torch.Tensor.data.__set__(self, value.detach())  # type: ignore[attr-defined]
        self.set_tensors(value)

    def set_tensors(self, other: "QuantizedTensor") -> None:
        """Take the codes and scales of another tensor, without a copy."""
        for name in ("codes", "scale", "factor", "spec", "transposed", "shares_scale"):
            setattr(self, name, getattr(other, name))

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of codes and scales."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return the tensors that store it: codes, scale, and the factor of two-level scales."""
        return [self.codes, self.scale, *(() if self.factor is None else (self.factor,))]

    def share_memory_(self) -> "QuantizedTensor":
        """Move codes and scales to shared memory, in place."""
        for t in self.tensors():
            t.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return True if the codes are in shared memory."""
        return self.codes.is_shared()

    # torch reads memory in these two without dispatching them, and there is none.

    def __dlpack__(self, *_: object, **__: object) -> Any:
        raise NotImplementedError(unsupported("DLPack"))

    def apply_(self, *_: object) -> Any:
        raise NotImplementedError(unsupported("apply_"))

    def __repr__(self, *_: object, **__: object) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"QuantizedTensor({self.spec}, {tuple(self.shape)}, {self.dtype}, {self.device}{grad})"

    # Compilers and torch.nn.Module take the tensor apart and put it together by these two.

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype, bool, bool]]:
        names = ["codes", "scale", *(() if self.factor is None else ("factor",))]
        return names, (self.spec.text, self.dtype, self.transposed, self.shares_scale)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[str, torch.dtype, bool, bool], size: Sequence[int], stride: Any
    ) -> "QuantizedTensor":
        text, dtype, transposed, shares_scale = context
        return QuantizedTensor(
            inner["codes"],
            inner["scale"],
            QuantSpec.parse(text),
            factor=inner.get("factor"),
            dtype=dtype,
            columns=size[-2 if transposed else -1],
            transposed=transposed,
            shares_scale=shares_scale,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Plain pickle has no float8.
        tensors = [self.codes.detach().view(torch.uint8), self.scale, self.factor]
        layout = self.spec.text, self.dtype, self.columns, self.transposed
        return _rebuild, (*tensors, *layout, self.requires_grad, isinstance(self, nn.Parameter))

    def __copy__(self) -> Any:
        alias: Any = self.detach()
        is_parameter = isinstance(self, nn.Parameter)
        return nn.Parameter(alias, self.requires_grad) if is_parameter else alias.requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only a leaf is copied by deepcopy; detach() this QuantizedTensor first")
        copied: Any = self.detach().clone()
        copied = nn.Parameter(copied) if isinstance(self, nn.Parameter) else copied.requires_grad_()
        memo[id(self)] = copied
        # A frozen tensor has no dtype of its gradient.
        copied.grad_dtype = self.grad_dtype if self.requires_grad or self.grad is None else self.grad.dtype
        if not isinstance(self, nn.Parameter):
            # torch copies no gradient of a parameter.
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied.requires_grad_(self.requires_grad)

    __torch_function__: Any = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = _OPERATIONS.get(function)
        if run is None:
            raise NotImplementedError(unsupported(function))
        return run(function, *args, **(kwargs or {}))

    def like(
        self,
        codes: Tensor,
        scale: Tensor,
        factor: Tensor | None,
        dtype: torch.dtype | None = None,
        shares_scale: bool = False,
    ) -> "QuantizedTensor":
        """Return a tensor of the same spec, layout and K with other codes and scales."""
        return QuantizedTensor(
            codes,
            scale,
            self.spec,
            factor=factor,
            dtype=self.dtype if dtype is None else dtype,
            columns=self.columns,
            transposed=self.transposed,
            shares_scale=shares_scale,
        )

    def with_tensors(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> "QuantizedTensor":
        """Return the same tensor with each stored tensor changed by a function, such as a move to another device."""
        factor = None if self.factor is None else change(self.factor)
        return self.like(change(self.codes), change(self.scale), factor, dtype)


#: Views of flat values that are flat values too.
FLAT_VIEWS = (aten.view.default, aten.slice.Tensor, aten.detach.default, aten.alias.default)


class FlatValues(Tensor):
    """A copy of the values of a QuantizedTensor, which DistributedDataParallel broadcasts and copies back.

    Any other write raises, because it would not reach the codes.
    """

    #: The values, a plain tensor.
    held: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "FlatValues":
        self: FlatValues = make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)
        self.held = values
        return self

    def __init__(self, *_: object) -> None:
        pass

    def __repr__(self, *_: object, **__: object) -> str:  # type: ignore[override]
        return f"FlatValues({self.held})"

    __torch_function__: Any = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {a.name: value for a, value in zip(function._schema.arguments, args, strict=False)} | (kwargs or {})
        written = any(
            a.alias_info is not None and a.alias_info.is_write and _has_flat(given.get(a.name))
            for a in function._schema.arguments
        )
        is_view = any(result.alias_info is not None for result in function._schema.returns) and not written
        collective = function.namespace != "aten" and "broadcast" not in function.name()
        if written or collective or (is_view and function not in FLAT_VIEWS and function is not aten.copy_.default):
            raise NotImplementedError(unsupported(function))
        result = function(*map(_held, args), **{name: _held(value) for name, value in (kwargs or {}).items()})
        return FlatValues(result) if function in FLAT_VIEWS else result


def _has_flat(value: Any) -> bool:
    """Return True for flat values, and for a list that has some."""
    return any(isinstance(each, FlatValues) for each in (value if isinstance(value, list | tuple) else [value]))


def _held(value: Any) -> Any:
    """Return what flat values hold, in lists too; other arguments unchanged."""
    if isinstance(value, list | tuple):
        return [_held(each) for each in value]
    return value.held if isinstance(value, FlatValues) else value


# Functions rather than only methods: a compiler takes methods of a tensor for operations.


def unwrap(weight: QuantizedTensor, index: int | None = None) -> Quantized:
    """Return codes and scales as the operand [N, K] that GEMMs read; with an index, of one matrix of a stack."""
    codes, factor, spec, shape = weight.codes, weight.factor, weight.spec, weight.shape[-2:]
    scale: Any = weight.scale
    if index is not None:
        codes, scale, factor = codes[index], scale[index], None if factor is None else factor[index]
    if not is_tracing() and spec.per_tensor and scale.is_cpu:
        scale = scale.item()
    rows, columns = shape[::-1] if weight.transposed else shape
    return Quantized(codes, scale, spec, (rows, columns), weight.transposed and not spec.format.packed, factor)


def dequantized(weight: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values as a plain tensor, in the dtype that the weight reports or in another one."""
    dtype = weight.dtype if dtype is None else dtype
    if weight.dim() == 2:
        return ops.DEQUANTIZE(unwrap(weight), dtype)
    values = [ops.DEQUANTIZE(unwrap(weight, index), dtype) for index in range(weight.shape[0])]
    if not values:
        return torch.empty(weight.shape, dtype=dtype, device=weight.device)
    stack = torch.stack(values)  # [G, N, K]
    return stack.transpose(1, 2).contiguous() if weight.transposed else stack


def nested_tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists and mappings."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from nested_tensors(tuple(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from nested_tensors(value)


def memory_of(tensor: Tensor) -> Tensor:
    """Return the tensor that holds the memory: the codes of a QuantizedTensor, any other tensor itself."""
    return tensor.codes if isinstance(tensor, QuantizedTensor) else tensor


def unsupported(function: Any) -> str:
    """Return the error message of an operation that a QuantizedTensor does not have."""
    return (
        f"{function} is not defined for a QuantizedTensor, which is stored as codes and scales: compute with "
        "w.dequantize() and write by w.copy_(values), or let an optimizer of quaver.torch.optim step it"
    )


def _check_spec(spec: QuantSpec) -> None:
    if spec.hadamard or spec.rounding != "nearest":
        raise ValueError(
            f"{spec} cannot describe a weight at rest, which is neither rotated nor rounded stochastically: use "
            "dataclasses.replace(spec, rounding='nearest', hadamard=False)"
        )


def _encode(value: Tensor, spec: QuantSpec, transposed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize a matrix [N, K], or a stack of them; return codes, scales, and the factor of two-level scales."""
    _check_spec(spec)
    value = value.detach()
    if value.dim() == 2:
        codes, scale, factor = _encode_matrix(value.contiguous(), spec, False)
    else:
        # Without matrices, the shapes of one.
        matrices = value if len(value) else value.new_empty((1, *value.shape[1:]), device="meta")
        each = [_encode_matrix(matrix.t() if transposed else matrix, spec, transposed) for matrix in matrices]
        codes, scale, factor = (
            torch.stack(tensors) if len(value) else tensors[0].new_empty((0, *tensors[0].shape), device=value.device)
            for tensors in zip(*each, strict=True)
        )
    return codes, scale, factor if spec.two_level else None


def _encode_matrix(value: Tensor, spec: QuantSpec, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a matrix [N, K]; return codes, scales and factor, transposed if `transposed` and not packed."""
    if value.is_meta:
        stores_transpose = transposed and not spec.format.packed
        return empty_parts(value.t() if stores_transpose else value, spec, stores_transpose)[:3]
    value = value if transposed else value.contiguous()
    value = value if value.dtype in ops.DTYPES else value.float()
    return parts(ops.QUANTIZE(value, spec, None, None, NO_NOISE), transposed)[:3]


def _rebuild(
    codes: Tensor,
    scale: Tensor,
    factor: Tensor | None,
    text: str,
    dtype: torch.dtype,
    columns: int,
    transposed: bool,
    requires_grad: bool,
    is_parameter: bool,
) -> Tensor:
    """Undo `QuantizedTensor.__reduce_ex__`."""
    spec = QuantSpec.parse(text)
    codes = codes.view(storage(spec.format))
    tensor = QuantizedTensor(codes, scale, spec, factor=factor, dtype=dtype, columns=columns, transposed=transposed)
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


# ---- operations ----


def _alias(function: Any, x: QuantizedTensor, *_: Any) -> QuantizedTensor:
    # The tensors themselves: below autograd, a view would have a version of its own.
    aliased = x.with_tensors(lambda t: t)
    aliased.shares_scale = x.shares_scale
    return aliased


def _clone(function: Any, x: QuantizedTensor, *, memory_format: Any = None) -> QuantizedTensor:
    # Views of rows may have gaps in their scales.
    return x.with_tensors(lambda t: t.clone(memory_format=torch.contiguous_format))


def _pin(function: Any, x: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    return x.with_tensors(lambda t: function(t, *args, **kwargs))


def _is_pinned(function: Any, x: QuantizedTensor, *args: Any, **kwargs: Any) -> bool:
    return all(t.is_pinned() for t in x.tensors())


def _record_stream(function: Any, x: QuantizedTensor, stream: Any) -> None:
    for t in x.tensors():
        function(t, stream)


def _view(function: Any, x: QuantizedTensor, size: Sequence[int]) -> Tensor:
    if tuple(size) == (-1,):
        return FlatValues(x.dequantize().view(-1))
    if len(size) != x.dim() or any(new not in (-1, old) for new, old in zip(size, x.shape, strict=True)):
        raise NotImplementedError(
            f"a QuantizedTensor {tuple(x.shape)} cannot be viewed as {tuple(size)}, because its blocks have two axes: "
            "view w.dequantize()"
        )
    return _alias(function, x)


def _as_strided(
    function: Any, x: QuantizedTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> QuantizedTensor:
    # fully_shard requests the gathered tensor in the shape of the sharded codes.
    contiguous = [math.prod(size[axis + 1 :]) for axis in range(len(size))]
    if tuple(size) not in (tuple(x.shape), tuple(x.codes.shape)) or list(stride) != contiguous or offset:
        raise NotImplementedError(unsupported(function))
    return _alias(function, x)


def _to_copy(
    function: Any,
    x: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    non_blocking: bool = False,
    **options: Any,
) -> QuantizedTensor:
    if dtype is not None and dtype not in REPORTED:
        raise TypeError(
            f"a QuantizedTensor cannot report {dtype}, only a dtype of high precision; read w.codes for its codes"
        )
    # Codes and scales move between devices, and only the reported dtype changes.
    return x.with_tensors(lambda t: t.to(device=device, non_blocking=non_blocking, copy=True), dtype)


def _empty_like(
    function: Any, x: QuantizedTensor, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> Tensor:
    if dtype in (None, *REPORTED):
        return x.with_tensors(lambda t: torch.empty_like(t, device=device), dtype)
    return torch.empty(x.shape, dtype=dtype, device=x.device if device is None else device)


def _plain_like(
    function: Any,
    x: QuantizedTensor,
    *args: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **options: Any,
) -> Tensor:
    """Return a plain tensor, as gradients and optimizer states are."""
    empty = torch.empty(0, dtype=dtype or x.dtype, device=x.device if device is None else device)
    if "_like" in str(function):
        # Expanding a number gives the shape without memory.
        empty, options = empty.new_empty(1).expand(x.shape), {"memory_format": torch.contiguous_format}
    else:
        options = {}
    result: Tensor = function(empty, *args, **options)
    return result


def _dequantize(function: Any, x: QuantizedTensor) -> Tensor:
    return x.dequantize()


def _equal(function: Any, a: Tensor, b: Tensor) -> bool:
    """Compare values, as torch.equal does; equal values may have different codes."""
    if a.shape != b.shape:
        return False
    values = (x.dequantize() if isinstance(x, QuantizedTensor) else x for x in (a, b))
    return torch.equal(*values)


def _copy(function: Any, into: Tensor, value: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(into, QuantizedTensor):
        assert isinstance(value, QuantizedTensor)
        return into.copy_(value.dequantize(), non_blocking)
    _check_writable(into)
    value = value.held if isinstance(value, FlatValues) else value
    if not isinstance(value, QuantizedTensor):
        if value.dtype not in REPORTED:
            raise TypeError(
                f"a QuantizedTensor got {value.dtype} values to copy, which are no weights in high precision: copy a "
                "QuantizedTensor of the same spec, which has its scales, or values in float32, bfloat16 or float16"
            )
        _write(into, value)
    elif value.spec == into.spec and value.shape == into.shape and value.transposed is into.transposed:
        for target, source in zip(into.tensors(), value.tensors(), strict=True):
            target.copy_(source, non_blocking)
        _count_write(into)
    else:
        _write(into, value.dequantize())
    return into


def _write(into: QuantizedTensor, value: Tensor) -> None:
    """Quantize values into the codes and scales, in place."""
    encoded = _encode(value.to(into.device).expand(into.shape), into.spec, into.transposed)
    for target, source in zip(into.tensors(), encoded, strict=False):
        assert source is not None
        target.copy_(source)
    _count_write(into)


def _count_write(x: QuantizedTensor) -> None:
    """Count a write to the codes, which autograd counts for the weight alone."""
    if not x.codes.is_inference() and not is_tracing():
        increment_version(x.codes)


def _check_writable(x: QuantizedTensor) -> None:
    if x.shares_scale:
        raise TypeError(
            f"these rows {tuple(x.shape)} are a view whose scale also serves other rows ({x.spec}), so writing to them "
            "would change those: write to the whole QuantizedTensor, or clone() the rows first"
        )


def _fill(function: Any, x: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    """Fill in high precision and quantize, as initializers do."""
    _check_writable(x)
    _write(x, function(torch.empty(x.shape, dtype=x.dtype, device=x.device), *args, **kwargs))
    return x


def _rows(x: QuantizedTensor, start: int, end: int) -> QuantizedTensor:
    """Return a view of the rows from start to end, which begin and end with a block; or of matrices of a stack."""
    height, rows = x.spec.block[0], x.shape[0]
    if x.dim() == 3:
        factor = None if x.factor is None else x.factor[start:end]
        return x.like(x.codes[start:end], x.scale[start:end], factor)
    if height is not None and (start % height or (end % height and end != rows)):
        raise NotImplementedError(
            f"rows {start} to {end} of a QuantizedTensor with {rows} rows cut a block of {height} rows ({x.spec}): "
            "take whole blocks, or rows of w.dequantize()"
        )
    scale = x.scale if height is None else x.scale[start // height : -(-end // height)]
    whole = start == 0 and end == rows
    shares_scale = x.shares_scale or (not whole and (height is None or x.factor is not None))
    return x.like(x.codes[start:end], scale, x.factor, shares_scale=shares_scale)


def _check_rows(function: Any, x: QuantizedTensor, dim: int, step: int = 1) -> None:
    if dim not in (0, -x.dim()) or step != 1:
        raise NotImplementedError(
            f"{function} takes contiguous rows of a QuantizedTensor {tuple(x.shape)}, and got axis {dim} and step "
            f"{step}: use w.dequantize()"
        )


def _slice(
    function: Any, x: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedTensor:
    start, end, step = slice(start, end, step).indices(x.shape[dim])
    if dim not in (0, -x.dim()) and (start, end, step) == (0, x.shape[dim], 1):
        return _alias(function, x)
    _check_rows(function, x, dim, step)
    return _rows(x, start, max(start, end))


def _split(function: Any, x: QuantizedTensor, size: int | Sequence[int], dim: int = 0) -> list[QuantizedTensor]:
    _check_rows(function, x, dim)
    rows = x.shape[0]
    sizes = [size] * max(1, -(-rows // size) if size else 1) if isinstance(size, int) else size
    ends = [min(sum(sizes[: i + 1]), rows) for i in range(len(sizes))]
    return [_rows(x, start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _cat(function: Any, tensors: Sequence[Tensor], dim: int = 0) -> QuantizedTensor:
    pieces = [x for x in tensors if isinstance(x, QuantizedTensor)]
    first = pieces[0]
    kinds = {(x.spec, x.dtype, x.transposed, x.shape[1:]) for x in pieces}
    if len(pieces) < len(tensors) or len(kinds) > 1 or dim not in (0, -first.dim()):
        raise NotImplementedError(
            "torch.cat joins rows of QuantizedTensors of one spec, dtype and width, and got others or another axis: "
            "use w.dequantize()"
        )
    codes = torch.cat([x.codes for x in pieces])
    if first.dim() == 3:
        factors = [x.factor for x in pieces if x.factor is not None]
        return first.like(codes, torch.cat([x.scale for x in pieces]), torch.cat(factors) if factors else None)
    height = first.spec.block[0]
    if height is not None and any(x.shape[0] % height for x in pieces[:-1]):
        raise NotImplementedError(
            f"torch.cat got {[x.shape[0] for x in pieces]} rows, which are not whole blocks of {height} rows: use "
            "w.dequantize()"
        )
    # Scales that serve all rows must be the same one, as in pieces of one split.
    for common in ([x.scale for x in pieces] if height is None else [], [x.factor for x in pieces]):
        if any(t is not None and t.data_ptr() != common[0].data_ptr() for t in common):  # type: ignore[union-attr]
            raise NotImplementedError(
                f"torch.cat got QuantizedTensors with scales of their own, where {first.spec} has one that serves all "
                "rows: use w.dequantize()"
            )
    scale = first.scale.clone() if height is None else torch.cat([x.scale for x in pieces])
    return first.like(codes, scale, None if first.factor is None else first.factor.clone())


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten.view.default: _view,
    aten.as_strided.default: _as_strided,
    TO_COPY: _to_copy,
    PIN_MEMORY: _pin,
    aten.is_pinned.default: _is_pinned,
    aten.record_stream.default: _record_stream,
    aten.copy_.default: _copy,
    aten.zero_.default: _fill,
    aten.fill_.Scalar: _fill,
    aten.uniform_.default: _fill,
    aten.normal_.default: _fill,
    aten.dequantize.self: _dequantize,
    aten.equal.default: _equal,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.cat.default: _cat,
    aten.empty_like.default: _empty_like,
    aten.zeros_like.default: _plain_like,
    aten.ones_like.default: _plain_like,
    aten.full_like.default: _plain_like,
    aten.new_empty.default: _plain_like,
    aten.new_zeros.default: _plain_like,
    aten.new_ones.default: _plain_like,
    aten.new_full.default: _plain_like,
}

# So that torch.load(weights_only=True) reads it.
torch.serialization.add_safe_globals([_rebuild])
