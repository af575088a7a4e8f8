"""Mixture of experts: routing, permutation of tokens, and layers."""
