"""Training runs: the loop, its steps, checkpoints; and predictions within a memory budget."""
