"""Recognition of the linear layers and experts in a model."""
