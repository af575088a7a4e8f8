"""What Transformer Engine's front ends share: its recipes; no framework is imported here."""
