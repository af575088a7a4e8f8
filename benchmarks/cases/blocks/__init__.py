"""Cases of whole blocks and of attention; no single linear layer."""
