"""Predictions of docs/performance.md, and figures that others published; nothing is measured here."""
