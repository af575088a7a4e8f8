"""Mixers of state spaces: which layers' weights they read themselves, and our block in the place of theirs; no scan."""
