"""Checkpoints written by an earlier commit, and what loading them gives: the files stay readable, bit for bit.

`python -m tests.golden.checkpoints --write` writes the files and `expected.json` again.
"""
