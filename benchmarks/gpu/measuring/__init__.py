"""How a figure is measured on a GPU, and on what: clock, card, setting, steps, peers; no section."""
