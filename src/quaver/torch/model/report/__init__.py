"""What `convert` says it did, layer by layer, and whether a run of the model bears it out; it converts nothing."""
