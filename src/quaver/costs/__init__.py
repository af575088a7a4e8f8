"""Predicted costs of layers and training steps: bytes, FLOPs, time and memory; nothing is measured here."""
