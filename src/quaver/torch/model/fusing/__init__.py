"""Norms, MLPs, attention and losses of any model computed by our blocks in place; no layer's recipe, and no rule."""
