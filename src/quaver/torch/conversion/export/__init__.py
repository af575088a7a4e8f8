"""Export of quantized checkpoints in the formats of serving libraries."""
