"""Compressed swaps (CSWAP): codecs for tensors on their way to the host and back, their costs, and when they pay."""
