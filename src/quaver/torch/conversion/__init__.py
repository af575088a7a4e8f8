"""Whole-model conversion: `convert`, reports, Hugging Face models, quantized weights and export."""
