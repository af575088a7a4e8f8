"""Rotary positions: where tokens stand, by how much pairs turn, and the turning; no attention."""
