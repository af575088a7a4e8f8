"""The trainer's PyTorch implementation."""
