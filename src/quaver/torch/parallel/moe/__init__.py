"""Expert parallelism: experts sharded over ranks, with all-to-all of quantized tokens."""
