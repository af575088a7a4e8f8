"""Planted faults: small wrong edits of the sources that the tests must catch.

`faults.toml` has for each fault the behaviour that it breaks, the edit, the tests that catch it and the cases of the
golden corpus that show it. `python -m tests.faults` plants each in a copy of the sources and runs both.
"""
