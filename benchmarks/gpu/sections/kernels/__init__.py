"""Sections of single launches: ceilings, GEMMs, quantizing, producers; no layer."""
