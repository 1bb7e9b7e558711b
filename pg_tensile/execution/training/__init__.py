"""Training runs (the loop, its steps and checkpoints) and predictions within a memory budget."""
