"""Optimizer states: create, save and load them, and convert those of other presets and libraries."""
