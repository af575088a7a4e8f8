"""Experts: tokens choose some, are laid expert by expert, and what comes of them is summed again; no mesh."""
