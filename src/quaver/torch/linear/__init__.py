"""Linear layers: the three GEMMs, `Linear`, `GroupedLinear`, and weights stored quantized."""
