"""Executable specification in numpy: operands, attention, experts and optimizer states; plain and slow.

The names exported here are the operations on operands, `quaver.reference.operations`.
"""

from quaver.reference.operations import (
    Quantized,
    decode,
    dequantize,
    encode,
    factors,
    matmul,
    quantize,
    round_to,
    spread,
)

__all__ = ["Quantized", "decode", "dequantize", "encode", "factors", "matmul", "quantize", "round_to", "spread"]
