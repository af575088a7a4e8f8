"""Replacement of supported modules (norms, MLPs, attention, Mamba-2 mixers, losses) by Quaver blocks, in place."""
