"""Cases by group: each module has `cases()`, functions of a `Record` by name. A group runs in a process of its own."""

GROUPS = ("formats", "linear", "blocks", "optimizers", "arrays", "models", "peers", "ranks")
