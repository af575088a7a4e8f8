"""Transformer Engine's modules: our blocks with its arguments and its parameters' names; nothing computes here."""
