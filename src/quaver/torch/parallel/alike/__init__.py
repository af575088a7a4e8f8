"""Whether ranks were given the same: models at the start, inputs at a forward; nothing that they compute."""
