"""Compile ahead for an absent GPU what a run would compile on it; nothing is computed or timed."""
