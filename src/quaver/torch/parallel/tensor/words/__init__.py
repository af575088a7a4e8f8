"""A vocabulary of which each rank has some words: its embedding, and the loss of its head; no other layer."""
