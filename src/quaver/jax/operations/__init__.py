"""quantize, dequantize and matmul, their lowering, and where arrays are sharded; no derivative and no layer."""
