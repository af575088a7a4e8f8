"""Training under PyTorch."""
