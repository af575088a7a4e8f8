"""What is measured: the layers of torch, torchao, JAX and ours with the same weights; no clock."""
