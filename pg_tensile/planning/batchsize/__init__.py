"""Which batch size trains fastest within a memory budget, and with which learning rate (AccUDNN)."""
