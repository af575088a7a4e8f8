"""A model's weights in the files that servers read: the codes of fprop's GEMMs and their scales; nothing is rounded."""
