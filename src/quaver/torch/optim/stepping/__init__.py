"""A parameter's step, piece by piece, and where its tensors lie; no formula, and no optimizer's interface."""
