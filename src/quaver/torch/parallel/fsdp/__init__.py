"""FSDP2 with quantized all-gathers: weight shards, shared amaxes, and `gather_quantized`."""
