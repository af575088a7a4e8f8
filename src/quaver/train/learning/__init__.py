"""A model in training behind the methods that the loop calls, a room for each framework; no loop, no file."""
