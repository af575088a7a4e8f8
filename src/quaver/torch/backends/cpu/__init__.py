"""Quantizing and multiplying on a CPU, fast and exact; nothing here asks for a GPU or for Triton."""
