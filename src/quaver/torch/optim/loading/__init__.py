"""What optimizers keep of parameters, and state dicts of any preset or library; nothing is stepped here."""
