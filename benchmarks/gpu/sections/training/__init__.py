"""Sections of training runs, eager and captured; no single layer."""
