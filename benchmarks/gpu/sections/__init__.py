"""What is measured on a GPU, and the registry of sections in their order; no clock."""
