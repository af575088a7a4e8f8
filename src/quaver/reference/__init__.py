"""The executable specification in numpy: operands, attention, histories; plain and slow, nothing fast is here.

What this page shows are the operations on operands, `quaver.reference.operations`.
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
