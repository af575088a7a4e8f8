"""The three GEMMs of a linear layer, their derivative, and the functions made of them; no module."""
