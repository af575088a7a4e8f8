"""Gradients between backward and step: in codes, clipped, stepped while backward goes on; no state that stays."""
