"""A linear layer's step with everything decided beforehand; no result that the general way does not give."""
