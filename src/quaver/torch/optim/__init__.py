"""Optimizers whose states, masters and gradients are kept in few bits; no schedule of learning rates and no model."""
