"""Compressed swaps (CSWAP): codecs for tensors on their way to the host and back, what they take, when they pay."""
