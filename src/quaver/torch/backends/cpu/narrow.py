"""Products with few rows, on a CPU: a weight times one token, or a handful of them.

Such a product reads its wide operand once, so what it costs is decoding. The wide operand is decoded a slice at a
time, small enough to stay in the cache, and multiplied in float32 at once. A matrix times a few vectors is summed in
one long row, whose errors add up: k is cut into pieces, and their sums are added in float64.
"""

import torch
from torch import Tensor

from quaver.torch.backends.cpu.decoding import decode
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized

#: Elements that are decoded at a time: 3 MB with what decoding needs.
SLICE = 1 << 19
#: Longest sum in float32: 256 of them lose 5e-7 even where one product outweighs all others.
PIECE = 256
#: The same where the sum goes along the memory, in as many parallel sums as a vector has lanes.
CONTIGUOUS_PIECE = 1024
#: So few outputs may all happen to cancel, which only float64 survives.
EXACT = 16


def product(a: Quantized, b: Quantized) -> Tensor:
    """a [m, k] @ b [n, k].T with scales, float64 [m, n] row by row, for small m or small n.

    Bounded: relative RMS below 1e-6 of float64 on the same operands.
    """
    return _product(a, b) if a.shape[0] <= b.shape[0] else _product(b, a).t().contiguous()


def _product(few: Quantized, wide: Quantized) -> Tensor:
    exact = few.shape[0] * wide.shape[0] <= EXACT
    left = None if exact else decode(few, half=False, tiny=False, slot="left")
    if left is None:
        return reference.double(few) @ reference.double(wide).t()
    x = left[0]  # [m, k]
    rows, columns = wide.lying_shape
    step = _step(wide, columns)
    if wide.turned:
        y = torch.zeros(x.shape[0], columns, dtype=torch.float64, device="cpu")
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            y += _times(x[:, start:stop], _lying_rows(wide, start, stop), PIECE)
    else:
        y = torch.empty(x.shape[0], rows, dtype=torch.float64, device="cpu")
        piece = CONTIGUOUS_PIECE if x.shape[0] == 1 else PIECE
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            y[:, start:stop] = _times(x, _lying_rows(wide, start, stop), piece)
    return y.mul_(left[1])


def _step(q: Quantized, columns: int) -> int:
    """Rows of one slice, whole blocks of them."""
    block = q.lying_block[0] or 1
    return max(SLICE // columns // block, 1) * block


def _lying_rows(q: Quantized, start: int, stop: int) -> Quantized:
    """Some rows of an operand as it lies, from the start of a block on."""
    scale, block = q.scale, q.lying_block[0]
    if isinstance(scale, Tensor) and block is not None:
        scale = scale[start // block : -(-stop // block)]
    shape = stop - start, q.lying_shape[1]
    return Quantized(q.data[start:stop], scale, q.spec, shape[::-1] if q.turned else shape, q.turned, q.tensor_factor)


def _times(x: Tensor, part: Quantized, piece: int) -> Tensor:
    """x [m, k] @ part [r, k].T, float64 [m, r]."""
    decoded = decode(part, half=False, tiny=False, slot="right")
    if decoded is None:
        # Scales so far apart, or not finite, that float32 could not hold a product: float64 can.
        return x.double() @ reference.double(part).t()
    values, scale = decoded
    v = values.t()  # [k, r]
    k = v.shape[0]
    y = torch.mm(x[:, :piece], v[:piece]).double()
    for start in range(piece, k, piece):
        y += torch.mm(x[:, start : start + piece], v[start : start + piece])
    return y.mul_(scale.t() if isinstance(scale, Tensor) else scale)
