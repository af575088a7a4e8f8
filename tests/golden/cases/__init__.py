"""Cases by group: each module has `cases()`, functions that take a `Record`, by name. Each group runs in a separate
process.
"""

GROUPS = ("formats", "linear", "blocks", "optimizers", "arrays", "models", "peers", "ranks")
