"""Cases of one linear layer; no block and no other cost than time, memory and noise."""
