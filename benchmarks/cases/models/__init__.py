"""Cases of whole models, converted and with blocks in place; no single block and no single layer."""
