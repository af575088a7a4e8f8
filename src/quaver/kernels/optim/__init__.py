"""Optimizer steps in Triton: codes of moments and weights, update rules, and addressing of parameters."""
