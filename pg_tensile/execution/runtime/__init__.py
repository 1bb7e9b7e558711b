"""Execution of a captured training iteration under a plan, on the host device or on CUDA."""
