"""Fast and exact quantization and GEMMs on a CPU; imports neither CUDA nor Triton."""
