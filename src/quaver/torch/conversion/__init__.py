"""Converts models: `convert`, reports, Hugging Face models, quantized weights and export."""
