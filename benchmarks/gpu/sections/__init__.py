"""Sections of measurements on a GPU, and their ordered registry."""
