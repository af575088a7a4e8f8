"""Transformer Engine's names, each in the file that it has them in; no front end is imported before it is used."""

from quaver.compat.transformer_engine import common

__all__ = ["common"]
