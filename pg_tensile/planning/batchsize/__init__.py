"""Choice of the batch size that trains fastest within a memory budget, and of its learning rate (AccUDNN)."""
