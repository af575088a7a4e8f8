"""Fixes for Triton's interpreter, so that it rounds as a GPU does.

Triton 3.6 to 3.9 round ties away from zero when converting to FP8, drop the carry into the exponent, turn NaN into a
number, and truncate float32 to bf16 (triton-lang/triton#11897). With numpy 2.4 and later, loops with a computed bound
fail. bf16 products are computed on the bits as integers. Before 3.9 `tl.fma` rounds twice. Before 3.8 `tl.maximum` and
`tl.minimum` keep a NaN that a GPU drops unless `PropagateNan.ALL` is passed.

`install_fixes` replaces the conversion by torch's, saturating like `cvt.rn.satfinite`. It multiplies in float32,
rounds `tl.fma` once, and drops those NaN.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_DTYPES = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_BLOCK_SCALED = {tl.bfloat16, tl.float16, tl.float8e4nv, tl.float8e5}
_SATURATING = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_INTEGERS = {
    1: (torch.uint8, np.uint8),
    2: (torch.int16, np.int16),
    4: (torch.int32, np.int32),
    8: (torch.int64, np.int64),
}
_originals: list[Any] = []


def install_fixes() -> None:
    """Install the fixes once per process; they affect interpreted kernels only."""
    if _originals:
        return
    original = interpreter._convert_float
    patch_tensor = interpreter._patch_lang_tensor

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        toward_zero = rounding is not None and rounding == interpreter._ir.ROUNDING_MODE.RTZ
        if source not in _DTYPES or target not in _DTYPES or toward_zero:
            return original(data, source, target, rounding)
        return _converted(data, _DTYPES[source], _DTYPES[target], _SATURATING.get(target))

    def patched(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        index = lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])  # noqa: E731
        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    builder = interpreter.InterpreterBuilder
    product = builder.create_dot

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return product(self, *(_wide(x) for x in (a, b)), *rest)

    def _wide(x: Any) -> Any:
        # The interpreter multiplies bf16 bits as integers; float32 products are numpy's and right.
        if x.dtype.scalar not in _BLOCK_SCALED:
            return x
        return interpreter.TensorHandle(convert(x.data, x.dtype.scalar, tl.float32, None).view(np.float32), tl.float32)

    twice = builder.create_fma

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar is not tl.float32:
            return twice(self, x, y, z)
        return interpreter.TensorHandle(_fused(x.data, y.data, z.data), tl.float32)

    names = "create_maxnumf", "create_minnumf"
    master_format = [getattr(builder, name) for name in names]
    builder.create_dot = dot
    builder.create_fma = fma
    for name, dropping in zip(names, (np.fmax, np.fmin), strict=True):
        setattr(builder, name, lambda self, x, y, dropping=dropping: self.binary_op(x, y, dropping))
    interpreter._convert_float = convert
    interpreter._patch_lang_tensor = patched
    _originals.extend((original, patch_tensor, product, twice, *master_format))


def run(
    fn: Any, grid: tuple[int, ...], dtypes: Sequence[Any], numbers: Sequence[Any], constants: dict[str, Any]
) -> Callable[..., None]:
    """Return a launch in the interpreter as a function of its tensors, which are read as these dtypes.

    Floating-point warnings are silenced, because overflow is the kernel's business.
    """
    install_fixes()

    def launch(*tensors: Any) -> None:
        read = [t if t is None or t.dtype is dtype else t.view(dtype) for t, dtype in zip(tensors, dtypes, strict=True)]
        with np.errstate(all="ignore"), warnings.catch_warnings():
            # numpy warns about a maximum over NaN only.
            warnings.simplefilter("ignore", RuntimeWarning)
            fn[grid](*read, *numbers, **constants)

    return launch


def _fused(x: Any, y: Any, z: Any) -> Any:
    """Compute x y + z of float32, rounded once.

    The product is exact in float64. The sum is rounded to odd, so that the rounding to float32 sees the bits that were
    cut off (Boldo and Melquiond, IEEE Transactions on Computers 57, 2008).
    """
    product, term = x.astype(np.float64) * y, z.astype(np.float64)
    total = np.asarray(product + term)
    # Exact rounding error of the sum; NaN if the sum is not finite.
    share = total - product
    rest = (product - (total - share)) + (term - share)
    bits = total.view(np.int64)
    lost = np.isfinite(rest) & (rest != 0) & (bits & 1 == 0)
    return (bits + np.where(lost, np.where((rest > 0) == (total > 0), 1, -1), 0)).view(np.float64).astype(np.float32)


def _converted(data: Any, source: torch.dtype, target: torch.dtype, largest: float | None) -> Any:
    if source is torch.bfloat16 and target is torch.float32:
        return data.astype(np.uint32) << np.uint32(16)
    signed, _ = _INTEGERS[data.dtype.itemsize]
    flat = np.ascontiguousarray(data).view(_INTEGERS[data.dtype.itemsize][1]).copy()
    x = torch.from_numpy(flat).view(signed).view(source)
    if largest is not None:
        x = x.float()
        x = torch.where(x.isnan(), x, x.clamp(-largest, largest))
    y = x.to(target)
    bits, kind = _INTEGERS[y.element_size()]
    unsigned = np.dtype(kind).str.replace("i", "u")
    return y.view(bits).numpy().view(unsigned).reshape(data.shape)
