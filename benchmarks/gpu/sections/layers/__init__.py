"""Sections of layers: linear layers, a Llama layer, memory, the host's time; no training."""
