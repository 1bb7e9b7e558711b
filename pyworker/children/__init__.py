"""Processes beside the server that compute: PyTorch or numpy."""
