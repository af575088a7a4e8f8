"""The head and its loss, a chunk of tokens after the other, so that all logits never exist; no other loss."""
