"""Transformer Engine's recipes, shared by its front ends; imports no framework."""
