"""A matrix to codes and scales and back, a file a kind of block; no kernel that computes what it quantizes."""
