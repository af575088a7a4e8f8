"""A layer of transformers' as a `TransformerLayer`: called, watched, built again, compared, refused; no whole model."""
