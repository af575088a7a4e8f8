"""State spaces: steps and decays, states from chunk to chunk, the scan inside of chunks, convolution; no projection."""
