"""torch's scaled GEMMs, what they ask of operands, and what multiplies in their place; nothing that quantizes."""
