"""The trainer's model and its step in PyTorch."""
