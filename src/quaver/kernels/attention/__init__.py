"""Attention with quantized products, tile by tile, of which no score is kept; no other GEMM."""
