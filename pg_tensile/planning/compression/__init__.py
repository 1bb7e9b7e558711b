"""Compressed swaps (CSWAP): codecs for tensors on their way to the host and back, and what coding takes."""
