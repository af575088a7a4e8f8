"""A weight that exists only in few bits: read by GEMMs, written by all else; no weight quantized at its use."""
