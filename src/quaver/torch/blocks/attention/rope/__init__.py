"""Positions: where tokens stand, pairs that turn by them, queries that grow, biases of distances; no attention."""
