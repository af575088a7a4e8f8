"""A sequence in parts on several ranks: its order, three ways to attend across them, how a model gets one; no layer."""
