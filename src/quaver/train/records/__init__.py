"""What a run leaves behind and how it is read again: checkpoints, metrics, comparisons; no picture of them."""
