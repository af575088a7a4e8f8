"""Expert parallelism with quantized dispatch."""
