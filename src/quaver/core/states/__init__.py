"""How optimizer states are kept in few bits: codes, blocks, presets, bounds of updates; no update, no framework."""
