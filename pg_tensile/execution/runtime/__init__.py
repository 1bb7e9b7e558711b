"""Executes a captured training iteration under a plan, on the host device or on CUDA (design.md section 5, Runtime)."""
