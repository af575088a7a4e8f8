"""Autograd functions of layers in parts: one layer, several behind a norm, tokens that travel meanwhile; no module."""
