"""The formulas of optimizers on float32 tensors, and how far a step moves a weight; nothing of how states are kept."""
