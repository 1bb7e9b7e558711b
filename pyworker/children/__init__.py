"""Processes beside the server that compute with PyTorch or numpy."""
