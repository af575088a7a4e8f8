"""Transformer and state-space layers: norms, MLP, attention, MoE, Mamba-2 and losses."""
