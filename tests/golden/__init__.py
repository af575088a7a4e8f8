"""What every feature gives, bit by bit, so that a change of structure can be shown to change nothing.

`python -m tests.golden` compares codes, their scales, counters and keys of state dicts with `digests.json`: they are
equal on every processor. `python -m tests.golden --base COMMIT` runs the same cases on another commit, on this machine,
and compares sums too: outputs, gradients, weights after steps.
"""
