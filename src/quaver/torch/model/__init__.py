"""What is done to a whole model: converted, explained, kept in eight bits, frozen, captured; no layer of its own."""
