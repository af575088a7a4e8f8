"""Text, tokens and batches, as pure functions of files, seed and step; no model."""
