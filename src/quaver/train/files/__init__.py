"""How files are written whole and folders locked; nothing that knows what is in them."""
