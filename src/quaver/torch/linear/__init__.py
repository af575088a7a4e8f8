"""The three GEMMs of a linear layer, and the layers made of nothing else; no norm, no activation."""
