"""Delayed scaling: histories of amaxes, recorded during a step and rolled at its end."""
