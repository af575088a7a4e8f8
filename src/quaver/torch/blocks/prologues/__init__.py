"""What makes the input of linear layers: norms, activations, each alone or with the layers in one function; no GEMM."""
