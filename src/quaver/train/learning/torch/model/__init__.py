"""The model that a run trains, what its experts add to its loss, and what it remembers of tokens; no optimizer."""
