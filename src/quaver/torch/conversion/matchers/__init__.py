"""Recognizes the linear layers and experts of a model."""
