"""What `convert` says it did, what runs in a layer, and whether a run bears it out; it converts nothing."""
