"""quantize, dequantize and matmul on arrays, their lowering per platform, and their sharding."""
