"""What mixes the tokens of a sequence on a GPU: quantized attention, scans, convolutions; no projection."""
