"""State dicts of optimizers: read, whichever preset or library wrote them; nothing is stepped here."""
