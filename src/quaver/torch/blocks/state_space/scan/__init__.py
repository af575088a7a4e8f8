"""The scan of a state space: the recurrence that defines it, and what computes it in chunks; no layer."""
