"""Statistics of quantized operands and GEMM results, and the table that reports them; no framework."""
