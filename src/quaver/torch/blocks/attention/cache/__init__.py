"""Keys and values of the tokens so far, in one piece or in pages; no attention is computed here."""
