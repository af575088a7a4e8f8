"""Operations (quantize, dequantize, matmul), the choice of their implementation, and their custom operators."""
