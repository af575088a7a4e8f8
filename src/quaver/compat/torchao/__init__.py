"""torchao's names for training in float8, to be imported in its place; no optimizer, and nothing for inference."""
