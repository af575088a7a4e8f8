"""Replaces supported modules of a model by Quaver blocks."""
