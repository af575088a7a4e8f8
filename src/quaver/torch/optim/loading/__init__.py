"""What optimizers keep of parameters, and state dicts of it, whoever wrote them; nothing is stepped here."""
