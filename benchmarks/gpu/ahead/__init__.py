"""A card that is not there: what a run would compile for it is compiled beforehand; nothing is computed or timed."""
