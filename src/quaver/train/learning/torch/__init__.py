"""The trainer's model, its step and its decoding in PyTorch; no other framework is imported."""
